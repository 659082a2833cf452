"""Does the source of every box hold what its target wants, and does a rank hold what the plan says?

Builder and proof go opposite ways: the builder asks where a layer and an expert live, the proof asks what a rank's parameter
is (the layers of its chunk, the experts of its expert-parallel rank) and follows both ends of a box back to the elements
of the Hugging Face tensors. So a layer index that is local to its stage, an expert offset, or gate and up exchanged on one
side cannot pass.

Both ends read one declaration. One that is wrong on one side (gate and up exchanged inside the engine's fused parameter)
passes this, coverage and every digest: only the probe, which compares log-probs, can see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np

from megatron_rl.layout.coords import coords_of
from megatron_rl.layout.intervals import matrix_shape
from megatron_rl.layout.pipeline import chunk_bounds
from megatron_rl.model_families.declaration import ModelFamily, ParamRule
from megatron_rl.model_families.shards import (
    engine_boxes,
    engine_group,
    local_matrix_shape,
    megatron_boxes,
    padded_vocab,
)
from megatron_rl.resharding.box_table import BoxTable, PlanError, PlanKey
from megatron_rl.resharding.sources import SourceClasses
from megatron_rl.types.layout import ShardInterval
from megatron_rl.types.resharding import SourceParam


def check_ownership(family: ModelFamily, key: PlanKey, boxes: BoxTable) -> None:
    """Raises PlanError naming the first box whose source holds something else than its target wants."""
    rules = _rules(family, key)
    origin = _source_origins(rules, key, boxes)
    columns, engine, dims = boxes.columns, key.engine_layout, key.dims
    target_id = {name: number for number, name in enumerate(boxes.target_params)}
    wanted = np.full((len(rules), max(dims.num_layers, 1)), -1, dtype=np.int64)
    for rule in rules:  # a norm that dense and MoE layers name alike is one rule here, the first
        name = rule.name_in_megatron(spec=key.spec)
        first = next(n for n, other in enumerate(rules) if other.name_in_megatron(spec=key.spec) == name)
        for layer in rule.layers_in(dims):
            wanted[first, layer] = target_id.get((rule.engine_name or "").format(layer=layer), -1)
    is_held = origin["layer"] >= 0
    is_right = is_held & (wanted[origin["rule"], origin["layer"]] == columns["target_param"])
    expert_rows = np.ones(len(rules), dtype=np.int64)
    is_expert = np.array([rule.is_expert for rule in rules])
    for number, rule in enumerate(rules):
        if rule.is_expert:
            expert_rows[number] = local_matrix_shape(family, rule, dims, engine.moe_tp, 0, engine=True)[0]
    rows_of = np.where(is_expert, expert_rows, 1 << 40)[origin["rule"]]
    local_expert, target_row = np.divmod(columns["target_row"].astype(np.int64), rows_of)
    target_expert = columns["target_rank"] // engine.moe_tp * (max(dims.num_experts, 1) // engine.ep) + local_expert
    is_right &= ~is_expert[origin["rule"]] | (target_expert == origin["expert"])
    if not is_right.all():
        raise PlanError(_blame(boxes, int(np.flatnonzero(~is_right)[0]), bool(is_held.all())))
    group_rank = np.array(
        [[engine_group(rule, engine, rank)[1] for rank in range(engine.tp)] for rule in rules], dtype=np.int64
    )[origin["rule"], columns["target_rank"]]
    geometry = np.stack(
        [origin["rule"], origin["tp"], group_rank, columns["source_row"], columns["source_col"],
         target_row, columns["target_col"], columns["num_rows"], columns["num_cols"]],
        axis=1,
    ).astype(np.int64)  # fmt: skip
    ends = _BothEnds(family, rules, key)
    for shape, row in _distinct(geometry):
        if not ends.agree(shape):
            raise PlanError(_blame(boxes, row, True))


def _rules(family: ModelFamily, key: PlanKey) -> list[ParamRule]:
    """The rules with a place in the engine; a tied copy stands for the embedding under its own Megatron name."""
    rules = [rule.under(key.spec) for rule in family.rules_for(key.dims)]
    named = {rule.hf_names: rule.engine_name for rule in rules if rule.engine_name is not None}
    return [_as_engine_param(rule, named[rule.hf_names]) for rule in rules if rule.hf_names in named]


def _as_engine_param(rule: ParamRule, engine_name: str) -> ParamRule:
    return rule if rule.engine_name is not None else replace(rule, engine_name=engine_name, over_attention_tp=True)


def _source_origins(rules: list[ParamRule], key: PlanKey, boxes: BoxTable) -> dict[str, np.ndarray]:
    """Per box what its source parameter is on its rank: rule, global layer (-1: nothing), global expert, TP rank."""
    layout, dims = key.layout, key.dims
    classes, bounds = SourceClasses(layout), chunk_bounds(layout, dims.num_layers)
    per_trainer = max(dims.num_experts, 1) // layout.ep
    meaning: dict[str, tuple[int, int, int]] = {}
    for number, rule in enumerate(rules):
        for layer in range(max(b - a for a, b in pairwise(bounds)) if rule.is_layered else 1):
            for expert in range(per_trainer if rule.is_expert else 1):
                meaning.setdefault(rule.name_in_megatron(layer, expert, spec=key.spec), (number, layer, expert))
    params = np.array([(chunk, *meaning.get(name, (0, -(1 << 30), 0))) for chunk, name in boxes.source_params], dtype=np.int64)
    chunk, rule_number, local_layer, local_expert = params[boxes.columns["source_param"]].T
    stage, kind = np.divmod(boxes.columns["source_class"].astype(np.int64), classes.per_stage)
    shard = kind - layout.tp - 1
    ep, etp = np.divmod(np.maximum(shard, 0), layout.etp)
    block = chunk * layout.pp + stage
    starts, stops = np.array(bounds[:-1]), np.array(bounds[1:])
    in_layers = starts[block] + local_layer
    is_layered, is_expert, is_whole, is_first = (
        np.array([getattr(rule, name) for rule in rules])[rule_number]
        for name in ("is_layered", "is_expert", "is_replicated", "is_on_first_stage")
    )
    is_there = np.where(
        is_layered,
        (local_layer >= 0) & (in_layers < stops[block]),
        np.where(is_first, block == 0, block == len(bounds) - 2) & (local_layer == 0),
    )
    is_there &= np.where(is_expert, shard >= 0, np.where(is_whole, shard == -1, shard < -1))
    return {
        "rule": rule_number,
        "layer": np.where(is_there, np.where(is_layered, in_layers, 0), -1),
        "expert": ep * per_trainer + local_expert,
        "tp": np.where(is_expert, etp, np.where(is_whole, 0, kind)),
    }


def _blame(boxes: BoxTable, row: int, is_held: bool) -> str:
    columns = boxes.columns
    source = boxes.source_params[int(columns["source_param"][row])].name
    target, rank = boxes.target_params[int(columns["target_param"][row])], int(columns["target_rank"][row])
    what = "holds other weights" if is_held else "is not on that stage"
    return f"resharding plan: engine parameter '{target}' on engine rank {rank} would take '{source}', which {what}"


def _distinct(table: np.ndarray) -> list[tuple[list[int], int]]:
    """The distinct rows of an integer matrix, each with the place of one that has it."""
    multipliers = np.random.default_rng(1).integers(1, 1 << 62, table.shape[1], dtype=np.int64) | 1
    hashes = (table * multipliers).sum(axis=1)
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    if not np.array_equal(table[first][inverse], table):
        raise AssertionError("two different rows with one hash")
    return [(table[row].tolist(), int(row)) for row in first]


class _BothEnds:
    """Follows the two ends of a box back to the Hugging Face tensors of its rule."""

    def __init__(self, family: ModelFamily, rules: list[ParamRule], key: PlanKey) -> None:
        self._family, self._rules, self._key = family, rules, key
        self._known: dict[tuple[str, int, int], list[list[ShardInterval]]] = {}

    def agree(self, geometry: list[int]) -> bool:
        """Whether both ends are the same elements of the same tensors, in the same order."""
        rule, source_tp, group_rank, source_row, source_col, target_row, target_col, num_rows, num_cols = geometry
        held = _follow_back(self._boxes("trainer", rule, source_tp), source_row, source_col, num_rows, num_cols)
        wanted = _follow_back(self._boxes("engine", rule, group_rank), target_row, target_col, num_rows, num_cols)
        return held is not None and held == wanted

    def _boxes(self, side: str, number: int, rank: int) -> list[list[ShardInterval]]:
        """Per component, the boxes of a rank of the group that splits the rule on that side."""
        if (side, number, rank) not in self._known:
            rule, layout, engine = self._rules[number], self._key.layout, self._key.engine_layout
            if side == "trainer":
                boxes_of, multiple = megatron_boxes, self._key.trainer_vocab_multiple
                size = layout.etp if rule.is_expert else layout.tp
            else:
                boxes_of, multiple = engine_boxes, engine.vocab_multiple
                size, _ = engine_group(rule, engine, 0)
            self._known[side, number, rank] = [
                boxes_of(self._family, rule, component, self._key.dims, size, rank, multiple)
                for component in range(len(rule.hf_names))
            ]
        return self._known[side, number, rank]


def _follow_back(
    boxes_of: list[list[ShardInterval]], row: int, col: int, num_rows: int, num_cols: int
) -> list[tuple[int, int, int, int]] | None:
    """The stretches (component, global row, global column, rows) of local rows; None: they are not all weights."""
    stretches: list[tuple[int, int, int, int]] = []
    found = sorted(
        (
            (max(box.local_row, row), component, box)
            for component, boxes in enumerate(boxes_of)
            for box in boxes
            if box.local_row < row + num_rows
            and row < box.local_row + box.num_rows
            and box.local_col <= col
            and col + num_cols <= box.local_col + box.num_cols
        ),
        key=lambda item: item[0],
    )
    at = row
    for start, component, box in found:
        if start != at:
            return None
        rows = min(box.local_row + box.num_rows, row + num_rows) - start
        first, column = box.global_row + start - box.local_row, box.global_col + col - box.local_col
        before = stretches[-1] if stretches else None
        if before and before[0] == component and before[1] + before[3] == first and before[2] == column:
            stretches[-1] = (component, before[1], column, before[3] + rows)
        else:
            stretches.append((component, first, column, rows))
        at += rows
    return stretches if at == row + num_rows else None


def held_shapes(family: ModelFamily, key: PlanKey, rank: int) -> dict[SourceParam, tuple[int, int]]:
    """The matrix shape of every parameter that the plan's trainer layout puts on a rank."""
    layout, dims = key.layout, key.dims
    coords, bounds = coords_of(layout, rank), chunk_bounds(layout, dims.num_layers)
    padded = padded_vocab(dims, layout.tp, key.trainer_vocab_multiple)
    last = (layout.virtual_pp - 1) * layout.pp + layout.pp - 1
    shapes: dict[SourceParam, tuple[int, int]] = {}
    for rule in (rule.under(key.spec) for rule in family.rules_for(dims)):
        shape = local_matrix_shape(family, rule, dims, layout.etp if rule.is_expert else layout.tp, padded, engine=False)
        for chunk in range(layout.virtual_pp):
            block = chunk * layout.pp + coords.pp
            for name in _names_in_chunk(rule, key, block, bounds, last):
                shapes[SourceParam(chunk, name)] = shape
    return shapes


def _names_in_chunk(rule: ParamRule, key: PlanKey, block: int, bounds: list[int], last: int) -> list[str]:
    layout, dims = key.layout, key.dims
    if not rule.is_layered:
        is_needed = rule.engine_name is not None or layout.pp > 1
        is_here = block == (0 if rule.is_on_first_stage else last)
        return [rule.name_in_megatron(spec=key.spec)] if is_here and is_needed else []
    layers = [layer - bounds[block] for layer in range(bounds[block], bounds[block + 1]) if layer in rule.layers_in(dims)]
    experts = range(dims.num_experts // layout.ep if rule.is_expert else 1)
    return [rule.name_in_megatron(layer, expert, spec=key.spec) for layer in layers for expert in experts]


def check_held(family: ModelFamily, key: PlanKey, rank: int, held: Mapping[SourceParam, tuple[int, ...]]) -> None:
    """Compare a trainer rank's model with what the plan says it holds. Raises PlanError naming the first difference.

    What a stale plan, of another layout, runs into before anything is sent.
    """
    wanted = held_shapes(family, key, rank)
    for param, shape in wanted.items():
        if param not in held:
            raise PlanError(f"trainer rank {rank} has no '{param.name}' in chunk {param.chunk}; the plan is of another layout")
        if matrix_shape(held[param]) != shape:
            found = matrix_shape(held[param])
            raise PlanError(f"trainer rank {rank}: '{param.name}' is {found}, the plan's layout makes it {shape}")
    extra = sorted(param.name for param in set(held) - set(wanted))
    if extra:
        raise PlanError(f"trainer rank {rank} has '{extra[0]}', which the plan's layout puts elsewhere")
