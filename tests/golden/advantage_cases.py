"""`advantages.json`: which function of ours computes each case."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from golden_batch import GoldenBatch, Unmapped, named_number

from megatron_rl.algorithms.advantages.gae import discounted_returns, gae, length_adaptive_lambda
from megatron_rl.algorithms.advantages.group import (
    batch_scaled_advantages,
    dr_grpo_advantages,
    grpo_advantages,
    opo_advantages,
    pass_at_k_advantages,
    rloo_advantages,
    whiten_by_tokens,
)
from megatron_rl.algorithms.advantages.token import token_rewards
from megatron_rl.algorithms.advantages.whitening import whiten

Case = dict[str, Any]
Result = dict[str, Any]


def compute(name: str, case: Case, batch: GoldenBatch, _: dict[str, Any]) -> Result:
    for pattern, function in PATTERNS:
        if re.match(pattern, name):
            return function(name, case, batch)
    raise Unmapped("no advantage of ours goes by this name")


def _ddof(case: Case) -> int:
    text = f"{case.get('std', '')} {case.get('var', '')}"
    return 0 if "ddof=0" in text or "population" in text else 1


def _by_group(batch: GoldenBatch, function: Any) -> np.ndarray:
    rows = np.zeros(len(batch.lens))
    for members in batch.groups():
        rows[members] = function(members)
    return rows


def _as_case(case: Case, rows: np.ndarray, batch: GoldenBatch) -> Result:
    """One number per row, or spread over the row's tokens, as the case has it."""
    return {"adv": np.repeat(rows, batch.lens) if isinstance(case["adv"][0], list) else rows}


def _grpo(name: str, case: Case, batch: GoldenBatch) -> Result:
    if "passk" in name:
        rows = _by_group(batch, lambda m: pass_at_k_advantages(batch.rewards[m]))
        return _as_case(case, rows, batch)
    epsilon, ddof = case.get("eps", 1e-6), _ddof(case)
    if "openrlhf" in name:  # the case's own words: "ddof=1, eps 1e-9 (group_norm)"
        epsilon, ddof = named_number(case["std"], "eps"), 1
    rows = _by_group(batch, lambda m: grpo_advantages(batch.rewards[m], ddof, epsilon))
    return _as_case(case, rows, batch)


def _centred(name: str, case: Case, batch: GoldenBatch) -> Result:
    return _as_case(case, _by_group(batch, lambda m: dr_grpo_advantages(batch.rewards[m])), batch)


def _rloo(name: str, case: Case, batch: GoldenBatch) -> Result:
    return _as_case(case, _by_group(batch, lambda m: rloo_advantages(batch.rewards[m])), batch)


def _opo(name: str, case: Case, batch: GoldenBatch) -> Result:
    lens = np.array(batch.lens)
    return _as_case(case, _by_group(batch, lambda m: opo_advantages(batch.rewards[m], lens[m])), batch)


def _batch_scaled(name: str, case: Case, batch: GoldenBatch) -> Result:
    groups = batch.groups()
    scaled = batch_scaled_advantages([batch.rewards[m] for m in groups], 1, case.get("eps", 1e-4))
    rows = np.zeros(len(batch.lens))
    rows[np.concatenate(groups)] = np.concatenate(scaled)
    return _as_case(case, rows, batch)


def _reinforce(name: str, case: Case, batch: GoldenBatch) -> Result:
    gamma = named_number(name, "gamma") if "gamma" in name else 1.0
    mask_T = batch.mask(case.get("mask")).numpy()
    rewards_T = token_rewards(batch.rewards, mask_T, batch.cu_seqlens)
    returns_T = discounted_returns(rewards_T, mask_T, batch.cu_seqlens, gamma)
    result = {"adv": whiten(returns_T, mask_T, ddof=_ddof(case))}
    if "ret" in case:
        result["ret"] = returns_T
    if "ret_row" in case:
        start, stop = batch.cu_seqlens[case["row"]], batch.cu_seqlens[case["row"] + 1]
        result["ret_row"] = returns_T[start:stop]
    return result


def _reinforce_baseline(name: str, case: Case, batch: GoldenBatch) -> Result:
    lens = np.array(batch.lens)
    groups = batch.groups()
    centred = [dr_grpo_advantages(batch.rewards[m]) for m in groups]
    white = whiten_by_tokens(centred, [lens[m] for m in groups], ddof=_ddof(case))
    rows = np.zeros(len(batch.lens))
    rows[np.concatenate(groups)] = np.concatenate(white)
    return _as_case(case, rows, batch)


def _gae(name: str, case: Case, batch: GoldenBatch) -> Result:
    lambda_ = named_number(name, "lam")
    gamma = named_number(name, "gam") if "gam" in name.replace("gae", "") else 1.0
    mask_T = batch.mask(case.get("mask")).numpy()
    rewards_T = token_rewards(batch.rewards, mask_T, batch.cu_seqlens)
    advantages_T, returns_T = gae(
        rewards_T, batch.tokens("values").numpy(), mask_T, batch.cu_seqlens,
        gamma=gamma, lambda_actor_S=lambda_, lambda_critic=lambda_,
    )  # fmt: skip
    if "whitened" in name:
        advantages_T = whiten(advantages_T, mask_T)
    return {"adv": advantages_T, "ret": returns_T, "_mask": mask_T}


def _vapo(name: str, case: Case, batch: GoldenBatch) -> Result:
    alpha = named_number(name, "alpha")
    mask_T = batch.mask().numpy()
    lambda_S = length_adaptive_lambda(np.array(batch.lens), alpha)
    rewards_T = token_rewards(batch.rewards, mask_T, batch.cu_seqlens)
    advantages_T, returns_T = gae(
        rewards_T, batch.tokens("values").numpy(), mask_T, batch.cu_seqlens,
        lambda_actor_S=lambda_S, lambda_critic=1.0,
    )  # fmt: skip
    whitened_T = whiten(advantages_T, mask_T)
    return {"adv": advantages_T, "ret": returns_T, "lambda_policy": lambda_S, "adv_whitened": whitened_T}


def _lambda_table(name: str, case: Case, batch: GoldenBatch) -> Result:
    return {"lam": length_adaptive_lambda(np.array(case["lengths"]), case["alpha"])}


PATTERNS = (
    (r"vapo_lambda_table", _lambda_table),
    (r"vapo_", _vapo),
    (r"gae_", _gae),
    (r"opo", _opo),
    (r"(openrlhf_|nemo_)?rein\w*_baseline", _reinforce_baseline),
    (r"(openrlhf_|nemo_)?reinforce", _reinforce),
    (r"(openrlhf_)?rloo", _rloo),
    (r"(openrlhf_)?dr_grpo|trl_scale_none", _centred),
    (r"trl_scale_batch", _batch_scaled),
    (r"grpo|trl_scale_group|megatron_grpo|openrlhf_group_norm", _grpo),
)
