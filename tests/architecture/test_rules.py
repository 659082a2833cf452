"""Each rule finds its offender in a small tree and is silent on a sound one."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from tests.architecture import rules
from tests.architecture.source_tree import Module, find_cycles, read_modules


def tree(folder: Path, files: Mapping[str, str]) -> dict[str, Module]:
    """`trainer/policy: text` becomes megatron_rl/trainer/policy.py; every package gets its `__init__`."""
    root = folder / rules.PACKAGE
    for name, text in files.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    for path in [root, *(p for p in root.rglob("*") if p.is_dir())]:
        (path / "__init__.py").touch()
    return read_modules(folder, rules.PACKAGE)


SOUND = {
    "types/nouns": "from __future__ import annotations",
    "config/load": "import yaml\nfrom megatron_rl.types.nouns import X",
    "layout/ranks": "from megatron_rl.types import nouns",
    "rewards/registry": "from megatron_rl.layout import ranks",
    "platforms/choose": "import torch\nimport megatron.core",
    "trainer/policy": "import torch\nimport megatron.core\nfrom megatron_rl.platforms.choose import choose",
    "rollout/collector": "def run(section: RolloutSection) -> None: ...",
    "controller/entry": "import ray\nfrom megatron_rl.trainer import policy\ndef run(config: ExperimentConfig): ...",
    "cli/train": "from megatron_rl.controller.entry import run\ndef show(config: ExperimentConfig): ...",
}


@pytest.mark.parametrize("check", [rules.check_floors, rules.check_cycles, rules.check_heavy, rules.check_whole_config])
def test_a_sound_tree_passes(tmp_path: Path, check) -> None:
    assert list(check(tree(tmp_path, SOUND))) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "layout/x",
            "import megatron_rl.trainer.policy",
            "layout (floor 1) imports megatron_rl.trainer.policy (floor 2)",
        ),
        (
            "rollout/x",
            "from megatron_rl.trainer.policy import P",
            "rollout (floor 2) imports megatron_rl.trainer.policy",
        ),
        ("rollout/x", "from megatron_rl import trainer", "imports megatron_rl.trainer (floor 2), a sibling"),
        ("rollout/x", "from ..trainer.policy import P", "imports megatron_rl.trainer.policy (floor 2), a sibling"),
        ("rollout/x", "def f():\n    from megatron_rl.trainer import policy", "megatron_rl/rollout/x.py:2: rollout"),
        (
            "controller/x",
            "from megatron_rl.cli import train",
            "imports megatron_rl.cli.train (floor 4), a higher floor",
        ),
        ("types/x", "if TYPE_CHECKING:\n    from megatron_rl.layout.ranks import R", "a higher floor"),
        ("attic/x", "", "package attic has no floor"),
    ],
)
def test_floors(tmp_path: Path, name: str, text: str, expected: str) -> None:
    (offender,) = rules.check_floors(tree(tmp_path, {**SOUND, name: text}))
    assert expected in offender


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"layout/a": "from megatron_rl.layout.b import x", "layout/b": "def f():\n    import megatron_rl.layout.a"},
            "cycle of modules: megatron_rl.layout.a -> megatron_rl.layout.b -> megatron_rl.layout.a",
        ),
        (
            {
                "layout/a": "import megatron_rl.rewards.x",
                "layout/b": "",
                "rewards/x": "",
                "rewards/y": "import megatron_rl.layout.b",
            },
            "cycle of packages: layout -> rewards -> layout",
        ),
    ],
)  # fmt: skip
def test_cycles(tmp_path: Path, files: Mapping[str, str], expected: str) -> None:
    assert list(rules.check_cycles(tree(tmp_path, files))) == [expected]


def test_find_cycles_agrees_with_a_dense_closure() -> None:
    import numpy as np

    rng = np.random.default_rng(5)
    for num_nodes, density in [(5, 0.2), (8, 0.15), (12, 0.1)] * 20:
        adjacency = rng.random((num_nodes, num_nodes)) < density
        np.fill_diagonal(adjacency, False)
        graph = {str(i): {str(j) for j in np.flatnonzero(adjacency[i])} for i in range(num_nodes)}
        closure = adjacency.copy()
        for _ in range(num_nodes):
            closure |= closure @ adjacency
        on_a_cycle = {str(i) for i in range(num_nodes) if closure[i, i]}
        cycles = find_cycles(graph)
        assert bool(cycles) == bool(on_a_cycle)
        for cycle in cycles:
            assert cycle[0] == cycle[-1]
            assert all(there in graph[here] for here, there in pairwise(cycle))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"layout/x": "import torch"}, "imports torch, which is allowed in"),
        ({"rollout/sglang/client": "from torch import nn"}, "imports torch, which is allowed in"),
        ({"trainer/x": "def f():\n    import ray.util"}, "imports ray, which is allowed in: controller"),
        ({"platforms/other": "import megatron.core"}, "megatron is imported by 2 files of platforms, expected one"),
    ],
)
def test_heavy(tmp_path: Path, files: Mapping[str, str], expected: str) -> None:
    (offender,) = rules.check_heavy(tree(tmp_path, {**SOUND, **files}))
    assert expected in offender


def test_heavy_in_an_init(tmp_path: Path) -> None:
    tree(tmp_path, SOUND)
    (tmp_path / rules.PACKAGE / "trainer" / "__init__.py").write_text("import torch\n")
    (offender,) = rules.check_heavy(read_modules(tmp_path, rules.PACKAGE))
    assert "trainer/__init__.py:1: __init__ imports torch" in offender


@pytest.mark.parametrize("name", ["utils", "trainer/utils", "trainer/misc/x", "rollout/helpers"])
def test_names(tmp_path: Path, name: str) -> None:
    offenders = list(rules.check_names(tree(tmp_path, {**SOUND, name: ""}).values()))
    assert offenders
    assert all("names no responsibility" in offender for offender in offenders)
    assert list(rules.check_names(tree(tmp_path / "sound", SOUND).values())) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"rollout/x": "def f(a, *, c: 'ExperimentConfig | None'): ..."}, "rollout/x.py:1: f takes the whole"),
        (
            {"trainer/x": "class A:\n    async def g(self, c: ExperimentConfig): ..."},
            "trainer/x.py:2: g takes the whole",
        ),
        ({"controller/x": "def f(c: ExperimentConfig): ..."}, "several files of controller"),
    ],
)
def test_whole_config(tmp_path: Path, files: Mapping[str, str], expected: str) -> None:
    (offender,) = rules.check_whole_config(tree(tmp_path, {**SOUND, **files}))
    assert expected in offender


def test_sizes(tmp_path: Path) -> None:
    long_function = "def f():\n" + "    x = 1\n" * 80
    modules = tree(tmp_path, {"types/long": "x = 1\n" * 401, "types/f": long_function, "types/g": "x = 1\n" * 400})
    assert list(rules.check_sizes(modules.values(), {})) == [
        "megatron_rl/types/f.py::f has 81 lines, at most 80: split it, or list it with the reason",
        "megatron_rl/types/long.py has 401 lines, at most 400: split it, or list it with the reason",
    ]
    exceptions = {"megatron_rl/types/f.py::f": "a table", "megatron_rl/types/long.py": "a table"}
    assert list(rules.check_sizes(modules.values(), exceptions)) == []
    (stale,) = rules.check_sizes(modules.values(), {**exceptions, "megatron_rl/types/g.py": "old"})
    assert stale == "megatron_rl/types/g.py is listed as too long but is not; remove it from the list"


def test_mirror(tmp_path: Path) -> None:
    modules = tree(tmp_path, {"layout/ranks": "", "rollout/sglang/client": "", "journal/record": ""})
    unit = tmp_path / "tests" / "unit"
    for name in ("layout/test_ranks", "layout/test_ranks_random", "layout/test_rank", "rollout/sglang/test_client"):
        (unit / name).parent.mkdir(parents=True, exist_ok=True)
        (unit / f"{name}.py").touch()
    (unit / "attic").mkdir()
    (unit / "attic" / "test_x.py").touch()
    assert list(rules.check_mirror(tmp_path, modules)) == [
        "tests/unit/attic/test_x.py tests no module of megatron_rl.attic; name it after one of ",
        "tests/unit/layout/test_rank.py tests no module of megatron_rl.layout; name it after one of ranks",
        "tests/unit/journal has no tests, but megatron_rl/journal has code",
    ]


def test_links(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "b.md").write_text("# The loop, in words\n")
    page = tmp_path / "docs" / "a.md"
    page.write_text(
        "[x](b.md) [y](b.md#the-loop-in-words) [z](https://example.org/none) [top](#here) [up](../docs)\n"
        "# Here\n```\n[code](none.md)\n```\n[one](none.md)\n![two](none.png) and [three](b.md#loop)\n[four](#there)\n"
    )
    assert list(rules.check_links(tmp_path, [page])) == [
        "docs/a.md:6: link to none.md, which does not exist",
        "docs/a.md:7: link to none.png, which does not exist",
        "docs/a.md:7: link to b.md#loop, but b.md has no such heading",
        "docs/a.md:8: link to #there, but a.md has no such heading",
    ]
