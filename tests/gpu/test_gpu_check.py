"""The GPU check itself, on the CPU with tiny sizes: the same code, the same words, everything but the CUDA calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gpu_check import __main__ as gpu_check
from gpu_check.flops import compute_train_flops, peak_flops

from megatron_rl.model_families.registry import FAMILIES
from megatron_rl.model_families.shards import count_parameters

ROOT = Path(__file__).parents[2]
OPTIONAL_PACKAGES = ("ray", "xxhash", "sglang", "numba", "pydantic", "aiohttp", "psutil", "reasoning_gym", "math_verify",
                     "tensorboard", "datasets", "pyarrow", "gguf", "einops", "pytest", "hypothesis")  # fmt: skip
BLOCKER = f"""
import sys
from importlib.machinery import PathFinder

class WithoutOptional(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {OPTIONAL_PACKAGES!r} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutOptional
"""


def run_script(*arguments: str, timeout_s: float, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "launch" / "gpu_check.sh"), *arguments],
        capture_output=True, text=True, timeout=timeout_s, check=False,
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    """The line of a whole run on the CPU in an interpreter that has none of the optional packages."""
    folder = tmp_path_factory.mktemp("without_optional_packages")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    done = run_script("--cpu", timeout_s=170, PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout
    assert "gpu_check: training:" in done.stderr
    (only,) = done.stdout.splitlines()
    return json.loads(only)


def test_all_checks_pass_on_the_cpu_without_optional_packages(line):
    assert line["ok"] and line["device"] == "cpu"
    assert set(gpu_check.WHAT) < set(line)


def test_log_probs_agree_in_both_dtypes(line):
    for family in ("qwen3_moe", "llama"):
        for form in ("megatron", "engine"):
            figures = line["equality"][family][form]
            assert 0 < figures["fp32_max_diff"] < 1e-4
            assert figures["fp32_max_diff"] < figures["bf16_max_diff"]
        assert line["equality"][family]["decode"]["fp32_max_diff"] < 1e-4


def test_training_falls_and_weights_arrive(line):
    losses = line["training"]["losses"]
    assert losses == sorted(losses, reverse=True)
    sync = line["weight_sync"]
    assert sync["transport"] == "shared_memory" and not sync["wrong_params"]
    assert sync["changed_params"] > 20 and sync["bytes"] > 2 * 190_000


def test_speeds_are_measured(line):
    training, generation = line["training_speed"], line["generation_speed"]
    dims = FAMILIES["qwen3_moe"].debug_dims
    assert training["weights"] == count_parameters(FAMILIES["qwen3_moe"], dims)
    assert training["tokens_per_s"] == pytest.approx(training["tokens_per_step"] / training["step_s"])
    assert training["mfu"] is None  # no peak is known for this processor
    assert generation["tokens_per_s"] == pytest.approx(5 * 6 / generation["seconds"])


def test_absent_parts_are_named(line):
    assert line["transformer_engine"] == line["apex"] == line["nccl"] == "absent"


def test_without_a_gpu_it_says_what_it_would_check():
    done = run_script("--json", timeout_s=60, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0 and not done.stderr
    said = json.loads(done.stdout)
    assert said["ok"] is None and "no GPU" in said["gpu_check"]
    assert said["would_check"] == gpu_check.WHAT


def test_a_failing_check_is_reported_and_the_others_run(monkeypatch, capsys):
    from megatron_rl.platforms.platform import CpuPlatform

    def broken(platform):
        raise ValueError("the device is on fire")

    checks = {"equality": broken, "training": lambda platform: {"ok": True, "losses": [2.0, 1.0]}}
    monkeypatch.setattr(gpu_check, "build_checks", lambda: checks)
    results = gpu_check.run_checks(CpuPlatform(), ["equality", "training", "apex"])
    assert results["equality"]["error"] == "ValueError: the device is on fire" and not results["equality"]["ok"]
    assert results["training"]["ok"] and results["apex"] == "absent"
    assert "on fire" in capsys.readouterr().err


def test_the_deadline_ends_a_check():
    with pytest.raises(TimeoutError, match="had 1 s"), gpu_check.deadline(1):
        while True:  # the signal ends it
            np.sin(np.arange(1000))


def test_train_flops_count_what_a_token_meets():
    dense, moe = FAMILIES["llama"].debug_dims, FAMILIES["qwen3_moe"].debug_dims
    # One token has no one to attend to but itself; norms are not counted, the tied embedding is the output layer.
    norms = dense.hidden_size * (2 * dense.num_layers + 1)
    weights = count_parameters(FAMILIES["llama"], dense) - norms
    squares = 6 * dense.num_layers * dense.num_heads * dense.head_dim
    assert compute_train_flops(dense, [1]) == 6 * weights + squares
    assert compute_train_flops(dense, [10, 3]) == 6 * weights * 13 + squares * 109
    idle_experts = moe.num_layers * (moe.num_experts - moe.top_k) * 3 * moe.hidden_size * moe.moe_ffn_size
    norms = moe.hidden_size * (2 * moe.num_layers + 1) + 2 * moe.num_layers * moe.head_dim
    lookup = moe.vocab_size * moe.hidden_size
    active = count_parameters(FAMILIES["qwen3_moe"], moe) - norms - lookup - idle_experts
    assert compute_train_flops(moe, [1]) == 6 * active + 6 * moe.num_layers * moe.num_heads * moe.head_dim
    more = replace(moe, num_experts=2 * moe.num_experts)
    router = 6 * moe.num_layers * moe.num_experts * moe.hidden_size
    assert compute_train_flops(more, [1]) == compute_train_flops(moe, [1]) + router


def test_peaks_are_known_by_the_names_that_drivers_report():
    assert peak_flops("NVIDIA H100 80GB HBM3") == peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("Some Other Device") is None
