"""The CUDA IPC transport in one process, with host memory where the shared GPU memory would be.

Only the calls into the driver are replaced (a handle finds its storage in a table); the GPU check runs the real ones.
"""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megatron_rl.resharding import box_sender, cuda_ipc
from megatron_rl.resharding.channel import ChannelError
from megatron_rl.types.layout import EngineLayout, ParallelLayout
from tests.unit.resharding.rig import world


class HostMemory:
    """Stands in for the driver: remembers what was shared, and refuses to share or open it twice."""

    def __init__(self, monkeypatch):
        self.shared: dict[bytes, torch.UntypedStorage] = {}
        self.opened: set[bytes] = set()
        self.num_synchronised = 0
        monkeypatch.setattr(cuda_ipc, "share_storage", self.share)
        monkeypatch.setattr(cuda_ipc, "open_storage", self.open)
        monkeypatch.setattr(cuda_ipc, "gpu_uuid", lambda device: "host")
        monkeypatch.setattr(cuda_ipc, "local_device", lambda uuid: torch.device("cpu"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=self.synchronise))
        monkeypatch.setattr(cuda_ipc.StagingBuffers, "__init__", self.allocate)

    @staticmethod
    def allocate(buffers, device, num_bytes):
        buffers._buffers = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(cuda_ipc.NUM_BUFFERS)]

    def share(self, storage):
        assert all(known is not storage for known in self.shared.values())
        handle = b"\x00\xff" + len(self.shared).to_bytes(62, "little")
        self.shared[handle] = storage
        return {
            "device": 0, "handle": handle, "size_bytes": storage.nbytes(), "offset_bytes": 0,
            "ref_counter_handle": b"/torch_1_2", "ref_counter_offset": 3, "event_handle": b"\x01" * 64,
            "event_sync_required": True,
        }  # fmt: skip

    def open(self, fields):
        assert fields["handle"] not in self.opened
        self.opened.add(fields["handle"])
        assert tuple(fields) == cuda_ipc._FIELDS and fields["event_handle"] == b"\x01" * 64
        return self.shared[fields["handle"]]

    def synchronise(self):
        self.num_synchronised += 1


@pytest.fixture
def host_memory(monkeypatch):
    return HostMemory(monkeypatch)


@pytest.fixture
def by_cuda_ipc(monkeypatch):
    """Every pair takes the transport that it would take on a shared GPU."""
    monkeypatch.setattr(box_sender, "choose_transport", lambda *_: "cuda_ipc")


@pytest.mark.parametrize("bucket_bytes", [3000, 10**9])
def test_staged_slices_are_the_slices(host_memory, by_cuda_ipc, bucket_bytes):
    layout, options = ParallelLayout(tp=2, ep=2, dp=2), {"bucket_bytes": bucket_bytes}
    with world("qwen3_moe", layout, EngineLayout(2, 1), torch.bfloat16, options=options) as one:
        for seed in (1, 2):
            one.load(seed)
            one.sync()
            one.assert_whole()
    assert host_memory.opened == set(host_memory.shared)
    assert host_memory.num_synchronised >= 2 * len(host_memory.shared) / cuda_ipc.NUM_BUFFERS


def test_the_receiver_unmaps_before_the_sender_frees(host_memory, by_cuda_ipc, monkeypatch):
    closed = []
    monkeypatch.setattr(cuda_ipc.MappedBuffers, "close", lambda buffers: closed.append(buffers))
    with world("llama", ParallelLayout(), EngineLayout(1, 1), torch.bfloat16) as one:
        one.sync()
    assert len(closed) == 1


def test_a_bucket_outside_its_buffer_is_refused(host_memory):
    mapped = cuda_ipc.MappedBuffers(cuda_ipc.StagingBuffers(torch.device("cpu"), 64).describe())
    assert mapped.read(1, 64).numel() == 64
    for number, num_bytes in ((2, 8), (-1, 8), (0, 65), (0, -1)):
        with pytest.raises(ValueError, match=f"buffer {number} with {num_bytes} bytes"):
            mapped.read(number, num_bytes)


def test_a_handle_survives_json():
    fields = dict.fromkeys(cuda_ipc._FIELDS, 7) | {name: bytes(range(256)) for name in cuda_ipc._BYTES}
    assert cuda_ipc.decode_handle(json.loads(json.dumps(cuda_ipc.encode_handle(fields)))) == fields
    encoded = cuda_ipc.encode_handle(fields)
    del encoded["size_bytes"]
    with pytest.raises(ValueError, match="'size_bytes' is on one side only"):
        cuda_ipc.decode_handle(encoded)


def test_torch_still_shares_storages_in_these_fields():
    """The order of `_FIELDS` is torch's own: its reducer unpacks the same names in the same places."""
    names = (
        "device", "handle", "storage_size_bytes", "storage_offset_bytes",
        "ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required",
    )  # fmt: skip
    assert tuple(name.removeprefix("storage_") for name in names) == cuda_ipc._FIELDS
    unpacked = "".join(inspect.getsource(reduce_tensor).split())
    assert f"({','.join(names)},)=storage._share_cuda_()" in unpacked
    opened = "".join(inspect.getsource(rebuild_cuda_tensor).split())
    passed = ",".join(("storage_device", "storage_handle", *names[2:]))
    assert f"_new_shared_cuda({passed},)" in opened


def test_weights_on_the_host_are_refused_in_one_line():
    with pytest.raises(ValueError, match="weights are on cpu, not on a GPU"):
        cuda_ipc.StagingBuffers(torch.device("cpu"), 64)


def test_a_gpu_that_the_engine_does_not_see_is_refused():
    with pytest.raises(ValueError, match="GPU-7 of the trainer is not visible"):
        cuda_ipc.local_device("GPU-7")


def test_a_sync_to_an_engine_elsewhere_fails_and_stays_incomplete(host_memory, by_cuda_ipc, monkeypatch):
    def blind(uuid):
        raise ValueError(f"GPU {uuid} of the trainer is not visible to the engine")

    monkeypatch.setattr(cuda_ipc, "local_device", blind)
    with world("llama", ParallelLayout(), EngineLayout(1, 1), torch.bfloat16) as one:
        order = one.begin()
        with pytest.raises(ChannelError, match="not visible"):
            one.senders[0].send(one.chunks[0], order)
        with pytest.raises(ChannelError, match="incomplete"):
            one.controls[0].finish(order.sync)
        one.assert_untouched()
