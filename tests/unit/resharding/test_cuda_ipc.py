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

from megatron_rl.checkpoint.hf_folder import RandomSource
from megatron_rl.checkpoint.hf_shards import import_params
from megatron_rl.model_families.registry import FAMILIES
from megatron_rl.resharding import cuda_ipc
from megatron_rl.resharding.channel import ChannelError
from megatron_rl.resharding.execute import begin_receive, execute_send, finish_receive
from megatron_rl.resharding.plan import build_reshard_plan
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.resharding.verify import check_digests, sources_of
from megatron_rl.types.layout import EngineLayout, ParallelLayout

KEY = b"k" * 32
TIMEOUT_S = 20.0


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


def sync(plan, layout, source, family, receivers, transport, version, bucket_bytes=3000):
    dims = family.debug_dims
    addresses = [receiver.address for receiver in receivers]
    for rank, address in enumerate(addresses):
        begin_receive(address, KEY, TIMEOUT_S, version=version, sources=sources_of(plan, rank))
    sent = []
    for rank in range(layout.world_size):
        chunks = import_params(source, family, dims, layout, rank, spec="local", vocab_multiple=1, dtype=torch.float32)
        sent += execute_send(
            plan, rank, chunks, addresses, key=KEY, version=version, dtype=torch.bfloat16,
            bucket_bytes=bucket_bytes, timeout_s=TIMEOUT_S, transport=transport,
        )  # fmt: skip
    received = [
        finish_receive(address, KEY, TIMEOUT_S, version=version, target_rank=rank)
        for rank, address in enumerate(addresses)
    ]
    check_digests(plan, sent, received)
    return received


@pytest.mark.parametrize("bucket_bytes", [3000, 10**9])
def test_staged_slices_equal_those_over_tcp(host_memory, bucket_bytes):
    family, layout, engine = FAMILIES["qwen3_moe"], ParallelLayout(tp=2, ep=2, dp=2), EngineLayout(2, 1)
    plan = build_reshard_plan("qwen3_moe", family.debug_dims, layout, engine)
    source = RandomSource(5, family.debug_dims.num_layers)
    shards = [{n: torch.full(s, 7.0, dtype=torch.bfloat16) for n, s in plan.target_shapes.items()} for _ in range(4)]
    receivers = [Receiver(shard, KEY) for shard in shards]
    try:
        for receiver in receivers:
            receiver.start()
        by_tcp = sync(plan, layout, source, family, receivers[:2], "tcp", 1, bucket_bytes)
        staged = sync(plan, layout, source, family, receivers[2:], "cuda_ipc", 1, bucket_bytes)
    finally:
        for receiver in receivers:
            receiver.close()
    assert [digest.num_elements for digest in staged] == [digest.num_elements for digest in by_tcp]
    for rank in range(2):
        for name, value in shards[rank].items():
            assert torch.equal(shards[2 + rank][name], value), name
    assert host_memory.opened == set(host_memory.shared)
    assert host_memory.num_synchronised >= 2 * len(host_memory.shared) / cuda_ipc.NUM_BUFFERS


def test_the_receiver_unmaps_before_the_sender_frees(host_memory, monkeypatch):
    closed = []
    monkeypatch.setattr(cuda_ipc.MappedBuffers, "close", lambda buffers: closed.append(buffers))
    family, layout = FAMILIES["llama"], ParallelLayout()
    plan = build_reshard_plan("llama", family.debug_dims, layout, EngineLayout(1, 1))
    receiver = Receiver({n: torch.zeros(s, dtype=torch.bfloat16) for n, s in plan.target_shapes.items()}, KEY)
    receiver.start()
    try:
        sync(plan, layout, RandomSource(5, 4), family, [receiver], "cuda_ipc", 1)
    finally:
        receiver.close()
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
    family = FAMILIES["llama"]
    plan = build_reshard_plan("llama", family.debug_dims, ParallelLayout(), EngineLayout(1, 1))
    receiver = Receiver({name: torch.zeros(shape) for name, shape in plan.target_shapes.items()}, KEY)
    receiver.start()
    try:
        with pytest.raises(ValueError, match=r"sync\.transport=cuda_ipc.*use tcp"):
            sync(plan, ParallelLayout(), RandomSource(5, 4), family, [receiver], "cuda_ipc", 1)
    finally:
        receiver.close()


def test_a_gpu_that_the_engine_does_not_see_is_refused():
    with pytest.raises(ValueError, match="GPU-7 of the trainer is not visible"):
        cuda_ipc.local_device("GPU-7")


def test_a_sync_to_an_engine_elsewhere_fails_and_stays_incomplete(host_memory, monkeypatch):
    def blind(uuid):
        raise ValueError(f"GPU {uuid} of the trainer is not visible to the engine")

    monkeypatch.setattr(cuda_ipc, "local_device", blind)
    family = FAMILIES["llama"]
    plan = build_reshard_plan("llama", family.debug_dims, ParallelLayout(), EngineLayout(1, 1))
    receiver = Receiver({name: torch.zeros(shape) for name, shape in plan.target_shapes.items()}, KEY)
    receiver.start()
    try:
        with pytest.raises(ChannelError, match="not visible"):
            sync(plan, ParallelLayout(), RandomSource(5, 4), family, [receiver], "cuda_ipc", 1)
        with pytest.raises(ChannelError, match="incomplete"):
            finish_receive(receiver.address, KEY, TIMEOUT_S, version=1, target_rank=0)
    finally:
        receiver.close()
