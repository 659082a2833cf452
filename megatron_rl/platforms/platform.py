"""The device that ranks compute on and the backend that they talk over: CPU with gloo, or CUDA with NCCL."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_rl.platforms.cpu_bf16 import enable_fp32_products_of_bf16, lacks_bf16_units
from megatron_rl.platforms.cpu_megatron import enable_megatron_on_cpu, mend_megatron_without_transformer_engine


class Platform(Protocol):
    """Implementations: `CpuPlatform`, `CudaPlatform`; `select_platform` chooses."""

    @property
    def device(self) -> torch.device: ...

    @property
    def backend(self) -> str: ...

    def prepare_torch(self, dtype: torch.dtype) -> None:
        """Make torch compute in `dtype` as fast as this machine can. Calling again is harmless."""
        ...

    def prepare_megatron(self) -> None:
        """Make Megatron-Core usable here. Call it before anything of it is built; calling again is harmless."""
        ...

    def seed(self, seed: int) -> None:
        """Seed the generator that draws on `device`."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it."""
        ...

    def peak_memory_bytes(self) -> int:
        """The most memory that this process ever held: resident memory on CPU, allocated device memory on CUDA."""
        ...


@dataclass(frozen=True, slots=True)
class CpuPlatform:
    """CPU tensors over gloo."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "gloo"

    def prepare_torch(self, dtype: torch.dtype) -> None:
        # A sharp policy's softmax over a large vocabulary holds numbers below 1e-38, and a product with many of those takes
        # sixty times as long. Threads inherit the setting, so it comes before the first kernel.
        torch.set_flush_denormal(True)
        if dtype is torch.bfloat16 and lacks_bf16_units():
            enable_fp32_products_of_bf16()

    def prepare_megatron(self) -> None:
        enable_megatron_on_cpu()

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def synchronize(self) -> None:
        return

    def peak_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True, slots=True)
class CudaPlatform:
    """One GPU over NCCL."""

    device: torch.device
    backend: str = "nccl"

    def prepare_torch(self, dtype: torch.dtype) -> None:
        return

    def prepare_megatron(self) -> None:
        # Megatron overlaps the communication of tensor and sequence parallelism by launch order, which one hardware queue
        # keeps; the driver reads it when the device is first used. A value that is set already is respected.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(self.device)
        mend_megatron_without_transformer_engine()

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        torch.cuda.manual_seed(seed)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def peak_memory_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


def select_platform(local_rank: int = 0) -> Platform:
    """CUDA device `local_rank` (modulo the visible devices: Ray shows each rank its own) if there is one, else the CPU."""
    if torch.cuda.is_available():
        return CudaPlatform(torch.device("cuda", local_rank % torch.cuda.device_count()))
    return CpuPlatform()


def free_cached_memory(device: torch.device) -> None:
    """Give what the allocator keeps for later back to the device, so that another process can have it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
