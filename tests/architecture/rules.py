"""The rules of docs/architecture.md as functions from a source tree to the list of its offenders."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.architecture.source_tree import Module, find_cycles, internal_imports, is_within

PACKAGE = "megatron_rl"

FLOORS: Mapping[str, int] = {
    "types": 0, "config": 0, "telemetry": 0,
    "layout": 1, "model_families": 1, "algorithms": 1, "rewards": 1, "scheduling": 1, "journal": 1, "batching": 1,
    "platforms": 2, "data": 2, "rollout": 2, "trainer": 2, "resharding": 2, "checkpoint": 2,
    "controller": 3, "planner": 3, "report": 3,
    "cli": 4,
}  # fmt: skip

SIBLINGS_MAY_IMPORT = ("platforms",)
"""Packages of floor 2 that their siblings may import too."""

HEAVY: Mapping[str, tuple[str, ...]] = {
    "yaml": ("config", "rollout.sglang.keys"),  # SGLang takes its keys from a YAML file
    "tensorboard": ("telemetry.tensorboard_sink",),
    "torch": (
        "model_families.transforms", "algorithms", "batching", "platforms", "rollout.embedded",
        "rollout.sglang.cpu_layer", "trainer", "resharding", "checkpoint", "controller",
    ),
    "megatron": ("trainer", "platforms", "checkpoint"),
    "transformer_engine": ("trainer", "platforms"),
    "apex": ("trainer", "platforms"),
    "ray": ("controller",),
    "sglang": ("rollout.sglang", "resharding"),
    "transformers": ("data", "checkpoint"),
    "tokenizers": ("data",),
    "datasets": ("data",),
    "pyarrow": ("data",),
    "gguf": ("checkpoint",),
    "safetensors": ("checkpoint", "resharding.transports.disk"),
    "reasoning_gym": ("rewards",),
    "math_verify": ("rewards",),
    "aiohttp": ("rollout.sglang", "rollout.remote_judge"),
    "psutil": ("rollout", "controller", "platforms"),
    "matplotlib": ("report",),
    "pandas": (),
    "tensorflow": (),
}  # fmt: skip
"""Top-level name of a library -> the parts of the package that may import it."""

ONE_FILE_EACH: Mapping[str, tuple[str, ...]] = {
    "megatron": ("platforms", "checkpoint"),
    "sglang": ("resharding",),
    "reasoning_gym": ("rewards",),
    "math_verify": ("rewards",),
    "gguf": ("checkpoint",),
}
"""Where a library may be imported by a single file of the part."""

BANNED_NAMES = ("utils", "util", "misc", "common", "helpers", "helper")

WHOLE_CONFIG = "ExperimentConfig"
WHOLE_CONFIG_PARTS = ("config", "cli")
"""Parts that see the whole config; beside them one file of `controller`, its entry."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80


def package_of(name: str) -> str | None:
    """`trainer` of `megatron_rl.trainer.policy`; None for the top package itself."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else None


def check_floors(modules: dict[str, Module]) -> Iterator[str]:
    """Rule 1: import only from lower floors; floors 0 and 1 may import siblings, 2 and 3 may not."""
    for module in modules.values():
        package = package_of(module.name)
        if package is not None and package not in FLOORS:
            if module.name == f"{PACKAGE}.{package}":
                yield f"{module.path}: package {package} has no floor; add it to docs/architecture.md and to FLOORS"
            continue
        for target, found in internal_imports(module, modules):
            other = package_of(target)
            if other is None or package is None or other == package or other not in FLOORS:
                continue
            here, there = FLOORS[package], FLOORS[other]
            is_sibling_allowed = here == there and (here <= 1 or other in SIBLINGS_MAY_IMPORT)
            if there > here or (there == here and not is_sibling_allowed):
                kind = "a sibling" if there == here else "a higher floor"
                yield f"{module.at(found.line)}: {package} (floor {here}) imports {target} (floor {there}), {kind}"


def check_cycles(modules: dict[str, Module]) -> Iterator[str]:
    """Rules 1 and 2: no cycle of modules or of packages; an import inside a function hides none."""
    module_graph: dict[str, set[str]] = {name: set() for name in modules}
    package_graph: dict[str, set[str]] = {}
    for module in modules.values():
        for target, _ in internal_imports(module, modules):
            if target != module.name and not modules[target].is_package:
                module_graph[module.name].add(target)
            package, other = package_of(module.name), package_of(target)
            if package and other and package != other:
                package_graph.setdefault(package, set()).add(other)
    for kind, graph in (("modules", module_graph), ("packages", package_graph)):
        for cycle in find_cycles(graph):
            yield f"cycle of {kind}: {' -> '.join(cycle)}"


def check_heavy(modules: dict[str, Module]) -> Iterator[str]:
    """Rule 3: a heavy library appears only in its own package, and in no `__init__`."""
    files_of: dict[tuple[str, str], set[str]] = {}
    for module in modules.values():
        inner = module.name.partition(".")[2]
        for found in module.imports():
            library = found.target.split(".")[0]
            if library not in HEAVY:
                continue
            allowed = HEAVY[library]
            if module.is_package:
                yield f"{module.at(found.line)}: __init__ imports {library}; import it in the module that needs it"
            elif not any(is_within(inner, part) for part in allowed):
                places = ", ".join(allowed) or "nowhere"
                yield f"{module.at(found.line)}: imports {library}, which is allowed in: {places}"
            for part in ONE_FILE_EACH.get(library, ()):
                if is_within(inner, part):
                    files_of.setdefault((library, part), set()).add(str(module.path))
    for (library, part), files in sorted(files_of.items()):
        if len(files) > 1:
            yield f"{library} is imported by {len(files)} files of {part}, expected one: {', '.join(sorted(files))}"


def check_names(modules: Iterable[Module]) -> Iterator[str]:
    """Rule 4: no room for odds and ends."""
    for module in modules:
        for part in (*module.path.parts[:-1], module.path.stem):
            if part in BANNED_NAMES:
                yield f"{module.path}: {part!r} names no responsibility; call it what it does"


def check_whole_config(modules: dict[str, Module]) -> Iterator[str]:
    """Rule 4: a function takes its section, not the whole config."""
    entries: set[str] = set()
    for module in modules.values():
        inner = module.name.partition(".")[2]
        if any(is_within(inner, part) for part in WHOLE_CONFIG_PARTS):
            continue
        for function in module.functions():
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            for argument in arguments:
                if argument.annotation is None or WHOLE_CONFIG not in ast.unparse(argument.annotation):
                    continue
                if is_within(inner, "controller"):
                    entries.add(str(module.path))
                else:
                    place = module.at(function.lineno)
                    yield f"{place}: {function.name} takes the whole {WHOLE_CONFIG}; pass its section"
    if len(entries) > 1:
        yield f"several files of controller take the whole {WHOLE_CONFIG}, expected its entry alone: {sorted(entries)}"


def check_sizes(modules: Iterable[Module], exceptions: Mapping[str, str]) -> Iterator[str]:
    """Rule 5. `exceptions`: path, or `path::function`, -> why it may be longer; unused ones are offenders."""
    used: set[str] = set()
    for module in modules:
        path = module.path.as_posix()
        sizes = [(path, module.num_lines, MAX_FILE_LINES)]
        for function in module.functions():
            num_lines = (function.end_lineno or function.lineno) - function.lineno + 1
            sizes.append((f"{path}::{function.name}", num_lines, MAX_FUNCTION_LINES))
        for name, num_lines, most in sizes:
            if num_lines > most and name in exceptions:
                used.add(name)
            elif num_lines > most:
                yield f"{name} has {num_lines} lines, at most {most}: split it, or list it with the reason"
    for name in sorted(exceptions.keys() - used):
        yield f"{name} is listed as too long but is not; remove it from the list"


def check_mirror(root: Path, modules: dict[str, Module]) -> Iterator[str]:
    """Rule 7: tests/unit mirrors the package. `test_<module>.py`, or `test_<module>_<aspect>.py`, stands where the
    module does, and every package with code has its folder."""
    unit = root / "tests" / "unit"
    for path in sorted(unit.rglob("test_*.py")):
        folder, stem = path.parent.relative_to(unit), path.stem.removeprefix("test_")
        package = ".".join((PACKAGE, *folder.parts))
        beside = [name.rpartition(".")[2] for name in modules if name.rpartition(".")[0] == package]
        if not any(stem == module or stem.startswith(f"{module}_") for module in beside):
            yield f"{path.relative_to(root)} tests no module of {package}; name it after one of {', '.join(beside)}"
    with_code = {package_of(module.name) for module in modules.values() if not module.is_package} - {None}
    for package in sorted(filter(None, with_code)):
        if not list((unit / package).rglob("test_*.py")):
            yield f"tests/unit/{package} has no tests, but {PACKAGE}/{package} has code"


_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|!\[[^\]]*\]\(([^)\s]+)\)")


def check_links(root: Path, documents: Iterable[Path]) -> Iterator[str]:
    """Rule 6: every relative link leads to a file, and every anchor to a heading."""
    for document in documents:
        text = re.sub(
            r"```.*?```", lambda m: "\n" * m.group().count("\n"), document.read_text("utf-8"), flags=re.DOTALL
        )
        for number, line in enumerate(text.splitlines(), 1):
            for match in _LINK.finditer(line):
                link = match.group(1) or match.group(2)
                if re.match(r"[a-z]+:", link):
                    continue
                place = f"{document.relative_to(root)}:{number}"
                name, _, anchor = link.partition("#")
                target = (document.parent / name).resolve() if name else document
                if not target.exists():
                    yield f"{place}: link to {link}, which does not exist"
                elif anchor and target.suffix == ".md" and anchor not in _anchors(target):
                    yield f"{place}: link to {link}, but {name or document.name} has no such heading"


def _anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+\s+(.*?)\s*$", document.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
