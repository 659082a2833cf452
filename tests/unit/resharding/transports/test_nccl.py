"""The NCCL transport in one process, with a stand-in for the library that moves host memory.

The stand-in meets, queues and moves as NCCL does: nothing happens before both ranks are there, and a buffer is read when its
transfer runs, not when it is queued. The GPU check calls the real library.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from megatron_rl.resharding import box_sender, cuda_ipc, nccl, receiver
from megatron_rl.resharding.channel import ChannelError
from megatron_rl.resharding.host import describe_host
from megatron_rl.resharding.nccl import Communicator
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.types.layout import EngineLayout, ParallelLayout
from tests.unit.resharding.rig import world

IN_PROGRESS, INTERNAL = 7, 3
LAYOUT, ENGINE = ParallelLayout(tp=2, ep=2, dp=2), EngineLayout(2, 1)


class Stream:
    """A rank's queue of one direction each; `cuda_stream` is what the C interface is given."""

    numbers = itertools.count(1)
    of: ClassVar[dict[int, Stream]] = {}

    def __init__(self, library):
        self.library, self.cuda_stream = library, next(self.numbers)
        self.sends, self.receives = deque(), deque()
        self.of[self.cuda_stream] = self

    def query(self):
        self.library.move()
        return not self.sends and not self.receives


class HostNccl:
    """The functions of libnccl that are used. `is_stuck`: transfers are taken in and never run."""

    def __init__(self):
        self.lock = threading.Lock()
        self.groups: dict[bytes, dict[int, int]] = {}
        self.comms: dict[int, SimpleNamespace] = {}
        self.ids, self.handles = itertools.count(1), itertools.count(100)
        self.is_stuck, self.error, self.aborted = False, 0, []
        self.staged_on: set[torch.device] = set()

    def ncclGetVersion(self, version):
        version._obj.value = 22705
        return 0

    def ncclGetUniqueId(self, identity):
        ctypes.memmove(identity, next(self.ids).to_bytes(128, "little"), 128)
        return 0

    def ncclCommInitRankConfig(self, handle, num_ranks, identity, rank, config):
        assert (config._obj.magic, config._obj.blocking, config._obj.size) == (0xCAFEBEEF, 0, 24)
        with self.lock:
            number = next(self.handles)
            group = self.groups.setdefault(bytes(identity), {})
            assert rank not in group, "two ranks of one number"
            group[rank] = number
            self.comms[number] = SimpleNamespace(group=group, rank=rank, num_ranks=num_ranks, stream=None)
        handle._obj.value = number
        return IN_PROGRESS

    def ncclCommGetAsyncError(self, handle, state):
        comm = self.comms[handle.value]
        state._obj.value = self.error or (0 if len(comm.group) == comm.num_ranks else IN_PROGRESS)
        return 0

    def ncclCommAbort(self, handle):
        with self.lock:
            comm = self.comms.pop(handle.value)
            self.aborted.append(handle.value)
            for queue in () if comm.stream is None else (comm.stream.sends, comm.stream.receives):
                queue.clear()
        return 0

    def ncclSend(self, address, count, kind, peer, handle, stream):
        return self.queue("sends", address, count, kind, peer, handle, stream)

    def ncclRecv(self, address, count, kind, peer, handle, stream):
        return self.queue("receives", address, count, kind, peer, handle, stream)

    def queue(self, what, address, count, kind, peer, handle, stream):
        comm = self.comms[handle.value]
        assert kind == 1 and peer == 1 - comm.rank
        comm.stream = Stream.of[stream]
        getattr(comm.stream, what).append((address, count))
        return IN_PROGRESS

    def move(self):
        """Whatever has both a sender and a receiver."""
        with self.lock:
            for comm in [] if self.is_stuck else list(self.comms.values()):
                other = self.comms.get(comm.group.get(1 - comm.rank, -1))
                if other is None or comm.stream is None or other.stream is None:
                    continue
                while comm.stream.sends and other.stream.receives:
                    (source, num_bytes), (target, room) = comm.stream.sends.popleft(), other.stream.receives.popleft()
                    assert num_bytes == room
                    ctypes.memmove(target, source, num_bytes)

    def await_end(self):
        """Until every communicator was let go: a receiver notices on a thread of its own that its peer has gone."""
        deadline = time.monotonic() + 30
        while self.comms:
            assert time.monotonic() < deadline, f"still there: {list(self.comms)}"
            threading.Event().wait(0.01)

    def ncclGetErrorString(self, result):
        return b"internal error"

    def ncclGetLastError(self, handle):
        return b"Net: no\n route"


@pytest.fixture
def library(monkeypatch):
    stand_in = HostNccl()

    def allocate(buffers, device, num_bytes):
        stand_in.staged_on.add(device)
        buffers._buffers = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(cuda_ipc.NUM_BUFFERS)]

    monkeypatch.setattr(nccl, "load_nccl", lambda: stand_in)
    monkeypatch.setattr(nccl, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(nccl, "new_stream", lambda device: Stream(stand_in))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(cuda_ipc.StagingBuffers, "__init__", allocate)
    monkeypatch.setattr(box_sender, "choose_transport", lambda *_: "nccl")
    yield stand_in
    stand_in.await_end()
    Stream.of.clear()


@pytest.mark.parametrize("bucket_bytes", [3000, 10**9])
def test_what_travels_over_nccl_is_the_slices(library, bucket_bytes):
    with world("qwen3_moe", LAYOUT, ENGINE, torch.bfloat16, options={"bucket_bytes": bucket_bytes}) as one:
        for seed in (1, 2):
            one.load(seed)
            one.sync()
            one.assert_whole()
        num_pairs = int((one.plan.num_elements_between() > 0).sum())
        assert len(library.groups) == num_pairs, "a communicator of each pair is kept from sync to sync"
        assert not library.aborted
    library.await_end()
    assert len(library.aborted) == 2 * num_pairs


def test_weights_are_cast_on_their_way(library):
    with world("qwen3_moe", LAYOUT, ENGINE, torch.bfloat16, trainer_dtype=torch.float32) as one:
        one.load(3)
        one.sync()
        one.assert_whole()


def test_what_lands_in_host_memory_is_staged_on_the_engines_gpu(library, monkeypatch):
    monkeypatch.setattr(Receiver, "_device", torch.device("cuda", 3))
    monkeypatch.setattr(receiver, "describe_host", lambda device: describe_host(torch.device("cpu")))
    with world("qwen3_moe", LAYOUT, ENGINE, torch.bfloat16) as one:
        one.load(5)
        order = one.sync(is_staged=True)
        one.assert_untouched()
        for control in one.controls:
            control.apply(order.sync)
        one.assert_whole()
    assert library.staged_on == {torch.device("cpu"), torch.device("cuda", 3)}  # the simulated trainers are on a CPU


def test_deltas_travel_beside_it(library):
    with world("qwen3_moe", LAYOUT, ENGINE, torch.bfloat16, options={"full_interval": 4}) as one:
        for seed in (1, 1, 2):
            one.load(seed)
            one.sync()
            one.assert_whole()


def test_a_peer_that_is_gone_ends_the_wait(library):
    library.is_stuck = True
    with world("qwen3_moe", ParallelLayout(), EngineLayout(1, 1), torch.bfloat16, options={"timeout_s": 60.0}) as one:
        one.load(1)
        order = one.begin()
        failures = []

        def send():
            try:
                one.senders[0].send(one.chunks[0], order)
            except ChannelError as error:
                failures.append(str(error))

        thread = threading.Thread(target=send)
        begun = time.monotonic()
        thread.start()
        while len(library.comms) < 2:  # they have met
            assert time.monotonic() - begun < 30
            thread.join(0.01)
        one.receivers[0].close()
        thread.join(30)
        assert not thread.is_alive() and time.monotonic() - begun < 30
        assert len(failures) == 1 and "receiver 127.0.0.1" in failures[0] and "\n" not in failures[0]
    library.await_end()
    assert len(library.aborted) == 2


def test_a_transfer_that_never_ends_is_cut_off(library):
    library.is_stuck = True
    with world("qwen3_moe", ParallelLayout(), EngineLayout(1, 1), torch.bfloat16, options={"timeout_s": 1.0}) as one:
        one.load(1)
        order = one.begin()
        with pytest.raises(OSError, match=r"nothing moved within 1 s|NCCL: the communicator was closed"):
            one.senders[0].send(one.chunks[0], order)


def test_what_nccl_says_is_said(library):
    with world("qwen3_moe", ParallelLayout(), EngineLayout(1, 1), torch.bfloat16) as one:
        one.load(1)
        order = one.begin()
        library.error = INTERNAL
        with pytest.raises(OSError, match=r"NCCL: internal error Net: no route; sync\.transport=socket does without it"):
            one.senders[0].send(one.chunks[0], order)
        library.error = 0
        one.sync()
        one.assert_whole()


def test_a_closed_communicator_takes_no_call(library):
    one = Communicator(nccl.new_unique_id(), 0, 2, torch.device("cuda", 0))
    one.abort()
    one.abort()
    assert len(library.aborted) == 1
    with pytest.raises(OSError, match="was closed"):
        one.is_ready()
    with pytest.raises(OSError, match="was closed"):
        one.send(torch.zeros(4, dtype=torch.uint8), 1)


def test_without_the_library_it_is_said(monkeypatch):
    monkeypatch.setattr(nccl, "load_nccl", lambda: None)
    assert nccl.nccl_version() is None
    with pytest.raises(OSError, match=r"libnccl\.so\.2 is not there; sync.transport=socket does without it"):
        nccl.new_unique_id()
