from __future__ import annotations

import torch

from megatron_rl.platforms.platform import CpuPlatform, CudaPlatform, select_platform


def test_the_platform_is_what_is_there() -> None:
    expected = CudaPlatform if torch.cuda.is_available() else CpuPlatform
    assert isinstance(select_platform(), expected)


def test_the_cpu_platform_seeds_and_measures() -> None:
    platform = CpuPlatform()
    platform.seed(7)
    first = torch.rand(3)
    platform.seed(7)
    assert torch.equal(first, torch.rand(3))
    assert platform.peak_memory_bytes() > 50 * 2**20
    assert (platform.device.type, platform.backend) == ("cpu", "gloo")
