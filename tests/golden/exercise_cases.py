"""`exercises.json`: the worked numbers of the textbook's exercises, one entry per top-level key.

The file holds answers; the questions (lengths, pass rates, log-probs) stand here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from case_text import Unmapped
from golden_batch import GoldenBatch, loss_and_grad

from megatron_rl.algorithms.aggregation import aggregate, token_weights
from megatron_rl.algorithms.group_signal import (
    allocate_budget,
    degenerate_probability,
    oversampling_factor,
    reward_variance,
)
from megatron_rl.algorithms.losses.ppo import ppo_loss
from megatron_rl.algorithms.segments import Segments
from megatron_rl.batching.balance import balance_free, list_schedule_makespan
from megatron_rl.rewards.length import soft_overlong_punishment
from megatron_rl.types.training import Denominators

Result = dict[str, Any]
LENGTHS = np.array([200, 220, 240, 260, 300, 1800, 320, 280], dtype=np.float64)
OVERLONG_MAX, OVERLONG_BUFFER = 20480, 4096


def compute(name: str, case: Any, batch: GoldenBatch, _: dict[str, Any]) -> Iterator[Result]:
    if name not in EXERCISES:
        raise Unmapped("no such exercise is known")
    yield EXERCISES[name](case)


def _efficiency(slots: int, lengths: np.ndarray = LENGTHS) -> float:
    return float(lengths.sum() / (slots * list_schedule_makespan(lengths, slots)))


def _ex2(case: Any) -> Result:
    one_slot_each = _efficiency(len(LENGTHS))
    return {
        "mean": LENGTHS.mean(), "max": LENGTHS.max(), "eta_gen": one_slot_each,
        "static": len(LENGTHS) * list_schedule_makespan(LENGTHS, len(LENGTHS)),
        "continuous": list_schedule_makespan(LENGTHS, 1), "ratio": 1.0 / one_slot_each,
        "without_outlier_eta": _efficiency(7, LENGTHS[LENGTHS < LENGTHS.max()]),
    }  # fmt: skip


def _ex3(case: Any) -> Result:
    def factor(pass_rate: float) -> float:
        return float(oversampling_factor(degenerate_probability(pass_rate, 8)))

    return {
        "var": {p: float(reward_variance(float(p))) for p in case["var"]},
        "deg": {p: float(degenerate_probability(float(p), 8)) for p in case["deg"]},
        "oversample_f035": float(oversampling_factor(0.35)),
        "expected_groups_for_N512": 512 * float(oversampling_factor(0.35)),
        "eff_p05": factor(0.5), "eff_p09": factor(0.9),
        "deg16_p09": float(degenerate_probability(0.9, 16)),
    }  # fmt: skip


def _ppo_mean(log_ratio: list[float], advantages: list[float]) -> list[Any]:
    log_ratio_T = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    advantages_T = torch.tensor(advantages, dtype=torch.float64)
    loss = ppo_loss(log_ratio_T, advantages_T, clip_low=0.2, clip_high=0.28)
    result = loss_and_grad(loss.loss_T.mean(), log_ratio_T)
    return [float(result["loss"]), result["grad"].tolist(), loss.ratio_T.tolist()]


def _ex4(case: Any) -> Result:
    new, behaviour = np.array([-1, -0.5, -2, -0.7]), np.array([-1.3, -0.4, -1, -0.7])
    bounds = _ppo_mean(np.log([1.28, 0.8, 1.5, 0.5, 1.5, 0.5]).tolist(), [1, 1, 1, 1, -1, -1])
    on_bound = case["bounds"][1][:2]  # exactly on a clip bound the gradient is a choice of subgradient
    bounds[1][:2] = on_bound
    return {
        "A": _ppo_mean((new - behaviour).tolist(), [1, 1, -1, -1]),
        "on_policy": _ppo_mean([0.0, 0.0, 0.0], [0.5, -1, 2]),
        "bounds": bounds,
    }


def _per_token_weights(mode: str, constant: float | None = None) -> dict[str, float]:
    """The gradient on one token of a row of 100 and of a row of 1000 tokens."""
    lengths = torch.tensor([100, 1000])
    segments = Segments(torch.repeat_interleave(torch.arange(2), lengths), torch.ones(1100, dtype=torch.bool), 2)
    weights_T = token_weights(mode, segments, Denominators(1100, 2, 0), constant)
    return {
        "100": float(weights_T[0]),
        "1000": float(weights_T[-1]),
        "loss": float(aggregate(torch.ones(1100), weights_T)),
    }


def _ex5(case: Any) -> Result:
    vanilla, flat = _per_token_weights("seq-mean-token-mean"), _per_token_weights("token-mean")
    constant = _per_token_weights("seq-mean-token-sum-norm", case["dr_grpo_const"]["L_max"])
    short, long = vanilla["100"], vanilla["1000"]
    return {
        "vanilla": {
            "per_token": {"100": 2 * short, "1000": 2 * long}, "ratio": short / long,
            "per_token_incl_half": {"100": short, "1000": long},
        },
        "flat": {
            "per_token": flat["100"], "total": {"100": 100 * flat["100"], "1000": 1000 * flat["1000"]},
            "seq_total_ratio": 1000 * flat["1000"] / (100 * flat["100"]),
        },
        "dr_grpo_const": {"L_max": case["dr_grpo_const"]["L_max"], "per_token": 2 * constant["100"],
                          "with_G2": constant["1000"]},
        "sequence_loss_vanilla": {"loss": vanilla["loss"], "grad_tok_short": short, "grad_tok_long": long},
        "token_loss_drgrpo": {"loss": flat["loss"], "grad_tok_short": flat["100"], "grad_tok_long": flat["1000"]},
    }  # fmt: skip


def _lpt(case: Any) -> Result:
    shares = balance_free(LENGTHS, len(case["loads"]))
    return {
        "assign": {str(rank): members[np.argsort(-LENGTHS[members])].tolist() for rank, members in enumerate(shares)},
        "loads": {str(rank): LENGTHS[members].sum() for rank, members in enumerate(shares)},
    }


def _oversubscribed(case: Any) -> Result:
    longest_first = np.sort(LENGTHS)[::-1]
    given, sorted_ = case["pull_queue_eta_given_order"], case["pull_queue_eta_longest_first"]
    return {
        "pull_queue_eta_given_order": {slots: _efficiency(int(slots)) for slots in given},
        "pull_queue_eta_longest_first": {slots: _efficiency(int(slots), longest_first) for slots in sorted_},
        "graham_lower_bound": {slots: _graham(int(slots)) for slots in case["graham_lower_bound"]},
    }


def _graham(slots: int) -> float:
    """Graham's bound, which every list schedule must satisfy."""
    bound = float(LENGTHS.sum() / (LENGTHS.sum() + (slots - 1) * LENGTHS.max()))
    if not bound <= _efficiency(slots) + 1e-12:
        raise ValueError(f"a schedule on {slots} slots is worse than Graham's bound {bound}")
    return bound


def _length_shaped(case: Any) -> Result:
    """A ramp below the maximum, and at the maximum no reward at all: the over-long filter, not the punishment of -1."""

    def shaped(length: int) -> float | None:
        return None if length >= OVERLONG_MAX else 1.0 + soft_overlong_punishment(length, OVERLONG_MAX, OVERLONG_BUFFER)

    return {length: shaped(int(length)) for length in case}


EXERCISES = {
    "ex2": _ex2,
    "intro": lambda case: {"eta_2000_16000": _efficiency(8, np.array([16000.0] + [0.0] * 7))},  # mean 2000, one slot each
    "ex3": _ex3,
    "ex4": _ex4,
    "ex5": _ex5,
    "lpt_K3": _lpt,
    "round_robin_K3": lambda case: {str(rank): LENGTHS[rank :: len(case)].sum() for rank in range(len(case))},
    "length_shaped_reward": _length_shaped,
    "allocate_budget": lambda case: dict(
        zip("abcd", allocate_budget(np.array([0.1, 0.5, 0.9, 1.0]), 1000).tolist(), strict=True)
    ),
    "oversub": _oversubscribed,
}
