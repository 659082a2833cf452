"""Boxes as bytes: where they lie as spans, packed side by side, and hashed.

A span is an address and a number of bytes. Addresses are good as long as the boxes they came from are held.
Shape suffixes: N boxes, S spans.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megatron_rl.resharding.boxes import Box, Boxes, pieces, runs, total_bytes
from megatron_rl.resharding.digest import Digest
from megatron_rl.resharding.row_copy import copy_rows, side_by_side

_HASHED_BYTES = {"cuda": 4 * 1024 * 1024, "cpu": 512 * 1024}
"""Hashed at once. From a GPU that is one copy; strided boxes of host memory are copied into half of a core's cache."""


def spans_of(boxes: Boxes) -> np.ndarray:
    """Spans [S, 2] (address, bytes) of boxes in place; what lies one after another is one."""
    extents = boxes.extents
    rows_N, row_bytes_N = extents.num_rows_N, extents.row_bytes_N
    num_spans_N = np.where(extents.is_whole_N, 1, rows_N)
    box_S = np.repeat(np.arange(len(boxes)), num_spans_N)
    row_S = np.arange(len(box_S)) - np.repeat(np.cumsum(num_spans_N) - num_spans_N, num_spans_N)
    address_S = extents.address_N[box_S] + row_S * extents.pitch_N[box_S]
    bytes_S = np.where(extents.is_whole_N, rows_N * row_bytes_N, row_bytes_N)[box_S]
    starts = np.flatnonzero(np.append(True, address_S[1:] != address_S[:-1] + bytes_S[:-1]))
    return np.stack([address_S[starts], np.add.reduceat(bytes_S, starts)], axis=1)


def span_of(values: torch.Tensor) -> np.ndarray:
    """The one span [1, 2] of a contiguous host tensor."""
    return np.array([[values.data_ptr(), values.numel() * values.element_size()]], dtype=np.int64)


def bytes_of(view: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor, to be read or written; the tensor is kept as long as it is."""
    return memory_at(view.data_ptr(), view.numel() * view.element_size(), view)


def memory_at(address: int, num_bytes: int, owner: object) -> memoryview:
    """Memory that `owner` holds. A quarter of the time that numpy's view takes."""
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return memoryview(memory)


def pack(boxes: Boxes, staging: torch.Tensor) -> torch.Tensor:
    """Write the boxes' values, cast to the dtypes in which they travel, one after another into host bytes `staging`.

    Returns the filled part. Boxes on a GPU are joined there first: one copy to the host instead of one per box.
    """
    if boxes.device.type == "cuda":
        joined = join(boxes)
        staging[: joined.numel()].copy_(joined, non_blocking=True)
        torch.cuda.current_stream(joined.device).synchronize()
        return staging[: joined.numel()]
    if boxes.matrices.are_in_place:
        extents = boxes.extents
        copy_rows(extents, side_by_side(extents, staging.data_ptr()))
        return staging[: total_bytes(boxes)]
    offset = 0
    for box in boxes:
        part = staging[offset : offset + box.num_bytes].view(box.dtype).view(box.view.shape)
        part.copy_(box.view)
        offset += box.num_bytes
    return staging[:offset]


def unpack(values: torch.Tensor, boxes: Boxes) -> None:
    """The inverse of `pack`: flat bytes into the boxes. `values` may lie on any device, aligned to the boxes' dtypes."""
    if boxes.device.type != values.device.type:
        values = values.to(boxes.device, non_blocking=boxes.device.type == "cuda")
    if boxes.matrices.are_in_place:
        extents = boxes.extents
        copy_rows(side_by_side(extents, values.data_ptr()), extents)
        return
    offset = 0
    for box in boxes:
        box.view.copy_(values[offset : offset + box.num_bytes].view(box.dtype).view(box.view.shape))
        offset += box.num_bytes


def join(boxes: Sequence[Box]) -> torch.Tensor:
    """The boxes' bytes as one flat tensor on their device."""
    return torch.cat([box.view.to(box.dtype).reshape(-1).view(torch.uint8) for box in boxes])


def read_bytes(boxes: Boxes) -> Iterator[memoryview]:
    """The boxes' bytes as they stand in memory now, for hashing. From a GPU they come in one copy."""
    if boxes.device.type == "cuda":
        yield bytes_of(join(boxes).cpu())
        return
    for box in boxes:
        yield bytes_of(box.view.to(box.dtype).contiguous())


def hash_boxes(boxes: Sequence[Box], digest: Digest) -> None:
    """`digest` sees the boxes' bytes in order, as they stand in memory now."""
    boxes = Boxes.of(boxes)
    if len(boxes) and not boxes.matrices.are_in_place:
        for piece in pieces(boxes, _HASHED_BYTES[boxes.device.type]):
            for data in read_bytes(piece):
                digest.update(data)
        return
    for run, is_whole in runs(boxes, boxes.extents.is_whole_N):
        if is_whole:
            for address, num_bytes in zip(run.extents.address_N.tolist(), run.num_bytes_N.tolist(), strict=True):
                digest.update(memory_at(address, num_bytes, boxes))
            continue
        parts = list(pieces(run, _HASHED_BYTES["cpu"]))
        scratch = torch.empty(max(map(total_bytes, parts)), dtype=torch.uint8)
        for part in parts:
            digest.update(bytes_of(pack(part, scratch)))
