"""The tables of what a section may name: advantages and losses, each adapted to one signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.advantages.group import (
    dr_grpo_advantages,
    grpo_advantages,
    leave_one_out_advantages,
    opo_advantages,
    rloo_advantages,
    whiten_by_tokens,
)
from megatron_rl.algorithms.inputs import LossInputs
from megatron_rl.algorithms.losses.cispo import aipo_loss, cispo_loss, reinforce_loss
from megatron_rl.algorithms.losses.covariance import clip_cov_loss, kl_cov_loss
from megatron_rl.algorithms.losses.dppo import dppo_loss
from megatron_rl.algorithms.losses.gmpo import gmpo_loss
from megatron_rl.algorithms.losses.gspo import gspo_loss, gspo_token_loss
from megatron_rl.algorithms.losses.ppo import ppo_loss
from megatron_rl.algorithms.losses.soft import sapo_loss, vespo_loss
from megatron_rl.algorithms.losses.token_loss import TokenLoss
from megatron_rl.algorithms.ratios import log_ratio
from megatron_rl.algorithms.segments import Segments
from megatron_rl.config.algorithm_sections import AlgorithmSection

Groups = Sequence[np.ndarray]
AdvantageEstimator = Callable[[Groups, Groups | None, AlgorithmSection], list[np.ndarray]]
PolicyLoss = Callable[[LossInputs, Segments, AlgorithmSection], TokenLoss]


def _grpo(rewards: Groups, counts: Groups | None, section: AlgorithmSection) -> list[np.ndarray]:
    options = (section.advantage_ddof, section.advantage_epsilon)
    return [grpo_advantages(r, *options, of_one=section.advantage_of_one) for r in rewards]


def _dr_grpo(rewards: Groups, counts: Groups | None, section: AlgorithmSection) -> list[np.ndarray]:
    return [dr_grpo_advantages(r, of_one=section.advantage_of_one) for r in rewards]


def _rloo(rewards: Groups, counts: Groups | None, section: AlgorithmSection) -> list[np.ndarray]:
    return [rloo_advantages(r, of_one=section.advantage_of_one) for r in rewards]


def _leave_one_out(rewards: Groups, counts: Groups | None, section: AlgorithmSection) -> list[np.ndarray]:
    options = (section.advantage_ddof, section.advantage_epsilon)
    return [leave_one_out_advantages(r, *options, of_one=section.advantage_of_one) for r in rewards]


def _opo(rewards: Groups, counts: Groups | None, section: AlgorithmSection) -> list[np.ndarray]:
    pairs = zip(rewards, _required(counts), strict=True)
    return [opo_advantages(r, n, of_one=section.advantage_of_one) for r, n in pairs]


def _reinforce_pp(rewards: Groups, counts: Groups | None, section: AlgorithmSection) -> list[np.ndarray]:
    return _whitened(rewards, counts, section)


def _reinforce_pp_baseline(rewards: Groups, counts: Groups | None, section: AlgorithmSection) -> list[np.ndarray]:
    return _whitened(_dr_grpo(rewards, counts, section), counts, section)


def _whitened(values: Groups, counts: Groups | None, section: AlgorithmSection) -> list[np.ndarray]:
    if not section.whiten_advantages:
        return list(values)
    return whiten_by_tokens(values, _required(counts), ddof=section.advantage_ddof)


def _required(counts: Groups | None) -> Groups:
    if counts is None:
        raise ValueError("the advantages opo and reinforce_pp weigh by tokens: hand in num_tokens_by_group")
    return counts


ADVANTAGES: dict[str, AdvantageEstimator] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "leave_one_out": _leave_one_out,
    "opo": _opo,
    "reinforce_pp": _reinforce_pp,
    "reinforce_pp_baseline": _reinforce_pp_baseline,
}
"""`gae` is missing on purpose: its advantages are made per token on the trainer ranks."""


def _ppo(inputs: LossInputs, segments: Segments, section: AlgorithmSection) -> TokenLoss:
    return ppo_loss(
        log_ratio(inputs.policy_logprobs_T, inputs.old_logprobs_T), inputs.advantages_T,
        clip_low=section.clip_low, clip_high=section.clip_high, dual_clip=section.dual_clip,
    )  # fmt: skip


def _gspo(inputs: LossInputs, segments: Segments, section: AlgorithmSection) -> TokenLoss:
    sequence_loss = gspo_loss if section.loss == "gspo" else gspo_token_loss
    return sequence_loss(
        log_ratio(inputs.policy_logprobs_T, inputs.old_logprobs_T),
        inputs.policy_logprobs_T, inputs.advantages_T, segments,
        clip_low=section.clip_low, clip_high=section.clip_high, dual_clip=section.dual_clip,
    )  # fmt: skip


def _cispo(inputs: LossInputs, segments: Segments, section: AlgorithmSection) -> TokenLoss:
    return cispo_loss(
        log_ratio(inputs.policy_logprobs_T, inputs.old_logprobs_T), inputs.policy_logprobs_T, inputs.advantages_T,
        clip_low=section.clip_low, clip_high=section.clip_high,
    )  # fmt: skip


def _sapo(inputs: LossInputs, segments: Segments, section: AlgorithmSection) -> TokenLoss:
    return sapo_loss(
        log_ratio(inputs.policy_logprobs_T, inputs.old_logprobs_T), inputs.advantages_T,
        tau_positive=section.tau_positive, tau_negative=section.tau_negative,
    )  # fmt: skip


def _vespo(inputs: LossInputs, segments: Segments, section: AlgorithmSection) -> TokenLoss:
    shape = section.vespo
    return vespo_loss(
        log_ratio(inputs.policy_logprobs_T, inputs.old_logprobs_T),
        inputs.policy_logprobs_T, inputs.advantages_T, segments,
        k_positive=shape.k_positive, lambda_positive=shape.lambda_positive,
        k_negative=shape.k_negative, lambda_negative=shape.lambda_negative,
    )  # fmt: skip


def _gmpo(inputs: LossInputs, segments: Segments, section: AlgorithmSection) -> TokenLoss:
    return gmpo_loss(
        log_ratio(inputs.policy_logprobs_T, inputs.old_logprobs_T), inputs.advantages_T, segments,
        clip_low=section.clip_low, clip_high=section.clip_high,
    )  # fmt: skip


def _dppo(inputs: LossInputs, segments: Segments, section: AlgorithmSection) -> TokenLoss:
    return dppo_loss(
        log_ratio(inputs.policy_logprobs_T, inputs.old_logprobs_T),
        inputs.policy_logprobs_T, inputs.old_logprobs_T, inputs.advantages_T,
        divergence="tv" if section.loss == "dppo_tv" else "kl",
        clip_low=section.clip_low, clip_high=section.clip_high, max_ratio=section.max_ratio,
    )  # fmt: skip


def _clip_cov(inputs: LossInputs, segments: Segments, section: AlgorithmSection) -> TokenLoss:
    return clip_cov_loss(
        log_ratio(inputs.policy_logprobs_T, inputs.old_logprobs_T), inputs.advantages_T, _chosen(inputs),
        clip_low=section.clip_low, clip_high=section.clip_high,
    )  # fmt: skip


def _kl_cov(inputs: LossInputs, segments: Segments, section: AlgorithmSection) -> TokenLoss:
    return kl_cov_loss(
        log_ratio(inputs.policy_logprobs_T, inputs.old_logprobs_T), inputs.advantages_T, _chosen(inputs),
        kl_coefficient=section.covariance.kl_coefficient,
    )  # fmt: skip


def _chosen(inputs: LossInputs) -> Tensor:
    if inputs.is_chosen_T is None:
        raise ValueError("the losses clip_cov and kl_cov treat chosen tokens apart, but none were chosen: annotate first")
    return inputs.is_chosen_T.bool()


def _reinforce(inputs: LossInputs, segments: Segments, section: AlgorithmSection) -> TokenLoss:
    return reinforce_loss(inputs.policy_logprobs_T, inputs.advantages_T)


def _aipo(inputs: LossInputs, segments: Segments, section: AlgorithmSection) -> TokenLoss:
    return aipo_loss(inputs.policy_logprobs_T, inputs.rollout_logprobs_T, inputs.advantages_T, clip_high=section.clip_high)


def _none(inputs: LossInputs, segments: Segments, section: AlgorithmSection) -> TokenLoss:
    """0 per token, attached to the graph: the KL to the reference is all that is learned."""
    ratio_T = torch.exp(log_ratio(inputs.policy_logprobs_T, inputs.old_logprobs_T).detach())
    return TokenLoss(0.0 * inputs.policy_logprobs_T, ratio_T, torch.zeros_like(ratio_T, dtype=torch.bool))


LOSSES: dict[str, PolicyLoss] = {
    "ppo": _ppo,
    "gspo": _gspo,
    "gspo_token": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "gmpo": _gmpo,
    "vespo": _vespo,
    "dppo_tv": _dppo,
    "dppo_kl": _dppo,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
    "reinforce": _reinforce,
    "aipo": _aipo,
    "none": _none,
}
