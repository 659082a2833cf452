"""`rollout_correction.json`: weights, rejection masks and corrected losses."""

from __future__ import annotations

import re
from typing import Any

import torch
from golden_batch import GoldenBatch, Unmapped, named_number, numbers
from torch import Tensor

from megatron_rl.algorithms.corrections import (
    divergence_gate,
    effective_sample_fraction,
    importance_weights,
    rejection_mask,
    self_normalise,
)
from megatron_rl.algorithms.losses.cispo import reinforce_loss
from megatron_rl.algorithms.losses.ppo import ppo_loss
from megatron_rl.algorithms.ratios import log_ratio
from megatron_rl.config.sections import AlgorithmSection, CorrectionSection

Case = dict[str, Any]
Result = dict[str, Any]
PPO = {"loss": "ppo", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token-mean"}
LEVEL = {"token": "token", "sequence": "sequence", "seq": "sequence"}
METRIC = {"k1": "ratio", "k2": "k2", "k3": "k3"}


def compute(name: str, case: Case, batch: GoldenBatch, _: dict[str, Any]) -> Result:
    for pattern, function in PATTERNS:
        if re.match(pattern, name):
            return function(name, case, batch)
    raise Unmapped("no correction of ours goes by this name")


def _log_rho(batch: GoldenBatch) -> Tensor:
    return log_ratio(batch.tokens("old"), batch.tokens("rollout"))


def _verl_weights(name: str, case: Case, batch: GoldenBatch) -> Result:
    level = LEVEL[name.split("_")[2]]
    bounds = numbers(name)
    low, high = (None, bounds[0]) if len(bounds) == 1 else bounds
    action = "truncate" if low is None else "mask"
    raw_T = weights_T = importance_weights(_log_rho(batch), batch.segments(), level, action, low, high)
    if name.endswith("_bnorm"):
        weights_T = self_normalise(weights_T, batch.segments(), by_sequence=level == "sequence")
    fraction = effective_sample_fraction(raw_T, batch.mask())
    return {"weights": weights_T, "metrics": {"rollout_is_eff_sample_size": fraction, "rollout_is_mean": raw_T.mean()}}


def _verl_mask(name: str, case: Case, batch: GoldenBatch) -> Result:
    kinds, bounds = re.match(r"verl_rs_((?:[a-z]\w*?_k\d,?)+)_([\d._,]+)$", name).groups()
    keep_T = batch.mask()
    for kind, bound in zip(kinds.split(","), bounds.split(","), strict=True):
        over, _, metric = kind.rpartition("_")
        values = [float(x) for x in bound.split("_")]
        low, high = (None, values[0]) if len(values) == 1 else values
        keep_T = keep_T & rejection_mask(
            _log_rho(batch), batch.segments(), METRIC[metric], over.removeprefix("seq_"), low, high
        )
    return {"mask": keep_T, "masked_fraction": 1.0 - keep_T.double().mean()}


def _trl_weights(name: str, case: Case, batch: GoldenBatch) -> Result:
    level, action, high, low = re.match(r"trl_(token|sequence)_(truncate|mask)_max([\d.]+)_min(\w.*)$", name).groups()
    low = None if low == "None" else float(low)
    return {"weights": importance_weights(_log_rho(batch), batch.segments(), level, action, low, float(high))}


def _slime_weights(name: str, case: Case, batch: GoldenBatch) -> Result:
    low, high = numbers(name)
    action = "mask" if "icepop" in name else "truncate"
    return {"weights": importance_weights(_log_rho(batch), batch.segments(), "token", action, low, high)}


def _ppo_times(name: str, case: Case, batch: GoldenBatch) -> Result:
    kind = re.match(r"loss_ppo_x_(token|seq)_(tis|icepop)", name).groups()
    correction = {
        ("token", "tis"): CorrectionSection("tis", high=2.0),
        ("token", "icepop"): CorrectionSection("icepop", low=0.5, high=5.0),
        ("seq", "tis"): CorrectionSection("sequence_tis", high=2.0),
    }
    if kind not in correction:
        raise Unmapped(f"{kind}")
    if "tis" in kind:
        correction[kind] = CorrectionSection(correction[kind].kind, high=named_number(name, "_tis"))
    return batch.section_loss(case, AlgorithmSection(**PPO, correction=correction[kind]))


def _bypass_reinforce(name: str, case: Case, batch: GoldenBatch) -> Result:
    """REINFORCE with detached weights of policy/rollout: AIPO at the token level, its product at the sequence level."""
    if (tis := re.search(r"(token|sequence|seq)_?(?:tis)?(\d+)$", name)) is not None:
        level, action, low, high = LEVEL[tis.group(1)], "truncate", None, float(tis.group(2))
    elif "token_icepop" in name:
        level, action, low, high = "token", "mask", 0.5, 5.0
    else:
        raise Unmapped("which weights?")
    if (level, action) == ("token", "truncate"):
        section = AlgorithmSection(loss="aipo", clip_high=high - 1.0, aggregation="token-mean")
        return batch.section_loss(case, section)

    def loss_T(x: Any) -> Tensor:
        log_weight_T = log_ratio(x.policy_logprobs_T, x.rollout_logprobs_T)
        weights_T = importance_weights(log_weight_T, x.build_segments(), level, action, low, high)
        return reinforce_loss(x.policy_logprobs_T, x.advantages_T).loss_T * weights_T

    return batch.token_loss(case, "token-mean", loss_T)


def _bypass_ppo(name: str, case: Case, batch: GoldenBatch) -> Result:
    low, high, dual = (float(x) for x in re.match(r"([\d.]+)/([\d.]+), c=([\d.]+)", case["clip"]).groups())
    section = AlgorithmSection(loss="ppo", clip_low=low, clip_high=high, dual_clip=dual, aggregation="token-mean")
    if name != "loss_bypass_ppo_clip":
        raise Unmapped("bypass with a rejection")
    return batch.section_loss(case, section, old_logprobs_T=batch.tokens("rollout"))


def _openrlhf(name: str, case: Case, batch: GoldenBatch) -> Result:
    level, action, metric = re.match(r"openrlhf_(token|seq)_(mask|clip)_(ratio|binary_kl|tv)", name).groups()
    low, high = numbers(name)
    if metric != "ratio":
        if (level, action, low) != ("token", "mask", 0.0):
            raise Unmapped("divergence gates of ours are per token, with an upper bound")
        keep_T = divergence_gate(batch.tokens("old"), batch.tokens("rollout"), metric, high)
        weights_T = torch.exp(_log_rho(batch)) * keep_T
        return batch.token_loss(
            case,
            "token-mean",
            lambda x: (
                ppo_loss(log_ratio(x.policy_logprobs_T, x.old_logprobs_T), x.advantages_T, clip_low=0.2, clip_high=0.28).loss_T
                * weights_T
            ),
        )
    kinds = {("token", "mask"): "icepop", ("token", "clip"): "tis", ("seq", "mask"): "geometric_mask"}
    if (level, action) not in kinds:
        raise Unmapped(f"{level} {action}")
    correction = CorrectionSection(kinds[level, action], low=low, high=high)
    return batch.section_loss(case, AlgorithmSection(**PPO, correction=correction))


def _nemo(name: str, case: Case, batch: GoldenBatch) -> Result:
    kinds = {"nemo_tis": "tis", "nemo_icepop": "icepop", "nemo_seq-mask-tis": "geometric_mask"}
    if name not in kinds:
        raise Unmapped("no such kind of NeMo's")
    correction = CorrectionSection(kinds[name], low=case["min"], high=case["max"])
    return batch.section_loss(case, AlgorithmSection(**PPO, correction=correction))


PATTERNS = (
    (r"verl_is_", _verl_weights),
    (r"verl_rs_", _verl_mask),
    (r"trl_(token|sequence)_", _trl_weights),
    (r"slime_", _slime_weights),
    (r"loss_ppo_x_", _ppo_times),
    (r"loss_bypass_(reinforce|pg)_", _bypass_reinforce),
    (r"loss_bypass_ppo_clip", _bypass_ppo),
    (r"openrlhf_", _openrlhf),
    (r"nemo_", _nemo),
)
