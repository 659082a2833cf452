"""The resharding plan: which box of which trainer parameter goes where in which engine parameter.

Pure and torch-free. It follows from the family's declaration, the trainer layout and the engine layout alone, so it is
made once per pair of layouts and cached. The plan is columnar (numpy): one row per box; `TransferOp` is a row view.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from megatron_rl.layout.coords import dense_replicas, expert_replicas
from megatron_rl.layout.intervals import intersect, matrix_shape, round_up
from megatron_rl.layout.pipeline import place_of_layer
from megatron_rl.model_families.declaration import ModelDims, ModelFamily, ParamRule, Shard
from megatron_rl.model_families.registry import FAMILIES
from megatron_rl.model_families.shards import engine_boxes, engine_shapes, local_matrix_shape, megatron_boxes
from megatron_rl.types.layout import EngineLayout, ParallelLayout, ShardInterval
from megatron_rl.types.resharding import SourceParam, TransferOp

COLUMNS = (
    "source_rank", "source_param", "source_row", "source_col",
    "target_rank", "target_param", "target_row", "target_col", "num_rows", "num_cols",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class ReshardPlan:
    """All transfers of one weight sync, sorted by (source rank, target rank, target parameter, row, column).

    `source_params` and `target_params` are the tables that the parameter columns index; `target_shapes` gives the shape
    of every engine parameter of a rank. A target's padding rows are in no transfer.
    """

    columns: dict[str, np.ndarray]
    source_params: tuple[SourceParam, ...]
    target_params: tuple[str, ...]
    target_shapes: dict[str, tuple[int, ...]]
    engine_layout: EngineLayout

    @property
    def num_ops(self) -> int:
        return len(self.columns["source_rank"])

    def op(self, row: int) -> TransferOp:
        values = {name: int(self.columns[name][row]) for name in COLUMNS}
        source = self.source_params[values.pop("source_param")]
        return TransferOp(source=source, target=self.target_params[values.pop("target_param")], **values)

    def ops_between(self, source_rank: int, target_rank: int) -> Iterator[TransferOp]:
        """The transfers of one pair, in sending order."""
        ranks = self.columns["source_rank"], self.columns["target_rank"]
        for row in np.flatnonzero((ranks[0] == source_rank) & (ranks[1] == target_rank)):
            yield self.op(int(row))

    def num_elements_between(self) -> np.ndarray:
        """Elements sent per (source rank, target rank), as a dense matrix."""
        shape = (int(self.columns["source_rank"].max()) + 1, self.engine_layout.num_ranks)
        elements = np.zeros(shape, dtype=np.int64)
        sizes = self.columns["num_rows"] * self.columns["num_cols"]
        np.add.at(elements, (self.columns["source_rank"], self.columns["target_rank"]), sizes)
        return elements


@lru_cache(maxsize=8)
def build_reshard_plan(
    family_name: str,
    dims: ModelDims,
    layout: ParallelLayout,
    engine_layout: EngineLayout,
    *,
    spec: str = "local",
    trainer_vocab_multiple: int = 1,
) -> ReshardPlan:
    """Plan a sync; the result is checked for full and unique coverage before it is returned.

    `spec` says which layer spec names the Megatron parameters ("local" or "te"). Raises ValueError when a layout does not
    divide the model.
    """
    family = FAMILIES[family_name]
    builder = _PlanBuilder(family, dims, layout, engine_layout, spec)
    for rule in family.rules_for(dims):
        if rule.engine_name is not None:
            builder.add_rule(rule, trainer_vocab_multiple)
    plan = builder.finish()
    check_coverage(plan, family, dims)
    return plan


class _PlanBuilder:
    """Collects rows. The geometry of a rule does not depend on layer or expert, so it is intersected once."""

    def __init__(
        self, family: ModelFamily, dims: ModelDims, layout: ParallelLayout, engine_layout: EngineLayout, spec: str
    ) -> None:
        self._family, self._dims, self._layout, self._engine, self._spec = family, dims, layout, engine_layout, spec
        self._source_ids: dict[SourceParam, int] = {}
        self._target_ids: dict[str, int] = {}
        self._rows: list[tuple[int, ...]] = []
        self._turn: dict[tuple[int, ...], int] = {}

    def add_rule(self, rule: ParamRule, trainer_vocab_multiple: int) -> None:
        geometry = self._geometry(rule, trainer_vocab_multiple)
        for layer in range(self._dims.num_layers if rule.is_layered else 1):
            for expert in range(self._dims.num_experts if rule.is_expert else 1):
                self._add_instance(rule, layer, expert, geometry)

    def finish(self) -> ReshardPlan:
        table = np.array(self._rows, dtype=np.int64).reshape(-1, len(COLUMNS))
        order = np.lexsort(tuple(table[:, COLUMNS.index(name)] for name in (
            "target_col", "target_row", "target_param", "target_rank", "source_rank",
        )))  # fmt: skip
        table = table[order]
        return ReshardPlan(
            columns={name: np.ascontiguousarray(table[:, number]) for number, name in enumerate(COLUMNS)},
            source_params=tuple(self._source_ids),
            target_params=tuple(self._target_ids),
            target_shapes=engine_shapes(self._family, self._dims, self._engine.tp, self._engine.vocab_multiple),
            engine_layout=self._engine,
        )

    def _geometry(self, rule: ParamRule, trainer_vocab_multiple: int) -> list[tuple[int, int, ShardInterval, ShardInterval]]:
        """(trainer TP rank, engine TP rank, source box, target box) of every shared part. A replicated parameter has one."""
        source_tp = self._layout.etp if rule.is_expert else self._layout.tp
        pairs = []
        for component in range(len(rule.hf_names)):
            for source_rank in range(1 if rule.shard is Shard.REPLICATED else source_tp):
                sources = megatron_boxes(
                    self._family, rule, component, self._dims, source_tp, source_rank, trainer_vocab_multiple
                )
                for target_rank in range(self._engine.tp):
                    targets = engine_boxes(
                        self._family, rule, component, self._dims, self._engine.tp, target_rank, self._engine.vocab_multiple
                    )
                    for source in sources:
                        for target in targets:
                            shared = intersect(source, target)
                            if shared is not None:
                                pairs.append((source_rank, target_rank, *shared))
        return pairs

    def _add_instance(
        self, rule: ParamRule, layer: int, expert: int, geometry: list[tuple[int, int, ShardInterval, ShardInterval]]
    ) -> None:
        layout, dims = self._layout, self._dims
        if rule.is_layered:
            stage, chunk, local_layer = place_of_layer(layout, dims.num_layers, layer)
        else:
            stage, chunk, local_layer = (0, 0, 0) if rule.is_on_first_stage else (layout.pp - 1, layout.virtual_pp - 1, 0)
        ep_rank, local_expert = divmod(expert, dims.num_experts // layout.ep) if rule.is_expert else (0, 0)
        source = SourceParam(chunk, rule.name_in_megatron(local_layer, local_expert, spec=self._spec))
        source_id = self._source_ids.setdefault(source, len(self._source_ids))
        assert rule.engine_name is not None
        target_id = self._target_ids.setdefault(rule.engine_name.format(layer=layer), len(self._target_ids))
        row_offset = expert * self._expert_rows(rule)
        for source_tp, target_tp, source_box, target_box in geometry:
            for engine in range(self._engine.num_engines):
                source_rank = self._choose_source(rule, stage, source_tp, ep_rank)
                self._rows.append((
                    source_rank, source_id, source_box.local_row, source_box.local_col,
                    engine * self._engine.tp + target_tp, target_id,
                    target_box.local_row + row_offset, target_box.local_col, source_box.num_rows, source_box.num_cols,
                ))  # fmt: skip

    def _expert_rows(self, rule: ParamRule) -> int:
        if not rule.is_expert:
            return 0
        return local_matrix_shape(self._family, rule, self._dims, self._engine.tp, 0, engine=True)[0]

    def _choose_source(self, rule: ParamRule, stage: int, tp_rank: int, ep_rank: int) -> int:
        """Replicas take turns, so that sending is even."""
        if rule.is_expert:
            key: tuple[int, ...] = (1, stage, tp_rank, ep_rank)
            candidates = list(expert_replicas(self._layout, etp=tp_rank, ep=ep_rank, pp=stage))
        else:
            key = (0, stage, tp_rank)
            candidates = list(dense_replicas(self._layout, tp=tp_rank, pp=stage))
        turn = self._turn.get(key, 0)
        self._turn[key] = turn + 1
        return candidates[turn % len(candidates)]


def check_coverage(plan: ReshardPlan, family: ModelFamily, dims: ModelDims) -> None:
    """Every live element of every engine parameter is written exactly once. Raises ValueError naming the first that is not.

    Counts on the grid of all box edges of a parameter, so the cost depends on the number of boxes, not of elements.
    """
    live_rows = _live_rows(plan, family, dims)
    columns = plan.columns
    keys = columns["target_rank"] * len(plan.target_params) + columns["target_param"]
    order = np.argsort(keys, kind="stable")
    bounds = np.flatnonzero(np.diff(keys[order], prepend=-1, append=-1))
    seen = 0
    for start, stop in pairwise(bounds.tolist()):
        rows = order[start:stop]
        name = plan.target_params[int(columns["target_param"][rows[0]])]
        target_rank = int(columns["target_rank"][rows[0]])
        height, width = live_rows[target_rank % plan.engine_layout.tp][name], matrix_shape(plan.target_shapes[name])[1]
        top, left = columns["target_row"][rows], columns["target_col"][rows]
        counts = _grid_counts(top, top + columns["num_rows"][rows], left, left + columns["num_cols"][rows], height, width)
        if counts.min(initial=1) != 1 or counts.max(initial=1) != 1:
            what = "not covered" if counts.min() < 1 else "written more than once"
            raise ValueError(f"resharding plan: a part of engine parameter '{name}' on engine rank {target_rank} is {what}")
        seen += 1
    expected = sum(rows > 0 for names in live_rows for rows in names.values()) * plan.engine_layout.num_engines
    if seen != expected:
        raise ValueError(f"resharding plan: {expected - seen} engine parameters receive nothing")


def _live_rows(plan: ReshardPlan, family: ModelFamily, dims: ModelDims) -> list[dict[str, int]]:
    """Rows that hold weights, per engine TP rank and parameter: all but the padding of the vocabulary."""
    tp = plan.engine_layout.tp
    vocab_names = {rule.engine_name for rule in family.rules_for(dims) if rule.shard is Shard.VOCAB}
    per_rank = round_up(round_up(dims.vocab_size, plan.engine_layout.vocab_multiple), tp) // tp
    return [
        {
            name: min(max(dims.vocab_size - rank * per_rank, 0), per_rank) if name in vocab_names else matrix_shape(shape)[0]
            for name, shape in plan.target_shapes.items()
        }
        for rank in range(tp)
    ]


def _grid_counts(
    top: np.ndarray, bottom: np.ndarray, left: np.ndarray, right: np.ndarray, height: int, width: int
) -> np.ndarray:
    """How often each cell of the grid of all edges is written, by a two-dimensional difference array."""
    row_edges = np.unique(np.concatenate([top, bottom, [0, height]]))
    col_edges = np.unique(np.concatenate([left, right, [0, width]]))
    grid = np.zeros((len(row_edges), len(col_edges)), dtype=np.int64)
    t, b = np.searchsorted(row_edges, top), np.searchsorted(row_edges, bottom)
    lo, r = np.searchsorted(col_edges, left), np.searchsorted(col_edges, right)
    np.add.at(grid, (t, lo), 1)
    np.add.at(grid, (b, lo), -1)
    np.add.at(grid, (t, r), -1)
    np.add.at(grid, (b, r), 1)
    return grid.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
