"""An algorithm: how rewards become advantages and packed log-probs become a loss, composed from the section's choices.

Shape suffixes: _T packed tokens, _S sequences, G samples of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.aggregation import aggregate, token_weights
from megatron_rl.algorithms.corrections import correction_weights, staleness_mask
from megatron_rl.algorithms.inputs import LossInputs, LossOutput, prepare
from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.algorithms.losses.positive_nll import positive_nll
from megatron_rl.algorithms.ratios import log_ratio
from megatron_rl.algorithms.registry import ADVANTAGES, LOSSES
from megatron_rl.algorithms.segments import Segments
from megatron_rl.config.algorithm_checks import COVARIANCE_LOSSES, check_algorithm
from megatron_rl.config.algorithm_sections import AlgorithmSection, CorrectionSection


@dataclass(frozen=True, slots=True)
class Algorithm:
    """`needs` names what the trainer annotates before the first optimizer step: old_logprobs, ref_logprobs, values, chosen,
    routing (the experts that the old pass chose), remaining (the loss mask without rejected tokens)."""

    section: AlgorithmSection
    name: str
    needs: frozenset[str]

    @property
    def has_token_advantages(self) -> bool:
        """Whether advantages are made per token on the trainer ranks (GAE, discounting, KL in the reward)."""
        section = self.section
        is_discounted = section.advantage == "reinforce_pp" and section.gamma != 1.0
        return section.advantage == "gae" or is_discounted or self.has_kl_in_reward

    @property
    def has_kl_in_reward(self) -> bool:
        return self.section.kl.coefficient != 0 and self.section.kl.placement == "reward"

    def group_advantages(
        self, rewards_by_group: Sequence[Sequence[float]], num_tokens_by_group: Sequence[Sequence[int]] | None = None
    ) -> list[np.ndarray]:
        """One fp64 array [G] per group, for all groups of the training step at once (some baselines whiten over them).

        `num_tokens_by_group` are trained tokens per trajectory, needed by the reinforce_pp advantages, whose whitening
        counts tokens. All zeros when `has_token_advantages`. Raises ValueError on a reward that is not finite.
        """
        rewards = [np.asarray(rewards_G, dtype=np.float64) for rewards_G in rewards_by_group]
        for group, rewards_G in enumerate(rewards):
            if not np.isfinite(rewards_G).all():
                raise ValueError(f"group {group} has the rewards {rewards_G.tolist()}: expected finite numbers")
        if self.has_token_advantages:
            return [np.zeros_like(rewards_G) for rewards_G in rewards]
        counts = None
        if num_tokens_by_group is not None:
            counts = [np.asarray(counts_G, dtype=np.int64) for counts_G in num_tokens_by_group]
        return ADVANTAGES[self.section.advantage](rewards, counts, self.section)

    def remaining(self, inputs: LossInputs) -> Tensor:
        """The trained tokens that the correction does not reject. bool [T]."""
        inputs = prepare(inputs)
        weights_T = _correction(inputs, inputs.build_segments(), self.section.correction)
        return inputs.loss_mask_T & (weights_T != 0)

    def loss(self, inputs: LossInputs) -> LossOutput:
        """The microbatch's share of the minibatch loss (see `LossOutput`).

        Raises TypeError for 16-bit log-probs, ValueError for NaN on a trained token, disagreeing shapes or a missing
        input that the section asks for.
        """
        section = self.section
        inputs = prepare(inputs)
        segments = inputs.build_segments()
        weights_T = token_weights(
            section.aggregation,
            segments,
            inputs.denominators,
            section.aggregation_constant,
            inputs.policy_logprobs_T.dtype,
        )
        token_loss = LOSSES[section.loss](inputs, segments, section)
        correction_T = _correction(inputs, segments, section.correction)
        policy_loss = aggregate(token_loss.loss_T * correction_T, weights_T)
        metrics = _token_metrics(inputs, token_loss.ratio_T, token_loss.is_clipped_T, correction_T)
        share = inputs.loss_mask_T.sum(dtype=torch.float64) / max(inputs.denominators.num_tokens, 1)
        metrics["loss/policy"] = (policy_loss.detach(), share)
        loss = policy_loss

        if section.kl.coefficient != 0 and section.kl.placement == "loss":
            if inputs.ref_logprobs_T is None:
                raise ValueError("algorithm.kl.coefficient is not 0, but no reference log-probs were annotated")
            log_ratio_T = log_ratio(inputs.policy_logprobs_T, inputs.old_logprobs_T)
            kl_T = kl_estimate(section.kl.estimator, inputs.policy_logprobs_T, inputs.ref_logprobs_T, log_ratio_T)
            loss = loss + section.kl.coefficient * aggregate(kl_T, weights_T)
        if section.entropy_coefficient != 0:
            if inputs.entropy_T is None:
                raise ValueError("algorithm.entropy_coefficient is not 0, but no entropy was computed")
            loss = loss - section.entropy_coefficient * aggregate(inputs.entropy_T, weights_T)
        if section.positive_nll_coefficient != 0:
            nll = positive_nll(inputs.policy_logprobs_T, inputs.is_correct_S, segments, inputs.denominators)
            metrics["loss/positive_nll"] = (nll.detach(), share)
            loss = loss + section.positive_nll_coefficient * nll
        metrics["loss/total"] = (loss.detach(), share)
        metrics["loss/masked_sequence_fraction"] = _masked_sequences(segments)
        return LossOutput(loss, metrics)


def build_algorithm(section: AlgorithmSection) -> Algorithm:
    """Compose the section's choices.

    The rules about which of them contradict each other are `config.algorithm_checks`, which a loaded configuration has
    already passed; a section made in code is held to them here. Raises ValueError with the key and what was expected.
    """
    for key, reason in check_algorithm(section, samples_per_prompt=2):  # the group size is the loader's to check
        raise ValueError(f"{key}: {reason}")
    needs = {"old_logprobs"}
    if section.loss in ("aipo", "reinforce", "none") and section.correction.kind in ("none", "opsm"):
        needs.discard("old_logprobs")
    if section.kl.coefficient != 0:
        needs.add("ref_logprobs")
        if section.kl.estimator == "unbiased" or section.kl.placement == "reward":
            needs.add("old_logprobs")
    if section.advantage == "gae":
        needs.add("values")
    if section.loss in COVARIANCE_LOSSES:
        needs.add("chosen")
    if section.correction.denominator == "remaining":
        needs |= {"old_logprobs", "remaining"}
    if section.router_replay == "r2":
        needs |= {"old_logprobs", "routing"}
    return Algorithm(section=section, name=section.name, needs=frozenset(needs))


def _correction(inputs: LossInputs, segments: Segments, section: CorrectionSection) -> Tensor:
    """The detached weight on each token's policy loss; tokens that are too old get 0."""
    weights_T = correction_weights(
        section.kind,
        policy_logprobs_T=inputs.policy_logprobs_T,
        old_logprobs_T=inputs.old_logprobs_T,
        rollout_logprobs_T=inputs.rollout_logprobs_T,
        advantages_T=inputs.advantages_T,
        segments=segments,
        low=section.low,
        high=section.high,
    )
    if section.max_version_age is None:
        return weights_T
    if inputs.policy_version is None:
        raise ValueError("algorithm.correction.max_version_age is set, but the loss was not told the version it trains")
    return weights_T * staleness_mask(inputs.versions_T, inputs.policy_version, section.max_version_age)


def _token_metrics(
    inputs: LossInputs, ratio_T: Tensor, is_clipped_T: Tensor, correction_T: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Means over trained tokens, as (sum, number of tokens)."""
    policy_T = inputs.policy_logprobs_T.detach()
    gap_T = log_ratio(policy_T, inputs.rollout_logprobs_T)
    per_token: dict[str, Tensor] = {
        "loss/ratio_mean": ratio_T,
        "loss/clip_fraction": is_clipped_T.to(policy_T.dtype),
        "loss/kl_to_rollout": torch.exp(gap_T) - 1.0 - gap_T,  # k3 of KL(mu, pi): the tokens were sampled from mu
        "loss/correction_mean": correction_T,
        "rollout/logprob_gap": (inputs.old_logprobs_T.detach() - inputs.rollout_logprobs_T).abs(),
        "loss/correction_zero_fraction": (correction_T == 0).to(policy_T.dtype),
    }
    if inputs.entropy_T is not None:
        per_token["loss/entropy"] = inputs.entropy_T.detach()
    if inputs.ref_logprobs_T is not None:
        per_token["loss/kl_to_ref"] = kl_estimate("k3", policy_T, inputs.ref_logprobs_T)
    mask_T = inputs.loss_mask_T
    num_tokens = mask_T.sum()
    return {name: (torch.where(mask_T, value_T, 0.0).sum(), num_tokens) for name, value_T in per_token.items()}


def _masked_sequences(segments: Segments) -> tuple[Tensor, Tensor]:
    """Sequences without a trained token against all; 1.0 warns that a whole batch trains nothing."""
    num_masked = (segments.counts_S == 0).sum()
    return num_masked, torch.full_like(num_masked, segments.num)
