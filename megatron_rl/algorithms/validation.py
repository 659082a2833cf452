"""Which choices contradict each other. Only rejects; each message names the key and what to write instead."""

from __future__ import annotations

from megatron_rl.algorithms.aggregation import MODES
from megatron_rl.algorithms.registry import ADVANTAGES, LOSSES
from megatron_rl.config.sections import AlgorithmSection

AGGREGATION_OF_LOSS = {"gspo": "seq-mean-token-mean", "gmpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean"}
"""Losses whose definition fixes the aggregation. gspo_token leaves it free."""

AGGREGATION_OF_NAME = {"dapo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm", "vapo": "token-mean"}
"""Algorithms that are told apart by their aggregation."""

UNBOUNDED_BELOW = ("cispo", "aipo", "gmpo", "dppo_kl")
"""Losses for which clip_low above 1 has a meaning."""


def check_section(section: AlgorithmSection) -> None:
    """Raises ValueError on the first contradiction."""
    for key, value, known in (
        ("loss", section.loss, tuple(LOSSES)),
        ("advantage", section.advantage, (*ADVANTAGES, "gae")),
        ("aggregation", section.aggregation, MODES),
    ):
        _require(value in known, f"algorithm.{key}={value!r} is not known: write one of {', '.join(known)}")
    _check_aggregation(section)
    _check_clips(section)
    _check_advantage(section)
    _check_combinations(section)


def _check_aggregation(section: AlgorithmSection) -> None:
    mode = section.aggregation
    for key, table, choice in (
        ("loss", AGGREGATION_OF_LOSS, section.loss),
        ("name", AGGREGATION_OF_NAME, section.name),
    ):
        fixed = table.get(choice, mode)
        _require(mode == fixed, f"algorithm.aggregation={mode} contradicts algorithm.{key}={choice}: write {fixed}")
    constant = section.aggregation_constant
    if mode == "seq-mean-token-sum-norm":
        _require(
            constant is not None and constant > 0,
            f"algorithm.aggregation={mode} needs algorithm.aggregation_constant > 0: "
            "write rollout.sampling.max_new_tokens",
        )
    else:
        _require(constant is None, f"algorithm.aggregation_constant has no meaning with {mode}: write null")


def _check_clips(section: AlgorithmSection) -> None:
    low, high, dual = section.clip_low, section.clip_high, section.dual_clip
    _require(low >= 0, f"algorithm.clip_low={low} is negative: write the distance below 1, such as 0.2")
    _require(high >= 0, f"algorithm.clip_high={high} is negative: write the distance above 1, such as 0.28")
    _require(
        low <= 1 or section.loss in UNBOUNDED_BELOW,
        f"algorithm.clip_low={low} lets the ratio go below 0: write a value in [0, 1], such as 0.2",
    )
    _require(dual is None or dual > 1, f"algorithm.dual_clip={dual} must exceed 1: write 3.0, or null for off")
    _require(
        dual is None or section.loss in ("ppo", "gspo", "gspo_token"),
        f"algorithm.dual_clip has no meaning with algorithm.loss={section.loss}: write null",
    )


def _check_advantage(section: AlgorithmSection) -> None:
    for key, value in (
        ("gamma", section.gamma),
        ("lambda_actor", section.lambda_actor),
        ("lambda_critic", section.lambda_critic),
    ):
        _require(0 <= value <= 1, f"algorithm.{key}={value} is outside [0, 1]: write a value inside, such as 1.0")
    alpha = section.lambda_alpha
    _require(alpha is None or alpha > 0, f"algorithm.lambda_alpha={alpha} must be above 0: write 0.05, or null for off")
    _require(section.advantage_ddof in (0, 1), f"algorithm.advantage_ddof={section.advantage_ddof}: write 0 or 1")
    _require(section.advantage_epsilon >= 0, f"algorithm.advantage_epsilon={section.advantage_epsilon}: write 1e-6")
    is_discounted_group = section.gamma != 1 and section.advantage not in ("gae", "reinforce_pp")
    _require(
        not is_discounted_group,
        f"algorithm.gamma has no meaning with algorithm.advantage={section.advantage}: write 1.0",
    )


def _check_combinations(section: AlgorithmSection) -> None:
    low, high = section.correction.low, section.correction.high
    _require(
        low is None or high is None or low < high,
        f"algorithm.correction.low={low} is not below algorithm.correction.high={high}: swap them",
    )
    _require(
        section.loss != "aipo" or section.correction.kind in ("none", "opsm"),
        "algorithm.loss=aipo already weights by policy/rollout, "
        f"algorithm.correction.kind={section.correction.kind} would count it twice: write none",
    )
    _require(
        section.kl.coefficient >= 0, f"algorithm.kl.coefficient={section.kl.coefficient} is negative: write 0 or more"
    )
    is_kl_in_reward = section.kl.coefficient != 0 and section.kl.placement == "reward"
    _require(
        not is_kl_in_reward or section.advantage in ("gae", "reinforce_pp"),
        "algorithm.kl.placement=reward needs per-token advantages (gae, reinforce_pp), "
        f"not {section.advantage}: write loss",
    )
    _require(
        not is_kl_in_reward or section.kl.estimator != "unbiased",
        "algorithm.kl.estimator=unbiased is a form for the loss: write k1 with placement=reward",
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
