"""Weights through a shared file system: bit for bit, a whole version or none, no pile of old ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from megatron_rl.resharding.boxes import Box
from megatron_rl.resharding.channel import ChannelError
from megatron_rl.resharding.digest import DIGEST_NAMES, new_digest
from megatron_rl.resharding.transports import disk
from megatron_rl.types.layout import EngineLayout, ParallelLayout
from tests.unit.resharding.rig import world


def draw_boxes(seed: int, dtype=torch.bfloat16) -> list[Box]:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(13, 11, generator=generator).to(dtype)
    return [Box(whole[:9, 2:7], dtype, "a.weight"), Box(whole[9:], dtype, "b.weight")]


def digest():
    return new_digest(DIGEST_NAMES[0])


def test_slices_through_files_are_the_slices(tmp_path):
    options = {"transport": "disk", "directory": tmp_path, "bucket_bytes": 40_000}
    with world("qwen3_moe", ParallelLayout(tp=2, ep=2, dp=2), EngineLayout(2, 1), torch.bfloat16, options=options) as one:
        for seed in (1, 2, 3):
            one.load(seed)
            one.sync()
            one.assert_whole()
        pairs = np.argwhere(one.plan.num_elements_between() > 0).tolist()
    folders = sorted(tmp_path.iterdir())
    assert [folder.name for folder in folders] == [f"from-{source}-to-{target}" for source, target in pairs]
    assert len(list(tmp_path.rglob("*.safetensors"))) > len(folders), "large pairs have a file per bucket"
    for folder in folders:
        (version,) = folder.iterdir()  # the ones before are gone
        files = sorted(version.glob("*.safetensors"))
        assert files and not list(version.glob("*.tmp"))
        assert [entry["file"] for entry in json.loads((version / "manifest.json").read_text())["files"]] == [
            file.name for file in files
        ]


def test_both_sides_hash_the_same(tmp_path):
    wrote, read = digest(), digest()
    source, target = draw_boxes(1), draw_boxes(2)
    manifest = disk.write_version(tmp_path, source, 30, wrote)
    disk.read_version(manifest, target, read)
    assert wrote.hexdigest() == read.hexdigest() == json.loads(manifest.read_text())["digest"]
    for one, other in zip(source, target, strict=True):
        assert torch.equal(one.view, other.view)


def test_a_truncated_file_is_named(tmp_path):
    manifest = disk.write_version(tmp_path, draw_boxes(1), 10**6, digest())
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"slices-00000\.safetensors"):
        disk.read_version(manifest, draw_boxes(2), digest())


def test_other_boxes_are_refused(tmp_path):
    manifest = disk.write_version(tmp_path, draw_boxes(1), 10**6, digest())
    with pytest.raises(ValueError, match="describes other boxes"):
        disk.read_version(manifest, draw_boxes(2)[:1], digest())
    with pytest.raises(ValueError, match=r"expected torch\.float16"):
        disk.read_version(manifest, draw_boxes(2, torch.float16), digest())


def test_a_folder_that_is_not_shared_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "APPEAR_TIMEOUT_S", 0.1)
    with pytest.raises(ValueError, match=r"manifest\.json did not appear.*sync\.directory"):
        disk.read_version(tmp_path / "manifest.json", draw_boxes(1), digest())


def test_a_version_that_cannot_be_written_leaves_no_part(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    options = {"transport": "disk", "directory": tmp_path, "bucket_bytes": 40_000}
    with world("llama", ParallelLayout(), EngineLayout(1, 1), torch.bfloat16, options=options) as one:
        order = one.begin()
        monkeypatch.setattr(disk, "save_file", full)
        with pytest.raises(OSError, match="no space left"):
            one.senders[0].send(one.chunks[0], order)
        assert not list((tmp_path / "from-0-to-0").iterdir())
        with pytest.raises(ChannelError, match="incomplete"):
            one.controls[0].finish(order.sync)
        one.assert_untouched()
