"""Groups of samples with one prompt: what they cost together, and how they are cut into pieces that stay together.

With C(n) the cost of n tokens computed from the start, m samples of lengths L_i that share a prompt of P tokens cost
sum C(L_i) - (m - 1) C(P), whether C is linear or quadratic: the answers attend to the prompt either way.

Shape suffixes: _S samples of a minibatch, _U units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.batching.balance import balance_free, compute_costs
from megatron_rl.types.training import TrainSample

AUTO_MIN_PROMPT_TOKENS = 32
"""Prompts from this length on are shared by themselves; not tuned, `tests/benchmarks/shared_prompts.py` measures both sides."""


@dataclass(frozen=True, slots=True)
class Units:
    """What is balanced and packed as a whole: the positions of its samples, its tokens and its cost."""

    members: list[np.ndarray]
    lengths_U: np.ndarray
    costs_U: np.ndarray


def shared_lengths(samples: Sequence[TrainSample], min_prompt_tokens: int | None) -> np.ndarray:
    """The tokens [S] that each sample can share with the others of its group; 0 below the minimum; None: never."""
    lengths_S = np.array([sample.num_prompt_tokens for sample in samples], dtype=np.int64)
    if min_prompt_tokens is None:
        return np.zeros_like(lengths_S)
    return np.where(lengths_S >= min_prompt_tokens, lengths_S, 0)


def order_by_group(samples: Sequence[TrainSample], order: np.ndarray) -> np.ndarray:
    """`order` with the samples of a group moved to where its first one stands."""
    first_place: dict[str, int] = {}
    keys = [first_place.setdefault(samples[index].group_id, place) for place, index in enumerate(order.tolist())]
    return order[np.argsort(keys, kind="stable")]


def share_units(
    samples: Sequence[TrainSample],
    lengths_S: np.ndarray,
    shared_S: np.ndarray,
    *,
    num_ranks: int,
    budget: int,
    attention_crossover: float,
) -> tuple[Units, list[np.ndarray]]:
    """Cut groups into units of at most `budget` tokens and spread them over the ranks: (units, unit numbers per rank).

    Whole groups compute their prompt once, pieces balance better: of 1, 2, 3, ... pieces per group, the first number
    whose makespan is within 1 % of an even spread of whole groups is taken, else that with the smallest makespan.
    """
    groups: dict[str, list[int]] = {}
    for position, sample in enumerate(samples):
        groups.setdefault(sample.group_id if shared_S[position] else f"{position}/{sample.sample_id}", []).append(position)
    best: tuple[Units, list[np.ndarray]] | None = None
    lowest = even = np.inf
    for num_pieces in range(1, max(len(members) for members in groups.values()) + 1):
        members = [
            piece
            for group in groups.values()
            for part in np.array_split(np.array(group), min(num_pieces, len(group)))
            for piece in _cut_to_budget(part, lengths_S, shared_S, budget)
        ]
        units = _measure(members, lengths_S, shared_S, attention_crossover)
        shares = balance_free(units.costs_U, num_ranks)
        makespan = max(float(units.costs_U[share].sum()) for share in shares)
        even = min(even, float(units.costs_U.sum()) / num_ranks)
        if makespan < lowest:
            best, lowest = (units, shares), makespan
        if lowest <= 1.01 * even:
            break
    assert best is not None
    return best


def _measure(members: list[np.ndarray], lengths_S: np.ndarray, shared_S: np.ndarray, attention_crossover: float) -> Units:
    costs_S, shared_costs_S = (compute_costs(lengths, attention_crossover) for lengths in (lengths_S, shared_S))
    return Units(
        members,
        np.array([_together(lengths_S[unit], shared_S[unit]) for unit in members], dtype=np.int64),
        np.array([_together(costs_S[unit], shared_costs_S[unit]) for unit in members]),
    )


def _together(whole_S: np.ndarray, shared_S: np.ndarray) -> float:
    return whole_S.sum() - (len(whole_S) - 1) * shared_S[0]


def _cut_to_budget(members: np.ndarray, lengths_S: np.ndarray, shared_S: np.ndarray, budget: int) -> list[np.ndarray]:
    """The members in order, cut as often as the budget demands."""
    cuts, used = [], 0
    for number, position in enumerate(members.tolist()):
        own = int(lengths_S[position] - shared_S[position])
        if used and used + own > budget:
            cuts.append(number)
            used = 0
        used += own if used else int(lengths_S[position])
    return np.split(members, cuts)
