"""The compiled loop of `row_copy`: imported where numba is installed, when the first boxes are copied."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_ROWS_AHEAD = 6
_LINE_BYTES = 64
_POINTER, _INT32 = ir.IntType(8).as_pointer(), ir.IntType(32)


@intrinsic
def _move(context, target, source, num_bytes):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """memcpy from address to address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, origin, count = arguments
        cgutils.raw_memcpy(builder, builder.inttoptr(to, _POINTER), builder.inttoptr(origin, _POINTER), count, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _prefetch(context, address):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Ask for the line at an address, to be read soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [_POINTER, _INT32, _INT32, _INT32])
        called = builder.module.declare_intrinsic("llvm.prefetch", [_POINTER], function)
        to_read, into_every_cache, data = _INT32(0), _INT32(3), _INT32(1)
        builder.call(called, [builder.inttoptr(arguments[0], _POINTER), to_read, into_every_cache, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


# numba passes an intrinsic its context, which mypy misses in the calls.
@njit(nogil=True, cache=True)
def copy(source_N, source_pitch_N, target_N, target_pitch_N, num_rows_N, row_bytes_N):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Addresses, pitches and sizes in bytes, int64 columns [N]."""
    for box in range(len(source_N)):
        source, target, num_rows, row_bytes = source_N[box], target_N[box], num_rows_N[box], row_bytes_N[box]
        source_pitch, target_pitch = source_pitch_N[box], target_pitch_N[box]
        if num_rows == 1 or (source_pitch == row_bytes and target_pitch == row_bytes):
            _move(target, source, num_rows * row_bytes)  # type: ignore[call-arg]
            continue
        for row in range(num_rows):
            if row + _ROWS_AHEAD < num_rows:
                ahead = source + _ROWS_AHEAD * source_pitch
                for line in range(0, row_bytes, _LINE_BYTES):
                    _prefetch(ahead + line)  # type: ignore[call-arg]
            _move(target, source, row_bytes)  # type: ignore[call-arg]
            source += source_pitch
            target += target_pitch
