"""The trainer's side of a weight sync: every rank sends its own boxes to the engine ranks that need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import torch

from megatron_rl.resharding.channel import Channel, ChannelError, connect
from megatron_rl.resharding.cuda_ipc import NUM_BUFFERS, StagingBuffers
from megatron_rl.resharding.digest import DIGEST_NAMES, Digest, new_digest
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
    transport: Literal["tcp", "cuda_ipc"] = "tcp",
) -> list[ShardDigest]:
    """Send everything that `rank` owes, to all engine ranks at once; `addresses[r]` is the receiver of engine rank r.

    `chunks` are the rank's parameters per virtual chunk; they are cast to the engine's `dtype`. `cuda_ipc` needs each
    receiver's engine rank on the GPU of this rank's weights. Returns what was sent, as hashed here. Raises ChannelError
    naming the receiver that failed; the others are still told the end or closed.
    """
    targets = [target for target in range(len(addresses)) if any(True for _ in plan.ops_between(rank, target))]
    if not targets:
        return []
    with ThreadPoolExecutor(max_workers=len(targets), thread_name_prefix="weight-send") as pool:
        futures = [
            pool.submit(
                _send_to, plan, rank, t, chunks, addresses[t], key, version, dtype, bucket_bytes, timeout_s, transport
            )
            for t in targets
        ]
        return [future.result(timeout=timeout_s) for future in futures]


def bucketed(ops: Iterator[TransferOp], max_elements: int) -> Iterator[list[TransferOp]]:
    """Group boxes into buckets of at most `max_elements`; a larger box is split by rows, a single row never."""
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
    params = _ask(address, key, timeout_s, {"kind": "describe"})["params"]
    return {name: (tuple(shape), dtype) for name, (shape, dtype) in params.items()}


def begin_receive(address: Address, key: bytes, timeout_s: float, *, version: int, sources: Sequence[int]) -> None:
    """Tell a receiver which version comes, and from which trainer ranks."""
    _ask(address, key, timeout_s, {"kind": "begin", "version": version, "sources": list(sources)})


def finish_receive(address: Address, key: bytes, timeout_s: float, *, version: int, target_rank: int) -> ShardDigest:
    """What a receiver has written for `version`. Raises ChannelError when a sender did not come to its end."""
    answer = _ask(address, key, timeout_s, {"kind": "finish", "version": version})
    digests = {int(source): digest for source, digest in answer["digests"].items()}
    return ShardDigest(target_rank=target_rank, num_elements=answer["num_elements"], digests=digests)


def _ask(address: Address, key: bytes, timeout_s: float, question: dict[str, Any]) -> dict[str, Any]:
    """One question on a connection of its own."""
    channel = connect(*address, key, timeout_s)
    try:
        return channel.ask(question)
    finally:
        channel.close()


def _split_rows(op: TransferOp, max_rows: int) -> Iterator[TransferOp]:
    for start in range(0, op.num_rows, max_rows):
        yield replace(
            op,
            source_row=op.source_row + start,
            target_row=op.target_row + start,
            num_rows=min(max_rows, op.num_rows - start),
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
    transport: str,
) -> ShardDigest:
    buckets = list(bucketed(plan.ops_between(rank, target), max(bucket_bytes // dtype.itemsize, 1)))
    channel = connect(*address, key, timeout_s)
    try:
        send = _send_staged if transport == "cuda_ipc" else _send_bytes
        return send(channel, buckets, chunks, dtype, version=version, rank=rank, target=target)
    finally:
        channel.close()


def _send_bytes(
    channel: Channel,
    buckets: Sequence[list[TransferOp]],
    chunks: Sequence[Mapping[str, torch.Tensor]],
    dtype: torch.dtype,
    *,
    version: int,
    rank: int,
    target: int,
) -> ShardDigest:
    """Every bucket as the payload of its message."""
    message = {"version": version, "source": rank}
    digest = new_digest(channel.ask({"kind": "open", "digests": DIGEST_NAMES, **message})["digest"])
    for bucket in buckets:
        payload = box_bytes(torch.cat(_parts(chunks, bucket, dtype)))
        digest.update(payload)
        channel.send({"kind": "bucket", "boxes": _boxes(bucket), **message}, payload)
    return _end(channel, message, digest, buckets, target)


def _send_staged(
    channel: Channel,
    buckets: Sequence[list[TransferOp]],
    chunks: Sequence[Mapping[str, torch.Tensor]],
    dtype: torch.dtype,
    *,
    version: int,
    rank: int,
    target: int,
) -> ShardDigest:
    """Every bucket in one of two staging buffers; a buffer is filled anew when the receiver has read it."""
    message = {"version": version, "source": rank}
    source = buckets[0][0].source
    staging = StagingBuffers(
        chunks[source.chunk][source.name].device, max(map(_num_elements, buckets)) * dtype.itemsize
    )
    opened = channel.ask({"kind": "open", "digests": DIGEST_NAMES, "staging": staging.describe(), **message})
    digest = new_digest(opened["digest"])
    for number, bucket in enumerate(buckets):
        if number >= NUM_BUFFERS:
            channel.expect()
        values = staging.fill(number % NUM_BUFFERS, _parts(chunks, bucket, dtype))
        place = {"buffer": number % NUM_BUFFERS, "num_bytes": values.numel() * dtype.itemsize}
        channel.send({"kind": "bucket", "boxes": _boxes(bucket), **place, **message})
        digest.update(box_bytes(values))
    for _ in buckets[-NUM_BUFFERS:]:
        channel.expect()
    return _end(channel, message, digest, buckets, target)


def _end(
    channel: Channel, message: dict[str, int], digest: Digest, buckets: Sequence[list[TransferOp]], target: int
) -> ShardDigest:
    rank, own = message["source"], digest.hexdigest()
    if channel.ask({"kind": "end", **message})["digest"] != own:
        raise ChannelError(f"{channel.peer}: the digest of what trainer rank {rank} sent differs; it arrived wrong")
    return ShardDigest(target_rank=target, num_elements=sum(map(_num_elements, buckets)), digests={rank: own})


def _parts(
    chunks: Sequence[Mapping[str, torch.Tensor]], bucket: list[TransferOp], dtype: torch.dtype
) -> list[torch.Tensor]:
    return [_source_box(chunks, op).to(dtype).reshape(-1) for op in bucket]


def _boxes(bucket: list[TransferOp]) -> list[list[str | int]]:
    return [[op.target, op.target_row, op.target_col, op.num_rows, op.num_cols] for op in bucket]


def _num_elements(bucket: list[TransferOp]) -> int:
    return sum(op.num_rows * op.num_cols for op in bucket)


def _source_box(chunks: Sequence[Mapping[str, torch.Tensor]], op: TransferOp) -> torch.Tensor:
    param = chunks[op.source.chunk][op.source.name]
    return box_view(param, op.source_row, op.source_col, op.num_rows, op.num_cols)
