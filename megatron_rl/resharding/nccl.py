"""NCCL between the GPUs of two processes: the library that torch brings, through its C interface.

torch's own process groups meet through a store that anybody on the network may write to, and their watchdog ends the process
when a peer is gone. A pair of a weight sync needs neither: the id of its communicator travels over the authenticated
channel, every call here returns at once, and the caller watches the channel while it waits.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

UNIQUE_ID_BYTES = 128
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
"""ncclUint8."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as NCCL 2.14 had it; later versions take it, by its size and version."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


_CONFIG = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 0)
_STREAM_CALL = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
"""Buffer, count, data type, peer, communicator, stream."""
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.c_void_p,),
    "ncclGetUniqueId": (ctypes.c_void_p,),
    "ncclCommInitRankConfig": (ctypes.c_void_p, ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.c_void_p),
    "ncclCommGetAsyncError": (ctypes.c_void_p, ctypes.c_void_p),
    "ncclCommAbort": (ctypes.c_void_p,),
    "ncclSend": _STREAM_CALL,
    "ncclRecv": _STREAM_CALL,
}


@cache
def load_nccl() -> ctypes.CDLL | None:
    """The NCCL that this process's torch uses (the loader finds what is loaded already), or None where there is none."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return None
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    library.ncclGetErrorString.restype = library.ncclGetLastError.restype = ctypes.c_char_p
    library.ncclGetLastError.argtypes = (ctypes.c_void_p,)
    return library


def nccl_version() -> int | None:
    """NCCL's version code, e.g. 22705 for 2.27.5; None where there is no NCCL."""
    library, version = load_nccl(), ctypes.c_int()
    if library is None:
        return None
    _check(library, library.ncclGetVersion(ctypes.byref(version)))
    return version.value


def new_unique_id() -> bytes:
    """What the ranks of one communicator have in common. Raises OSError when NCCL finds no network interface."""
    library, unique_id = _library(), _UniqueId()
    _check(library, library.ncclGetUniqueId(ctypes.byref(unique_id)))
    return bytes(unique_id)


class Communicator:
    """One rank of a communicator of GPUs. No call waits; after each, `is_ready` tells when the next may follow.

    Everything raises OSError with NCCL's own line, also after `abort`, which any thread may call.
    """

    def __init__(self, unique_id: bytes, rank: int, num_ranks: int, device: torch.device) -> None:
        self._library, self._device = _library(), device
        self._lock = threading.Lock()
        self._handle: ctypes.c_void_p | None = ctypes.c_void_p()
        with on_device(device):
            self._stream = new_stream(device)
            identity = _UniqueId.from_buffer_copy(unique_id)
            self._check(
                self._library.ncclCommInitRankConfig(
                    ctypes.byref(self._handle), num_ranks, identity, rank, ctypes.byref(_CONFIG)
                )
            )

    def is_ready(self) -> bool:
        """Whether everything called so far has been taken in: the meeting of the ranks, the launch of a transfer."""
        state = ctypes.c_int()
        self._call(lambda handle: self._library.ncclCommGetAsyncError(handle, ctypes.byref(state)))
        self._check(state.value)
        return state.value != _IN_PROGRESS

    def send(self, values: torch.Tensor, peer: int) -> None:
        """Queue contiguous bytes [N] on the communicator's stream; what made them has to be done."""
        self._transfer(self._library.ncclSend, values, peer)

    def receive(self, values: torch.Tensor, peer: int) -> None:
        """Queue the arrival of as many bytes as `values` has."""
        self._transfer(self._library.ncclRecv, values, peer)

    def is_idle(self) -> bool:
        """Whether all that was queued has moved."""
        is_idle = bool(self._stream.query())
        self._call(lambda handle: _SUCCESS)  # an abort empties the stream, too
        return is_idle

    def abort(self) -> None:
        """Stop what runs and let the memory go; at once, whatever the peer does."""
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is not None:
                with on_device(self._device):
                    self._library.ncclCommAbort(handle)

    def _transfer(self, function: Callable[..., int], values: torch.Tensor, peer: int) -> None:
        stream = self._stream.cuda_stream
        with on_device(self._device):
            self._call(lambda handle: function(values.data_ptr(), values.numel(), _UINT8, peer, handle, stream))

    def _call(self, function: Callable[[ctypes.c_void_p], int]) -> None:
        with self._lock:
            if self._handle is None:
                raise OSError("NCCL: the communicator was closed")
            self._check(function(self._handle))

    def _check(self, result: int) -> None:
        _check(self._library, result)


def _library() -> ctypes.CDLL:
    library = load_nccl()
    if library is None:
        raise OSError("libnccl.so.2 is not there; sync.transport=socket does without it")
    return library


def _check(library: ctypes.CDLL, result: int) -> None:
    if result in (_SUCCESS, _IN_PROGRESS):
        return
    detail = " ".join(library.ncclGetLastError(None).decode(errors="replace").split())
    line = f"{library.ncclGetErrorString(result).decode(errors='replace')} {detail}".rstrip()
    raise OSError(f"NCCL: {line}; sync.transport=socket does without it")


def on_device(device: torch.device) -> Any:
    """A new thread starts on the first GPU, whatever its process uses."""
    return torch.cuda.device(device)


def new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
