"""Choices of an objective that contradict each other. Sources of the rules: the papers named in docs/algorithms.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_rl.config.algorithm_sections import AlgorithmSection, CorrectionSection
from megatron_rl.config.provenance import Problem

GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "leave_one_out", "opo", "reinforce_pp_baseline")
"""Advantages that compare the samples of one prompt: a single sample has none."""

WHITENED_ADVANTAGES = ("gae", "reinforce_pp", "reinforce_pp_baseline")

TOKEN_ADVANTAGES = ("gae", "reinforce_pp")
"""Advantages made per token: only they can take a discount and a KL penalty in the reward."""

AGGREGATION_OF_LOSS = {"gspo": "seq-mean-token-mean", "gmpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean"}
"""Losses whose definition fixes the aggregation; gspo_token leaves it free."""

AGGREGATION_OF_NAME = {"dapo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm", "vapo": "token-mean"}
"""Algorithms that are told apart by their aggregation."""

CLIP_LOW_ABOVE_ONE = ("cispo", "aipo", "gmpo", "dppo_kl")
"""Losses for which clip_low above 1 has a meaning; elsewhere it would let the ratio go below 0."""

DUAL_CLIP_LOSSES = ("ppo", "gspo", "gspo_token")

COVARIANCE_LOSSES = ("clip_cov", "kl_cov")
"""Losses that treat chosen tokens of the minibatch apart."""

READERS: Mapping[str, tuple[str, ...]] = {
    "tau_positive": ("sapo",),
    "tau_negative": ("sapo",),
    "max_ratio": ("dppo_tv", "dppo_kl"),
    "covariance": COVARIANCE_LOSSES,
    "vespo": ("vespo",),
}
"""Keys that some losses alone read: a value given to another loss would silently do nothing."""

REJECTING = ("icepop", "sequence_mask", "geometric_mask", "binary_kl_mask", "tv_mask")
"""Corrections that give some tokens the weight 0, by log-probs that stand before the first optimizer step."""

UPPER_BOUND_ONLY = ("opsm", "binary_kl_mask", "tv_mask")
"""Corrections by a distance, which has no lower bound."""


def check_algorithm(algorithm: AlgorithmSection, samples_per_prompt: int) -> Iterator[Problem]:
    """Every contradiction of an objective; `samples_per_prompt` is the group size."""
    yield from _check_aggregation(algorithm)
    yield from _check_advantage(algorithm, samples_per_prompt)
    yield from _check_loss(algorithm)
    yield from _check_kl(algorithm)
    yield from _check_reference(algorithm)
    yield from _check_shaping(algorithm)
    yield from _check_replay(algorithm)


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
    is_compared = algorithm.advantage in GROUP_ADVANTAGES and algorithm.loss != "none"
    if is_compared and samples_per_prompt < 2 and algorithm.advantage_of_one == "zero":
        reason = f"advantage {algorithm.advantage} compares the samples of one prompt; expected at least 2, got 1"
        yield "run.samples_per_prompt", reason
    if algorithm.gamma != 1 and algorithm.advantage not in TOKEN_ADVANTAGES:
        reason = f"advantage {algorithm.advantage} has no discount; expected 1.0, got {algorithm.gamma:g}"
        yield "algorithm.gamma", reason
    if not algorithm.whiten_advantages and algorithm.advantage not in WHITENED_ADVANTAGES:
        yield "algorithm.whiten_advantages", f"advantage {algorithm.advantage} is not whitened; remove it"


def _check_loss(algorithm: AlgorithmSection) -> Iterator[Problem]:
    loss, correction = algorithm.loss, algorithm.correction
    if algorithm.clip_low > 1 and loss not in CLIP_LOW_ABOVE_ONE:
        reason = f"expected at most 1 (the ratio cannot go below 0), got {algorithm.clip_low:g}"
        yield "algorithm.clip_low", reason
    if algorithm.dual_clip is not None and loss not in DUAL_CLIP_LOSSES:
        yield "algorithm.dual_clip", f"loss {loss} has no dual clip; expected null, got {algorithm.dual_clip:g}"
    default = AlgorithmSection()
    for key, readers in READERS.items():
        if loss not in readers and getattr(algorithm, key) != getattr(default, key):
            reason = f"only loss {' and '.join(readers)} reads it, not {loss}; remove it or choose that loss"
            yield f"algorithm.{key}", reason
    if loss in COVARIANCE_LOSSES and makes_token_advantages(algorithm):
        reason = f"loss {loss} chooses its tokens before advantages per token are made; expected one per answer, such as grpo"
        yield "algorithm.advantage", reason
    if loss in COVARIANCE_LOSSES and algorithm.covariance.low >= algorithm.covariance.high:
        reason = f"expected a value below high {algorithm.covariance.high:g}, got {algorithm.covariance.low:g}"
        yield "algorithm.covariance.low", reason
    low, high = correction.low, correction.high
    if low is not None and correction.kind in UPPER_BOUND_ONLY:
        yield "algorithm.correction.low", f"{correction.kind} has an upper bound only; expected null, got {low:g}"
    if correction.kind == "none" and (low is not None or high is not None):
        yield "algorithm.correction.kind", "none takes no bounds; name a correction or remove low and high"
    if low is not None and high is not None and low >= high:
        yield "algorithm.correction.low", f"expected a value below high {high:g}, got {low:g}"
    yield from _check_denominator(correction)
    if loss == "aipo" and correction.kind not in ("none", "opsm"):
        reason = f"loss aipo weighs by policy/rollout already; expected none, got {correction.kind}"
        yield "algorithm.correction.kind", reason


def _check_denominator(correction: CorrectionSection) -> Iterator[Problem]:
    key, kind = "algorithm.correction.denominator", correction.kind
    if correction.denominator == "original":
        return
    if kind == "opsm":
        yield key, "opsm rejects anew at every optimizer step, when the denominator stands already; expected original"
    elif kind not in REJECTING and correction.max_version_age is None:
        reason = f"correction {kind} rejects nothing; expected original, or one of {', '.join(REJECTING)}"
        yield key, reason


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


def makes_token_advantages(algorithm: AlgorithmSection) -> bool:
    """Whether advantages are made on the trainer ranks, after everything else is annotated."""
    in_reward = algorithm.kl.coefficient != 0 and algorithm.kl.placement == "reward"
    return algorithm.advantage == "gae" or algorithm.gamma != 1 or in_reward


def _check_reference(algorithm: AlgorithmSection) -> Iterator[Problem]:
    reference, kl = algorithm.reference, algorithm.kl
    if not kl.coefficient:
        for key in ("path", "refresh_interval", "layout"):
            if getattr(reference, key) is not None:
                reason = "nothing reads the reference with algorithm.kl.coefficient 0; set that, or expected null"
                yield f"algorithm.reference.{key}", reason
    elif reference.path is not None and reference.refresh_interval is not None:
        reason = f"a teacher is not replaced by the policy; expected null with reference.path, got {reference.refresh_interval}"
        yield "algorithm.reference.refresh_interval", reason
    if reference.layout is not None and reference.storage == "cpu":
        yield "algorithm.reference.storage", "with ranks of its own the reference has no copy elsewhere; expected device"
    if algorithm.loss != "none":
        return
    if not kl.coefficient or kl.placement != "loss":
        reason = "loss none learns from the KL to the reference alone; expected above 0, with kl.placement loss"
        yield "algorithm.kl.coefficient", reason
    if algorithm.skip_zero_variance_groups:
        reason = "loss none compares no samples, every group teaches; expected false"
        yield "algorithm.skip_zero_variance_groups", reason


def _check_shaping(algorithm: AlgorithmSection) -> Iterator[Problem]:
    punishment = algorithm.overlong_punishment
    if punishment.buffer_tokens is None:
        return
    if punishment.buffer_tokens < 1:
        reason = f"a ramp needs a width; expected at least 1 token, or null for none, got {punishment.buffer_tokens}"
        yield "algorithm.overlong_punishment.buffer_tokens", reason
    elif punishment.max_tokens is not None and punishment.buffer_tokens > punishment.max_tokens:
        reason = f"expected at most max_tokens {punishment.max_tokens}, got {punishment.buffer_tokens}"
        yield "algorithm.overlong_punishment.buffer_tokens", reason


def check_overlong_fits(algorithm: AlgorithmSection, max_new_tokens: int) -> Iterator[Problem]:
    """Answers can reach the whole ramp, and nothing beyond it."""
    punishment = algorithm.overlong_punishment
    if punishment.buffer_tokens is None:
        return
    if punishment.max_tokens is None and punishment.buffer_tokens > max_new_tokens:
        reason = f"expected at most rollout.sampling.max_new_tokens {max_new_tokens}, got {punishment.buffer_tokens}"
        yield "algorithm.overlong_punishment.buffer_tokens", reason
    if punishment.max_tokens is not None and punishment.max_tokens - punishment.buffer_tokens >= max_new_tokens:
        reason = f"no answer of rollout.sampling.max_new_tokens {max_new_tokens} reaches the ramp; leave it out"
        yield "algorithm.overlong_punishment.max_tokens", reason


def _check_replay(algorithm: AlgorithmSection) -> Iterator[Problem]:
    if not algorithm.replay.num_groups:
        return
    if makes_token_advantages(algorithm):
        reason = f"the draw's weight multiplies advantages per answer, {algorithm.advantage} makes them per token; expected 0"
        yield "algorithm.replay.num_groups", reason
    if algorithm.loss != "aipo" and algorithm.correction.kind in ("none", "opsm"):
        reason = "replayed answers were sampled by older weights; expected a correction by old/rollout such as tis"
        yield "algorithm.correction.kind", reason
