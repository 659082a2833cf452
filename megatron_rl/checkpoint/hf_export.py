"""A Hugging Face folder from many ranks: each writes the boxes it owns, then one process merges them tensor by tensor."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_rl.checkpoint.hf_folder import CheckpointError, write_folder
from megatron_rl.checkpoint.hf_shards import export_params
from megatron_rl.layout.intervals import matrix_shape
from megatron_rl.model_families.declaration import ModelDims, ModelFamily
from megatron_rl.types.layout import ParallelLayout

_MAX_FILE_BYTES = 4 * 1024**3


def write_export_part(
    parts_folder: str | Path,
    chunks: Sequence[Mapping[str, torch.Tensor]],
    family: ModelFamily,
    dims: ModelDims,
    layout: ParallelLayout,
    rank: int,
    *,
    spec: str,
    vocab_multiple: int,
) -> None:
    """Write the boxes of this rank as safetensors, keyed by name and position. Of replicas only the first rank writes."""
    tensors = {
        f"{name}@{box.global_row},{box.global_col}": values.detach().cpu().contiguous()
        for name, box, values in export_params(chunks, family, dims, layout, rank, spec=spec, vocab_multiple=vocab_multiple)
    }
    folder = Path(parts_folder)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"rank-{rank:05d}.tmp"
    save_file(tensors, str(temporary))
    temporary.rename(folder / f"rank-{rank:05d}.safetensors")


def merge_export(
    parts_folder: str | Path, folder: str | Path, family: ModelFamily, dims: ModelDims, dtype: torch.dtype
) -> None:
    """Merge the parts into a Hugging Face folder and remove them. Raises CheckpointError naming a tensor with a hole."""
    handles = [safe_open(str(path), framework="pt") for path in sorted(Path(parts_folder).glob("*.safetensors"))]
    boxes: dict[str, list[tuple[int, int, int, str]]] = {}
    for number, handle in enumerate(handles):
        for key in handle.keys():
            name, _, corner = key.rpartition("@")
            row, col = map(int, corner.split(","))
            boxes.setdefault(name, []).append((row, col, number, key))

    def merged() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in hf_tensor_shapes(family, dims):
            whole = torch.empty(matrix_shape(shape), dtype=dtype)
            covered = 0
            for row, col, number, key in boxes.get(name, []):
                values = handles[number].get_tensor(key)
                whole[row : row + values.shape[0], col : col + values.shape[1]] = values.to(dtype)
                covered += values.numel()
            if covered != whole.numel():
                raise CheckpointError(f"{parts_folder}: tensor '{name}' has {covered} of {whole.numel()} elements")
            yield name, whole.reshape(shape)

    write_model(folder, family, dims, merged(), dtype)
    shutil.rmtree(parts_folder)


def write_model(
    folder: str | Path,
    family: ModelFamily,
    dims: ModelDims,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    write_extras: Callable[[Path], None] | None = None,
) -> None:
    """Write a Hugging Face folder from a stream of whole tensors in `dtype`, in files of at most 4 GiB."""
    config = family.hf_from_dims(dims) | {"dtype": str(dtype).removeprefix("torch.")}
    write_folder(folder, config, _files(tensors), write_extras)


def hf_tensor_shapes(family: ModelFamily, dims: ModelDims) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every Hugging Face tensor of the model with its shape, in declaration order."""
    for rule in family.rules_for(dims):
        if rule.engine_name is None:
            continue
        for layer in range(dims.num_layers if rule.is_layered else 1):
            for expert in range(dims.num_experts if rule.is_expert else 1):
                for template in rule.hf_names:
                    yield template.format(layer=layer, expert=expert), family.shape_of(template, dims)


def _files(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    current: dict[str, torch.Tensor] = {}
    filled = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if current and filled + size > _MAX_FILE_BYTES:
            yield current
            current, filled = {}, 0
        current[name] = tensor
        filled += size
    yield current
