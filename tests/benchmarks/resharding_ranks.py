"""One rank of the resharding benchmark: its parameters, and each way to move them. Ranks 0-3 train, ranks 4-7 generate."""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.checkpoint.hf_shards import import_params, local_params
from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.model_families.registry import get_family
from megatron_rl.model_families.shards import count_parameters
from megatron_rl.resharding import box_memory, box_sender, digest
from megatron_rl.resharding.box_sender import SendOptions
from megatron_rl.resharding.boxes import as_matrix
from megatron_rl.resharding.control import ReceiverControl
from megatron_rl.resharding.execute import WeightSender
from megatron_rl.resharding.hops import sources_of
from megatron_rl.resharding.plan import build_reshard_plan
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.resharding.transports import ipc, sockets
from megatron_rl.types.layout import EngineLayout, ParallelLayout, ShardInterval
from megatron_rl.types.resharding import SyncOrder, TransferOp
from tests.unit.resharding.rig import expected_shard, live_vocab_rows

FAMILY, LAYOUT, ENGINE = "qwen3_moe", ParallelLayout(tp=2, pp=2, ep=2), EngineLayout(4, 1)
NUM_TRAINERS = NUM_ENGINES = 4
NUM_RANKS = NUM_TRAINERS + NUM_ENGINES
KEY = b"b" * 32
BROADCAST_ELEMENTS = 32 * 1024 * 1024
"""64 MB: the bucket of gather-and-broadcast."""
CONTESTANTS = (
    "gather_broadcast", "per_slice", "gloo_ceiling", "p2p", "p2p_verified", "p2p_tcp", "memcpy", "shm", "shm_verified"
)  # fmt: skip


def model_dims(is_small: bool) -> tuple[ModelDims, int]:
    """The model, and the bytes of its bf16 weights."""
    layers, hidden, ffn, vocab = (2, 128, 64, 1000) if is_small else (8, 1024, 704, 16000)
    dims = ModelDims(
        num_layers=layers, hidden_size=hidden, num_heads=16, num_kv_heads=4, head_dim=64, vocab_size=vocab, ffn_size=ffn,
        num_experts=16, top_k=4, moe_ffn_size=ffn, tied_embeddings=False, qk_norm=True, norm_topk_prob=True,
        norm_epsilon=1e-6, rope_theta=1e4, max_positions=512,
    )  # fmt: skip
    return dims, 2 * count_parameters(get_family(FAMILY), dims)


class PatternSource:
    """Whole tensors whose every element tells its name, row, column and version: cheap to make anywhere, hard to fake."""

    def __init__(self, version: int) -> None:
        self._version = version

    def read(self, name: str, shape: tuple[int, ...], box: ShardInterval) -> torch.Tensor:
        seed = int.from_bytes(hashlib.blake2b(f"{self._version} {name}".encode(), digest_size=2).digest(), "little")
        rows = np.arange(box.global_row, box.global_row + box.num_rows, dtype=np.uint32)[:, None] * np.uint32(40503)
        cols = np.arange(box.global_col, box.global_col + box.num_cols, dtype=np.uint32)[None, :] * np.uint32(1237)
        bits = ((rows + cols + np.uint32(seed)) & np.uint32(0xFFFF)).astype(np.uint16)
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)

    def whole(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        rows, cols = (int(np.prod(shape[:-1])), shape[-1]) if len(shape) > 1 else (shape[0], 1)
        return self.read(name, shape, ShardInterval(0, 0, 0, 0, rows, cols)).reshape(shape)


class NoDigest:
    """In the place of a hash, where the movement alone is measured."""

    def update(self, data: Any) -> None:
        pass

    def hexdigest(self) -> str:
        return NO_DIGEST


NO_DIGEST = "none"
digest._DIGESTS[NO_DIGEST] = NoDigest


@dataclass
class Rank:
    """A process of the benchmark. `chunk` are a trainer's parameters, `params` an engine rank's."""

    number: int
    dims: ModelDims

    def __post_init__(self) -> None:
        self.is_trainer = self.number < NUM_TRAINERS
        self.engine = self.number - NUM_TRAINERS
        self.plan = build_reshard_plan(FAMILY, self.dims, LAYOUT, ENGINE)
        self.chunk: dict[str, torch.Tensor] = {}
        self.params: dict[str, torch.Tensor] = {}
        if self.is_trainer:
            self.load(0)
        else:
            self.params = {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in self.plan.target_shapes.items()}
        self.stage_groups = [dist.new_group([2 * stage, 2 * stage + 1]) for stage in range(2)]
        self.broadcast_groups = [dist.new_group([2 * stage, *range(NUM_TRAINERS, NUM_RANKS)]) for stage in range(2)]
        self.buffer = torch.zeros(BROADCAST_ELEMENTS, dtype=torch.float16)

    def load(self, version: int) -> None:
        """The trainer's weights become those of a version, in the memory that they have."""
        options = {"spec": "local", "vocab_multiple": 1, "dtype": torch.bfloat16}
        (fresh,) = import_params(PatternSource(version), get_family(FAMILY), self.dims, LAYOUT, self.number, **options)
        if not self.chunk:  # in one buffer, as Megatron's data parallelism lays them
            buffer = torch.zeros(sum(tensor.numel() for tensor in fresh.values()), dtype=torch.bfloat16)
            parts = buffer.split([tensor.numel() for tensor in fresh.values()])
            self.chunk = {name: part.view(fresh[name].shape) for name, part in zip(fresh, parts, strict=True)}
        for name, tensor in fresh.items():
            self.chunk[name].copy_(tensor)

    def holds(self, version: int) -> bool:
        """Whether the engine rank's every live element is that of a version."""
        want = expected_shard(get_family(FAMILY), self.dims, ENGINE, PatternSource(version), torch.bfloat16, self.engine)
        rows = live_vocab_rows(self.dims, ENGINE)[self.engine]
        live = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), rows)
        return all(
            torch.equal(self.params[n][: live.get(n)].view(torch.int16), v[: live.get(n)].view(torch.int16))
            for n, v in want.items()
        )


def source_view(chunk: dict[str, torch.Tensor], op: TransferOp) -> torch.Tensor:
    return as_matrix(chunk[op.source.name])[
        op.source_row : op.source_row + op.num_rows, op.source_col : op.source_col + op.num_cols
    ]


def target_view(params: dict[str, torch.Tensor], op: TransferOp) -> torch.Tensor:
    return as_matrix(params[op.target])[
        op.target_row : op.target_row + op.num_rows, op.target_col : op.target_col + op.num_cols
    ]


def prepare_gather_broadcast(rank: Rank) -> Callable[[], None]:
    """Stage by stage: all-gather each parameter over the stage's two ranks, broadcast buckets, cut out the slices."""
    stages = [StageBuckets(rank, stage) for stage in range(2)]

    def run() -> None:
        for stage in stages:
            stage.run()

    return run


class StageBuckets:
    """The whole tensors of a pipeline stage, laid into buckets, and what this engine rank cuts out of each."""

    def __init__(self, rank: Rank, stage: int) -> None:
        self.rank, self.stage, self.sender = rank, stage, 2 * stage
        held = [
            {
                param.name: (param.shape, all(box.num_rows * box.num_cols == np.prod(shape) for _, shape, box in param.parts))
                for param in local_params(get_family(FAMILY), rank.dims, LAYOUT, r, spec="local", vocab_multiple=1)
            }
            for r in (self.sender, self.sender + 1)
        ]
        self.buckets: list[list[tuple[str, int, int, bool]]] = [[]]  # (name, offset, elements of one rank, is replicated)
        place: dict[tuple[int, str], tuple[int, int, tuple[int, ...]]] = {}
        filled = 0
        for name, (shape, is_whole) in held[0].items():
            is_replicated = is_whole and "local_experts" not in name
            size = int(np.prod(shape))
            total = size if is_replicated else 2 * size
            if filled + total > BROADCAST_ELEMENTS:
                self.buckets.append([])
                filled = 0
            self.buckets[-1].append((name, filled, size, is_replicated))
            for r in range(2):
                place[self.sender + r, name] = (len(self.buckets) - 1, filled + (0 if is_replicated else r * size), shape)
            filled += total
        self.cuts: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.buckets]
        if not rank.is_trainer:
            for source in (self.sender, self.sender + 1):
                for op in rank.plan.ops_between(source, rank.engine):
                    bucket, offset, shape = place[source, op.source.name]
                    whole = rank.buffer[offset : offset + int(np.prod(shape))].view(torch.bfloat16).view(shape)
                    pair = source_view({op.source.name: whole}, op), target_view(rank.params, op)
                    self.cuts[bucket].append(pair)

    def run(self) -> None:
        rank, buffer = self.rank, self.rank.buffer
        for bucket, cuts in zip(self.buckets, self.cuts, strict=True):
            if rank.is_trainer and rank.number // 2 == self.stage:
                for name, offset, size, is_replicated in bucket:
                    mine = rank.chunk[name].view(-1).view(torch.float16)
                    if is_replicated:
                        buffer[offset : offset + size].copy_(mine)
                    else:
                        parts = list(buffer[offset : offset + 2 * size].split(size))
                        dist.all_gather(parts, mine, group=rank.stage_groups[self.stage])
            if rank.number == self.sender or not rank.is_trainer:
                used = max(offset + size * (1 if whole else 2) for _, offset, size, whole in bucket)
                dist.broadcast(buffer[:used], self.sender, group=rank.broadcast_groups[self.stage])
            for source, target in cuts:
                target.copy_(source)


def prepare_per_slice(rank: Rank) -> Callable[[], None]:
    """Every box is a message of its own, all in flight at once."""
    pairs = [
        (op, other)
        for other in range(4)
        for op in (rank.plan.ops_between(rank.number, other) if rank.is_trainer else rank.plan.ops_between(other, rank.engine))
    ]

    def run() -> None:
        if rank.is_trainer:
            tensors = [source_view(rank.chunk, op).contiguous().view(torch.float16) for op, _ in pairs]
            sent = [dist.isend(t, NUM_TRAINERS + other) for t, (_, other) in zip(tensors, pairs, strict=True)]
            for work in sent:
                work.wait()
            return
        views = [target_view(rank.params, op) for op, _ in pairs]
        tensors = [v if v.is_contiguous() else torch.empty(v.shape, dtype=v.dtype) for v in views]
        received = [
            dist.irecv(t.view(torch.float16), other) for t, (_, other) in zip(tensors, pairs, strict=True)
        ]  # fmt: skip
        for work, view, tensor in zip(received, views, tensors, strict=True):
            work.wait()
            if view is not tensor:
                view.copy_(tensor)

    return run


def prepare_gloo_ceiling(rank: Rank) -> Callable[[], None]:
    """Four pairs, a quarter of the bytes each, flat tensors: what gloo reaches here at best."""
    elements = int(rank.plan.num_elements_between().sum()) // NUM_ENGINES
    flat = torch.ones(elements, dtype=torch.float16)

    def run() -> None:
        if rank.is_trainer:
            dist.send(flat, rank.number + NUM_TRAINERS)
        else:
            dist.recv(flat, rank.number - NUM_TRAINERS)

    return run


def prepare_memcpy(rank: Rank) -> Callable[[], None]:
    """Each engine rank copies the bytes of its shard once, with the C library."""
    num_bytes = 0 if rank.is_trainer else 2 * int(rank.plan.num_elements_between()[:, rank.engine].sum())
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    return lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes) if num_bytes else None


def prepare_sync(
    rank: Rank, addresses: Sequence[tuple[str, int]], transport: Any, digests: Sequence[str], timeout_s: float
) -> Any:
    """The library's own sync. Returns (announce a sync, which rank 0 does before the clock starts; run it)."""
    dtypes = dict.fromkeys(rank.plan.target_shapes, "bfloat16")
    options = SendOptions(bucket_bytes=16 * 1024 * 1024, timeout_s=timeout_s, transport=transport)
    sender = WeightSender(rank.plan, rank.number, addresses, KEY, options) if rank.is_trainer else None
    controls = [ReceiverControl(r, a, KEY, timeout_s) for r, a in enumerate(addresses)] if rank.number == 0 else []
    order: list[Any] = [None]

    def announce() -> None:
        # Without a digest nothing is read for one either: gathering a strided box for a hash costs as much as sending it.
        ipc.hash_boxes = sockets.hash_boxes = _nothing if NO_DIGEST in digests else box_memory.hash_boxes
        if controls:
            order[0] = SyncOrder(secrets.token_hex(4), 1, tuple(addresses), dtypes, rank.plan.layout_digest)
            for control in controls:
                control.begin(order[0].sync, 1, sources_of(rank.plan, control.target_rank), is_staged=False)
        dist.broadcast_object_list(order, src=0)

    def run() -> None:
        if sender is not None:
            box_sender.DIGEST_NAMES = tuple(digests)
            sender.send([rank.chunk], order[0])

    return announce, run


def rank_main(number: int, port: int, rounds: int, is_small: bool, timeout_s: float, barrier: Any, results: Any) -> None:
    try:
        end_with(os.getppid())
        torch.set_num_threads(1)
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group(
            "gloo", init_method=address, rank=number, world_size=NUM_RANKS, timeout=timedelta(seconds=timeout_s)
        )
        results.put(_run_rank(Rank(number, model_dims(is_small)[0]), rounds, timeout_s, barrier))
    except BaseException:  # noqa: BLE001 - whatever it was, the parent reports it
        results.put({"error": f"rank {number}: {traceback.format_exc()}"})
        barrier.abort()
    finally:
        results.close()
        results.join_thread()
        os._exit(0)


def _run_rank(rank: Rank, rounds: int, timeout_s: float, barrier: Any) -> dict[str, Any]:
    receivers = [] if rank.is_trainer else [Receiver(rank.params, KEY, is_local=is_local) for is_local in (True, False)]
    for receiver in receivers:
        receiver.start()
    addresses: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(addresses, [receiver.address for receiver in receivers])
    engines, remote = ([tuple(both[n]) for both in addresses[NUM_TRAINERS:]] for n in range(2))
    fast = [name for name in digest.DIGEST_NAMES if name != NO_DIGEST]
    runs: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "gather_broadcast": (_nothing, prepare_gather_broadcast(rank)),
        "per_slice": (_nothing, prepare_per_slice(rank)),
        "gloo_ceiling": (_nothing, prepare_gloo_ceiling(rank)),
        "memcpy": (_nothing, prepare_memcpy(rank)),
        "p2p": prepare_sync(rank, engines, "p2p", [NO_DIGEST], timeout_s),
        "p2p_verified": prepare_sync(rank, engines, "p2p", fast, timeout_s),
        "p2p_tcp": prepare_sync(rank, remote, "p2p", [NO_DIGEST], timeout_s),
        "shm": prepare_sync(rank, engines, "ipc", [NO_DIGEST], timeout_s),
        "shm_verified": prepare_sync(rank, engines, "ipc", fast, timeout_s),
    }
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTESTANTS}
    is_exact = True
    for round_number in range(rounds + 1):
        for turn, name in enumerate(CONTESTANTS):
            announce, run = runs[name]
            moves_weights = name not in ("gloo_ceiling", "memcpy")
            version = 100 * round_number + turn
            checks = round_number == rounds and moves_weights
            if checks and rank.is_trainer:
                rank.load(version)
            announce()
            barrier.wait(timeout_s)
            begun = time.monotonic()
            run()
            spans[name].append((begun, time.monotonic()))
            barrier.wait(timeout_s)
            if checks and not rank.is_trainer:
                is_exact = is_exact and rank.holds(version)
    return {"spans": spans, "bit_exact": is_exact}


def end_with(parent: int) -> None:
    """The kernel ends this rank when the benchmark's process ends, however that comes."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _nothing(*unused: object) -> None:
    pass
