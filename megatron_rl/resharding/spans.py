"""Who sends which boxes to whom: the boxes of every source class, cut into one run per sender and engine rank.

The boxes of a class, for all engines one after another, lie on a tape; its ranks take consecutive stretches of it, each as
long as its quota (`sources.stage_quotas`). A stretch that ends inside a box divides it between two rows. So every sender
has few targets, each pair exchanges one run of boxes per class, and the whole assignment is a small table, however many
engines there are.

Without relay the tape holds all boxes of the class once per engine. With relay it holds them once: engine e receives the
e-th part of each rank's boxes from the trainers and everything else from its neighbour (`hops.relay_rounds`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_rl.resharding.box_table import BoxTable, nearest_cut
from megatron_rl.resharding.sources import SourceClasses, stage_quotas
from megatron_rl.types.layout import EngineLayout

SPAN_COLUMNS = (
    "source_rank", "target_rank", "start_box", "start_row", "stop_box", "stop_row", "num_elements",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SpanTable:
    """Columns by name, sorted by (source rank, target rank, start box). A span is the boxes from row `start_row` of
    `start_box` up to, not including, row `stop_row` of `stop_box` (0: up to the end of the box before).

    `target_rank` is engine number * engine TP + rank. `bound` is the least possible load of the most loaded sender.
    """

    columns: dict[str, np.ndarray]
    bound: float


def assign_spans(boxes: BoxTable, classes: SourceClasses, engine: EngineLayout, *, relay: bool, cut_rows: int) -> SpanTable:
    """Give every box of every engine (with relay: of one) to exactly one rank of its class."""
    source_class, sizes = boxes.columns["source_class"], boxes.num_elements
    times = 1 if relay else engine.num_engines
    loads = np.bincount(source_class, weights=sizes, minlength=classes.num_classes).astype(np.int64) * times
    quotas, bound = stage_quotas(classes, loads)
    edges = np.searchsorted(source_class, np.arange(classes.num_classes + 1))
    blocks = [
        _cut_class(boxes, sizes, int(edges[number]), int(edges[number + 1]), engine, quotas[number],
                   classes.members(number), relay=relay, cut_rows=cut_rows)
        for number in range(classes.num_classes)
        if edges[number] < edges[number + 1]
    ]  # fmt: skip
    table = np.concatenate(blocks, axis=1)
    order = np.lexsort((table[2], table[1], table[0]))
    narrow = dict.fromkeys(SPAN_COLUMNS, np.int32) | {"num_elements": np.int64}
    return SpanTable(
        columns={name: table[number][order].astype(narrow[name]) for number, name in enumerate(SPAN_COLUMNS)},
        bound=bound,
    )


def _cut_class(
    boxes: BoxTable,
    sizes: np.ndarray,
    first: int,
    stop: int,
    engine: EngineLayout,
    quotas: np.ndarray,
    members: np.ndarray,
    *,
    relay: bool,
    cut_rows: int,
) -> np.ndarray:
    """The spans of one class as a matrix of `SPAN_COLUMNS` x spans."""
    ruler = _Ruler(boxes, sizes, first, stop, cut_rows)
    ranks = boxes.columns["target_rank"][first:stop]
    starts = np.flatnonzero(np.diff(ranks, prepend=-1))
    segment_rank = ranks[starts]
    low, high = ruler.ends[starts], ruler.ends[np.append(starts[1:], stop - first)]
    engines = np.repeat(np.arange(engine.num_engines), len(starts))
    low, high, segment_rank = (np.tile(values, engine.num_engines) for values in (low, high, segment_rank))
    if relay:
        length = high - low
        high = ruler.snap(low + length * (engines + 1) // engine.num_engines)
        low = ruler.snap(low + length * engines // engine.num_engines)
    tape = np.concatenate([[0], np.cumsum(high - low)])
    wanted = np.cumsum(quotas)[:-1] * (tape[-1] / max(quotas.sum(), 1.0))
    piece = np.clip(np.searchsorted(tape, wanted, side="right") - 1, 0, len(low) - 1)
    cuts = tape[piece] + np.clip(
        ruler.snap((low[piece] + wanted - tape[piece]).astype(np.int64)) - low[piece], 0, (high - low)[piece]
    )
    cuts = np.maximum.accumulate(cuts) if len(cuts) else cuts.astype(np.int64)
    points = np.unique(np.concatenate([tape, cuts]))
    begin, end = points[:-1], points[1:]
    piece = np.searchsorted(tape, begin, side="right") - 1
    sender = np.searchsorted(cuts, begin, side="right")
    start_box, start_row = ruler.place(low[piece] + begin - tape[piece])
    stop_box, stop_row = ruler.place(low[piece] + end - tape[piece])
    target = engines[piece] * engine.tp + segment_rank[piece]
    return np.stack([members[sender], target, start_box, start_row, stop_box, stop_row, end - begin])


class _Ruler:
    """Positions (in elements) along the boxes first..stop and the places where they may be cut."""

    def __init__(self, boxes: BoxTable, sizes: np.ndarray, first: int, stop: int, cut_rows: int) -> None:
        self._first, self._cut_rows = first, cut_rows
        self._cols = boxes.columns["num_cols"][first:stop].astype(np.int64)
        self._rows = boxes.columns["num_rows"][first:stop].astype(np.int64)
        self._target_row = boxes.columns["target_row"][first:stop].astype(np.int64)
        self.ends = np.concatenate([[0], np.cumsum(sizes[first:stop])])
        """Where each box begins, and the end of the last."""

    def snap(self, position: np.ndarray) -> np.ndarray:
        """The nearest position at which the box may be cut: one of its ends, or a target row divisible by `cut_rows`."""
        box = np.clip(np.searchsorted(self.ends, position, side="right") - 1, 0, len(self._cols) - 1)
        row = (position - self.ends[box]) / self._cols[box]
        return self.ends[box] + nearest_cut(row, self._target_row[box], self._rows[box], self._cut_rows) * self._cols[box]

    def place(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(box, row in it) of a position that is on a row."""
        box = np.searchsorted(self.ends, position, side="right") - 1
        inside = np.minimum(box, len(self._cols) - 1)
        row = np.where(box < len(self._cols), (position - self.ends[inside]) // self._cols[inside], 0)
        return box + self._first, row


def expand(boxes: BoxTable, columns: dict[str, np.ndarray], chosen: np.ndarray) -> dict[str, np.ndarray]:
    """The boxes of the spans `chosen`, one row each, in span order; `num_rows` and the rows follow the cuts (int64)."""
    start_box, start_row = columns["start_box"][chosen].astype(np.int64), columns["start_row"][chosen].astype(np.int64)
    stop_box, stop_row = columns["stop_box"][chosen].astype(np.int64), columns["stop_row"][chosen].astype(np.int64)
    counts = stop_box - start_box + (stop_row > 0)
    first = np.concatenate([[0], np.cumsum(counts)])
    span = np.repeat(np.arange(len(counts)), counts)
    box = start_box[span] + np.arange(first[-1]) - first[:-1][span]
    skipped = np.where(box == start_box[span], start_row[span], 0)
    rows = boxes.columns["num_rows"][box].astype(np.int64)
    last = np.where(box == stop_box[span], stop_row[span], rows)
    table = {name: boxes.columns[name][box].astype(np.int64) for name in boxes.columns if name != "source_class"}
    table["source_row"] += skipped
    table["target_row"] += skipped
    table["num_rows"] = last - skipped
    table["source_rank"] = columns["source_rank"][chosen].astype(np.int64)[span]
    table["target_rank"] = columns["target_rank"][chosen].astype(np.int64)[span]
    return table
