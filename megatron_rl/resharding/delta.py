"""Lossless deltas: only the 2-byte elements that changed, as gaps between their places and their new values.

A box is read row by row as one sequence of elements. Each changed element is one byte, the number of unchanged elements
before it (0 to 254), and its new value; 255 skips 255 unchanged elements and stands for no value. With Adam at usual RL
learning rates a few percent of bf16 weights change per step. For host memory numba compiles
the loops; a vectorised torch form does the same on GPUs and where numba is absent. Both write the same bytes.

Shape suffixes: N boxes, K changed elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from megatron_rl.resharding.boxes import Box, total_bytes
from megatron_rl.resharding.row_copy import has_numba

SKIP = 255
"""The gap byte that stands for as many unchanged elements and no value."""
LANES, WORD_BYTES = 4, 8
"""Elements compared at once: a 64-bit word."""
CHUNK_WORDS = 32 * 1024
"""Both sides of a chunk fit into half of a core's cache."""
PLACE_OF_BYTE = np.uint64(sum((i << 5) << (8 * (7 - i)) for i in range(8)))
"""Times a word whose only bit is the lowest of byte i: i stands in the three highest bits."""
LANE_ENDS = tuple(np.uint64((1 << (16 * lane)) - 1) for lane in (1, 2, 3))


class DeltaBase:
    """What a trainer rank last sent to one engine rank, and the digest of it (None: unknown, send everything)."""

    def __init__(self) -> None:
        self.digest: str | None = None
        self._values: torch.Tensor | None = None

    def encode(self, boxes: Sequence[Box]) -> bytes | None:
        """What changed since the last call; None when there is no base. The base is the boxes' values afterwards."""
        if self.digest is None or self._values is None:
            self.remember(boxes)
            return None
        parts = [encode_box(box.view.to(box.dtype), part) for box, part in zip(boxes, self._parts(boxes), strict=True)]
        counts_N2 = np.array([(len(gaps), len(values)) for gaps, values in parts], dtype=np.int64)
        return b"".join(
            [counts_N2.tobytes(), *(values.tobytes() for _, values in parts), *(gaps.tobytes() for gaps, _ in parts)]
        )

    def remember(self, boxes: Sequence[Box]) -> None:
        """Take the boxes' values as the base."""
        for box, part in zip(boxes, self._parts(boxes), strict=True):
            part.view(box.dtype).view(box.view.shape).copy_(box.view)

    def _parts(self, boxes: Sequence[Box]) -> list[torch.Tensor]:
        """Each box's part of the base, beginning at a whole word."""
        sizes = [-(-box.view.numel() // LANES) * LANES for box in boxes]
        if self._values is None:
            self._values = torch.zeros(sum(sizes), dtype=torch.int16, device=boxes[0].view.device)
        return [part[: box.view.numel()] for box, part in zip(boxes, self._values.split(sizes), strict=True)]


def can_encode(boxes: Sequence[Box]) -> bool:
    """Whether all boxes are of 2-byte elements."""
    return all(box.dtype.itemsize == 2 for box in boxes)


def apply_delta(payload: bytes | bytearray | memoryview, boxes: Sequence[Box]) -> None:
    """Write the changed elements into the boxes. Raises ValueError when the payload does not fit them."""
    table_bytes = len(boxes) * 16
    if len(payload) < table_bytes:
        raise ValueError(f"delta of {len(payload)} bytes for {len(boxes)} boxes")
    counts_N2 = np.frombuffer(payload, dtype=np.int64, count=2 * len(boxes)).reshape(-1, 2)
    num_gaps, num_values = counts_N2.sum(axis=0).tolist()
    if counts_N2.min(initial=0) < 0 or table_bytes + 2 * num_values + num_gaps != len(payload):
        raise ValueError(f"delta of {len(payload)} bytes for {num_values} values and {num_gaps} gaps")
    values = np.frombuffer(payload, dtype=np.uint16, count=num_values, offset=table_bytes)
    gaps = np.frombuffer(payload, dtype=np.uint8, offset=table_bytes + 2 * num_values)
    gap, value = 0, 0
    for box, (gap_count, value_count) in zip(boxes, counts_N2.tolist(), strict=True):
        apply_box(box.view, gaps[gap : gap + gap_count], values[value : value + value_count])
        gap, value = gap + gap_count, value + value_count


def is_worth_it(payload: bytes, boxes: Sequence[Box]) -> bool:
    return len(payload) < total_bytes(boxes) // 2


def encode_box(view: torch.Tensor, base: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(gap bytes, values [K] as uint16) of what differs from flat int16 `base`, which takes the new values."""
    flat = view.contiguous().view(-1).view(torch.int16)
    if view.device.type != "cpu" or not has_numba():
        return _encode_torch(flat, base)
    if flat.data_ptr() % WORD_BYTES:
        flat = flat.clone()
    return _encode_words(flat.numpy().view(np.uint16), base.numpy().view(np.uint16))


def apply_box(view: torch.Tensor, gaps: np.ndarray, values: np.ndarray) -> None:
    """The inverse of `encode_box`. Raises ValueError when gaps and values do not belong together or leave the box."""
    if view.device.type == "cpu" and has_numba():
        span, stride = _span(view)
        fits = _kernels()[1](span, view.shape[0], stride, view.shape[1], gaps, values)
    else:
        fits = _apply_torch(view, gaps, values)
    if not fits:
        raise ValueError(f"a delta with {len(values)} values does not fit a box {tuple(view.shape)}")


def _span(view: torch.Tensor) -> tuple[np.ndarray, int]:
    """The memory from the first to the last element of the box as uint16, and the elements from row to row."""
    rows, cols = view.shape
    stride = cols if rows == 1 else view.stride(0)
    flat = view.as_strided(((rows - 1) * stride + cols,), (1,), view.storage_offset())
    return flat.view(torch.int16).numpy().view(np.uint16), stride


def _encode_words(new: np.ndarray, old: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compares words of four elements, a cacheful at a time; only words that differ are looked into."""
    num_words, count_words = len(new) // LANES, _kernels()[0]
    new_words, old_words = new[: num_words * LANES].view(np.uint64), old[: num_words * LANES].view(np.uint64)
    gaps, values = np.empty(len(new) + len(new) // SKIP + 1, np.uint8), np.empty(len(new), np.uint16)
    differs = np.zeros(CHUNK_WORDS, dtype=bool)
    num_gaps = num_values = gap = 0
    for start in range(0, num_words, CHUNK_WORDS):
        theirs, ours = old_words[start : start + CHUNK_WORDS], new_words[start : start + CHUNK_WORDS]
        np.not_equal(ours, theirs, out=differs[: len(ours)])
        differs[len(ours) :] = False  # of the last chunk
        num_gaps, num_values, gap = count_words(differs.view(np.uint64), ours, theirs, gaps, values, num_gaps, num_values, gap)
    new_tail, old_tail = (torch.from_numpy(part[num_words * LANES :].view(np.int16)) for part in (new, old))
    tail = _encode_torch(new_tail, old_tail, gap)
    return np.concatenate([gaps[:num_gaps], tail[0]]), np.concatenate([values[:num_values], tail[1]])


def _encode_torch(flat: torch.Tensor, base: torch.Tensor, gap: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """`gap`: unchanged elements before the first."""
    places_K = (flat != base).nonzero().squeeze(1)
    values_K = flat[places_K]
    base.copy_(flat)
    gaps_K = torch.diff(places_K, prepend=places_K.new_tensor([-1 - gap])) - 1
    ends_K = (gaps_K // SKIP + 1).cumsum(0)
    gap_bytes = torch.full((int(ends_K[-1]) if len(ends_K) else 0,), SKIP, dtype=torch.uint8, device=flat.device)
    gap_bytes[ends_K - 1] = (gaps_K % SKIP).to(torch.uint8)
    return gap_bytes.cpu().numpy(), values_K.cpu().numpy().view(np.uint16)


def _apply_torch(view: torch.Tensor, gaps: np.ndarray, values: np.ndarray) -> bool:
    gap = torch.from_numpy(gaps.astype(np.int64)).to(view.device)
    places = torch.where(gap == SKIP, SKIP, gap + 1).cumsum(0)[gap != SKIP] - 1
    if len(places) != len(values) or (len(places) and int(places[-1]) >= view.numel()):
        return False
    changed = torch.from_numpy(values.view(np.int16).copy()).to(view.device)
    view.view(torch.int16)[places // view.shape[1], places % view.shape[1]] = changed
    return True


@cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(encode, apply), compiled on first use: importing numba takes a second."""
    from numba import njit

    compiled = njit(nogil=True, cache=True)
    return compiled(_encode_kernel), compiled(_apply_kernel)


def _encode_kernel(flags, new, old, gaps, values, num_gaps, num_values, gap):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """One chunk: `flags` has a byte per word, 1 where `new` and `old` differ. Returns the three counts.

    It goes from one changed element to the next by the lowest bit that is set: what does not differ costs no branch, and
    most words that differ do in one element.
    """
    one, lane_mask = np.uint64(1), np.uint64(0xFFFF)
    last = -1 - gap  # where the value before stands
    for group in range((len(new) + 7) // 8):
        flag = flags[group]
        while flag:
            lowest = flag & (~flag + one)
            flag ^= lowest
            index = 8 * group + np.int64((lowest * PLACE_OF_BYTE) >> np.uint64(61))
            word = new[index]
            changed = word ^ old[index]
            old[index] = word
            while changed:
                lowest = changed & (~changed + one)
                lane = np.int64(lowest > LANE_ENDS[0]) + np.int64(lowest > LANE_ENDS[1]) + np.int64(lowest > LANE_ENDS[2])
                shift = np.uint64(16 * lane)
                changed &= ~(lane_mask << shift)
                place = LANES * index + lane
                gap, last = place - last - 1, place
                while gap >= SKIP:
                    gaps[num_gaps] = SKIP
                    num_gaps += 1
                    gap -= SKIP
                gaps[num_gaps] = gap
                values[num_values] = (word >> shift) & lane_mask
                num_gaps, num_values = num_gaps + 1, num_values + 1
    return num_gaps, num_values, LANES * len(new) - 1 - last


def _apply_kernel(span, rows, stride, cols, gaps, values):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Whether gaps and values fit the box; nothing is written outside of it."""
    used, row, col = 0, 0, -1
    if stride == cols:  # one long row
        rows, cols = 1, rows * cols
    for gap in gaps:
        if gap == SKIP:
            col += SKIP
            continue
        col += gap + 1
        while col >= cols:
            col -= cols
            row += 1
        if row >= rows or used >= len(values):
            return False
        span[row * stride + col] = values[used]
        used += 1
    return used == len(values)
