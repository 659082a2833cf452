from __future__ import annotations

import os
import subprocess
import sys

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


def test_the_gpu_platform_mends_megatron_where_transformer_engine_is_absent() -> None:
    """In a fresh interpreter, with the one call into the driver left out: the router of a GPU run finds its names."""
    code = """
import os, warnings
warnings.simplefilter("ignore")
import torch
torch.cuda.set_device = lambda device: None
from megatron_rl.platforms.platform import CudaPlatform
platform = CudaPlatform(torch.device("cuda", 0))
platform.prepare_megatron()
platform.prepare_megatron()
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
assert moe_utils.te_general_gemm is None
assert CheckpointWithoutOutput(fp8=False).fp8 is False and CheckpointWithoutOutput(fp8=True).fp8 is True
assert moe_utils.torch is torch, "the stand-ins of the CPU are not for GPUs"
assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
hidden, weight = torch.randn(3, 5), torch.randn(7, 5)
logits = moe_utils.router_gating_linear(hidden, weight, None, torch.float32)
torch.testing.assert_close(logits, hidden @ weight.T)
"""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def test_numbers_too_small_to_compute_with_are_zero_on_every_thread() -> None:
    code = (
        "import torch\n"
        "from megatron_rl.platforms.platform import CpuPlatform\n"
        "torch.set_num_threads(2)\n"
        "CpuPlatform().prepare_torch(torch.bfloat16)\n"
        "tiny = torch.full((64, 4096), 1e-39)\n"
        "assert not (torch.full((1 << 20,), 1e-30) * 1e-9).any(), 'element by element'\n"
        "assert not (tiny @ torch.ones(4096, 64)).any(), 'as a product'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
