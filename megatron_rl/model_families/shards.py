"""Where the parts of a rule's Hugging Face tensors lie inside one rank's parameter, on the trainer and the engine side.

Everything that moves weights (resharding plan, import, export, tests) reads these functions, so that a shard is declared
once. All boxes are `ShardInterval`s over matrix views; those of experts are relative to the expert's own rows.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.layout.coords import engine_attention_rank, engine_expert_coords
from megatron_rl.layout.intervals import matrix_shape, padded_engine_vocab, round_up, shard_range
from megatron_rl.model_families.declaration import Fused, ModelDims, ModelFamily, ParamRule, Shard
from megatron_rl.types.layout import EngineLayout, ShardInterval


def component_shape(family: ModelFamily, rule: ParamRule, component: int, dims: ModelDims) -> tuple[int, int]:
    """The matrix shape [rows, cols] of one Hugging Face tensor of a rule."""
    return matrix_shape(family.shape_of(rule.hf_names[component], dims))


def megatron_boxes(
    family: ModelFamily, rule: ParamRule, component: int, dims: ModelDims, tp: int, tp_rank: int, vocab_multiple: int
) -> list[ShardInterval]:
    """The boxes of component `component` in the Megatron parameter of tensor-parallel rank `tp_rank`.

    `tp` is the expert tensor-parallel size for expert rules. `vocab_multiple` is Megatron's
    make_vocab_size_divisible_by. QKV rows are interleaved per key-value group: [q of the group, k, v].
    """
    if rule.fused is Fused.QKV:
        return _megatron_qkv_boxes(component, dims, tp, tp_rank)
    rows, cols = component_shape(family, rule, component, dims)
    return [_plain_box(rule, component, rows, cols, tp, tp_rank, padded_vocab(dims, tp, vocab_multiple))]


def engine_boxes(
    family: ModelFamily, rule: ParamRule, component: int, dims: ModelDims, tp: int, tp_rank: int, vocab_multiple: int
) -> list[ShardInterval]:
    """The boxes of component `component` in the engine parameter of rank `tp_rank`, in SGLang's layout.

    `tp` and `tp_rank` are of the group that splits the rule (`engine_group`). QKV rows are [q; k; v] of this rank's heads;
    key-value heads are replicated when `tp` exceeds them.
    """
    if rule.fused is Fused.QKV:
        return [_engine_qkv_box(component, dims, tp, tp_rank)]
    rule = rule.in_engine()
    rows, cols = component_shape(family, rule, component, dims)
    padded = padded_engine_vocab(dims.vocab_size, tp, vocab_multiple)
    box = _plain_box(rule, component, rows, cols, tp, tp_rank, padded)
    offset = rule.engine_offset(dims) if rule.engine_offset else 0
    return [replace(box, local_row=box.local_row + offset)]


def engine_group(rule: ParamRule, layout: EngineLayout, rank: int) -> tuple[int, int]:
    """(size, rank) of the ranks of one engine that split a rule, as seen from engine rank `rank`."""
    if rule.is_expert:
        return layout.moe_tp, engine_expert_coords(layout, rank)[1]
    if rule.over_attention_tp:
        return layout.attention_tp, engine_attention_rank(layout, rank)
    return layout.tp, rank


def padded_vocab(dims: ModelDims, tp: int, vocab_multiple: int) -> int:
    """Megatron's padded vocabulary: a multiple of `vocab_multiple` x `tp`."""
    return round_up(dims.vocab_size, vocab_multiple * tp)


def local_matrix_shape(
    family: ModelFamily, rule: ParamRule, dims: ModelDims, tp: int, padded_vocab_size: int, *, engine: bool
) -> tuple[int, int]:
    """The matrix shape of one rank's parameter; of experts, of one expert."""
    rule = rule.in_engine() if engine else rule
    rows, cols = 0, 0
    for component in range(len(rule.hf_names)):
        part_rows, cols = component_shape(family, rule, component, dims)
        rows += part_rows
    if rule.shard is Shard.VOCAB:
        return padded_vocab_size // tp, cols
    if rule.fused is Fused.QKV:
        num_kv = max(dims.num_kv_heads // tp, 1) if engine else dims.num_kv_heads // tp
        return (dims.num_heads // tp + 2 * num_kv) * dims.head_dim, cols
    if rule.shard in (Shard.COLUMN, Shard.EXPERT_COLUMN):
        return rows // tp, cols
    if rule.shard in (Shard.ROW, Shard.EXPERT_ROW):
        return rows, cols // tp
    return rows, cols


def engine_shapes(
    family: ModelFamily, dims: ModelDims, tp: int, vocab_multiple: int, *, ep: int = 1, attention_dp: int = 1
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one engine rank's parameters, equal on all; stacked experts are [experts, rows, cols]."""
    layout = EngineLayout(tp=tp, vocab_multiple=vocab_multiple, ep=ep, attention_dp=attention_dp)
    shapes: dict[str, tuple[int, ...]] = {}
    for rule in family.rules_for(dims):
        if rule.engine_name is None:
            continue
        size, _ = engine_group(rule, layout, 0)
        padded = padded_engine_vocab(dims.vocab_size, size, vocab_multiple)
        rows, cols = local_matrix_shape(family, rule, dims, size, padded, engine=True)
        shape: tuple[int, ...] = (rows, cols)
        if rule.is_expert:
            shape = (dims.num_experts // ep, rows, cols)
        elif len(family.shape_of(rule.hf_names[0], dims)) == 1:
            shape = (rows,)
        elif rule.engine_offset:
            shape = (rule.engine_offset(dims) + rows, cols)
        for layer in rule.layers_in(dims):
            shapes[rule.engine_name.format(layer=layer)] = shape
    return shapes


def count_parameters(family: ModelFamily, dims: ModelDims) -> int:
    """The number of weights of the whole model (tied embeddings once), from the declaration alone."""
    total = 0
    for rule in family.rules_for(dims):
        if rule.engine_name is None:
            continue
        copies = len(rule.layers_in(dims)) * (dims.num_experts if rule.is_expert else 1)
        for component in range(len(rule.hf_names)):
            rows, cols = component_shape(family, rule, component, dims)
            total += copies * rows * cols
    return total


def _plain_box(rule: ParamRule, component: int, rows: int, cols: int, tp: int, tp_rank: int, padded_rows: int) -> ShardInterval:
    if rule.shard is Shard.VOCAB:
        start, stop = shard_range(padded_rows, tp, tp_rank)
        return ShardInterval(min(start, rows), 0, 0, 0, max(min(stop, rows) - start, 0), cols)
    if rule.shard in (Shard.COLUMN, Shard.EXPERT_COLUMN):
        start, stop = shard_range(rows, tp, tp_rank)
        return ShardInterval(start, 0, component * (stop - start), 0, stop - start, cols)
    if rule.shard in (Shard.ROW, Shard.EXPERT_ROW):
        start, stop = shard_range(cols, tp, tp_rank)
        return ShardInterval(0, start, 0, 0, rows, stop - start)
    return ShardInterval(0, 0, 0, 0, rows, cols)


def _megatron_qkv_boxes(component: int, dims: ModelDims, tp: int, tp_rank: int) -> list[ShardInterval]:
    first, last = shard_range(dims.num_kv_heads, tp, tp_rank)
    query_rows = dims.num_heads // dims.num_kv_heads * dims.head_dim
    group_rows = query_rows + 2 * dims.head_dim
    num_rows = query_rows if component == 0 else dims.head_dim
    offset = (0, query_rows, query_rows + dims.head_dim)[component]
    return [
        ShardInterval(group * num_rows, 0, (group - first) * group_rows + offset, 0, num_rows, dims.hidden_size)
        for group in range(first, last)
    ]


def _engine_qkv_box(component: int, dims: ModelDims, tp: int, tp_rank: int) -> ShardInterval:
    query_rows = dims.num_heads // tp * dims.head_dim
    if component == 0:
        return ShardInterval(tp_rank * query_rows, 0, 0, 0, query_rows, dims.hidden_size)
    num_kv = max(dims.num_kv_heads // tp, 1)
    first_kv = tp_rank * dims.num_kv_heads // tp
    kv_rows = num_kv * dims.head_dim
    local = query_rows + (component - 1) * kv_rows
    return ShardInterval(first_kv * dims.head_dim, 0, local, 0, kv_rows, dims.hidden_size)
