"""How a server is called: section and place -> command line and environment. Pure; `process` starts what it says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_rl.config.rollout_sections import SglangSection
from megatron_rl.types.routing import RoutingShape

CUSTOM_LOADER = "megatron_rl.resharding.sglang_loader.load"
"""Runs inside every tensor-parallel rank; what `update_weights_from_tensor` calls by this name."""
RECEIVER_DIR_ENV = "MEGATRON_RL_RECEIVER_DIR"
RECEIVER_HOST_ENV = "MEGATRON_RL_RECEIVER_HOST"
"""What that loader reads from its environment."""
CPU_LAYER_PATH = Path(__file__).parent / "cpu_layer" / "on_path"
"""On PYTHONPATH of CPU servers only; its sitecustomize installs the CPU layer in each of their processes."""

DERIVED_ARGS = frozenset(
    {
        *("model_path", "skip_tokenizer_init", "custom_weight_loader", "weight_version", "max_running_requests"),
        *("host", "port", "tp_size", "ep_size", "attn_dp_size", "nnodes", "node_rank", "dist_init_addr", "device"),
        *("config", "api_key", "admin_api_key"),
    }
)
"""Server options that we derive; setting one under `rollout.sglang.server_args` is refused."""


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Where one process of an engine runs and what it may use.

    `host` is the interface it binds (never 0.0.0.0). An engine over several nodes has one place per node with the same
    `dist_init_addr` ("host:port" of node 0). `cpu_cores` are the cores of this process's ranks, on CPU only.
    """

    host: str = "127.0.0.1"
    port: int = 0
    node_rank: int = 0
    dist_init_addr: str | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    cpu_cores: tuple[int, ...] = ()
    gives_memory_up: bool = False
    """Whether trainers share its GPUs: SGLang's memory saver then frees what it releases. On CPU nothing is saved and the
    same calls are made."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the processes of an engine load, and the interpreter that has SGLang.

    `load_format="dummy"` starts from random weights, for engines that receive theirs by a sync before the first prompt.
    `routing`: what the routed experts look like that it shall return; None: it returns none.
    """

    python: str
    path: str
    dtype: Literal["fp32", "bf16"]
    max_context: int
    load_format: Literal["auto", "dummy"] = "auto"
    routing: RoutingShape | None = None


@dataclass(frozen=True, slots=True)
class ServerLaunch:
    """One server process: `argv` without any secret, and what is added to the parent's environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    host: str
    port: int


def plan_launch(
    section: SglangSection, place: EnginePlace, model: ServedModel, *, key_file: Path, receiver_dir: Path
) -> ServerLaunch:
    """The command of one process of one engine.

    The KV pool is capped at `num_concurrent * max_context` tokens: uncapped, SGLang takes most of the memory.
    Deterministic inference is on unless `server_args` says otherwise; without it SGLang ignores per-request seeds.

    Raises ValueError with the key path for a server option that is derived or whose value has no command-line form.
    """
    key_path = "rollout.sglang.server_args"
    user_args = {name.replace("-", "_"): value for name, value in section.server_args.items()}
    for name in sorted(DERIVED_ARGS & set(user_args)):
        raise ValueError(f"{key_path}.{name}: is derived from other keys and cannot be set here; remove it")
    if place.host in ("0.0.0.0", "::"):
        raise ValueError(f"engine host {place.host}: bind to one interface, 127.0.0.1 or the cluster's")
    if section.num_nodes > 1 and place.dist_init_addr is None:
        raise ValueError(f"rollout.sglang.num_nodes={section.num_nodes}: an engine over nodes needs dist_init_addr")
    args: dict[str, Any] = {
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[model.dtype],
        "load_format": model.load_format,
        "max_total_tokens": section.num_concurrent * model.max_context,
        "enable_deterministic_inference": True,
        "sleep_on_idle": True,
        **(_CPU_ARGS if place.device == "cpu" else {}),
        **({"enable_memory_saver": True} if place.gives_memory_up and place.device == "cuda" else {}),
        **user_args,
        "device": place.device,
        "model_path": model.path,
        "skip_tokenizer_init": True,
        "host": place.host,
        "port": place.port,
        "tp_size": section.tp_size,
        **({"ep_size": section.ep_size} if section.ep_size > 1 else {}),
        **({"enable_return_routed_experts": True} if model.routing is not None else {}),
        "max_running_requests": section.num_concurrent,
        "weight_version": "0",
        "custom_weight_loader": CUSTOM_LOADER,
    }
    if section.num_nodes > 1:
        args |= {"nnodes": section.num_nodes, "node_rank": place.node_rank, "dist_init_addr": place.dist_init_addr}
    flags = [word for name, value in args.items() for word in _flag(f"{key_path}.{name}", name, value)]
    return ServerLaunch(
        argv=(model.python, "-m", "sglang.launch_server", "--config", str(key_file), *flags),
        env=_environment(section, place, receiver_dir),
        host=place.host,
        port=place.port,
    )


_CPU_ARGS = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "disable_overlap_schedule": True}
"""A step computed on the processor itself leaves nothing to overlap: scheduling one ahead would only decode a step too many
for whatever ends, and prefill what the batch before is about to cache."""


def _flag(key_path: str, name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is None or value is False:  # SGLang's switches only turn on
        return []
    if value is True:
        return [flag]
    if isinstance(value, Mapping):
        return [flag, json.dumps(value)]
    if isinstance(value, (list, tuple)):
        return [flag, *(str(item) for item in value)]
    if isinstance(value, (str, int, float)):
        return [flag, str(value)]
    raise ValueError(f"{key_path}: {type(value).__name__} has no command-line form")


def _environment(section: SglangSection, place: EnginePlace, receiver_dir: Path) -> dict[str, str]:
    env = {
        RECEIVER_DIR_ENV: str(receiver_dir),
        RECEIVER_HOST_ENV: place.host,
        "HF_HUB_OFFLINE": "1",  # the model is a folder; nothing is fetched
        "SGLANG_TIMEOUT_KEEP_ALIVE": "600",  # idle connections are the client's to close, see `client`
        # A crashed server otherwise collects GPU core dumps for a minute before it ends, and looks alive meanwhile.
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    }
    if place.device == "cpu":
        ranks_here = section.tp_size // section.num_nodes
        env |= {
            "PYTHONPATH": str(CPU_LAYER_PATH),
            "SGLANG_USE_CPU_ENGINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            # More threads than cores fight: ten times slower.
            "OMP_NUM_THREADS": str(max(len(place.cpu_cores) // ranks_here, 1)),
            "TORCHDYNAMO_DISABLE": "1",  # its C++ and Triton back ends are not there
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(_cores_of_ranks(place.cpu_cores, ranks_here)),
        }
    return env


def _cores_of_ranks(cores: Sequence[int], num_ranks: int) -> list[str]:
    """One entry per rank: its share of the cores, or one core in turn when there are fewer cores than ranks."""
    if not cores:
        raise ValueError("an engine on CPU needs at least one core in EnginePlace.cpu_cores")
    if len(cores) < num_ranks:
        return [str(cores[rank % len(cores)]) for rank in range(num_ranks)]
    share = len(cores) // num_ranks
    return [",".join(str(core) for core in cores[rank * share : (rank + 1) * share]) for rank in range(num_ranks)]
