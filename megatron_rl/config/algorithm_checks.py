"""Choices of an objective that contradict each other. Sources of the rules: the papers named in docs/algorithms.md."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.provenance import Problem
from megatron_rl.config.sections import AlgorithmSection

GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
"""Advantages that compare the samples of one prompt: a single sample has none."""

TOKEN_ADVANTAGES = ("gae", "reinforce_pp")
"""Advantages made per token: only they can take a discount and a KL penalty in the reward."""

AGGREGATION_OF_LOSS = {"gspo": "seq-mean-token-mean", "gmpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean"}
"""Losses whose definition fixes the aggregation; gspo_token leaves it free."""

AGGREGATION_OF_NAME = {"dapo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm", "vapo": "token-mean"}
"""Algorithms that are told apart by their aggregation."""

CLIP_LOW_ABOVE_ONE = ("cispo", "aipo", "gmpo", "dppo_kl")
"""Losses for which clip_low above 1 has a meaning; elsewhere it would let the ratio go below 0."""

DUAL_CLIP_LOSSES = ("ppo", "gspo", "gspo_token")


def check_algorithm(algorithm: AlgorithmSection, samples_per_prompt: int) -> Iterator[Problem]:
    """Every contradiction of an objective; `samples_per_prompt` is the group size."""
    yield from _check_aggregation(algorithm)
    yield from _check_advantage(algorithm, samples_per_prompt)
    yield from _check_loss(algorithm)
    yield from _check_kl(algorithm)


def _check_aggregation(algorithm: AlgorithmSection) -> Iterator[Problem]:
    mode = algorithm.aggregation
    for key, fixed in (
        (f"loss {algorithm.loss}", AGGREGATION_OF_LOSS.get(algorithm.loss, mode)),
        (f"name {algorithm.name}", AGGREGATION_OF_NAME.get(algorithm.name, mode)),
    ):
        if mode != fixed:
            yield "algorithm.aggregation", f"contradicts {key}: expected {fixed}, got {mode}"
    if algorithm.aggregation_constant is not None and mode != "seq-mean-token-sum-norm":
        reason = f"belongs to aggregation seq-mean-token-sum-norm, not {mode}; expected null"
        yield "algorithm.aggregation_constant", reason


def _check_advantage(algorithm: AlgorithmSection, samples_per_prompt: int) -> Iterator[Problem]:
    if algorithm.advantage in GROUP_ADVANTAGES and samples_per_prompt < 2:
        reason = f"advantage {algorithm.advantage} compares the samples of one prompt; expected at least 2, got 1"
        yield "run.samples_per_prompt", reason
    if algorithm.gamma != 1 and algorithm.advantage not in TOKEN_ADVANTAGES:
        reason = f"advantage {algorithm.advantage} has no discount; expected 1.0, got {algorithm.gamma:g}"
        yield "algorithm.gamma", reason


def _check_loss(algorithm: AlgorithmSection) -> Iterator[Problem]:
    loss, correction = algorithm.loss, algorithm.correction
    if algorithm.clip_low > 1 and loss not in CLIP_LOW_ABOVE_ONE:
        reason = f"expected at most 1 (the ratio cannot go below 0), got {algorithm.clip_low:g}"
        yield "algorithm.clip_low", reason
    if algorithm.dual_clip is not None and loss not in DUAL_CLIP_LOSSES:
        yield "algorithm.dual_clip", f"loss {loss} has no dual clip; expected null, got {algorithm.dual_clip:g}"
    low, high = correction.low, correction.high
    if correction.kind == "none" and (low is not None or high is not None):
        yield "algorithm.correction.kind", "none takes no bounds; name a correction or remove low and high"
    if low is not None and high is not None and low >= high:
        yield "algorithm.correction.low", f"expected a value below high {high:g}, got {low:g}"
    if loss == "aipo" and correction.kind not in ("none", "opsm"):
        reason = f"loss aipo weighs by policy/rollout already; expected none, got {correction.kind}"
        yield "algorithm.correction.kind", reason


def _check_kl(algorithm: AlgorithmSection) -> Iterator[Problem]:
    kl = algorithm.kl
    if not kl.coefficient:
        return
    if kl.placement == "loss" and kl.estimator == "k1":
        yield "algorithm.kl.estimator", "k1 in the loss has a gradient of mean zero; expected k2, k3 or unbiased"
    if kl.placement == "reward" and kl.estimator == "unbiased":
        yield "algorithm.kl.estimator", "unbiased is a form for the loss; in the reward expected k1"
    if kl.placement == "reward" and algorithm.advantage not in TOKEN_ADVANTAGES:
        reason = f"reward needs an advantage per token ({', '.join(TOKEN_ADVANTAGES)}), not {algorithm.advantage}"
        yield "algorithm.kl.placement", f"{reason}; expected loss"
