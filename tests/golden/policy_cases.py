"""`policy_losses.json`: which section or function of ours computes each case."""

from __future__ import annotations

import re
from typing import Any

import torch
from golden_batch import Excepted, GoldenBatch, Unmapped, aggregation_of, named_number, numbers

from megatron_rl.algorithms.corrections import importance_weights
from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.algorithms.losses.covariance import clip_cov_loss, kl_cov_loss
from megatron_rl.algorithms.losses.ppo import ppo_loss
from megatron_rl.algorithms.losses.soft import sapo_loss, vespo_loss
from megatron_rl.algorithms.ratios import log_ratio
from megatron_rl.config.sections import AlgorithmSection, CorrectionSection, KlSection

Case = dict[str, Any]
Result = dict[str, Any]
CLIP_HIGHER = {"clip_low": 0.2, "clip_high": 0.28}


def compute(name: str, case: Case, batch: GoldenBatch, _: dict[str, Any]) -> Result:
    for pattern, function in PATTERNS:
        if re.match(pattern, name):
            return function(name, case, batch)
    raise Unmapped("no objective of ours goes by this name")


def _ppo(name: str, case: Case, batch: GoldenBatch, **changes: Any) -> Result:
    text = f"{name} {case['peer']}"
    mode = aggregation_of(name)
    constant = named_number(text, "loss_scale_factor=") if mode.endswith("-norm") else None
    fields: dict[str, Any] = {"aggregation": mode, "aggregation_constant": constant}
    return batch.section_loss(case, AlgorithmSection(name="x", loss="ppo", **{**fields, **changes}))


def _clip_symmetric(name: str, case: Case, batch: GoldenBatch) -> Result:
    clip = numbers(name.replace("clip0", "clip_0"))[0]
    return _ppo(name, case, batch, clip_low=clip, clip_high=clip)


def _dual_clip(name: str, case: Case, batch: GoldenBatch) -> Result:
    return _ppo(name, case, batch, clip_low=0.2, clip_high=0.2, dual_clip=named_number(name, "_c"))


def _clip_higher(name: str, case: Case, batch: GoldenBatch) -> Result:
    low, high = numbers(name)[:2]
    return _ppo(name, case, batch, clip_low=low, clip_high=high, dual_clip=case.get("clip_ratio_c"))


def _openrlhf_dual(name: str, case: Case, batch: GoldenBatch) -> Result:
    return _ppo(name, case, batch, **CLIP_HIGHER, dual_clip=named_number(name, "dual"))


def _gspo(name: str, case: Case, batch: GoldenBatch) -> Result:
    low, high = [*numbers(name), 3e-4, 4e-4][:2]
    mode = aggregation_of(name, "seq-mean-token-mean")
    is_paper = mode == "seq-mean-token-mean" and "gspo_token" not in name
    loss = "gspo" if is_paper else "gspo_token"
    return batch.section_loss(case, AlgorithmSection(loss=loss, clip_low=low, clip_high=high, aggregation=mode))


def _luspo(name: str, case: Case, batch: GoldenBatch) -> Result:
    """LUSPO multiplies GSPO's row loss by the row's length: GSPO-token summed instead of averaged over the row."""
    low, high = (float(x) for x in re.findall(r"\d+e-?\d+", case["peer"]))
    section = AlgorithmSection(loss="gspo_token", clip_low=low, clip_high=high, aggregation="seq-mean-token-sum")
    return batch.section_loss(case, section)


def _sapo(name: str, case: Case, batch: GoldenBatch) -> Result:
    positive, negative = numbers(name)
    if (positive, negative) == (1.0, 1.05):
        return batch.section_loss(case, AlgorithmSection(name="sapo", loss="sapo"))
    return batch.token_loss(
        case,
        "seq-mean-token-mean",
        lambda x: (
            sapo_loss(
                log_ratio(x.policy_logprobs_T, x.old_logprobs_T),
                x.advantages_T,
                tau_positive=positive,
                tau_negative=negative,
            ).loss_T
        ),
    )


def _gmpo(name: str, case: Case, batch: GoldenBatch) -> Result:
    clip = numbers(name)[-1]
    return batch.section_loss(case, AlgorithmSection(loss="gmpo", clip_low=clip, clip_high=clip))


def _cispo(name: str, case: Case, batch: GoldenBatch) -> Result:
    if "onesided" in name:
        low = named_number(case["peer"], "clip_ratio_low=")
        high = re.search(r"clip_ratio_high=(\d+\.\d+)", case["peer"])
        if high is None:
            raise Unmapped("no cap in the case")
        low_high = (low, float(high.group(1)))
    else:
        low_high = tuple(numbers(name)[:2])
    section = AlgorithmSection(
        name="cispo", loss="cispo", clip_low=low_high[0], clip_high=low_high[1], aggregation="token-mean"
    )
    return batch.section_loss(case, section)


def _dppo(name: str, case: Case, batch: GoldenBatch) -> Result:
    clip = numbers(name)[0]
    loss = "dppo_tv" if "_tv" in name else "dppo_kl"
    return batch.section_loss(case, AlgorithmSection(loss=loss, clip_low=clip, clip_high=clip, aggregation="token-mean"))


def _clip_cov(name: str, case: Case, batch: GoldenBatch) -> Result:
    peer = case["peer"]
    match = re.search(r"ratio=([\d.e-]+)", peer)
    ratio = float(match.group(1)) if match else 0.0
    if ratio != 1.0:
        raise Excepted("the tokens that Clip-Cov takes out are drawn at random")
    return batch.token_loss(
        case,
        "token-mean",
        lambda x: (
            clip_cov_loss(
                log_ratio(x.policy_logprobs_T, x.old_logprobs_T),
                x.policy_logprobs_T,
                x.advantages_T,
                x.loss_mask_T,
                clip_low=0.2,
                clip_high=0.2,
                fraction=ratio,
                cov_low=named_number(peer, "lb="),
                cov_high=named_number(peer, "ub="),
            ).loss_T
        ),
    )


def _kl_cov(name: str, case: Case, batch: GoldenBatch) -> Result:
    return batch.token_loss(
        case,
        "token-mean",
        lambda x: (
            kl_cov_loss(
                log_ratio(x.policy_logprobs_T, x.old_logprobs_T),
                x.policy_logprobs_T,
                x.advantages_T,
                x.loss_mask_T,
                fraction=numbers(name)[0],
                kl_coefficient=named_number(name, "coef"),
            ).loss_T
        ),
    )


def _reinforce(name: str, case: Case, batch: GoldenBatch) -> Result:
    return batch.section_loss(case, AlgorithmSection(loss="reinforce", aggregation=aggregation_of(name)))


def _vespo(name: str, case: Case, batch: GoldenBatch) -> Result:
    peer = case["peer"]
    return batch.token_loss(
        case,
        "token-mean",
        lambda x: (
            vespo_loss(
                log_ratio(x.policy_logprobs_T, x.old_logprobs_T),
                x.policy_logprobs_T,
                x.advantages_T,
                x.build_segments(),
                k_positive=named_number(peer, "k_pos="),
                lambda_positive=named_number(peer, "lam_pos="),
                k_negative=named_number(peer, "k_neg="),
                lambda_negative=named_number(peer, "lam_neg="),
            ).loss_T
        ),
    )


TRL_AGGREGATION = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}


def _trl(name: str, case: Case, batch: GoldenBatch) -> Result:
    loss_type = re.search(r"loss_type=(\w+)", case["peer"])
    if loss_type is None or loss_type.group(1) not in TRL_AGGREGATION:
        raise Unmapped("no loss_type of TRL's that we know")
    mode = TRL_AGGREGATION[loss_type.group(1)]
    changes: dict[str, Any] = {"aggregation": mode, **CLIP_HIGHER}
    if mode.endswith("-norm"):
        changes["aggregation_constant"] = named_number(case["peer"], "'max_completion_length':")
    if (clip := re.match(r"trl_(?:grpo|bnpo|dapo|dr_grpo)_(\d[\d.e-]*)_(\d[\d.e-]*)$", name)) is not None:
        changes["clip_low"], changes["clip_high"] = float(clip.group(1)), float(clip.group(2))
    if "_beta" in name:
        estimator = "unbiased" if "kl_is1" in name else "k3"
        changes["clip_high"] = 0.2  # TRL's default of both, which this case leaves alone
        changes["kl"] = KlSection(coefficient=named_number(name, "_beta"), estimator=estimator)
    if "_opsm" in name:
        changes["clip_high"] = 0.2
        changes["correction"] = CorrectionSection(kind="opsm", high=named_number(name, "_delta"))
    elif "_delta" in name:
        changes["dual_clip"] = named_number(name, "_delta")
    return _ppo(name, case, batch, **changes)


def _vapo_nll(name: str, case: Case, batch: GoldenBatch) -> Result:
    low, high = (float(x) for x in re.findall(r"clip (\S+)/(\S+)", case["peer"])[0])
    return _ppo(name, case, batch, clip_low=low, clip_high=high, positive_nll_coefficient=named_number(name, "_mu"))


def _megatron_per_token(name: str, case: Case, batch: GoldenBatch) -> Result:
    low, high = (float(x) for x in re.findall(r"clip (\S+)/(\S+)", case["peer"])[0])
    x = batch.inputs(case)
    ppo = ppo_loss(log_ratio(x.policy_logprobs_T, x.old_logprobs_T), x.advantages_T, clip_low=low, clip_high=high)
    kl_T = kl_estimate("k3", x.policy_logprobs_T, x.ref_logprobs_T)
    return {"per_token": (ppo.loss_T + named_number(name, "_beta") * kl_T).detach()}


def _decoupled(name: str, case: Case, batch: GoldenBatch) -> Result:
    """Decoupled PPO is PPO on policy/old times a detached f(old/rollout)."""
    rs = case["rs"]
    x = batch.inputs(case, rollout_logprobs_T=batch.tokens(case["behav"]))
    log_rho_T = log_ratio(x.old_logprobs_T, x.rollout_logprobs_T)
    segments = batch.segments()
    if rs is None:
        weights_T = torch.ones_like(log_rho_T)
    elif rs["metric"] != "ratio" or rs["agg"] not in ("mean", "sum"):
        raise Unmapped(f"rejection sampling {rs}")
    else:
        level = "token" if rs["level"] == "token" else {"mean": "geometric", "sum": "sequence"}[rs["agg"]]
        action = {"clamp": "truncate", "mask": "mask"}[rs["action"]]
        weights_T = importance_weights(log_rho_T, segments, level, action, rs["lower"], rs["upper"])
    return batch.token_loss(
        case,
        "token-mean",
        lambda x: ppo_loss(log_ratio(x.policy_logprobs_T, x.old_logprobs_T), x.advantages_T, **CLIP_HIGHER).loss_T * weights_T,
    )


PATTERNS = (
    (r"ppo_clip_|grpo_clip", _clip_symmetric),
    (r"ppo_dualclip_", _dual_clip),
    (r"dapo_cliphigher_", _clip_higher),
    (r"openrlhf_ppo_dual", _openrlhf_dual),
    (r"gspo_", _gspo),
    (r"luspo_", _luspo),
    (r"sapo_", _sapo),
    (r"gmpo_", _gmpo),
    (r"cispo_", _cispo),
    (r"dppo_", _dppo),
    (r"clip_cov", _clip_cov),
    (r"kl_cov", _kl_cov),
    (r"reinforce_gpg", _reinforce),
    (r"vespo_", _vespo),
    (r"trl_", _trl),
    (r"vapo_positive_nll", _vapo_nll),
    (r"megatron_per_token", _megatron_per_token),
    (r"decoupled_ppo_", _decoupled),
)
