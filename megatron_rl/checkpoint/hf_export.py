"""A Hugging Face folder from many ranks: each writes the boxes it owns, then one process merges them tensor by tensor."""

from __future__ import annotations

import math
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
from megatron_rl.types.layout import ParallelLayout, ShardInterval

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
    keys = [(key.rpartition("@"), key, handle) for handle in handles for key in handle.keys()]  # noqa: SIM118
    keys.sort(key=lambda item: item[0][0])

    def boxes() -> Iterator[tuple[str, ShardInterval, torch.Tensor]]:
        for (name, _, corner), key, handle in keys:
            values = handle.get_tensor(key)
            row, col = map(int, corner.split(","))
            yield name, ShardInterval(row, col, 0, 0, *values.shape), values

    write_model(folder, family, dims, assemble_tensors(boxes(), family, dims, dtype), dtype)
    shutil.rmtree(parts_folder)


def assemble_tensors(
    boxes: Iterable[tuple[str, ShardInterval, torch.Tensor]], family: ModelFamily, dims: ModelDims, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors from their boxes, each given out as soon as it is complete.

    Memory holds only the tensors whose boxes have begun to come. Raises CheckpointError naming one with a hole at the end.
    """
    shapes = dict(hf_tensor_shapes(family, dims))
    missing = {name: math.prod(shape) for name, shape in shapes.items()}
    begun: dict[str, torch.Tensor] = {}
    for name, box, values in boxes:
        if name not in begun:
            begun[name] = torch.empty(matrix_shape(shapes[name]), dtype=dtype)
        rows = slice(box.global_row, box.global_row + box.num_rows)
        begun[name][rows, box.global_col : box.global_col + box.num_cols] = values
        missing[name] -= values.numel()
        if missing[name] == 0:
            yield name, begun.pop(name).reshape(shapes[name])
    for name, count in missing.items():
        if count:
            raise CheckpointError(f"tensor '{name}': {count} of {math.prod(shapes[name])} elements are missing")


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
        for layer in rule.layers_in(dims):
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
