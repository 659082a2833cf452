"""Random ragged minibatches, and ranks simulated by threads that add up at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.inputs import LossInputs
from megatron_rl.types.training import Denominators

TOKEN_ARRAYS = ("policy", "old", "rollout", "ref", "entropy", "advantage", "mask", "version", "chosen")


@dataclass(frozen=True)
class RaggedBatch:
    """Rows of unequal length. `rows[i][name]` is an fp64 vector; `is_correct[i]` a flag."""

    rows: list[dict[str, np.ndarray]]
    is_correct: list[bool]

    @property
    def denominators(self) -> Denominators:
        counts = [int(row["mask"].sum()) for row in self.rows]
        return Denominators(
            num_tokens=sum(counts),
            num_sequences=sum(count > 0 for count in counts),
            num_positive_tokens=sum(count for count, correct in zip(counts, self.is_correct) if correct),
        )

    def inputs(self, row_indices: list[int], shard: np.ndarray | None = None, **changes: Any) -> LossInputs:
        """The rows packed in that order; `shard` keeps a part of the packed tokens (context parallelism)."""
        lengths = [len(self.rows[i]["mask"]) for i in row_indices]
        keep = np.arange(sum(lengths)) if shard is None else shard

        def pack(name: str) -> Tensor:
            whole = np.concatenate([self.rows[i][name] for i in row_indices] or [np.zeros(0)])
            return torch.from_numpy(whole[keep])

        fields: dict[str, Any] = {
            "policy_logprobs_T": pack("policy").requires_grad_(),
            "old_logprobs_T": pack("old"),
            "rollout_logprobs_T": pack("rollout"),
            "ref_logprobs_T": pack("ref"),
            "entropy_T": pack("entropy"),
            "advantages_T": pack("advantage"),
            "loss_mask_T": pack("mask").bool(),
            "segment_ids_T": torch.from_numpy(np.repeat(np.arange(len(row_indices)), lengths)[keep]),
            "num_segments": len(row_indices),
            "is_correct_S": torch.tensor([self.is_correct[i] for i in row_indices], dtype=torch.bool),
            "versions_T": pack("version").long(),
            "is_chosen_T": pack("chosen").bool(),
            "denominators": self.denominators,
        }
        return LossInputs(**{**fields, **changes})


def make_batch(seed: int, num_rows: int = 9, spread: float = 0.4) -> RaggedBatch:
    """Rows of 1 to 12 tokens, among them one of length 1, one fully masked, and gaps in the masks."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(num_rows):
        length = 1 if index == 0 else int(rng.integers(1, 13))
        old = -rng.exponential(1.0, length)
        mask = (rng.random(length) < 0.8).astype(float) if index > 1 else np.full(length, float(index == 0))
        rows.append(
            {
                "old": old,
                "policy": old + spread * rng.normal(size=length),
                "rollout": old + 0.3 * rng.normal(size=length),
                "ref": old + 0.5 * rng.normal(size=length),
                "entropy": rng.exponential(1.0, length),
                "advantage": np.full(length, rng.normal()),
                "mask": mask,
                "version": rng.integers(3, 6, length).astype(float),
                "chosen": (rng.random(length) < 0.2).astype(float),
            }
        )
    return RaggedBatch(rows, [bool(flag) for flag in rng.random(num_rows) < 0.5])


def run_on_ranks(num_ranks: int, work: Callable[[int, Callable[[Any], Any]], Any]) -> list[Any]:
    """`work(rank, add_up)` on one thread per rank; `add_up(local)` returns the sum over ranks: an all-reduce."""
    barrier = threading.Barrier(num_ranks, timeout=30.0)
    board: list[Any] = [None] * num_ranks

    def run(rank: int) -> Any:
        def add_up(local: Any) -> Any:
            board[rank] = local
            barrier.wait()
            total = sum(board[1:], board[0])
            barrier.wait()  # nobody writes the next call before everyone has read this one
            return total

        try:
            return work(rank, add_up)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


@pytest.fixture
def ragged() -> Callable[..., RaggedBatch]:
    return make_batch


@pytest.fixture
def on_ranks() -> Callable[..., list[Any]]:
    return run_on_ranks
