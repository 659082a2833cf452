"""Shared memory between trainer and engine ranks: the same slices, nothing left behind, and clear refusals."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron_rl.resharding.boxes import Box, Boxes
from megatron_rl.resharding.channel import ChannelError
from megatron_rl.resharding.transports import ipc
from megatron_rl.types.layout import EngineLayout, ParallelLayout
from tests.unit.resharding.rig import world

IPC = {"transport": "ipc"}


@pytest.mark.parametrize("trainer_dtype", [torch.float32, torch.bfloat16])
def test_slices_out_of_shared_memory_are_the_slices(trainer_dtype):
    layout = ParallelLayout(tp=2, pp=2, ep=2)
    with world("qwen3_moe", layout, EngineLayout(4, 1), torch.bfloat16, trainer_dtype, IPC) as one:
        before = set(os.listdir("/dev/shm"))
        for seed in (1, 2):
            one.load(seed)  # into the memory that is shared since the first sync
            one.sync()
            one.assert_whole()
        assert {pair.sender._transport_name for sender in one.senders for pair in sender._pairs} == {"shared_memory"}
        assert set(os.listdir("/dev/shm")) == before, "shared memory has no name that could be left behind"


def test_tensors_move_in_place_and_views_with_them():
    buffer = torch.arange(60, dtype=torch.bfloat16)
    view = buffer[10:40].view(5, 6)
    descriptor = ipc.share(buffer.untyped_storage())
    assert ipc.share(view.untyped_storage()) == descriptor, "one storage, one shared memory"
    mapped = ipc.map_shared(os.getpid(), descriptor, os.fstat(descriptor).st_ino, 120).view(torch.bfloat16)
    view[2, 3] = 99.0
    assert mapped[10 + 2 * 6 + 3] == 99.0 and buffer[25] == 99.0 and mapped[59] == 59.0


def test_parameters_that_moved_are_mapped_anew():
    with world("llama", ParallelLayout(), EngineLayout(1, 1), torch.bfloat16, torch.bfloat16, IPC) as one:
        one.sync()
        (chunk,) = one.chunks[0]
        for name in chunk:
            chunk[name] = chunk[name].clone()
        one.load(9)
        one.sync()
        one.assert_whole()


def test_memory_of_another_kind_is_refused():
    with pytest.raises(ValueError, match=r"/proc/4194305/fd/3: No such file.*set sync\.transport=p2p"):
        ipc.map_shared(2**22 + 1, 3, 0, 8)  # no process has that id
    descriptor = os.open(os.devnull, os.O_RDWR)
    try:
        with pytest.raises(ValueError, match="not the trainer's memory any more"):
            ipc.map_shared(os.getpid(), descriptor, os.fstat(descriptor).st_ino + 1, 8)
    finally:
        os.close(descriptor)


def test_too_little_room_is_one_line_and_nothing_is_applied(monkeypatch):
    full = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(ipc.os, "statvfs", lambda path: full)
    with world("llama", ParallelLayout(), EngineLayout(1, 1), torch.bfloat16, torch.bfloat16, IPC) as one:
        order = one.begin()
        with pytest.raises(OSError, match=r"/dev/shm has 0 bytes left.*set sync\.transport=p2p"):
            one.senders[0].send(one.chunks[0], order)
        with pytest.raises(ChannelError, match="incomplete"):
            one.controls[0].finish(order.sync)
        one.assert_untouched()


def test_a_box_without_whole_rows_is_refused():
    with pytest.raises(ValueError, match="expected whole rows"):
        ipc.describe_shared(Boxes.of([Box(torch.zeros(4, 6).t(), torch.float32)]))


def test_a_trainer_that_is_killed_leaves_no_memory_behind():
    code = (
        "import torch, os, sys, signal\n"
        "from megatron_rl.resharding.transports.ipc import share\n"
        "t = torch.ones(1 << 20); share(t.untyped_storage()); print('shared', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "shared", done.stderr
    assert {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("torch")} == set()


@pytest.mark.parametrize(
    "row",
    [(0, 0, 6, 11, 6), (0, 55, 6, 1, 6), (0, -1, 6, 2, 3), (0, 0, -6, 2, 3), (0, 0, 2**62, 3, 2), (0, 4, 6, 2**63 - 1, 1),
     (0, 2**63 - 1, 1, 1, 1), (0, 0, 6, 0, 3), (1, 0, 6, 1, 3), (-1, 0, 6, 1, 3)],
)  # fmt: skip
def test_a_shared_box_outside_of_its_storage_is_refused(row):
    storage = torch.arange(60, dtype=torch.bfloat16)
    assert torch.equal(ipc.SharedBoxes([storage], np.array([(0, 8, 6, 3, 2)])).view(0), storage.view(10, 6)[1:4, 2:4])
    with pytest.raises(ValueError, match="a shared box"):
        ipc.SharedBoxes([storage], np.array([row], dtype=np.int64))
