"""Everything that lets the released Megatron-Core run without a GPU. Applied by `enable_megatron_on_cpu()`, never on import.

Only `megatron.core` modules are touched: they see a proxy of `torch` whose `cuda` is a stand-in and whose tensor factories
read `device="cuda"` as the CPU. The real `torch.cuda` stays as it is, so whatever this table misses fails loudly.

Checked on megatron-core 0.16.1 (torch 2.13, Python 3.11) and written for 0.19.2 (torch 2.14, Python 3.12).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

CHECKED_VERSIONS = ("0.16.1", "0.19.2")

_IMPORTED_FIRST = (
    "megatron.core.dist_checkpointing.serialization",
    # Loaded inside `save` otherwise, where they would see the real torch.cuda.
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.moe.router_replay",
    "megatron.core.transformer.multi_latent_attention",
)


@dataclass(frozen=True, slots=True)
class Patch:
    """One name that is replaced. `apply` receives the module and does it; a missing `attribute` is not an error."""

    module: str
    attribute: str
    reason: str
    apply: Callable[[types.ModuleType, str], None]
    also_on_gpu: bool = False
    """Whether a GPU without Transformer Engine needs it too."""


class _NullStream:
    """A stream or event of a device that has only one order of work."""

    cuda_stream = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __enter__(self) -> _NullStream:
        return self

    def __exit__(self, *_exc: object) -> None: ...

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None: ...

    wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, event: _NullStream | None = None) -> _NullStream:
        return event or self

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: _NullStream) -> float:
        return 0.0


class _CpuInPlaceOfCuda(types.ModuleType):
    """`torch.cuda` as `megatron.core` sees it. An unknown name raises and says where to add it."""

    Stream = ExternalStream = Event = _NullStream
    OutOfMemoryError = torch.OutOfMemoryError
    FloatTensor, HalfTensor, BFloat16Tensor = torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor
    get_rng_state = staticmethod(lambda *_a, **_k: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_a, **_k: torch.set_rng_state(state))
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    current_device = staticmethod(lambda: torch.device("cpu"))
    device_count = staticmethod(lambda: 1)
    is_available = is_initialized = is_current_stream_capturing = staticmethod(lambda: False)
    set_device = synchronize = empty_cache = set_stream = staticmethod(lambda *_a, **_k: None)
    current_stream = default_stream = staticmethod(_NullStream)
    stream = staticmethod(lambda *_a, **_k: contextlib.nullcontext())
    memory_allocated = memory_reserved = staticmethod(lambda *_a, **_k: 0)
    max_memory_allocated = max_memory_reserved = staticmethod(lambda *_a, **_k: 0)
    memory_stats = staticmethod(lambda *_a, **_k: {})
    nvtx = types.SimpleNamespace(
        range_push=lambda *_a: None, range_pop=lambda: None, range=lambda *_a, **_k: contextlib.nullcontext()
    )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"megatron.core asked for torch.cuda.{name} on a machine without a GPU; "
            "give it a stand-in in megatron_rl/platforms/cpu_megatron.py"
        )


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The tensor factory with `device="cuda"` read as the CPU and without pinned memory."""

    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        if str(kwargs.get("device", "cpu")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return made


@functools.cache
def _torch_proxy() -> types.ModuleType:
    """`torch` as `megatron.core` sees it. A copy of the namespace, so that attribute access costs what it always costs."""
    proxy = types.ModuleType("torch")
    proxy.__dict__.update(torch.__dict__)
    proxy.__dict__["cuda"] = _CpuInPlaceOfCuda("torch.cuda")
    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like", "ones_like"):
        proxy.__dict__[name] = _on_cpu(getattr(torch, name))
    proxy.__dict__["__getattr__"] = lambda name: getattr(torch, name)  # submodules that are imported later
    return proxy


_TYPE_NAMES = {f"torch.cuda.{kind}": f"torch.{kind}" for kind in ("FloatTensor", "HalfTensor", "BFloat16Tensor")}


def _rename_constants(code: types.CodeType) -> types.CodeType:
    """The code with the type names of CUDA tensors replaced by those of CPU tensors, nested functions included."""

    def renamed(constant: Any) -> Any:
        if isinstance(constant, types.CodeType):
            return _rename_constants(constant)
        if isinstance(constant, tuple):
            return tuple(renamed(item) for item in constant)
        return _TYPE_NAMES.get(constant, constant) if isinstance(constant, str) else constant

    return code.replace(co_consts=tuple(renamed(constant) for constant in code.co_consts))


def _accept_cpu_types(module: types.ModuleType, path: str) -> None:
    target: Any = module
    for part in path.split("."):
        target = getattr(target, part)
    function = getattr(target, "__func__", target)
    function.__code__ = _rename_constants(function.__code__)


def _cuda_method_as_cpu(module: types.ModuleType, path: str) -> None:
    """Let the function's `tensor.cuda()` mean `tensor.cpu()`. For functions that do not name `torch.cuda`."""
    owner, name = path.split(".")
    function = getattr(getattr(module, owner), name)
    code = function.__code__
    function.__code__ = code.replace(co_names=tuple("cpu" if item == "cuda" else item for item in code.co_names))


def _splits_as_numpy(module: types.ModuleType, name: str) -> None:
    def keep_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    setattr(module, name, keep_on_cpu)


def _define_as(value: Any, *, only_if_missing: bool = False) -> Callable[[types.ModuleType, str], None]:
    def apply(module: types.ModuleType, name: str) -> None:
        if not (only_if_missing and hasattr(module, name)):
            setattr(module, name, value)

    return apply


def _optional_fp8(module: types.ModuleType, name: str) -> None:
    owner = getattr(module, name)
    original = owner.__init__

    @functools.wraps(original)
    def init(self: Any, fp8: Any = None, *args: Any, **kwargs: Any) -> None:
        original(self, fp8 or None, *args, **kwargs)

    owner.__init__ = init


def _own_step_per_state(module: types.ModuleType, name: str) -> None:
    owner = getattr(module, name)
    original = owner.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        if self.optimizer is None:
            return
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    owner.load_state_dict = load_state_dict


_OPTIMIZER = "megatron.core.optimizer"
_TYPE_CHECK = "compares tensor.type() with torch.cuda.*Tensor"
_RANDOM = "megatron.core.tensor_parallel.random"
_MOE = "megatron.core.transformer.moe"
PATCHES: tuple[Patch, ...] = (
    Patch(f"{_OPTIMIZER}.optimizer", "Float16OptimizerWithFloat16Params.__init__", _TYPE_CHECK, _accept_cpu_types),
    Patch(
        f"{_OPTIMIZER}.distrib_optimizer",
        "DistributedOptimizer._build_model_and_main_param_groups",
        _TYPE_CHECK,
        _accept_cpu_types,
    ),
    Patch(f"{_OPTIMIZER}.clip_grads", "clip_grad_by_total_norm_fp32", _TYPE_CHECK, _accept_cpu_types),
    Patch(
        f"{_OPTIMIZER}.distrib_optimizer",
        "DistributedOptimizer",
        "puts one shared `step` tensor into every Adam state when it loads, which corrupts the bias correction",
        _own_step_per_state,
        also_on_gpu=True,
    ),
    Patch(
        f"{_MOE}.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        "leaves split sizes as a CPU tensor, which gloo's all_to_all_single rejects",
        _splits_as_numpy,
    ),
    Patch(
        f"{_MOE}.moe_utils",
        "te_general_gemm",
        "undefined without Transformer Engine, but read by the router",
        _define_as(None, only_if_missing=True),
        also_on_gpu=True,
    ),
    Patch(
        "megatron.core.models.common.language_module.language_module",
        "LanguageModule.setup_embeddings_and_output_layer",
        "moves tied embeddings with .cuda()",
        _cuda_method_as_cpu,
    ),
    Patch(
        _RANDOM,
        "_get_cuda_rng_state",
        "reads the generator of a CUDA device",
        _define_as(lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()),
    ),
    Patch(
        _RANDOM,
        "_set_cuda_rng_state",
        "writes the generator of a CUDA device",
        _define_as(lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)),
    ),
    Patch(
        _RANDOM,
        "CheckpointWithoutOutput",
        "takes fp8=False as fp8 on, then misses Transformer Engine",
        _optional_fp8,
        also_on_gpu=True,
    ),
    Patch(
        "megatron.core.transformer.multi_latent_attention",
        "HAVE_TE",
        "is True although Transformer Engine is absent",
        _define_as(False),
        also_on_gpu=True,
    ),
)


def _original(value: Any) -> Any:
    """The function that `torch.compile` wrapped, or None. (Stand-in mocks for absent packages answer to every name.)"""
    return value.__dict__.get("_torchdynamo_orig_callable") if isinstance(value, types.FunctionType) else None


def _uncompile(module: types.ModuleType) -> None:
    """Undo `jit_fuser` (torch.compile) on what the module defined when it was imported: it would call a C++ compiler."""
    for name, value in list(vars(module).items()):
        if (original := _original(value)) is not None:
            setattr(module, name, original)
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for key, member in list(vars(value).items()):
                if isinstance(member, staticmethod) and (original := _original(member.__func__)) is not None:
                    setattr(value, key, staticmethod(original))
                elif (original := _original(member)) is not None:
                    setattr(value, key, original)


_patched_modules: set[str] = set()
_tables_applied: list[str] = []


def enable_megatron_on_cpu() -> None:
    """Make `megatron.core` run on this machine's CPU. Call it before anything of Megatron is built.

    Calling it again is harmless and covers `megatron.core` modules that were imported since.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns about every absent GPU package
        for name in _IMPORTED_FIRST:
            importlib.import_module(name)
    jit = sys.modules["megatron.core.jit"]
    jit.disable_jit_fuser()
    for name, module in list(sys.modules.items()):
        if not name.startswith("megatron.core") or name in _patched_modules or module is None:
            continue
        _patched_modules.add(name)
        if module.__dict__.get("torch") is torch:
            module.torch = _torch_proxy()  # type: ignore[attr-defined]
        if "jit_fuser" in module.__dict__ and module is not jit:
            module.jit_fuser = jit.noop_decorator  # type: ignore[attr-defined]
        _uncompile(module)
    if not _tables_applied:
        for patch in PATCHES:
            patch.apply(sys.modules[patch.module], patch.attribute)
        _tables_applied.append(sys.modules["megatron.core"].__version__)


def mend_megatron_without_transformer_engine() -> None:
    """On a GPU: mend what `megatron.core` takes for granted where Transformer Engine is absent. Harmless to call again."""
    if _tables_applied or importlib.util.find_spec("transformer_engine") is not None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns about every absent GPU package
        for patch in PATCHES:
            if patch.also_on_gpu:
                patch.apply(importlib.import_module(patch.module), patch.attribute)
    _tables_applied.append(sys.modules["megatron.core"].__version__)
