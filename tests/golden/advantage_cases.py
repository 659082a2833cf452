"""`advantages.json`: which function of ours computes each case. Several readings where the case is silent."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from case_text import CaseText, Unmapped
from golden_batch import GoldenBatch

from megatron_rl.algorithms.advantages.gae import discounted_returns, gae, length_adaptive_lambda
from megatron_rl.algorithms.advantages.group import (
    batch_scaled_advantages,
    dr_grpo_advantages,
    grpo_advantages,
    leave_one_out_advantages,
    opo_advantages,
    pass_at_k_advantages,
    rloo_advantages,
    whiten_by_tokens,
)
from megatron_rl.algorithms.advantages.token import token_rewards
from megatron_rl.algorithms.advantages.whitening import whiten

Case = dict[str, Any]
Result = dict[str, Any]
Readings = Iterator[Result]
OF_ONE = ("zero", "reward")
"""What a group of one gets: peers differ and no case says."""


def compute(name: str, case: Case, batch: GoldenBatch, _: dict[str, Any]) -> Readings:
    text = CaseText(name, case)
    for pattern, function in PATTERNS:
        if text.has(pattern):
            return function(text, batch)
    raise Unmapped("no advantage of ours goes by this name")


def _ddofs(text: CaseText, field: str = "var") -> list[int]:
    """0 or 1 as the case's words about `field` say (`var` of what is whitened, `std` of a group), else both."""
    words = str(text.case.get(field, "")).lower()
    if re.search(r"ddof=1|unbiased|bessel", words):
        return [1]
    if re.search(r"ddof=0|population|biased", words):
        return [0]
    return [0, 1] if text.has(r"ddof=0|population|(?<!un)biased") else [1, 0]


def _epsilons(text: CaseText) -> list[float]:
    stated = text.number("eps", "epsilon")
    return [1e-6, 1e-4, 1e-9, 1e-8] if stated is None else [stated]


def _rows(batch: GoldenBatch, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """`function` of the row positions of each group, put back in the order of the rows."""
    rows = np.zeros(len(batch.lens))
    for members in batch.groups():
        rows[members] = function(members)
    return rows


def _as_case(text: CaseText, rows: np.ndarray, batch: GoldenBatch) -> Result:
    """One number per row, or spread over the row's tokens (0 on masked ones), as the case has it."""
    if not any(isinstance(value, list) for value in text.case["adv"]):
        return {"adv": rows}
    return {"adv": np.repeat(rows, batch.lens) * batch.mask(text.case.get("mask")).numpy()}


def _grpo(text: CaseText, batch: GoldenBatch) -> Readings:
    for of_one, ddof, epsilon in itertools.product(OF_ONE, _ddofs_of_std(text), _epsilons(text)):
        rows = _rows(batch, lambda m, d=ddof, e=epsilon, o=of_one: grpo_advantages(batch.rewards[m], d, e, of_one=o))
        yield _as_case(text, rows, batch)


def _ddofs_of_std(text: CaseText) -> list[int]:
    return _ddofs(text, "std")


def _leave_one_out(text: CaseText, batch: GoldenBatch) -> Readings:
    for of_one, ddof, epsilon in itertools.product(OF_ONE, _ddofs_of_std(text), _epsilons(text)):
        options = {"ddof": ddof, "epsilon": epsilon, "of_one": of_one}
        yield _as_case(text, _rows(batch, lambda m, o=options: leave_one_out_advantages(batch.rewards[m], **o)), batch)
    yield from _rloo(text, batch)


def _pass_at_k(text: CaseText, batch: GoldenBatch) -> Readings:
    for ddof, epsilon in itertools.product(_ddofs_of_std(text), _epsilons(text)):
        rows = _rows(batch, lambda m, d=ddof, e=epsilon: pass_at_k_advantages(batch.rewards[m], d, e))
        yield _as_case(text, rows, batch)


def _centred(text: CaseText, batch: GoldenBatch) -> Readings:
    for of_one in OF_ONE:
        yield _as_case(text, _rows(batch, lambda m, o=of_one: dr_grpo_advantages(batch.rewards[m], of_one=o)), batch)


def _rloo(text: CaseText, batch: GoldenBatch) -> Readings:
    for of_one in OF_ONE:
        yield _as_case(text, _rows(batch, lambda m, o=of_one: rloo_advantages(batch.rewards[m], of_one=o)), batch)


def _opo(text: CaseText, batch: GoldenBatch) -> Readings:
    mask_T = batch.mask(text.case.get("mask"))
    counts = batch.segments(mask_T).counts_S.numpy()
    for of_one in OF_ONE:
        rows = _rows(batch, lambda m, o=of_one: opo_advantages(batch.rewards[m], counts[m], of_one=o))
        yield _as_case(text, rows, batch)


def _batch_scaled(text: CaseText, batch: GoldenBatch) -> Readings:
    groups = batch.groups()
    for ddof, epsilon in itertools.product(_ddofs_of_std(text), _epsilons(text)):
        rows = np.zeros(len(batch.lens))
        scaled = batch_scaled_advantages([batch.rewards[m] for m in groups], ddof, epsilon)
        rows[np.concatenate(groups)] = np.concatenate(scaled)
        yield _as_case(text, rows, batch)


def _reinforce(text: CaseText, batch: GoldenBatch) -> Readings:
    gamma = text.number("gamma", "gam")
    mask_T = batch.mask(_mask_name(text)).numpy()
    rewards_T = token_rewards(batch.rewards, mask_T, batch.cu_seqlens)
    returns_T = discounted_returns(rewards_T, mask_T, batch.cu_seqlens, 1.0 if gamma is None else gamma)
    for ddof in _ddofs(text):
        result = {"adv": whiten(returns_T, mask_T, ddof=ddof)}
        if "ret" in text.case:
            result |= {"ret": returns_T, "_mask": mask_T}
        if "ret_row" in text.case:
            start, stop = batch.cu_seqlens[text.case["row"]], batch.cu_seqlens[text.case["row"] + 1]
            result["ret_row"] = returns_T[start:stop]
        yield result


def _mask_name(text: CaseText) -> str | None:
    return text.case.get("mask", "tool_mask" if text.has("tool_?mask") else None)


def _reinforce_baseline(text: CaseText, batch: GoldenBatch) -> Readings:
    groups = batch.groups()
    counts = batch.segments(batch.mask(text.case.get("mask"))).counts_S.numpy()
    for of_one, ddof in itertools.product(OF_ONE, _ddofs(text)):
        centred = [dr_grpo_advantages(batch.rewards[m], of_one=of_one) for m in groups]
        white = whiten_by_tokens(centred, [counts[m] for m in groups], ddof=ddof)
        rows = np.zeros(len(batch.lens))
        rows[np.concatenate(groups)] = np.concatenate(white)
        yield _as_case(text, rows, batch)


def _gae(text: CaseText, batch: GoldenBatch) -> Readings:
    alpha = text.number("alpha", "length_adaptive_alpha") if text.has("vapo|length_adaptive|alpha") else None
    gamma = text.number("gamma", r"gam")
    mask_T = batch.mask(_mask_name(text)).numpy()
    counts_S = batch.segments(batch.mask(_mask_name(text))).counts_S.numpy()
    lambda_: Any = text.required("gae_lambda", "lambda", "lam") if alpha is None else length_adaptive_lambda(counts_S, alpha)
    critic = text.number("gae_lambda_value", "lambda_critic", "lam_critic", "lamc", "critic_lambda")
    if critic is None:
        critic = 1.0 if alpha is not None else float(lambda_)
    rewards_T = token_rewards(batch.rewards, mask_T, batch.cu_seqlens)
    advantages_T, returns_T = gae(
        rewards_T, batch.tokens("values").numpy(), mask_T, batch.cu_seqlens,
        gamma=1.0 if gamma is None else gamma, lambda_actor_S=lambda_, lambda_critic=critic,
    )  # fmt: skip
    for ddof in _ddofs(text):
        whitened_T = whiten(advantages_T, mask_T, ddof=ddof)
        is_whitened = text.has("whiten") and "adv_whitened" not in text.case and "raw" not in text.name
        result = {"adv": whitened_T if is_whitened else advantages_T, "ret": returns_T, "_mask": mask_T}
        optional = {"adv_whitened": whitened_T, "lambda_policy": lambda_}
        yield result | {key: value for key, value in optional.items() if key in text.case}


def _lambda_table(text: CaseText, batch: GoldenBatch) -> Readings:
    yield {"lam": length_adaptive_lambda(np.array(text.case["lengths"]), text.required("alpha"))}


PATTERNS: tuple[tuple[str, Callable[[CaseText, GoldenBatch], Readings]], ...] = (
    (r"lambda_table", _lambda_table),
    (r"vapo|gae", _gae),
    (r"^\S*opo\b", _opo),
    (r"pass_?@?k", _pass_at_k),
    (r"^\S*(reinforce|rein|rf)\w*baseline", _reinforce_baseline),
    (r"^\S*(reinforce|rf_?pp|reinforce_plus)", _reinforce),
    (r"leave_one_out|^\S*_loo\b", _leave_one_out),
    (r"^\S*rloo", _rloo),
    (r"^\S*(dr_grpo|scale_none)|norm_adv_by_std_in_grpo=false|scale_rewards=none", _centred),
    (r"scale_batch|scale_rewards=batch", _batch_scaled),
    (r"^\S*(grpo|group)", _grpo),
)
"""Patterns with ^ look at the name alone; an estimator's words may name others."""
