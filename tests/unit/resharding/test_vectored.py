"""Spans through a socket: every split of the bytes arrives in order, and waits end."""

from __future__ import annotations

import socket
import struct
import threading

import numpy as np
import pytest
import torch

from megatron_rl.resharding import vectored
from megatron_rl.resharding.vectored import receive_all, send_all


def random_spans(rng: np.random.Generator, memory: torch.Tensor, num_bytes: int) -> np.ndarray:
    """`num_bytes` of `memory` in ragged spans with gaps between, empty ones among them."""
    cuts = np.sort(rng.choice(num_bytes, size=min(3000, num_bytes // 3), replace=False))
    lengths = np.diff(np.concatenate([[0], cuts, [num_bytes]]))
    gaps = rng.integers(0, 5, len(lengths))
    starts = np.cumsum(lengths + gaps) - lengths
    assert starts[-1] + lengths[-1] <= memory.numel()
    return np.stack([memory.data_ptr() + starts, lengths], axis=1)


def gather(spans_S2: np.ndarray, memory: torch.Tensor) -> bytes:
    base = memory.data_ptr()
    return b"".join(memory[a - base : a - base + n].numpy().tobytes() for a, n in spans_S2.tolist())


@pytest.mark.parametrize("num_bytes", [10, 5000, 3_000_000])
def test_ragged_spans_arrive_in_ragged_spans(num_bytes):
    rng = np.random.default_rng(num_bytes)
    source = torch.from_numpy(rng.integers(0, 256, num_bytes + 20_000, dtype=np.uint8))
    target = torch.zeros_like(source)
    out, into = random_spans(rng, source, num_bytes), random_spans(rng, target, num_bytes)
    before = out.copy()
    left, right = socket.socketpair()
    with left, right:
        thread = threading.Thread(target=send_all, args=(left, out))
        thread.start()
        assert receive_all(right, into)
        thread.join(10.0)
    assert gather(into, target) == gather(out, source) and int((target != 0).sum()) <= num_bytes
    assert np.array_equal(out, before), "the caller's spans are its own"


def test_a_peer_that_closes_early_is_told():
    left, right = socket.socketpair()
    memory = torch.zeros(100, dtype=torch.uint8)
    with right:
        left.send(b"abc")
        left.close()
        assert not receive_all(right, np.array([[memory.data_ptr(), 100]]))
    assert bytes(memory[:3].tolist()) == b"abc"
    assert receive_all(right, np.zeros((0, 2), dtype=np.int64)), "nothing to fill is filled"


def test_a_silent_peer_ends_the_wait():
    left, right = socket.socketpair()
    memory = torch.zeros(100, dtype=torch.uint8)
    with left, right:
        right.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50_000))
        with pytest.raises(BlockingIOError):
            receive_all(right, np.array([[memory.data_ptr(), 100]]))


def test_a_message_that_the_kernel_would_cut_short_goes_alone():
    spans = np.array([[0, 2**20]] * 3000, dtype=np.int64)
    ends = spans[:, 1].cumsum()
    assert vectored._messages(spans[:1000], ends[:1000])["num_spans"].tolist() == [1000]
    assert vectored._messages(spans, ends)["num_spans"].tolist() == [1024, 1024, 952]
    assert vectored._messages(spans * 2, ends * 2)["num_spans"].tolist() == [1024], "2 GiB in the first"
    assert vectored._messages(spans[1000:], ends[1000:] - ends[999])["num_spans"].tolist() == [1024, 976]
