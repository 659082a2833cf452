"""Boxes of parameters: what one (trainer rank, engine rank) pair moves, in order. As columns for all, as views for one.

Shape suffixes: M matrices, N boxes, P parts of boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, overload

import numpy as np
import torch


class Box(NamedTuple):
    """A 2-D view [rows, cols] of a parameter, and the dtype in which its values travel. `label`: for people."""

    view: torch.Tensor
    dtype: torch.dtype
    label: str = ""

    @property
    def num_bytes(self) -> int:
        return self.view.numel() * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Matrices:
    """2-D tensors [rows, cols], the dtypes in which their values travel, and where they lie."""

    tensors: Sequence[torch.Tensor]
    dtypes: Sequence[torch.dtype]

    @cached_property
    def travel_size_M(self) -> np.ndarray:
        """Bytes of an element on its way."""
        return np.array([dtype.itemsize for dtype in self.dtypes], dtype=np.int64)

    @cached_property
    def are_in_place(self) -> bool:
        """Whether what travels lies in host memory as it is, row by row."""
        return all(
            tensor.device.type == "cpu" and tensor.dtype == dtype and (tensor.stride(1) == 1 or tensor.shape[1] == 1)
            for tensor, dtype in zip(self.tensors, self.dtypes, strict=True)
        )

    @cached_property
    def places_M3(self) -> np.ndarray:
        """Address, bytes from row to row and bytes of an element, as they lie."""
        places = [(t.data_ptr(), t.stride(0) * t.element_size(), t.element_size()) for t in self.tensors]
        return np.array(places, dtype=np.int64).reshape(-1, 3)


class Extents(NamedTuple):
    """Where boxes lie in host memory, in bytes."""

    address_N: np.ndarray
    num_rows_N: np.ndarray
    row_bytes_N: np.ndarray
    pitch_N: np.ndarray

    @property
    def is_whole_N(self) -> np.ndarray:
        """Which boxes lie in one piece."""
        return (self.pitch_N == self.row_bytes_N) | (self.num_rows_N == 1)


    def part(self, first: int, stop: int) -> Extents:
        """Those of some consecutive boxes."""
        return Extents(*(column[first:stop] for column in self))

    def split(self, max_bytes: int) -> Extents:
        """As `Boxes.split`."""
        box_P, first_row_P, num_rows_P = cut_boxes(self.num_rows_N, self.row_bytes_N, max_bytes)
        pitch_P = self.pitch_N[box_P]
        return Extents(self.address_N[box_P] + first_row_P * pitch_P, num_rows_P, self.row_bytes_N[box_P], pitch_P)


def cut_boxes(num_rows_N: np.ndarray, row_bytes_N: np.ndarray, max_bytes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(box, first row, number of rows) of parts of at most `max_bytes`, or of one row."""
    most_rows_N = np.where(num_rows_N * row_bytes_N > max_bytes, np.maximum(max_bytes // row_bytes_N, 1), num_rows_N)
    num_parts_N = -(-num_rows_N // most_rows_N)
    box_P = np.repeat(np.arange(len(num_rows_N)), num_parts_N)
    first_P = (np.arange(len(box_P)) - np.repeat(np.cumsum(num_parts_N) - num_parts_N, num_parts_N)) * most_rows_N[box_P]
    return box_P, first_P, np.minimum(most_rows_N[box_P], num_rows_N[box_P] - first_P)


class Boxes(Sequence[Box]):
    """The boxes of one pair, in the order of their bytes; `rows_N5[i]` is (index into matrices, row, col, rows, cols).

    `labels` may be empty where nobody reads them.
    """

    def __init__(self, matrices: Matrices, rows_N5: np.ndarray, labels: Sequence[str]) -> None:
        self.matrices, self.rows_N5, self.labels = matrices, rows_N5, labels

    @classmethod
    def of(cls, boxes: Sequence[Box]) -> Boxes:
        """The same boxes, each a matrix of its own if they are only views."""
        if isinstance(boxes, cls):
            return boxes
        rows = [(number, 0, 0, *box.view.shape) for number, box in enumerate(boxes)]
        matrices = Matrices([box.view for box in boxes], [box.dtype for box in boxes])
        return cls(matrices, np.array(rows, dtype=np.int64).reshape(-1, 5), [box.label for box in boxes])

    def __len__(self) -> int:
        return len(self.rows_N5)

    @overload
    def __getitem__(self, index: int) -> Box: ...
    @overload
    def __getitem__(self, index: slice) -> Boxes: ...
    def __getitem__(self, index: int | slice) -> Box | Boxes:
        if isinstance(index, slice):
            return Boxes(self.matrices, self.rows_N5[index], self.labels[index])
        number, row, col, num_rows, num_cols = self.rows_N5[index].tolist()
        matrix = self.matrices.tensors[number]
        pitch, step = matrix.stride()
        view = matrix.as_strided((num_rows, num_cols), (pitch, step), matrix.storage_offset() + row * pitch + col * step)
        return Box(view, self.matrices.dtypes[number], self.labels[index] if self.labels else "")

    @cached_property
    def num_bytes_N(self) -> np.ndarray:
        """The bytes of each that travel."""
        return self.rows_N5[:, 3] * self.rows_N5[:, 4] * self.matrices.travel_size_M[self.rows_N5[:, 0]]

    @property
    def device(self) -> torch.device:
        """Of the first: all boxes of a pair lie on one."""
        return self.matrices.tensors[self.rows_N5[0, 0]].device

    @property
    def extents(self) -> Extents:
        """Where they lie; of use for host memory whose columns are side by side."""
        number_N, row_N, col_N, num_rows_N, num_cols_N = self.rows_N5.T
        address_N, pitch_N, size_N = self.matrices.places_M3[number_N].T
        return Extents(address_N + row_N * pitch_N + col_N * size_N, num_rows_N, num_cols_N * size_N, pitch_N)

    def split(self, max_bytes: int) -> Boxes:
        """The same bytes; a box of more than `max_bytes` is several, cut between rows."""
        box_P, first_row_P, num_rows_P = cut_boxes(self.rows_N5[:, 3], self.num_bytes_N // self.rows_N5[:, 3], max_bytes)
        rows_P5 = self.rows_N5[box_P]
        rows_P5[:, 1] += first_row_P
        rows_P5[:, 3] = num_rows_P
        return Boxes(self.matrices, rows_P5, [self.labels[i] for i in box_P.tolist()] if self.labels else ())


@dataclass(frozen=True, eq=False)
class PairTable:
    """The boxes of one pair in the order of their bytes: `rows_N5[i]` is (index into names, row, col, rows, cols)."""

    names: tuple[Any, ...]
    rows_N5: np.ndarray

    @classmethod
    def of_side(cls, side: str, columns: Mapping[str, np.ndarray], names: Sequence[Any]) -> PairTable:
        """The boxes of a plan's columns where they lie on one side, `source` or `target`; `names`: all of that side."""
        used, numbers = np.unique(columns[f"{side}_param"], return_inverse=True)
        fields = (numbers, columns[f"{side}_row"], columns[f"{side}_col"], columns["num_rows"], columns["num_cols"])
        return cls(tuple(names[int(i)] for i in used), np.stack(fields, axis=1).astype(np.int64))

    def resolve(self, params: Mapping[Any, torch.Tensor]) -> Boxes:
        """The boxes in `params`. Raises KeyError for an unknown name, ValueError outside of a parameter."""
        matrices = [as_matrix(params[name]) for name in self.names]
        number_N, row_N, col_N, rows_N, cols_N = self.rows_N5.T
        shapes_N2 = np.array([matrix.shape for matrix in matrices], dtype=np.int64).reshape(-1, 2)[number_N]
        is_inside_N = (np.minimum(row_N, col_N) >= 0) & (np.minimum(rows_N, cols_N) >= 1)
        is_inside_N &= (rows_N <= shapes_N2[:, 0] - row_N) & (cols_N <= shapes_N2[:, 1] - col_N)  # sums could wrap
        for bad in np.flatnonzero(~is_inside_N)[:1].tolist():
            raise ValueError(f"box {self.labels[bad]} is outside of a parameter of {tuple(shapes_N2[bad].tolist())}")
        return Boxes(Matrices(matrices, [matrix.dtype for matrix in matrices]), self.rows_N5, self.labels)

    @cached_property
    def labels(self) -> list[str]:
        """What people call each box."""
        return [f"{self.names[i]}[{row}:{row + rows}, {col}:{col + cols}]" for i, row, col, rows, cols in self.rows_N5.tolist()]

    @property
    def num_elements(self) -> int:
        return int((self.rows_N5[:, 3] * self.rows_N5[:, 4]).sum())


def as_matrix(param: torch.Tensor) -> torch.Tensor:
    """The parameter as [rows, cols]: a vector is a column, stacked experts are flattened over their leading dimensions."""
    if param.ndim == 2 and not param.requires_grad:
        return param
    matrix = param.detach()
    return matrix.unsqueeze(1) if matrix.ndim == 1 else matrix.view(-1, matrix.shape[-1])


def pieces(boxes: Sequence[Box], max_bytes: int) -> Iterator[Boxes]:
    """Consecutive boxes in pieces of at most `max_bytes`; a larger box is split by rows, a single row never."""
    parts = Boxes.of(boxes).split(max_bytes)
    first = filled = 0
    for number, num_bytes in enumerate(parts.num_bytes_N.tolist()):
        if number > first and filled + num_bytes > max_bytes:
            yield parts[first:number]
            first, filled = number, 0
        filled += num_bytes
    if len(parts):
        yield parts[first:]


def runs(boxes: Boxes, flag_N: np.ndarray) -> Iterator[tuple[Boxes, bool]]:
    """Consecutive boxes with one value of the flag, and that value."""
    edges = [0, *(np.flatnonzero(flag_N[1:] != flag_N[:-1]) + 1).tolist(), len(boxes)]
    for first, stop in pairwise(edges):
        if first < stop:
            yield boxes[first:stop], bool(flag_N[first])


def total_bytes(boxes: Sequence[Box]) -> int:
    return int(Boxes.of(boxes).num_bytes_N.sum())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The inverse of `dtype_name`. Raises ValueError for a name that torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} names no dtype of torch {torch.__version__}")
    return dtype
