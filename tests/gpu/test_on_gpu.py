"""The GPU check on a GPU, one test per check. CI has none and deselects them (marker `gpu`)."""

from __future__ import annotations

import pytest
import torch
from gpu_check import __main__ as gpu_check

from megatron_rl.platforms.platform import select_platform

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def platform():
    if not torch.cuda.is_available():
        pytest.fail("these tests need an NVIDIA GPU; without one leave out -m gpu")
    torch.set_float32_matmul_precision("highest")
    chosen = select_platform()
    chosen.prepare_megatron()
    return chosen


@pytest.mark.parametrize("name", gpu_check.WHAT)
def test_check(platform, name):
    (result,) = gpu_check.run_checks(platform, [name]).values()
    assert result == "absent" or result["ok"], result
    if name == "weight_sync":
        assert result["transport"] == "cuda_ipc"
