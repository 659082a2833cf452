"""The boxes that one engine receives: which part of which trainer parameter goes where, for every rank of one engine.

The geometry of a rule does not depend on layer or expert, so it is intersected once and repeated over both with numpy. A
box names the source *class* that holds it (`sources`); which of its ranks sends is decided afterwards (`spans`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_rl.layout.intervals import intersect
from megatron_rl.layout.pipeline import place_of_layer
from megatron_rl.model_families.declaration import ModelDims, ModelFamily, ParamRule, Shard
from megatron_rl.model_families.shards import engine_boxes, engine_group, local_matrix_shape, megatron_boxes
from megatron_rl.resharding.sources import SourceClasses, tied_share_of_first
from megatron_rl.types.layout import EngineLayout, ParallelLayout, ShardInterval
from megatron_rl.types.resharding import SourceParam

BOX_COLUMNS = (
    "source_class", "source_param", "source_row", "source_col",
    "target_rank", "target_param", "target_row", "target_col", "num_rows", "num_cols",
)  # fmt: skip


class PlanError(ValueError):
    """A plan that would bring wrong weights, or that is not of this layout; the message is one line."""


@dataclass(frozen=True, slots=True)
class PlanKey:
    """Everything that a plan follows from; two plans with equal keys are equal."""

    family_name: str
    dims: ModelDims
    layout: ParallelLayout
    engine_layout: EngineLayout
    spec: str
    """The layer spec that names the Megatron parameters: "local" or "te"."""
    trainer_vocab_multiple: int
    relay: bool
    cut_rows: int
    """A box is divided between two senders only at target rows that are multiples of this (fp8 scales cover 128 rows)."""


@dataclass(frozen=True, slots=True, eq=False)
class BoxTable:
    """int32 columns by name, sorted by (source class, engine rank, target parameter, row, column).

    `target_rank` is the rank inside the engine. The parameter columns index `source_params` and `target_params`.
    """

    columns: dict[str, np.ndarray]
    source_params: tuple[SourceParam, ...]
    target_params: tuple[str, ...]

    @property
    def num_elements(self) -> np.ndarray:
        return self.columns["num_rows"].astype(np.int64) * self.columns["num_cols"]


class _Part(NamedTuple):
    """A part of a rule's parameter that one trainer TP rank and one engine group rank share."""

    source_tp: int
    group_rank: int
    source: ShardInterval
    target: ShardInterval


def build_boxes(family: ModelFamily, key: PlanKey) -> BoxTable:
    """All boxes of one engine. Raises ValueError when a layout does not divide the model."""
    builder = _Builder(family, key)
    rules = [rule.under(key.spec) for rule in family.rules_for(key.dims)]
    tied = {rule.hf_names: rule for rule in rules if rule.engine_name is None} if key.layout.pp > 1 else {}
    for rule in rules:
        if rule.engine_name is not None and rule.hf_names not in tied:
            builder.add(rule)
    for rule in rules:
        if rule.engine_name is not None and rule.hf_names in tied:
            builder.add_tied(rule, tied[rule.hf_names])
    return builder.finish()


class _Builder:
    def __init__(self, family: ModelFamily, key: PlanKey) -> None:
        self._family, self._dims, self._key = family, key.dims, key
        self._layout, self._engine = key.layout, key.engine_layout
        self._classes = SourceClasses(key.layout)
        self._source_ids: dict[SourceParam, int] = {}
        self._target_ids: dict[str, int] = {}
        self._blocks: list[np.ndarray] = []

    def add(self, rule: ParamRule) -> None:
        """Every instance of a rule that exists in one place of the pipeline."""
        parts = self._parts(rule)
        if rule.is_expert:
            self._add_experts(rule, parts)
            return
        for layer in rule.layers_in(self._dims):
            stage, chunk, local_layer = self._place(rule, layer)
            source = self._source_id(chunk, rule.name_in_megatron(local_layer, spec=self._key.spec))
            self._append(rule, parts, stage, source, self._target_id(rule, layer))

    def add_tied(self, rule: ParamRule, copy: ParamRule) -> None:
        """The embedding that the first and the last stage hold: each sends the rows that even out the two stages."""
        last = self._layout.pp - 1
        parts = self._parts(rule)
        tied = np.zeros(self._layout.tp, dtype=np.int64)
        copies = self._engine.tp // engine_group(rule, self._engine, 0)[0]
        for part in parts:
            tied[part.source_tp] += part.source.num_rows * part.source.num_cols * copies
        share = tied_share_of_first(self._classes, self._loads(), tied)
        first_parts, last_parts = [], []
        for part in parts:
            num_rows = part.source.num_rows
            cut = int(nearest_cut(num_rows * share[part.source_tp], part.target.local_row, num_rows, self._key.cut_rows))
            first_parts += _rows_of(part, 0, cut)
            last_parts += _rows_of(part, cut, num_rows)
        target = self._target_id(rule, 0)
        self._append(rule, first_parts, 0, self._source_id(0, rule.name_in_megatron(spec=self._key.spec)), target)
        source = self._source_id(self._layout.virtual_pp - 1, copy.name_in_megatron(spec=self._key.spec))
        self._append(rule, last_parts, last, source, target)

    def finish(self) -> BoxTable:
        table = np.concatenate(self._blocks)
        names = ("source_class", "target_rank", "target_param", "target_row", "target_col")
        order = np.lexsort(tuple(table[:, BOX_COLUMNS.index(name)] for name in reversed(names)))
        return BoxTable(
            columns={name: np.ascontiguousarray(table[order, number]) for number, name in enumerate(BOX_COLUMNS)},
            source_params=tuple(self._source_ids),
            target_params=tuple(self._target_ids),
        )

    def _parts(self, rule: ParamRule) -> list[_Part]:
        """A replicated parameter is held by every trainer rank of its stage and counts as trainer TP rank 0."""
        family, dims, engine = self._family, self._dims, self._engine
        source_tp = self._layout.etp if rule.is_expert else self._layout.tp
        group_size, _ = engine_group(rule, engine, 0)
        parts = []
        for component in range(len(rule.hf_names)):
            targets = [
                engine_boxes(family, rule, component, dims, group_size, rank, engine.vocab_multiple)
                for rank in range(group_size)
            ]
            for source_rank in range(1 if rule.shard is Shard.REPLICATED else source_tp):
                for source in megatron_boxes(
                    family, rule, component, dims, source_tp, source_rank, self._key.trainer_vocab_multiple
                ):
                    for group_rank, boxes in enumerate(targets):
                        for target in boxes:
                            shared = intersect(source, target)
                            if shared is not None:
                                parts.append(_Part(source_rank, group_rank, *shared))
        return _joined(parts)

    def _place(self, rule: ParamRule, layer: int) -> tuple[int, int, int]:
        if rule.is_layered:
            return place_of_layer(self._layout, self._dims.num_layers, layer)
        return (0, 0, 0) if rule.is_on_first_stage else (self._layout.pp - 1, self._layout.virtual_pp - 1, 0)

    def _source_id(self, chunk: int, name: str) -> int:
        return self._source_ids.setdefault(SourceParam(chunk, name), len(self._source_ids))

    def _target_id(self, rule: ParamRule, layer: int) -> int:
        assert rule.engine_name is not None
        return self._target_ids.setdefault(rule.engine_name.format(layer=layer), len(self._target_ids))

    def _append(self, rule: ParamRule, parts: Sequence[_Part], stage: int, source: int, target: int) -> None:
        """One dense instance, for every engine rank of every group rank."""
        whole = rule.shard is Shard.REPLICATED
        ranks_of: dict[int, list[int]] = {}
        for rank in range(self._engine.tp):
            ranks_of.setdefault(engine_group(rule, self._engine, rank)[1], []).append(rank)
        rows = [
            (self._classes.replicated(stage) if whole else self._classes.dense(stage, part.source_tp), source,
             part.source.local_row, part.source.local_col, rank, target,
             part.target.local_row, part.target.local_col, part.source.num_rows, part.source.num_cols)
            for part in parts
            for rank in ranks_of[part.group_rank]
        ]  # fmt: skip
        self._blocks.append(np.array(rows, dtype=np.int32).reshape(-1, len(BOX_COLUMNS)))

    def _add_experts(self, rule: ParamRule, parts: Sequence[_Part]) -> None:
        """Every expert of every layer: one block of rows per layer, experts outermost."""
        dims, engine, layout = self._dims, self._engine, self._layout
        geometry = np.array(
            [
                (p.source_tp, p.group_rank, p.source.local_row, p.source.local_col, p.target.local_row,
                 p.target.local_col, p.source.num_rows, p.source.num_cols)
                for p in parts
            ],
            dtype=np.int32,
        )  # fmt: skip
        experts = np.repeat(np.arange(dims.num_experts, dtype=np.int32), len(parts))
        source_tp, group_rank, source_row, source_col, row, col, num_rows, num_cols = np.tile(geometry, (dims.num_experts, 1)).T
        per_trainer, per_engine = dims.num_experts // layout.ep, dims.num_experts // engine.ep
        expert_rows = local_matrix_shape(self._family, rule, dims, engine.moe_tp, 0, engine=True)[0]
        target_rank = experts // per_engine * engine.moe_tp + group_rank
        target_row = experts % per_engine * expert_rows + row
        kind = self._classes.expert(0, 0, 0) + experts // per_trainer * layout.etp + source_tp
        for layer in rule.layers_in(dims):
            stage, chunk, local_layer = self._place(rule, layer)
            names = [rule.name_in_megatron(local_layer, expert, spec=self._key.spec) for expert in range(per_trainer)]
            ids = np.array([self._source_id(chunk, name) for name in names], dtype=np.int32)
            block = np.empty((len(experts), len(BOX_COLUMNS)), dtype=np.int32)
            columns = (
                kind + stage * self._classes.per_stage, ids[experts % per_trainer], source_row, source_col,
                target_rank, self._target_id(rule, layer), target_row, col, num_rows, num_cols,
            )  # fmt: skip
            for number, column in enumerate(columns):
                block[:, number] = column
            self._blocks.append(block)

    def _loads(self) -> np.ndarray:
        loads = np.zeros(self._classes.num_classes, dtype=np.int64)
        for block in self._blocks:
            sizes = block[:, 8].astype(np.int64) * block[:, 9]
            loads += np.bincount(block[:, 0], weights=sizes, minlength=len(loads)).astype(np.int64)
        return loads


def nearest_cut(row: Any, top: Any, num_rows: Any, cut_rows: int) -> Any:
    """Of the rows at which boxes of `num_rows` from target row `top` may be cut, those nearest to `row` (elementwise).

    A box may be cut at either end and at target rows divisible by `cut_rows`.
    """
    inside = np.clip(np.rint((top + row) / cut_rows).astype(np.int64) * cut_rows - top, 0, num_rows)
    choices = np.stack(np.broadcast_arrays(inside, 0, num_rows))
    return np.take_along_axis(choices, np.abs(choices - row).argmin(axis=0)[None], axis=0)[0]


def _joined(parts: list[_Part]) -> list[_Part]:
    """Parts that follow each other row by row on both sides become one (gate and up of an expert that nobody splits)."""
    parts = sorted(parts, key=lambda p: (p.source_tp, p.group_rank, p.target.local_col, p.target.local_row))
    joined: list[_Part] = []
    for part in parts:
        if joined and _follows(joined[-1], part):
            last = joined.pop()
            joined.append(last._replace(source=_taller(last.source, part), target=_taller(last.target, part)))
        else:
            joined.append(part)
    return joined


def _follows(one: _Part, two: _Part) -> bool:
    rows = one.source.num_rows
    return (
        (one.source_tp, one.group_rank) == (two.source_tp, two.group_rank)
        and one.source.num_cols == two.source.num_cols
        and (one.source.local_row + rows, one.source.local_col) == (two.source.local_row, two.source.local_col)
        and (one.target.local_row + rows, one.target.local_col) == (two.target.local_row, two.target.local_col)
    )


def _taller(box: ShardInterval, part: _Part) -> ShardInterval:
    num_rows = box.num_rows + part.source.num_rows
    return ShardInterval(box.global_row, box.global_col, box.local_row, box.local_col, num_rows, box.num_cols)


def _rows_of(part: _Part, start: int, stop: int) -> list[_Part]:
    """The rows start..stop of a part, as a list of one or none."""
    if start >= stop:
        return []
    source, target = (
        ShardInterval(b.global_row + start, b.global_col, b.local_row + start, b.local_col, stop - start, b.num_cols)
        for b in (part.source, part.target)
    )
    return [part._replace(source=source, target=target)]
