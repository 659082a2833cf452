"""Hugging Face -> Megatron's distributed format -> any layout -> Hugging Face, through the commands, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.checkpoint.hf_export import hf_tensor_shapes, write_model
from megatron_rl.checkpoint.megatron_dist import read_checkpoint_model
from megatron_rl.model_families.registry import get_family
from tests.distributed.checkpoint_walk import walk_checkpoints
from tests.distributed.launch import run_distributed
from tests.distributed.walk import SpreadSource, debug_dims

ROOT = Path(__file__).parents[2]
LAYOUTS = {
    "qwen3_moe": [{"tp": 2, "ep": 2}, {"pp": 2, "virtual_pp": 2}, {"dp": 2, "ep": 2}, {"tp": 2, "etp": 2}],
    "llama": [{"tp": 2}, {"pp": 2}, {"pp": 2, "virtual_pp": 2}],
}

pytestmark = pytest.mark.distributed


def run_tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "checkpoints_tools" / f"{name}.py"), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("family_name", sorted(LAYOUTS))
def test_round_trip_over_layouts(family_name: str, tmp_path: Path) -> None:
    family = get_family(family_name)
    dims = debug_dims(family_name)
    source = SpreadSource(dims.num_layers)
    tensors = {name: source.whole(name, shape) for name, shape in hf_tensor_shapes(family, dims)}
    write_model(tmp_path / "hf", family, dims, tensors.items(), torch.float32)
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")

    done = run_tool("hf_to_megatron", "--input", tmp_path / "hf", "--output", tmp_path / "start")
    assert done.returncode == 0, done.stderr
    saved = read_checkpoint_model(tmp_path / "start")
    assert (saved.family.name, saved.dims, saved.dtype) == (family_name, dims, torch.float32)

    cases = [{"layout": layout, "load": ["start"]} for layout in LAYOUTS[family_name]]
    cases[0]["save"] = "first"
    cases[1] |= {"load": ["start", "first"], "save": "second"}
    cases[2]["load"] = ["second"]
    cases.append({"layout": LAYOUTS[family_name][0], "load": ["start"], "dtype": "bf16"})
    for results in run_distributed(walk_checkpoints, 2, timeout_s=300, family=family_name, folder=str(tmp_path), cases=cases):
        assert results == [{name: [] for name in case["load"]} for case in cases]

    done = run_tool("megatron_to_hf", "--input", tmp_path / "second", "--output", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "hf" / "config.json").read_text()
    done = run_tool("megatron_to_hf", "--input", tmp_path / "start", "--output", tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (tmp_path / "again" / "model.safetensors").read_bytes()
    assert (tmp_path / "whole" / "tokenizer.json").read_text() == "{}"
    assert not list(tmp_path.glob("*.tmp"))
