"""The inputs of the variants, and what their plain loops share: aggregation, PPO's clip, gradients by differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Rows = list[list[float]]
Loss = Callable[[Rows, Rows], float]
"""(log-probs, frozen copy of them) -> loss."""


def make_batch(seed: int) -> dict[str, Any]:
    """Groups of 4, 1, 3 and 1 rows; rows of 0 to 9 tokens, the first of one token."""
    rng = np.random.default_rng(seed)
    lens = [1, *rng.integers(2, 10, 6).tolist(), 0, int(rng.integers(2, 10))]
    old = [(-rng.exponential(1.0, n)).tolist() for n in lens]

    def near(scale: float) -> Rows:
        return [[x + scale * rng.normal() for x in row] for row in old]

    def free() -> Rows:
        return [rng.normal(size=n).tolist() for n in lens]

    batch: dict[str, Any] = {
        "group_index": [0, 0, 0, 0, 1, 2, 2, 2, 3],
        "lens": lens,
        "rewards": rng.normal(size=9).round(3).tolist(),
        "old": old, "new_wide": near(0.4), "new_narrow": near(2e-4), "ref": near(0.3), "rollout": near(0.3),
        "values": free(), "vpred": free(), "adv_tok": free(), "adv_seq": rng.normal(size=9).tolist(),
        "tool_mask": [[1] * n for n in lens], "behaviour_version": [[3] * n for n in lens],
    }  # fmt: skip
    longest = int(np.argmax(lens))
    batch["tool_mask"][longest][1 : max(lens) // 2] = [0] * (max(lens) // 2 - 1)
    return batch


def mean_over(mode: str, rows: Rows, constant: float = 1.0) -> float:
    """The aggregation of per-token losses; rows without a token do not count."""
    filled = [row for row in rows if row]
    if mode == "token-sum":
        return sum(map(sum, filled))
    if mode == "token-mean":
        return sum(map(sum, filled)) / sum(map(len, filled))
    if mode == "seq-mean-token-sum":
        return sum(map(sum, filled)) / len(filled)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in filled) / len(filled)
    return sum(map(sum, filled)) / (len(filled) * constant)


def clipped(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -dual * advantage) if dual is not None and advantage < 0 else loss


def per_token(batch: dict[str, Any], adv: str, function: Callable[..., float]) -> Callable[[Rows, Rows], Rows]:
    """`function(new, frozen, old, advantage, i, t)` of every token."""
    advantages = batch[adv] if isinstance(batch[adv][0], list) else spread(batch[adv], batch["lens"])

    def losses(new: Rows, frozen: Rows) -> Rows:
        return [
            [function(new[i][t], frozen[i][t], batch["old"][i][t], advantages[i][t], i, t) for t in range(len(row))]
            for i, row in enumerate(new)
        ]

    return losses


def spread(values: list[float], lens: list[int]) -> Rows:
    return [[value] * n for value, n in zip(values, lens, strict=True)]


def case_of(batch: dict[str, Any], new: str, adv: str, loss: Loss, peer: str, **fields: Any) -> dict[str, Any]:
    """Loss and gradient, by central differences."""
    rows, step = batch[new], 2e-7
    grad = []
    for i, row in enumerate(rows):
        grad.append([])
        for t in range(len(row)):
            ends = []
            for sign in (1, -1):
                moved = [list(r) for r in rows]
                moved[i][t] += sign * step
                ends.append(loss(moved, rows))
            grad[i].append((ends[0] - ends[1]) / (2 * step))
    return {"peer": peer, "loss": loss(rows, rows), "grad": grad, "new": new, "adv": adv, **fields}
