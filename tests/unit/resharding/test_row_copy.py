"""Rows arrive where they belong and nowhere else, compiled and without numba."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.resharding import row_copy
from megatron_rl.resharding.boxes import Extents
from megatron_rl.resharding.row_copy import copy_rows, side_by_side


@pytest.fixture(params=["compiled", "numpy"])
def form(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(row_copy, "has_numba", lambda: False)
    else:
        assert row_copy.has_numba()
    return request.param


def draw_boxes(rng, num_boxes):
    """(rows, bytes of a row, pitch at the source, pitch at the target); some in one piece on one side or on both."""
    rows = rng.integers(1, 40, num_boxes)
    row_bytes = rng.integers(1, 300, num_boxes)
    pitches = [row_bytes + rng.integers(0, 90, num_boxes) * rng.integers(0, 2, num_boxes) for _ in range(2)]
    return rows, row_bytes, *pitches


def place(rng, rows, pitch, memory):
    """Boxes behind one another, with gaps."""
    room = rows * pitch + rng.integers(0, 50, len(rows))
    starts = np.cumsum(room) - room
    assert starts[-1] + room[-1] <= len(memory)
    return starts


@pytest.mark.parametrize("seed", range(20))
def test_random_boxes(form, seed):
    rng = np.random.default_rng(seed)
    rows, row_bytes, source_pitch, target_pitch = draw_boxes(rng, int(rng.integers(1, 30)))
    source = rng.integers(0, 256, 2**20, dtype=np.uint8)
    target = rng.integers(0, 256, 2**20, dtype=np.uint8)
    starts, ends = place(rng, rows, source_pitch, source), place(rng, rows, target_pitch, target)
    expected = target.copy()
    for box, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        for row in range(rows[box]):
            origin, to, count = start + row * source_pitch[box], end + row * target_pitch[box], row_bytes[box]
            expected[to : to + count] = source[origin : origin + count]
    copy_rows(
        Extents(starts + source.ctypes.data, rows, row_bytes, source_pitch),
        Extents(ends + target.ctypes.data, rows, row_bytes, target_pitch),
    )
    assert np.array_equal(target, expected)


def test_side_by_side_packs_and_unpacks(form):
    rng = np.random.default_rng(5)
    rows, row_bytes, pitch, _ = draw_boxes(rng, 12)
    source = rng.integers(0, 256, 2**20, dtype=np.uint8)
    boxes = Extents(place(rng, rows, pitch, source) + source.ctypes.data, rows, row_bytes, pitch)
    packed = np.zeros(int((rows * row_bytes).sum()), dtype=np.uint8)
    copy_rows(boxes, side_by_side(boxes, packed.ctypes.data))
    before = source.copy()
    source[:] = 0
    copy_rows(side_by_side(boxes, packed.ctypes.data), boxes)
    held = source != 0
    assert np.array_equal(source[held], before[held]) and held.sum() > 0.9 * len(packed)


def test_no_boxes(form):
    none = Extents(*(np.zeros(0, dtype=np.int64) for _ in range(4)))
    copy_rows(none, none)
    copy_rows(side_by_side(none, 0), none)
