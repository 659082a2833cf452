"""What a checkpoint says about itself, and what is refused. Saving and loading tensors: tests/distributed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_rl.checkpoint.hf_folder import CheckpointError
from megatron_rl.checkpoint.megatron_dist import RELEASE, TRACKER_NAME, read_checkpoint_model
from megatron_rl.model_families.registry import FAMILIES


def checkpoint(folder, common, tracker="release", release=RELEASE):
    (folder / release).mkdir(parents=True)
    (folder / TRACKER_NAME).write_text(tracker)
    (folder / release / "metadata.json").write_text("{}")
    torch.save(common, folder / release / "common.pt")
    return folder


@pytest.mark.parametrize("family_name", sorted(FAMILIES))
@pytest.mark.parametrize(("tracker", "release"), [("release", "release"), ("12\n", "iter_0000012")])
def test_family_dims_and_dtype_come_from_the_checkpoint(tmp_path, family_name, tracker, release):
    dims = dataclasses.replace(FAMILIES[family_name].debug_dims, eos_token_id=2)
    own = {"family": family_name, "dims": dataclasses.asdict(dims), "dtype": "bf16"}
    folder = checkpoint(tmp_path / "saved", {"iteration": 0, "megatron_rl": own}, tracker, release)
    for path in (folder, folder / release):
        saved = read_checkpoint_model(path)
        assert (saved.family.name, saved.dims, saved.dtype) == (family_name, dims, torch.bfloat16)


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere: not found"):
        read_checkpoint_model(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty: has no metadata.json"):
        read_checkpoint_model(tmp_path / "empty")
    foreign = checkpoint(tmp_path / "foreign", {"iteration": 0})
    with pytest.raises(CheckpointError, match=r"common.pt: does not say which model it is"):
        read_checkpoint_model(foreign)
    odd = checkpoint(tmp_path / "odd", {"iteration": 0}, tracker="latest")
    with pytest.raises(CheckpointError, match=r"latest_checkpointed_iteration.txt: 'latest', expected"):
        read_checkpoint_model(odd)
    common = foreign / RELEASE / "common.pt"
    common.write_bytes(common.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=r"common.pt: cut short"):
        read_checkpoint_model(foreign)
    common.unlink()
    with pytest.raises(CheckpointError, match=r"common.pt: not found; the checkpoint is incomplete"):
        read_checkpoint_model(foreign)
