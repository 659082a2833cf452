"""The CPU layer, in a process of its own: what it changes in `megatron.core` and what it must not change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROBE = """
import importlib.metadata, json, sys
import torch
from megatron_rl.platforms import cpu_megatron
result = {"imported_on_import": "megatron.core" in sys.modules}
cpu_megatron.enable_megatron_on_cpu()
import megatron.core
from megatron.core import optimizer, tensor_parallel
from megatron.core.optimizer import clip_grads
from megatron.core.transformer import utils
from megatron.core.transformer.moe import moe_utils
first = clip_grads.torch
code = clip_grads.clip_grad_by_total_norm_fp32.__code__
cpu_megatron.enable_megatron_on_cpu()
result["idempotent"] = first is clip_grads.torch and code is clip_grads.clip_grad_by_total_norm_fp32.__code__
result["version"] = importlib.metadata.version("megatron-core")  # its own __version__ also names this checkout's revision
result["real_cuda_kept"] = torch.cuda.__name__ == "torch.cuda" and torch.zeros is not clip_grads.torch.zeros
result["device"] = str(clip_grads.torch.zeros(1, device="cuda").device)
grad = torch.ones(4)
parameter = torch.nn.Parameter(torch.zeros(4)); parameter.grad = grad
clip_grads.clip_grad_by_total_norm_fp32([parameter], 1.0, 2.0)
result["clipped"] = parameter.grad.tolist()
try:
    clip_grads.torch.cuda.brand_new_call()
except AttributeError as error:
    result["miss"] = str(error)
result["compiled"] = sorted(
    f"{name}.{key}"
    for name, module in list(sys.modules.items()) if name.startswith("megatron.core") and module is not None
    for key, value in vars(module).items()
    if "_torchdynamo_orig_callable" in getattr(value, "__dict__", {})
)
result["patches"] = [[patch.module, patch.attribute, patch.reason] for patch in cpu_megatron.PATCHES]
print("RESULT" + json.dumps(result))
"""


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return dict(json.loads(line.removeprefix("RESULT")))


def test_importing_the_module_touches_nothing(probe: dict[str, Any]) -> None:
    assert probe["imported_on_import"] is False


def test_only_megatron_sees_the_stand_in(probe: dict[str, Any]) -> None:
    assert probe["real_cuda_kept"] is True
    assert probe["device"] == "cpu"


def test_it_can_be_called_twice(probe: dict[str, Any]) -> None:
    assert probe["idempotent"] is True


def test_clipping_takes_cpu_gradients(probe: dict[str, Any]) -> None:
    assert probe["clipped"] == pytest.approx([0.5] * 4, abs=1e-6)


def test_a_name_that_the_layer_misses_says_where_to_add_it(probe: dict[str, Any]) -> None:
    assert "torch.cuda.brand_new_call" in probe["miss"] and "cpu_megatron.py" in probe["miss"]


def test_nothing_is_left_that_would_call_a_compiler(probe: dict[str, Any]) -> None:
    assert probe["compiled"] == []


def test_every_patch_says_why_and_the_version_was_checked(probe: dict[str, Any]) -> None:
    from megatron_rl.platforms.cpu_megatron import CHECKED_VERSIONS

    assert all(len(reason) > 10 for _, _, reason in probe["patches"])
    assert probe["version"] in CHECKED_VERSIONS
