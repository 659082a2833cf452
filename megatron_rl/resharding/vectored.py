"""sendmsg and recvmsg over an array of spans: Python's own take a list of buffers, one object per row of a strided box.

Spans [S, 2] of int64 (address, bytes) are what the kernel calls an array of `struct iovec`. The layout of `struct msghdr`
is that of 64-bit Linux, which is where Megatron-Core, SGLang and NCCL run.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Callable

import numpy as np

_MAX_SPANS = 1024
"""Of one system call (IOV_MAX)."""
_SPAN_BYTES = 16


class _Message(ctypes.Structure):
    """struct msghdr"""

    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("spans", ctypes.c_void_p),
        ("num_spans", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


def _system_call(name: str) -> Callable[[int, object, int], int]:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes, function.restype = (ctypes.c_int, ctypes.POINTER(_Message), ctypes.c_int), ctypes.c_ssize_t
    return function  # type: ignore[no-any-return]


_sendmsg, _recvmsg = _system_call("sendmsg"), _system_call("recvmsg")


def send_all(connection: socket.socket, spans_S2: np.ndarray) -> None:
    """Send the spans. `connection` blocks; it raises BlockingIOError when its SO_SNDTIMEO passes, OSError for the rest."""
    _move_all(connection, spans_S2, _sendmsg, socket.MSG_NOSIGNAL)


def receive_all(connection: socket.socket, spans_S2: np.ndarray) -> bool:
    """Fill the spans; false when the peer closed before. Raises as `send_all`, with SO_RCVTIMEO."""
    return _move_all(connection, spans_S2, _recvmsg, socket.MSG_WAITALL)


def _move_all(
    connection: socket.socket, spans_S2: np.ndarray, system_call: Callable[[int, object, int], int], flags: int
) -> bool:
    spans_S2 = np.array(spans_S2, dtype=np.int64, order="C")  # its own: what has moved is cut off in it
    if not len(spans_S2):
        return True
    ends_S = spans_S2[:, 1].cumsum()
    base, message = spans_S2.ctypes.data, _Message()
    first, moved, total = 0, 0, int(ends_S[-1])
    while moved < total:
        message.spans, message.num_spans = base + first * _SPAN_BYTES, min(len(ends_S) - first, _MAX_SPANS)
        now = system_call(connection.fileno(), message, flags)
        if now < 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:
                continue
            raise OSError(number, os.strerror(number))
        if now == 0:
            return False
        moved += now
        first = int(ends_S.searchsorted(moved, side="right"))
        if moved < total:
            left = int(ends_S[first]) - moved
            spans_S2[first, 0] += spans_S2[first, 1] - left
            spans_S2[first, 1] = left
    return True
