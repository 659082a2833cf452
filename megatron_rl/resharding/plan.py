"""The resharding plan: which box of which trainer parameter goes where in which engine parameter.

Pure and torch-free. It follows from a `PlanKey` alone (family, dims, both layouts), is made once per key, proven (coverage
and ownership) before anyone gets it, and cached by that key: a plan of another layout is another plan.

    boxes    what one engine receives, columnar, by the class of trainer ranks that hold it   (box_table.py)
    spans    who of each class sends which run of boxes to which engine rank                  (spans.py, sources.py)

`TransferOp` is a row view; `columns` expands everything, which large layouts never need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from megatron_rl.layout.checks import check_engine_layout, check_trainer_layout
from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.model_families.registry import declared_family
from megatron_rl.model_families.shards import engine_shapes
from megatron_rl.resharding.box_table import BoxTable, PlanKey, build_boxes
from megatron_rl.resharding.coverage import check_coverage, check_spans
from megatron_rl.resharding.ownership import check_ownership
from megatron_rl.resharding.sources import SourceClasses
from megatron_rl.resharding.spans import SpanTable, assign_spans, expand
from megatron_rl.types.layout import EngineLayout, ParallelLayout
from megatron_rl.types.resharding import SourceParam, TransferOp

COLUMNS = (
    "source_rank", "source_param", "source_row", "source_col",
    "target_rank", "target_param", "target_row", "target_col", "num_rows", "num_cols",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """All transfers of one weight sync, sorted by (source rank, target rank, target parameter, row, column).

    `target_shapes` gives the shape of every engine parameter of a rank. A target's padding rows are in no transfer. With
    `key.relay` the trainers send every box to one engine only and `hops.relay_rounds` says what engines pass on.
    """

    key: PlanKey
    boxes: BoxTable
    spans: SpanTable
    target_shapes: dict[str, tuple[int, ...]] = field(repr=False)

    @property
    def layout(self) -> ParallelLayout:
        return self.key.layout

    @property
    def engine_layout(self) -> EngineLayout:
        return self.key.engine_layout

    @property
    def source_params(self) -> tuple[SourceParam, ...]:
        return self.boxes.source_params

    @property
    def target_params(self) -> tuple[str, ...]:
        return self.boxes.target_params

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal plans, on every machine: what both sides of a sync can compare."""
        digest = hashlib.blake2b(repr(self.key).encode(), digest_size=16)
        for table in (self.boxes.columns, self.spans.columns):
            for name in sorted(table):
                digest.update(np.ascontiguousarray(table[name]).data)
        return digest.hexdigest()

    @cached_property
    def layout_digest(self) -> str:
        """Of the model and both layouts, without the names that a layer spec gives the trainer's parameters: equal where
        two plans bring the same slices to the same places, which is what an order and its senders compare."""
        return hashlib.blake2b(repr(replace(self.key, spec="")).encode(), digest_size=16).hexdigest()

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """Every transfer as a row of int64 columns, `COLUMNS`."""
        return _sorted_columns(expand(self.boxes, self.spans.columns, np.arange(len(self.spans.columns["source_rank"]))))

    @property
    def num_ops(self) -> int:
        spans = self.spans.columns
        return int((spans["stop_box"] - spans["start_box"] + (spans["stop_row"] > 0)).sum())

    def op(self, row: int) -> TransferOp:
        return self._op(self.columns, row)

    def ops_between(self, source_rank: int, target_rank: int) -> Iterator[TransferOp]:
        """The transfers of one pair, in sending order."""
        yield from self._ops(self._spans_of_pair(source_rank, target_rank))

    def columns_from(self, source_rank: int) -> dict[str, np.ndarray]:
        """The rows of `columns` that one trainer rank sends, without expanding those of the others."""
        low, high = np.searchsorted(self.spans.columns["source_rank"], [source_rank, source_rank + 1])
        return _sorted_columns(expand(self.boxes, self.spans.columns, np.arange(low, high)))

    def columns_into(self, target_rank: int) -> dict[str, np.ndarray]:
        """The rows of `columns` that one engine rank receives from trainer ranks."""
        chosen = np.flatnonzero(self.spans.columns["target_rank"] == target_rank)
        return _sorted_columns(expand(self.boxes, self.spans.columns, chosen))

    def num_elements_between(self) -> np.ndarray:
        """Elements sent per (trainer rank, engine rank), as a dense matrix."""
        shape = (self.layout.world_size, self.engine_layout.num_ranks)
        elements = np.zeros(shape, dtype=np.int64)
        spans = self.spans.columns
        np.add.at(elements, (spans["source_rank"], spans["target_rank"]), spans["num_elements"])
        return elements

    def num_relayed(self) -> np.ndarray:
        """Elements that each engine rank passes on to its neighbour."""
        tp, engines = self.engine_layout.tp, self.engine_layout.num_engines
        if not self.key.relay or engines == 1:
            return np.zeros(self.engine_layout.num_ranks, dtype=np.int64)
        entered = self.num_elements_between().sum(axis=0).reshape(engines, tp)
        return (entered.sum(axis=0) - np.roll(entered, -1, axis=0)).reshape(-1)

    def sender_bound(self) -> float:
        """Elements that the most loaded trainer rank must send at least, whatever the choice of sources (`sources`)."""
        return self.spans.bound

    def _spans_of_pair(self, source_rank: int, target_rank: int) -> np.ndarray:
        spans = self.spans.columns
        low, high = np.searchsorted(spans["source_rank"], [source_rank, source_rank + 1])
        edges = np.searchsorted(spans["target_rank"][low:high], [target_rank, target_rank + 1]) + low
        return np.arange(edges[0], edges[1])

    def _ops(self, chosen: np.ndarray) -> Iterator[TransferOp]:
        columns = _sorted_columns(expand(self.boxes, self.spans.columns, chosen))
        for row in range(len(columns["num_rows"])):
            yield self._op(columns, row)

    def _op(self, columns: dict[str, np.ndarray], row: int) -> TransferOp:
        return TransferOp(
            source=self.source_params[int(columns["source_param"][row])],
            target=self.target_params[int(columns["target_param"][row])],
            **{name: int(columns[name][row]) for name in COLUMNS if name not in _NAMED},
        )


_NAMED = ("source_param", "target_param")


def build_reshard_plan(
    family_name: str,
    dims: ModelDims,
    layout: ParallelLayout,
    engine_layout: EngineLayout,
    *,
    spec: str = "local",
    trainer_vocab_multiple: int = 1,
    relay: bool = False,
    cut_rows: int = 128,
) -> ReshardPlan:
    """Plan a sync; the result is proven before it is returned, and cached by everything it follows from.

    `spec` says which layer spec names the Megatron parameters ("local" or "te"). `relay`: the trainers send every box once,
    engines pass it on. Raises ValueError, one line that names the size, when a layout does not divide the model.
    """
    return _build(PlanKey(family_name, dims, layout, engine_layout, spec, trainer_vocab_multiple, relay, max(cut_rows, 1)))


@lru_cache(maxsize=8)
def _build(key: PlanKey) -> ReshardPlan:
    family = declared_family(key.family_name)
    problems = check_trainer_layout(key.dims, key.layout) + check_engine_layout(key.dims, key.engine_layout, "engine")
    if problems:
        raise ValueError(": ".join(problems[0]))
    engine = key.engine_layout
    boxes = build_boxes(family, key)
    shapes = engine_shapes(family, key.dims, engine.tp, engine.vocab_multiple, ep=engine.ep, attention_dp=engine.attention_dp)
    check_coverage(family, key, boxes, shapes)
    check_ownership(family, key, boxes)
    classes = SourceClasses(key.layout)
    spans = assign_spans(boxes, classes, engine, relay=key.relay, cut_rows=key.cut_rows)
    check_spans(key, boxes, spans)
    return ReshardPlan(key, boxes, spans, shapes)


def _sorted_columns(table: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    order = np.lexsort(
        tuple(table[name] for name in ("target_col", "target_row", "target_param", "target_rank", "source_rank"))
    )
    return {name: table[name][order] for name in COLUMNS}
