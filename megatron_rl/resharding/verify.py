"""Checks around a weight sync, pure: do both sides speak of the same parameters, and did everything arrive?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from megatron_rl.resharding.plan import ReshardPlan
from megatron_rl.resharding.precision import BLOCK, FP8, SCALE_SUFFIX
from megatron_rl.types.resharding import ShardDigest


class SyncError(RuntimeError):
    """A weight sync that did not bring every engine to one whole version; the message is one line."""


def check_receiver(plan: ReshardPlan, target_rank: int, described: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, str]:
    """Compare an engine rank's parameters with the plan; returns the dtype of each that receives something.

    Raises SyncError naming the first difference. A name that the engine does not have is never sent: it would kill some
    servers.
    """
    for name, shape in plan.target_shapes.items():
        if name not in described:
            raise SyncError(f"engine rank {target_rank} has no parameter '{name}'; trainer and engine differ in the model")
        found, _ = described[name]
        if found != shape:
            raise SyncError(f"engine rank {target_rank}: '{name}' has shape {found}, the trainer's model needs {shape}")
    unknown = sorted(name for name in set(described) - set(plan.target_shapes) if name.endswith("weight"))
    if unknown:
        raise SyncError(f"engine rank {target_rank} has parameter '{unknown[0]}' that the trainer's model does not have")
    dtypes = {name: described[name][1] for name in plan.target_shapes}
    return dtypes | _scales(plan, target_rank, described)


def _scales(plan: ReshardPlan, target_rank: int, described: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, str]:
    """The block scales of the parameters that the engine holds in fp8. Raises SyncError when one is missing."""
    scales = {}
    for name, (*stacked, rows, cols) in ((n, s) for n, s in plan.target_shapes.items() if described[n][1] == FP8):
        scale, shape = name + SCALE_SUFFIX, (*stacked, -(-rows // BLOCK), -(-cols // BLOCK))
        if described.get(scale) != (shape, "float32"):
            found = described.get(scale, "absent")
            raise SyncError(f"engine rank {target_rank}: '{scale}' is {found}, fp8 needs {shape} in float32")
        scales[scale] = "float32"
    return scales


def check_digests(plan: ReshardPlan, sent: Iterable[ShardDigest], received: Sequence[ShardDigest]) -> None:
    """Every engine rank holds exactly what was sent to it, and all of it. Raises SyncError naming the rank."""
    expected = plan.num_elements_between().sum(axis=0) + np.roll(plan.num_relayed(), plan.engine_layout.tp)
    sent_digests: dict[int, dict[int, str]] = {}
    for digest in sent:
        sent_digests.setdefault(digest.target_rank, {}).update(digest.digests)
    if len(received) != len(expected):
        raise SyncError(f"{len(received)} engine ranks answered, the plan has {len(expected)}")
    for answer in received:
        rank = answer.target_rank
        if answer.num_elements != expected[rank]:
            raise SyncError(f"engine rank {rank} received {answer.num_elements} weights, expected {expected[rank]}")
        if answer.digests != sent_digests.get(rank, {}):
            raise SyncError(f"engine rank {rank}: its digests differ from the senders'; nothing was committed")
