"""Rows of many boxes from one place in host memory to another, in one call that holds no interpreter lock.

torch and numpy copy one box per call, and short rows of a wide matrix at half of memory's speed: the processor fetches
nothing ahead across a pitch. numba compiles a loop that asks for the rows to come (`row_kernel.py`); where it is absent numpy
copies box by box.

Shape suffix: N boxes.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache

import numpy as np

from megatron_rl.resharding.boxes import Extents


def copy_rows(sources: Extents, targets: Extents) -> None:
    """Box i of `sources` to box i of `targets`: as many rows of as many bytes, each side with its own pitch. No overlap."""
    if has_numba():
        from megatron_rl.resharding.row_kernel import copy  # importing numba takes a second

        columns = (
            sources.address_N, sources.pitch_N, targets.address_N, targets.pitch_N, sources.num_rows_N, sources.row_bytes_N
        )  # fmt: skip
        copy(*(np.ascontiguousarray(column, dtype=np.int64) for column in columns))
        return
    for source, target in zip(_as_arrays(sources), _as_arrays(targets), strict=True):
        np.copyto(target, source)


def side_by_side(extents: Extents, address: int) -> Extents:
    """Boxes of the same sizes, one after another from `address` on."""
    ends_N = np.cumsum(extents.num_rows_N * extents.row_bytes_N)
    starts_N = address + ends_N - extents.num_rows_N * extents.row_bytes_N
    return Extents(starts_N, extents.num_rows_N, extents.row_bytes_N, extents.row_bytes_N)


@cache
def has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def _as_arrays(extents: Extents) -> list[np.ndarray]:
    arrays = []
    for address, num_rows, row_bytes, pitch in zip(*(column.tolist() for column in extents), strict=True):
        memory = (ctypes.c_ubyte * ((num_rows - 1) * pitch + row_bytes)).from_address(address)
        arrays.append(np.lib.stride_tricks.as_strided(np.frombuffer(memory, np.uint8), (num_rows, row_bytes), (pitch, 1)))
    return arrays
