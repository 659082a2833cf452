"""Boxes of parameters as views and as bytes: what one (trainer rank, engine rank) pair moves, in order."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_rl.resharding.digest import Digest

_HASHED_BYTES = {"cuda": 4 * 1024 * 1024, "cpu": 512 * 1024}
"""Hashed at once. From a GPU that is one copy; a strided box of host memory is copied into half of a core's cache."""


class Box(NamedTuple):
    """A 2-D view [rows, cols] of a parameter, and the dtype in which its values travel. `label`: for people."""

    view: torch.Tensor
    dtype: torch.dtype
    label: str = ""

    @property
    def num_bytes(self) -> int:
        return self.view.numel() * self.dtype.itemsize

    @property
    def is_plain(self) -> bool:
        """Whether the bytes that travel lie in host memory, in one piece, as they are."""
        return self.view.dtype == self.dtype and self.view.is_contiguous() and self.view.device.type == "cpu"


@dataclass(frozen=True, eq=False)
class PairTable:
    """The boxes of one pair in the order of their bytes: `rows_N5[i]` is (index into names, row, col, rows, cols)."""

    names: tuple[Any, ...]
    rows_N5: np.ndarray

    def resolve(self, params: Mapping[Any, torch.Tensor]) -> list[Box]:
        """The boxes as views of `params`. Raises KeyError for an unknown name, ValueError outside of a parameter."""
        matrices = [as_matrix(params[name]) for name in self.names]
        number_N, row_N, col_N, rows_N, cols_N = self.rows_N5.T
        shapes_N2 = np.array([matrix.shape for matrix in matrices], dtype=np.int64).reshape(-1, 2)[number_N]
        is_inside_N = (np.minimum(row_N, col_N) >= 0) & (np.minimum(rows_N, cols_N) >= 1)
        is_inside_N &= (rows_N <= shapes_N2[:, 0] - row_N) & (cols_N <= shapes_N2[:, 1] - col_N)  # sums could wrap
        for bad in np.flatnonzero(~is_inside_N)[:1].tolist():
            raise ValueError(f"box {self.labels[bad]} is outside of a parameter of {tuple(shapes_N2[bad].tolist())}")
        # There are many small boxes: `as_strided` costs a third of two slices.
        places = [(matrix, matrix.storage_offset(), *matrix.stride(), matrix.dtype) for matrix in matrices]
        boxes = []
        for label, (number, row, col, num_rows, num_cols) in zip(self.labels, self.rows_N5.tolist(), strict=True):
            matrix, first, pitch, step, dtype = places[number]
            view = matrix.as_strided((num_rows, num_cols), (pitch, step), first + row * pitch + col * step)
            boxes.append(Box(view, dtype, label))
        return boxes

    @cached_property
    def labels(self) -> list[str]:
        """What people call each box."""
        return [f"{self.names[i]}[{row}:{row + rows}, {col}:{col + cols}]" for i, row, col, rows, cols in self.rows_N5.tolist()]

    @property
    def num_elements(self) -> int:
        return int((self.rows_N5[:, 3] * self.rows_N5[:, 4]).sum())


def as_matrix(param: torch.Tensor) -> torch.Tensor:
    """The parameter as [rows, cols]: a vector is a column, stacked experts are flattened over their leading dimensions."""
    matrix = param.detach()
    return matrix.unsqueeze(1) if matrix.ndim == 1 else matrix.view(-1, matrix.shape[-1])


def pieces(boxes: Sequence[Box], max_bytes: int) -> Iterator[list[Box]]:
    """Consecutive boxes in pieces of at most `max_bytes`; a larger box is split by rows, a single row never."""
    piece: list[Box] = []
    filled = 0
    for box in boxes:
        row_bytes = box.view.shape[1] * box.dtype.itemsize
        for part in box.view.split(max(max_bytes // row_bytes, 1)) if box.num_bytes > max_bytes else (box.view,):
            num_bytes = part.shape[0] * row_bytes
            if piece and filled + num_bytes > max_bytes:
                yield piece
                piece, filled = [], 0
            piece.append(box._replace(view=part))
            filled += num_bytes
    if piece:
        yield piece


def total_bytes(boxes: Sequence[Box]) -> int:
    return sum(box.num_bytes for box in boxes)


def bytes_of(view: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor, to be read or written."""
    return _memory(view, view.numel() * view.element_size())


def spans_of(boxes: Sequence[Box]) -> list[memoryview]:
    """The memory of plain boxes; boxes that lie one after another in memory become one span. Boxes outlive their spans."""
    runs: list[tuple[torch.Tensor, int]] = []  # first view, number of bytes
    end = 0
    for box in boxes:
        address, num_bytes = box.view.data_ptr(), box.num_bytes
        if runs and address == end:
            runs[-1] = (runs[-1][0], runs[-1][1] + num_bytes)
        else:
            runs.append((box.view, num_bytes))
        end = address + num_bytes
    return [_memory(view, num_bytes) for view, num_bytes in runs]


def _memory(owner: torch.Tensor, num_bytes: int) -> memoryview:
    """Bytes from where `owner` begins; it is kept as long as they are. A quarter of the time that numpy's view takes."""
    memory = (ctypes.c_ubyte * num_bytes).from_address(owner.data_ptr())
    memory.owner = owner  # type: ignore[attr-defined]
    return memoryview(memory)


def pack(boxes: Sequence[Box], staging: torch.Tensor) -> torch.Tensor:
    """Write the boxes' values, cast to the dtypes in which they travel, one after another into host bytes `staging`.

    Returns the filled part. Boxes on a GPU are joined there first: one copy to the host instead of one per box.
    """
    if boxes and boxes[0].view.is_cuda:
        joined = join(boxes)
        staging[: joined.numel()].copy_(joined, non_blocking=True)
        torch.cuda.current_stream(joined.device).synchronize()
        return staging[: joined.numel()]
    offset = 0
    for box in boxes:
        part = staging[offset : offset + box.num_bytes].view(box.dtype).view(box.view.shape)
        part.copy_(box.view)
        offset += box.num_bytes
    return staging[:offset]


def unpack(values: torch.Tensor, boxes: Sequence[Box]) -> None:
    """The inverse of `pack`: flat bytes into the boxes. `values` may lie on any device, aligned to the boxes' dtypes."""
    if boxes and boxes[0].view.is_cuda and not values.is_cuda:
        values = values.to(boxes[0].view.device, non_blocking=True)
    offset = 0
    for box in boxes:
        box.view.copy_(values[offset : offset + box.num_bytes].view(box.dtype).view(box.view.shape))
        offset += box.num_bytes


def join(boxes: Sequence[Box]) -> torch.Tensor:
    """The boxes' bytes as one flat tensor on their device."""
    return torch.cat([box.view.to(box.dtype).reshape(-1).view(torch.uint8) for box in boxes])


def read_bytes(boxes: Sequence[Box]) -> Iterator[memoryview]:
    """The boxes' bytes as they stand in memory now, for hashing. From a GPU they come in one copy."""
    if boxes and boxes[0].view.is_cuda:
        yield bytes_of(join(boxes).cpu())
        return
    for box in boxes:
        yield bytes_of(box.view.to(box.dtype).contiguous())


def hash_boxes(boxes: Sequence[Box], digest: Digest) -> None:
    """`digest` sees the boxes' bytes in order, as they stand in memory now."""
    for piece in pieces(boxes, _HASHED_BYTES[boxes[0].view.device.type] if boxes else 1):
        for data in read_bytes(piece):
            digest.update(data)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The inverse of `dtype_name`. Raises ValueError for a name that torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} names no dtype of torch {torch.__version__}")
    return dtype
