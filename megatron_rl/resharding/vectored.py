"""sendmmsg and recvmsg over an array of spans: Python's own take a list of buffers, one object per row of a strided box.

Spans [S, 2] of int64 (address, bytes) are what the kernel calls an array of `struct iovec`; a message of it takes 1024, and
one call sends many messages. The structures are those of 64-bit Linux, which is where Megatron-Core, SGLang and NCCL run.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Callable

import numpy as np

_MAX_SPANS, _MAX_MESSAGES = 1024, 1024
"""Of a message (IOV_MAX), of a call (UIO_MAXIOV)."""
_MAX_BYTES = 2**30
"""Of a message that others follow in one call: the kernel would cut one of 2 GiB short and go on with the next."""
_SPAN_BYTES = 16
_MESSAGE = np.dtype(
    [
        ("name", np.uint64), ("name_bytes", np.uint32), ("_", np.uint32), ("spans", np.uint64), ("num_spans", np.uint64),
        ("control", np.uint64), ("control_bytes", np.uint64), ("flags", np.int32), ("__", np.uint32),
        ("moved", np.uint32), ("___", np.uint32),
    ]
)  # fmt: skip
"""struct mmsghdr; its beginning is a struct msghdr."""


def _system_call(name: str, result: type, *arguments: type) -> Callable[..., int]:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes, function.restype = (ctypes.c_int, ctypes.c_void_p, *arguments), result
    return function  # type: ignore[no-any-return]


_sendmmsg = _system_call("sendmmsg", ctypes.c_int, ctypes.c_uint, ctypes.c_int)
_recvmsg = _system_call("recvmsg", ctypes.c_ssize_t, ctypes.c_int)


def send_all(connection: socket.socket, spans_S2: np.ndarray) -> None:
    """Send the spans. `connection` blocks; it raises BlockingIOError when its SO_SNDTIMEO passes, OSError for the rest."""
    _move_all(spans_S2, lambda messages: _send(connection, messages))


def receive_all(connection: socket.socket, spans_S2: np.ndarray) -> bool:
    """Fill the spans; false when the peer closed before. Raises as `send_all`, with SO_RCVTIMEO."""
    return _move_all(spans_S2, lambda messages: _receive(connection, messages))


def _send(connection: socket.socket, messages: np.ndarray) -> int:
    """Bytes moved. The kernel stops at a message that it could not send whole, so they are the first ones."""
    count = _sendmmsg(connection.fileno(), messages.ctypes.data, len(messages), socket.MSG_NOSIGNAL)
    return count if count < 0 else int(messages["moved"][:count].sum())


def _receive(connection: socket.socket, messages: np.ndarray) -> int:
    """Bytes moved, into the first message alone: recvmmsg would go on with the next after one that timed out half full."""
    return _recvmsg(connection.fileno(), messages.ctypes.data, socket.MSG_WAITALL)


def _move_all(spans_S2: np.ndarray, move: Callable[[np.ndarray], int]) -> bool:
    spans_S2 = np.array(spans_S2, dtype=np.int64, order="C")  # its own: what has moved is cut off in it
    ends_S = spans_S2[:, 1].cumsum()
    first, moved, total = 0, 0, int(ends_S[-1]) if len(ends_S) else 0
    while moved < total:
        now = move(_messages(spans_S2[first:], ends_S[first:] - moved))
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


def _messages(spans_S2: np.ndarray, ends_S: np.ndarray) -> np.ndarray:
    """The first messages of these spans, as many as go in one call; at least one."""
    starts = np.arange(0, len(spans_S2), _MAX_SPANS)[:_MAX_MESSAGES]
    stops = np.minimum(starts + _MAX_SPANS, len(spans_S2))
    messages = np.zeros(len(starts), dtype=_MESSAGE)
    messages["spans"] = spans_S2.ctypes.data + starts * _SPAN_BYTES
    messages["num_spans"] = stops - starts
    sizes = np.diff(ends_S[stops - 1], prepend=0)
    return messages if sizes.max() <= _MAX_BYTES else messages[:1]
