"""What is proven of every plan before anyone gets it: every element once, from a rank that has it.

* coverage: every live element of every engine parameter is in exactly one box;
* spans: for every engine (with relay: once) each box is sent by exactly one rank, and that rank is in the box's class.

`ownership` proves that the class holds the very elements that the target wants.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from megatron_rl.layout.intervals import matrix_shape, padded_engine_vocab
from megatron_rl.model_families.declaration import ModelFamily, Shard
from megatron_rl.model_families.shards import engine_group
from megatron_rl.resharding.box_table import BoxTable, PlanError, PlanKey
from megatron_rl.resharding.sources import SourceClasses
from megatron_rl.resharding.spans import SpanTable


def check_coverage(family: ModelFamily, key: PlanKey, boxes: BoxTable, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises PlanError naming the first engine parameter of which an element is missing or written twice.

    Counts on the grid of all box edges of a parameter; parameters with the same boxes (other layers) are counted once.
    """
    columns, num_params = boxes.columns, len(boxes.target_params)
    unknown = sorted(set(boxes.target_params) - set(shapes))
    if unknown:
        raise PlanError(f"resharding plan: the engine has no parameter '{unknown[0]}'")
    keys = columns["target_rank"].astype(np.int64) * num_params + columns["target_param"]
    order = np.argsort(keys, kind="stable")
    boxes_NC = np.stack([columns[name] for name in ("target_row", "target_col", "num_rows", "num_cols")], axis=1)[order]
    bounds = np.flatnonzero(np.diff(keys[order], prepend=-1, append=-1))
    live_rows = _live_rows(family, key)
    sound: set[tuple[bytes, int, int]] = set()
    covered = np.zeros((key.engine_layout.tp, num_params), dtype=bool)
    for start, stop in pairwise(bounds.tolist()):
        rank, param = divmod(int(keys[order[start]]), num_params)
        name = boxes.target_params[param]
        height, width = matrix_shape(shapes[name])
        height = live_rows[rank].get(name, height)
        covered[rank, param] = True
        signature = (boxes_NC[start:stop].tobytes(), height, width)
        if signature not in sound:
            _check_grid(boxes_NC[start:stop].astype(np.int64), height, width, name, rank)
            sound.add(signature)
    for name in shapes:
        for rank in range(key.engine_layout.tp):
            has_rows = live_rows[rank].get(name, 1) > 0
            if has_rows and (name not in boxes.target_params or not covered[rank, boxes.target_params.index(name)]):
                raise PlanError(f"resharding plan: engine parameter '{name}' on engine rank {rank} receives nothing")


def _live_rows(family: ModelFamily, key: PlanKey) -> list[dict[str, int]]:
    """Per engine rank, the rows of vocabulary parameters that are not padding."""
    engine, vocab = key.engine_layout, key.dims.vocab_size
    live: list[dict[str, int]] = []
    for rank in range(engine.tp):
        rows = {}
        for rule in family.rules_for(key.dims):
            if rule.shard is Shard.VOCAB and rule.engine_name is not None:
                size, group_rank = engine_group(rule, engine, rank)
                part = padded_engine_vocab(vocab, size, engine.vocab_multiple) // size
                rows[rule.engine_name] = min(max(vocab - group_rank * part, 0), part)
        live.append(rows)
    return live


def _check_grid(boxes_N4: np.ndarray, height: int, width: int, name: str, rank: int) -> None:
    """How often each cell of the grid of all edges is written, by a two-dimensional difference array."""
    top, left, bottom, right = boxes_N4.T[0], boxes_N4.T[1], boxes_N4[:, 0] + boxes_N4[:, 2], boxes_N4[:, 1] + boxes_N4[:, 3]
    row_edges = np.unique(np.concatenate([top, bottom, [0, height]]))
    col_edges = np.unique(np.concatenate([left, right, [0, width]]))
    grid = np.zeros((len(row_edges), len(col_edges)), dtype=np.int64)
    t, b = np.searchsorted(row_edges, top), np.searchsorted(row_edges, bottom)
    lo, r = np.searchsorted(col_edges, left), np.searchsorted(col_edges, right)
    for rows, cols, amount in ((t, lo, 1), (b, lo, -1), (t, r, -1), (b, r, 1)):
        np.add.at(grid, (rows, cols), amount)
    counts = grid.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
    is_outside = row_edges[-1] > height or col_edges[-1] > width
    if is_outside or counts.min(initial=1) != 1 or counts.max(initial=1) != 1:
        what = "written outside it" if is_outside else "not covered" if counts.min() < 1 else "written more than once"
        raise PlanError(f"resharding plan: a part of engine parameter '{name}' on engine rank {rank} is {what}")


def check_spans(key: PlanKey, boxes: BoxTable, spans: SpanTable) -> None:
    """Raises PlanError when a box is sent by none, by two or by a rank outside its class, or to the wrong engine rank."""
    columns, classes = spans.columns, SourceClasses(key.layout)
    engine, num_boxes = key.engine_layout, len(boxes.columns["num_rows"])
    last = columns["stop_box"] - (columns["stop_row"] == 0)
    first_class, first_rank = (boxes.columns[name][columns["start_box"]] for name in ("source_class", "target_rank"))
    one_run = (first_class == boxes.columns["source_class"][last]) & (first_rank == boxes.columns["target_rank"][last])
    patterns = np.array([classes.pattern(number) for number in range(classes.per_stage)])[first_class % classes.per_stage]
    stage, in_stage = np.divmod(columns["source_rank"], classes.ranks_per_stage)
    is_member = (stage == first_class // classes.per_stage) & (in_stage % patterns[:, 0] == patterns[:, 1])
    wrong = np.flatnonzero(~(one_run & is_member & (columns["target_rank"] % engine.tp == first_rank)))
    if len(wrong):
        sender, target = int(columns["source_rank"][wrong[0]]), int(columns["target_rank"][wrong[0]])
        raise PlanError(f"resharding plan: trainer rank {sender} does not own what it would send to engine rank {target}")
    number = np.zeros_like(columns["target_rank"]) if key.relay else columns["target_rank"] // engine.tp
    order = np.lexsort((columns["start_row"], columns["start_box"], number))
    starts = np.stack([columns["start_box"], columns["start_row"]], axis=1)[order]
    stops = np.stack([columns["stop_box"], columns["stop_row"]], axis=1)[order]
    number = number[order]
    opens = np.flatnonzero(np.diff(number, prepend=-1))
    closes = np.append(opens[1:], len(number)) - 1
    inner = np.setdiff1d(np.arange(len(number)), opens)
    tiles = (
        np.array_equal(starts[inner], stops[inner - 1])
        and (starts[opens] == 0).all()
        and (stops[closes] == (num_boxes, 0)).all()
        and len(opens) == (1 if key.relay else engine.num_engines)
    )
    if not tiles:
        raise PlanError("resharding plan: a box is sent by no trainer rank or by more than one")
