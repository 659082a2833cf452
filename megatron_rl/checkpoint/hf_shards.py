"""Hugging Face tensors <-> one rank's Megatron parameters, box by box through the family's declaration.

`spec` is "local" or "te": under which layer spec the Megatron model was built (they name some parameters differently).
A rank's parameters are a list of dictionaries, one per virtual chunk, with the names inside that chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_rl.checkpoint.hf_folder import CheckpointError, TensorSource
from megatron_rl.layout.coords import coords_of
from megatron_rl.layout.pipeline import layers_of_chunk
from megatron_rl.model_families.declaration import ModelDims, ModelFamily, ParamRule, Shard
from megatron_rl.model_families.shards import local_matrix_shape, megatron_boxes, padded_vocab
from megatron_rl.types.layout import ParallelLayout, RankCoords, ShardInterval


@dataclass(frozen=True, slots=True)
class LocalParam:
    """One parameter of one rank and what it is made of: (Hugging Face name, whole shape, box) per part."""

    chunk: int
    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int, ...], ShardInterval], ...]
    is_owner: bool
    """Whether this rank is the one that exports it: the first of its replicas, and never a tied copy."""


def local_params(
    family: ModelFamily, dims: ModelDims, layout: ParallelLayout, rank: int, *, spec: str, vocab_multiple: int
) -> Iterator[LocalParam]:
    """Every parameter that this rank holds, in declaration order."""
    coords = coords_of(layout, rank)
    for rule in (rule.under(spec) for rule in family.rules_for(dims)):
        if rule.is_layered:
            for chunk in range(layout.virtual_pp):
                for local_layer, layer in enumerate(layers_of_chunk(layout, dims.num_layers, coords.pp, chunk)):
                    if layer not in rule.layers_in(dims):
                        continue
                    yield from _layer_params(family, rule, dims, layout, coords, spec, chunk, local_layer, layer)
        elif _holds_outer(rule, layout, coords):
            chunk = 0 if rule.is_on_first_stage else layout.virtual_pp - 1
            name = rule.name_in_megatron(spec=spec)
            yield _param(family, rule, dims, layout, coords, vocab_multiple, chunk, name)


def import_params(
    source: TensorSource,
    family: ModelFamily,
    dims: ModelDims,
    layout: ParallelLayout,
    rank: int,
    *,
    spec: str,
    vocab_multiple: int,
    dtype: torch.dtype,
) -> list[dict[str, torch.Tensor]]:
    """This rank's parameters, read box by box. Rows of vocabulary padding are zero."""
    chunks: list[dict[str, torch.Tensor]] = [{} for _ in range(layout.virtual_pp)]
    options = {"spec": spec, "vocab_multiple": vocab_multiple, "dtype": dtype}
    for chunk, name, local in read_params(source, family, dims, layout, rank, **options):
        chunks[chunk][name] = local
    return chunks


def read_params(
    source: TensorSource,
    family: ModelFamily,
    dims: ModelDims,
    layout: ParallelLayout,
    rank: int,
    *,
    spec: str,
    vocab_multiple: int,
    dtype: torch.dtype,
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """`import_params` as a stream of (chunk, name, values), for models of which memory holds only one copy."""
    for param in local_params(family, dims, layout, rank, spec=spec, vocab_multiple=vocab_multiple):
        local = torch.zeros(param.shape, dtype=dtype)
        matrix = local.unsqueeze(1) if local.ndim == 1 else local
        for name, shape, box in param.parts:
            if box.num_rows:
                matrix_box(matrix, box).copy_(source.read(name, shape, box))
        yield param.chunk, param.name, local


def export_params(
    chunks: Sequence[Mapping[str, torch.Tensor]],
    family: ModelFamily,
    dims: ModelDims,
    layout: ParallelLayout,
    rank: int,
    *,
    spec: str,
    vocab_multiple: int,
) -> Iterator[tuple[str, ShardInterval, torch.Tensor]]:
    """(Hugging Face name, box, values) of everything this rank owns; over all ranks every element comes exactly once."""
    for param in local_params(family, dims, layout, rank, spec=spec, vocab_multiple=vocab_multiple):
        if not param.is_owner:
            continue
        if param.name not in chunks[param.chunk]:
            raise CheckpointError(f"parameter '{param.name}' of rank {rank} is not in the model; family {family.name} is wrong")
        local = chunks[param.chunk][param.name]
        matrix = local.unsqueeze(1) if local.ndim == 1 else local
        for name, _, box in param.parts:
            if box.num_rows:
                yield name, box, matrix_box(matrix, box)


def matrix_box(matrix: torch.Tensor, box: ShardInterval) -> torch.Tensor:
    """The view of a local matrix that a box describes."""
    return matrix[box.local_row : box.local_row + box.num_rows, box.local_col : box.local_col + box.num_cols]


def _holds_outer(rule: ParamRule, layout: ParallelLayout, coords: RankCoords) -> bool:
    if rule.is_on_first_stage:
        return coords.pp == 0
    if rule.engine_name is None:  # a tied copy exists only where the first stage's embedding is out of reach
        return layout.pp > 1 and coords.pp == layout.pp - 1
    return coords.pp == layout.pp - 1


def _layer_params(
    family: ModelFamily,
    rule: ParamRule,
    dims: ModelDims,
    layout: ParallelLayout,
    coords: RankCoords,
    spec: str,
    chunk: int,
    local_layer: int,
    layer: int,
) -> Iterator[LocalParam]:
    if not rule.is_expert:
        name = rule.name_in_megatron(local_layer, spec=spec)
        yield _param(family, rule, dims, layout, coords, 1, chunk, name, layer=layer)
        return
    per_rank = dims.num_experts // layout.ep
    for local_expert in range(per_rank):
        name = rule.name_in_megatron(local_layer, local_expert, spec=spec)
        expert = coords.ep * per_rank + local_expert
        yield _param(family, rule, dims, layout, coords, 1, chunk, name, layer=layer, expert=expert)


def _param(
    family: ModelFamily,
    rule: ParamRule,
    dims: ModelDims,
    layout: ParallelLayout,
    coords: RankCoords,
    vocab_multiple: int,
    chunk: int,
    name: str,
    *,
    layer: int = 0,
    expert: int = 0,
) -> LocalParam:
    tp, tp_rank = (layout.etp, coords.etp) if rule.is_expert else (layout.tp, coords.tp)
    is_first_replica = coords.expert_dp == 0 if rule.is_expert else coords.dp == 0 and coords.cp == 0
    if rule.shard is Shard.REPLICATED:
        is_first_replica = is_first_replica and coords.tp == 0
    parts = tuple(
        (hf_name.format(layer=layer, expert=expert), family.shape_of(hf_name, dims), box)
        for component, hf_name in enumerate(rule.hf_names)
        for box in megatron_boxes(family, rule, component, dims, tp, tp_rank, vocab_multiple)
    )
    matrix = local_matrix_shape(family, rule, dims, tp, padded_vocab(dims, tp, vocab_multiple), engine=False)
    is_vector = len(family.shape_of(rule.hf_names[0], dims)) == 1
    is_owner = is_first_replica and rule.engine_name is not None
    return LocalParam(chunk, name, matrix[:1] if is_vector else matrix, parts, is_owner)
