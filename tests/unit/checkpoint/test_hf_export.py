"""Hugging Face -> ranks of any layout -> Hugging Face is bit-equal."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.checkpoint.hf_export import hf_tensor_shapes, merge_export, write_export_part
from megatron_rl.checkpoint.hf_folder import CheckpointError, FolderSource, RandomSource, write_folder
from megatron_rl.checkpoint.hf_shards import export_params, import_params
from megatron_rl.model_families.registry import FAMILIES, load_dims
from megatron_rl.types.layout import ParallelLayout

LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(tp=2, dp=2),
    ParallelLayout(tp=2, pp=2, virtual_pp=2, ep=2, dp=2),
    ParallelLayout(pp=4, cp=2),
    ParallelLayout(tp=2, etp=2, ep=2, dp=2),
]


def original(family, tmp_path, **changes):
    dims = family.debug_dims
    random = RandomSource(5, dims.num_layers)
    tensors = {name: random.whole(name, shape) for name, shape in hf_tensor_shapes(family, dims)}
    tensors = {name: tensor + torch.rand(tensor.shape) for name, tensor in tensors.items()}  # norms differ too
    names = sorted(tensors)
    half = len(names) // 2
    files = [{n: tensors[n] for n in names[:half]}, {n: tensors[n] for n in names[half:]}]
    write_folder(tmp_path / "hf", family.hf_from_dims(dims), files)
    return tmp_path / "hf", tensors


@pytest.mark.parametrize("family_name", sorted(FAMILIES))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_round_trip_is_bit_equal(family_name, layout, tmp_path):
    torch.manual_seed(3)
    folder, tensors = original(FAMILIES[family_name], tmp_path)
    family, dims = load_dims(folder)
    if not dims.num_experts:
        layout = ParallelLayout(tp=layout.tp, pp=layout.pp, virtual_pp=layout.virtual_pp, cp=layout.cp, dp=layout.dp)
    written = dict.fromkeys(tensors, 0)
    for rank in range(layout.world_size):
        source = FolderSource(folder)
        options = {"spec": "local", "vocab_multiple": 3}
        chunks = import_params(source, family, dims, layout, rank, dtype=torch.float32, **options)
        for name, box, _ in export_params(chunks, family, dims, layout, rank, **options):
            written[name] += box.num_rows * box.num_cols
        write_export_part(tmp_path / "parts", chunks, family, dims, layout, rank, **options)
    assert written == {name: tensor.numel() for name, tensor in tensors.items()}, "every element once"
    merge_export(tmp_path / "parts", tmp_path / "out", family, dims, torch.float32)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == tensors.keys()
    assert all(torch.equal(merged[name], tensors[name]) for name in tensors)
    assert load_dims(tmp_path / "out") == (family, dims)
    assert not (tmp_path / "parts").exists()


def test_a_missing_part_is_named_and_nothing_is_left(tmp_path):
    family = FAMILIES["llama"]
    folder, _ = original(family, tmp_path)
    layout = ParallelLayout(pp=2)
    for rank in range(1):
        chunks = import_params(
            FolderSource(folder), family, family.debug_dims, layout, rank,
            spec="local", vocab_multiple=1, dtype=torch.float32,
        )  # fmt: skip
        write_export_part(
            tmp_path / "parts", chunks, family, family.debug_dims, layout, rank, spec="local", vocab_multiple=1
        )
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        merge_export(tmp_path / "parts", tmp_path / "out", family, family.debug_dims, torch.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "parts"]


def test_bad_folders_are_named(tmp_path):
    family = FAMILIES["llama"]
    with pytest.raises(CheckpointError, match=r"nowhere: not found"):
        FolderSource(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor"):
        FolderSource(tmp_path / "empty")
    folder, tensors = original(family, tmp_path)
    source = FolderSource(folder)
    assert source.names == sorted(tensors)
    layout, options = ParallelLayout(), {"spec": "local", "vocab_multiple": 1, "dtype": torch.float32}
    import_params(source, family, family.debug_dims, layout, 0, **options)
    other = FAMILIES["qwen3_moe"]
    with pytest.raises(CheckpointError, match=r"lm_head.weight.*missing"):
        import_params(source, other, other.debug_dims, layout, 0, **options)
    second = folder / "model-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model-00002.safetensors: cut short"):
        import_params(FolderSource(folder), family, family.debug_dims, layout, 0, **options)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002.safetensors: named by"):
        import_params(FolderSource(folder), family, family.debug_dims, layout, 0, **options)


def test_random_start_does_not_depend_on_the_layout():
    family = FAMILIES["qwen3_moe"]
    dims = family.debug_dims
    seen: dict[str, dict] = {}
    for layout in LAYOUTS[:3]:
        whole: dict[str, torch.Tensor] = {}
        for rank in range(layout.world_size):
            options = {"spec": "local", "vocab_multiple": 1}
            chunks = import_params(
                RandomSource(9, dims.num_layers), family, dims, layout, rank, dtype=torch.float32, **options
            )
            for name, box, values in export_params(chunks, family, dims, layout, rank, **options):
                whole[f"{name}@{box.global_row},{box.global_col}"] = values.sum()
        totals = {}
        for key, value in whole.items():
            totals[key.split("@")[0]] = totals.get(key.split("@")[0], 0) + float(value)
        seen[str(layout)] = totals
    first, *others = seen.values()
    for totals in others:
        assert totals == pytest.approx(first, abs=1e-4)
