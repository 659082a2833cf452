"""Import-time stand-ins for the packages that the released SGLang imports but never calls on a CPU.

SGLang imports its Triton kernels and its CUDA extension at module level. A finder at the end of `sys.meta_path` answers
only for packages that are not installed, so a real one always wins. A stand-in can be imported, subclassed, named in an
annotation and used as a kernel decorator. Calling anything else raises NotImplementedError: no stand-in computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

REASONS = {
    "triton": "GPU kernels, decorated at import and launched on GPUs only",
    "sgl_kernel": "SGLang's compiled kernels; the wheel needs libcuda",
    "torchvision": "image preprocessing of multimodal models",
    "soundfile": "audio input of multimodal models",
    "IPython": "a type named by the interactive frontend language",
    "gguf": "GGUF checkpoints, which are converted before they reach an engine",
}
"""Every package that may be stood in for, and why nothing of it runs here (checked on SGLang 0.5.23)."""

HIDDEN = ("megatron",)
"""Packages that a server does not see: SGLang's debug dumper imports Megatron wherever it finds it, for nothing, which
costs each process a tenth of its start."""


class _Absent(type):
    """The type of every name in a stand-in: a class, so that it can be subclassed, annotated and tested against."""

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError(f"{cls.__module__}.{cls.__qualname__} is not installed and has no CPU implementation")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        child = _Absent(name, (), {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.{name}"})
        setattr(cls, name, child)
        return child


class _Kernel:
    """What `triton.jit` returns: keeps the function for those who inspect it, refuses to be launched."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = fn.__name__
        self.__module__ = fn.__module__
        self.__doc__ = fn.__doc__

    def __getitem__(self, grid: object) -> Any:
        raise NotImplementedError(f"Triton kernel {self.__module__}.{self.__name__} was launched on a CPU")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self[None]


def _jit(fn: Callable[..., Any] | None = None, **options: object) -> Any:
    return _jit if fn is None else _Kernel(fn)


def _decorator_with_options(*args: object, **kwargs: object) -> Callable[[Any], Any]:
    return lambda kernel: kernel


class _Record:
    """Keeps constructor arguments; for constants and tuning tables that are built at import."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.args = args
        self.kwargs = kwargs


_TRITON = {
    "__version__": "3.5.0",  # compared with minimum versions at import
    "cdiv": lambda numerator, denominator: -(-numerator // denominator),
    "next_power_of_2": lambda n: 1 << (n - 1).bit_length(),
    "jit": _jit,
    "autotune": _decorator_with_options,
    "heuristics": _decorator_with_options,
    "Config": _Record,
}
_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "triton": _TRITON,
    "triton.language": {"constexpr": _Record},
    "triton.knobs": {"runtime": None},  # as in Triton builds without the kernel-load hooks, which SGLang provides for
}


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"stand-in module {self.__name__} has no {name}")
        value = _Absent(name, (), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class _StandInLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        # Probes (transformers') compare versions: the oldest possible one turns features off.
        vars(module).update({"__version__": "0"} | _ATTRIBUTES.get(module.__name__, {}))


class _PluginDistribution(Distribution):
    """Declares the SGLang plugin (`plugin.register`) for the processes that have this layer, and for no others."""

    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": "Metadata-Version: 2.1\nName: megatron-rl-sglang-cpu\nVersion: 0\n",
            "entry_points.txt": "[sglang.srt.plugins]\nmegatron_rl_cpu = "
            "megatron_rl.rollout.sglang.cpu_layer.plugin:register\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path


class CpuLayerFinder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        root = fullname.partition(".")[0]
        # A missing submodule of an installed package stays missing.
        if root not in REASONS or (root in sys.modules and not isinstance(sys.modules[root], _StandIn)):
            return None
        return ModuleSpec(fullname, _StandInLoader(), is_package=True)

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        name = context.name if context is not None else None
        return [_PluginDistribution()] if name in (None, "megatron-rl-sglang-cpu") else []


def install() -> None:
    """Append the finder to `sys.meta_path`, once, and hide what a server has no use for."""
    for name in HIDDEN:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # importing it now raises ModuleNotFoundError
    if not any(isinstance(finder, CpuLayerFinder) for finder in sys.meta_path):
        sys.meta_path.append(CpuLayerFinder())
