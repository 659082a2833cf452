"""The option tables are those of the installed releases, and options are checked against them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from megatron_rl.config.construct import key_paths
from megatron_rl.config.known_options import OWNED_BY_US, TABLE_FILES, TABLES, accepts, check_options, load_table
from megatron_rl.config.sections import ExperimentConfig

GENERATOR = Path(__file__).parents[3] / "launch" / "generate_config_tables.py"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_config_tables", GENERATOR)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_installed_releases(generator: ModuleType) -> None:
    built = generator.build_tables()
    assert set(built) == set(TABLE_FILES.values())
    for name, file_name in TABLE_FILES.items():
        table, shipped = built[file_name], json.loads((TABLES / file_name).read_text())
        if table["version"] == shipped["version"]:
            assert table == shipped, f"{file_name} is old: run launch/generate_config_tables.py"
        else:  # another supported release, under another Python: what we derive must exist there too
            assert OWNED_BY_US[name].keys() <= table["options"].keys() | table["not_yaml"].keys()


@pytest.mark.parametrize("name", sorted(TABLE_FILES))
def test_every_option_that_we_own_exists_and_leads_to_a_key_of_ours(name: str) -> None:
    options, ours = load_table(name)["options"], set(key_paths(ExperimentConfig))
    for option, replacement in OWNED_BY_US[name].items():
        assert option in options or option in load_table(name)["not_yaml"], option
        key = replacement.split(" ")[0]
        assert key in ("", *ours) or key.startswith("model.dims."), key


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("transformer", {"moe_router_dtyp": "fp32"}, "did you mean p.moe_router_dtype?"),
        ("transformer", {"hidden_size": 3}, "is derived; set model.dims.hidden_size instead"),
        ("transformer", {"init_method": "normal"}, "has type Optional[Callable] in megatron-core"),
        ("transformer", {"variable_seq_lengths": True}, "is derived; remove it"),
        ("transformer", {"moe_router_dtype": "fp33"}, "expected Optional[Literal['fp32', 'fp64']]"),
        ("transformer", {"moe_z_loss_coeff": "much"}, "expected Optional[float]"),
        ("optimizer", {"lr": 1.0}, "set trainer.optimizer.learning_rate instead"),
        ("optimizer", {"overlap_param_gather": 1}, "expected bool"),
        ("ddp", {"overlap_grad_reduc": True}, "did you mean p.overlap_grad_reduce?"),
        ("server_args", {"mem_fraction_statc": 0.5}, "did you mean p.mem_fraction_static?"),
        ("server_args", {"device": "cuda"}, "set cluster.gpus_per_engine_rank (0: the CPU) instead"),
        ("server_args", {"admin_api_key": "x"}, "set rollout.sglang.key_file"),
    ],
)
def test_refused(name: str, given: dict[str, object], reason: str) -> None:
    ((key_path, found),) = check_options(name, given, "p")
    assert key_path == f"p.{next(iter(given))}"
    assert reason in found


def test_accepted() -> None:
    assert not list(check_options("transformer", {"moe_router_dtype": "fp32", "moe_z_loss_coeff": 1}, "p"))
    assert not list(check_options("transformer", {"recompute_modules": ["mlp"], "mtp_num_layers": None}, "p"))
    assert not list(check_options("optimizer", {"decoupled_lr": 1e-5}, "p"))
    assert not list(check_options("server_args", {"mem_fraction_static": 0.5, "sleep_on_idle": True}, "p"))


@pytest.mark.parametrize(
    ("type_text", "good", "bad"),
    [
        ("int", [3], [True, 3.0, "3", None]),
        ("float", [3, 0.5], [True, "3"]),
        ("Optional[bool]", [None, True], [1]),
        ("str | None", [None, "a"], [2]),
        ("Union[int, List[int]]", [1, [1]], ["a", {}]),
        ("typing.Literal['a', 2]", ["a", 2], ["b"]),
        ("Optional[Dict[str, int]]", [{}, None], [[]]),
        ("Tuple[int, int]", [[1, 2]], ["12"]),
        ("Something", [1, "a", None], []),
    ],
)
def test_type_texts(type_text: str, good: list[object], bad: list[object]) -> None:
    assert all(accepts(type_text, value) for value in good)
    assert not any(accepts(type_text, value) for value in bad)
