"""What `train` checks before any process starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron_rl.checkpoint.hf_folder import write_folder
from megatron_rl.cli.train import check_teacher
from megatron_rl.config.algorithm_sections import ReferenceSection
from megatron_rl.config.layout_section import LayoutSection
from megatron_rl.controller.model_setup import ModelSetup, reference_model
from megatron_rl.model_families.registry import get_family


@pytest.mark.parametrize("num_layers", [2, 3])
def test_a_teacher_has_the_policys_dimensions(num_layers: int, tmp_path: Path) -> None:
    family = get_family("llama")
    dims = dataclasses.replace(family.debug_dims, num_layers=2)
    write_folder(tmp_path / "teacher", family.hf_from_dims(dataclasses.replace(dims, num_layers=num_layers)), [])
    setup = ModelSetup("llama", dims, None, 1, 1)
    problems = list(check_teacher(ReferenceSection(path=str(tmp_path / "teacher")), setup))
    assert not list(check_teacher(ReferenceSection(), setup))
    if num_layers == 2:
        assert not problems
    else:
        ((key, reason),) = problems
        assert key == "algorithm.reference.path" and "expected a folder of the policy's own family and dimensions" in reason


def test_a_teacher_on_ranks_of_its_own_may_be_larger_but_reads_the_same_tokens(tmp_path: Path) -> None:
    family = get_family("llama")
    dims = family.debug_dims
    write_folder(tmp_path / "large", family.hf_from_dims(dataclasses.replace(dims, num_layers=9)), [])
    write_folder(tmp_path / "other", family.hf_from_dims(dataclasses.replace(dims, vocab_size=dims.vocab_size + 1)), [])
    setup = ModelSetup("llama", dims, None, 1, 1)
    section = ReferenceSection(path=str(tmp_path / "large"), layout=LayoutSection())
    assert not list(check_teacher(section, setup))
    teacher = reference_model(section, setup)
    assert (teacher.dims.num_layers, teacher.path) == (9, section.path)
    ((key, reason),) = check_teacher(dataclasses.replace(section, path=str(tmp_path / "other")), setup)
    assert key == "algorithm.reference.path" and f"expected the policy's {dims.vocab_size}" in reason
    assert reference_model(ReferenceSection(layout=LayoutSection()), setup) == setup
