"""The trainer's side of a weight sync: every rank sends its own boxes to the engine ranks that need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

from megatron_rl.resharding.channel import Channel, ChannelError, connect
from megatron_rl.resharding.plan import ReshardPlan
from megatron_rl.resharding.receiver import box_bytes, box_view
from megatron_rl.types.resharding import ShardDigest, TransferOp

Address = tuple[str, int]


def execute_send(
    plan: ReshardPlan,
    rank: int,
    chunks: Sequence[Mapping[str, torch.Tensor]],
    addresses: Sequence[Address],
    *,
    key: bytes,
    version: int,
    dtype: torch.dtype,
    bucket_bytes: int,
    timeout_s: float,
) -> list[ShardDigest]:
    """Send everything that `rank` owes, to all engine ranks at once; `addresses[r]` is the receiver of engine rank r.

    `chunks` are the rank's parameters per virtual chunk; they are cast to the engine's `dtype`. Returns what was sent, as
    hashed here. Raises ChannelError naming the receiver that failed; the others are still told the end or closed.
    """
    targets = [target for target in range(len(addresses)) if any(True for _ in plan.ops_between(rank, target))]
    if not targets:
        return []
    with ThreadPoolExecutor(max_workers=len(targets), thread_name_prefix="weight-send") as pool:
        futures = [
            pool.submit(_send_to, plan, rank, t, chunks, addresses[t], key, version, dtype, bucket_bytes, timeout_s)
            for t in targets
        ]
        return [future.result(timeout=timeout_s) for future in futures]


def bucketed(ops: Iterator[TransferOp], max_elements: int) -> Iterator[list[TransferOp]]:
    """Group boxes into buckets of at most `max_elements`; a larger box is split by rows (a single row is never split)."""
    bucket: list[TransferOp] = []
    filled = 0
    for op in ops:
        for piece in _split_rows(op, max(max_elements // op.num_cols, 1)):
            size = piece.num_rows * piece.num_cols
            if bucket and filled + size > max_elements:
                yield bucket
                bucket, filled = [], 0
            bucket.append(piece)
            filled += size
    if bucket:
        yield bucket


def describe_receiver(address: Address, key: bytes, timeout_s: float) -> dict[str, tuple[tuple[int, ...], str]]:
    """Names, shapes and dtypes of what a receiver would write into."""
    channel = connect(*address, key, timeout_s)
    try:
        params = channel.ask({"kind": "describe"})["params"]
    finally:
        channel.close()
    return {name: (tuple(shape), dtype) for name, (shape, dtype) in params.items()}


def begin_receive(address: Address, key: bytes, timeout_s: float, *, version: int, sources: Sequence[int]) -> None:
    """Tell a receiver which version comes, and from which trainer ranks."""
    channel = connect(*address, key, timeout_s)
    try:
        channel.ask({"kind": "begin", "version": version, "sources": list(sources)})
    finally:
        channel.close()


def finish_receive(address: Address, key: bytes, timeout_s: float, *, version: int, target_rank: int) -> ShardDigest:
    """What a receiver has written for `version`. Raises ChannelError when a sender did not come to its end."""
    channel = connect(*address, key, timeout_s)
    try:
        answer = channel.ask({"kind": "finish", "version": version})
    finally:
        channel.close()
    digests = {int(source): digest for source, digest in answer["digests"].items()}
    return ShardDigest(target_rank=target_rank, num_elements=answer["num_elements"], digests=digests)


def _split_rows(op: TransferOp, max_rows: int) -> Iterator[TransferOp]:
    for start in range(0, op.num_rows, max_rows):
        yield TransferOp(
            source_rank=op.source_rank,
            source=op.source,
            source_row=op.source_row + start,
            source_col=op.source_col,
            target_rank=op.target_rank,
            target=op.target,
            target_row=op.target_row + start,
            target_col=op.target_col,
            num_rows=min(max_rows, op.num_rows - start),
            num_cols=op.num_cols,
        )


def _send_to(
    plan: ReshardPlan,
    rank: int,
    target: int,
    chunks: Sequence[Mapping[str, torch.Tensor]],
    address: Address,
    key: bytes,
    version: int,
    dtype: torch.dtype,
    bucket_bytes: int,
    timeout_s: float,
) -> ShardDigest:
    channel = connect(*address, key, timeout_s)
    try:
        return _send_buckets(channel, plan, rank, target, chunks, version, dtype, bucket_bytes)
    finally:
        channel.close()


def _send_buckets(
    channel: Channel,
    plan: ReshardPlan,
    rank: int,
    target: int,
    chunks: Sequence[Mapping[str, torch.Tensor]],
    version: int,
    dtype: torch.dtype,
    bucket_bytes: int,
) -> ShardDigest:
    digest = xxhash.xxh3_128()
    num_elements = 0
    for bucket in bucketed(plan.ops_between(rank, target), max(bucket_bytes // dtype.itemsize, 1)):
        values = torch.cat([_source_box(chunks, op).to(dtype).reshape(-1) for op in bucket])
        payload = box_bytes(values)
        digest.update(payload)
        boxes = [[op.target, op.target_row, op.target_col, op.num_rows, op.num_cols] for op in bucket]
        channel.send({"kind": "bucket", "version": version, "source": rank, "boxes": boxes}, payload)
        num_elements += values.numel()
    answer = channel.ask({"kind": "end", "version": version, "source": rank})
    if answer["digest"] != digest.hexdigest():
        raise ChannelError(f"{channel.peer}: digest of the part from trainer rank {rank} differs; the weights arrived wrong")
    return ShardDigest(target_rank=target, num_elements=num_elements, digests={rank: digest.hexdigest()})


def _source_box(chunks: Sequence[Mapping[str, torch.Tensor]], op: TransferOp) -> torch.Tensor:
    param = chunks[op.source.chunk][op.source.name]
    return box_view(param, op.source_row, op.source_col, op.num_rows, op.num_cols)
