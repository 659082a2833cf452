"""`rollout_correction.json`: weights, rejection masks and corrected losses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import policy_cases
import torch
from case_text import NUMBER, CaseText, Unmapped
from golden_batch import GoldenBatch
from torch import Tensor

from megatron_rl.algorithms.corrections import (
    effective_sample_fraction,
    importance_weights,
    rejection_mask,
    self_normalise,
    token_divergence,
)
from megatron_rl.algorithms.losses.cispo import reinforce_loss
from megatron_rl.algorithms.losses.ppo import ppo_loss
from megatron_rl.algorithms.ratios import log_ratio
from megatron_rl.config.algorithm_sections import AlgorithmSection, CorrectionSection

Case = dict[str, Any]
Result = dict[str, Any]
Readings = Iterator[Result]
HIGHER, PLAIN = (0.2, 0.28), (0.2, 0.2)
DEFAULT_BOUNDS = {"tis": (None, 2.0), "icepop": (0.5, 5.0)}
METRIC = {"k1": "ratio", "k2": "k2", "k3": "k3"}


def compute(name: str, case: Case, batch: GoldenBatch, file: dict[str, Any]) -> Readings:
    text = CaseText(name, case)
    for pattern, function in PATTERNS:
        if re.match(pattern, name):
            return function(text, batch)
    if "loss" in case:  # an objective without a correction, or AReaL's decoupled one
        return policy_cases.compute(name, case, batch, file)
    raise Unmapped("no correction of ours goes by this name")


def _log_rho(batch: GoldenBatch) -> Tensor:
    return log_ratio(batch.tokens("old"), batch.tokens("rollout"))


def _level(text: CaseText) -> str:
    if text.has("geometric|_geo"):
        return "geometric"
    return "sequence" if re.search(r"(?:^|_)seq(?:uence)?(?:_|\d|$)", text.name) else "token"


def _bounds(values: list[float]) -> tuple[float | None, float | None]:
    """One number is an upper bound, two are both."""
    if not values:
        raise Unmapped("no bound in the name")
    return (None, values[0]) if len(values) == 1 else (values[0], values[1])


def _verl_weights(text: CaseText, batch: GoldenBatch) -> Readings:
    """An upper bound alone truncates, both bounds mask."""
    level = _level(text)
    low, high = _bounds(text.numbers)
    action = "truncate" if low is None else "mask"
    raw_T = weights_T = importance_weights(_log_rho(batch), batch.segments(), level, action, low, high)
    if text.name.endswith("_bnorm"):
        weights_T = self_normalise(weights_T, batch.segments(), by_sequence=level != "token")
    fraction = effective_sample_fraction(raw_T, batch.mask())
    yield {"weights": weights_T, "metrics": {"rollout_is_eff_sample_size": fraction, "rollout_is_mean": raw_T.mean()}}


def verl_rejection(kinds: str, bounds: str, log_rho_T: Tensor, batch: GoldenBatch, pair: tuple[Tensor, Tensor]) -> Tensor:
    """verl's `rollout_rs` and `rollout_rs_threshold`: every named test must pass; one threshold may serve all. bool [T].

    A single number for k1 bounds the ratio on both sides, by it and its reciprocal.
    """
    names, limits = kinds.split(","), bounds.split(",")
    keep_T = batch.mask()
    for kind, limit in zip(names, limits * len(names) if len(limits) == 1 else limits, strict=True):
        values = [float(x) for x in limit.split("_")]
        if kind == "binary_kl":
            keep_T = keep_T & (token_divergence(*pair, "max_binary_kl") <= values[0])
            continue
        over, _, metric = kind.rpartition("_")
        if metric == "k1" and len(values) == 1:
            values = [1.0 / values[0], values[0]]
        low, high = _bounds(values)
        keep_T = keep_T & rejection_mask(log_rho_T, batch.segments(), METRIC[metric], over.removeprefix("seq_"), low, high)
    return keep_T


def _verl_mask(text: CaseText, batch: GoldenBatch) -> Readings:
    match = re.match(r"verl_rs_((?:(?:token|seq_\w+?)_k\d|binary_kl)(?:,(?:(?:token|seq_\w+?)_k\d|binary_kl))*)_([\d._,e-]+)$",
                     text.name)  # fmt: skip
    if match is None:
        raise Unmapped("no rejection of ours goes by this name")
    keep_T = verl_rejection(*match.groups(), _log_rho(batch), batch, (batch.tokens("old"), batch.tokens("rollout")))
    yield {"mask": keep_T, "masked_fraction": 1.0 - keep_T.double().mean()}


def _trl_weights(text: CaseText, batch: GoldenBatch) -> Readings:
    match = re.match(r"trl_(token|sequence)_(truncate|mask)_max([\w.]+)_min([\w.]+)$", text.name)
    if match is None:
        raise Unmapped("no weights of ours go by this name")
    level, action, high, low = match.groups()
    bounds = [None if value == "None" else float(value) for value in (low, high)]
    yield {"weights": importance_weights(_log_rho(batch), batch.segments(), level, action, *bounds)}


def _slime_weights(text: CaseText, batch: GoldenBatch) -> Readings:
    low, high = _bounds(text.numbers)
    action = "mask" if text.has("icepop|mask|mis_function") and not text.has("truncate|tis") else "truncate"
    yield {"weights": importance_weights(_log_rho(batch), batch.segments(), _level(text), action, low, high)}


def _kind(text: CaseText) -> tuple[str, float | None, float | None]:
    """tis or icepop, with the bounds that the name states (`tis2`, `icepop_0.4_4`), else the usual ones."""
    kind = "icepop" if text.has("icepop") else "tis"
    match = re.search(rf"(?:tis|icepop|seq|token)_?((?:_?{NUMBER})+)$", text.name)
    if match is None:
        return (kind, *DEFAULT_BOUNDS[kind])
    return (kind, *_bounds([float(x) for x in re.findall(NUMBER, match.group(1).replace("_", " "))]))


def _ppo_times(text: CaseText, batch: GoldenBatch) -> Readings:
    kind, low, high = _kind(text)
    names = {
        ("token", "tis"): "tis", ("sequence", "tis"): "sequence_tis", ("geometric", "tis"): "geometric_tis",
        ("token", "icepop"): "icepop", ("sequence", "icepop"): "sequence_mask",
    }  # fmt: skip
    if (_level(text), kind) not in names:
        raise Unmapped(f"{_level(text)} {kind}")
    correction = CorrectionSection(names[_level(text), kind], low=low, high=high)  # type: ignore[arg-type]
    yield from _corrected_ppo(text, batch, correction)


def _corrected_ppo(text: CaseText, batch: GoldenBatch, correction: CorrectionSection) -> Readings:
    for low, high in [text.pair("clip")] if text.pair("clip") else [HIGHER, PLAIN]:
        for mode in text.modes("token-mean"):
            section = AlgorithmSection(
                name="x",
                loss="ppo",
                clip_low=low,
                clip_high=high,
                aggregation=mode,
                correction=correction,  # type: ignore[arg-type]
            )
            yield batch.section_loss(text.case, section)


def _bypass_reinforce(text: CaseText, batch: GoldenBatch) -> Readings:
    """REINFORCE with detached weights of policy/rollout: AIPO at the token level, a product at the sequence level."""
    kind, low, high = _kind(text)
    action, level = ("mask" if kind == "icepop" else "truncate"), _level(text)
    if (level, action, low) == ("token", "truncate", None):
        assert high is not None
        section = AlgorithmSection(loss="aipo", clip_high=high - 1.0, aggregation="token-mean")
        yield batch.section_loss(text.case, section)
        return

    def loss_T(x: Any) -> Tensor:
        log_weight_T = log_ratio(x.policy_logprobs_T, x.rollout_logprobs_T)
        weights_T = importance_weights(log_weight_T, x.build_segments(), level, action, low, high)
        return reinforce_loss(x.policy_logprobs_T, x.advantages_T).loss_T * weights_T

    yield batch.token_loss(text.case, "token-mean", loss_T)


def _bypass_ppo(text: CaseText, batch: GoldenBatch) -> Readings:
    """PPO with old := rollout. A rejection there takes tokens out of the denominator too (verl)."""
    match = re.match(rf"({NUMBER})/({NUMBER}), c=({NUMBER})", text.case["clip"])
    if match is None:
        raise Unmapped(f"clip {text.case['clip']!r}")
    low, high, dual = map(float, match.groups())
    section = AlgorithmSection(loss="ppo", clip_low=low, clip_high=high, dual_clip=dual, aggregation="token-mean")
    changes: dict[str, Any] = {"old_logprobs_T": batch.tokens("rollout")}
    rest = text.name.removeprefix("loss_bypass_ppo_clip").strip("_")
    if not rest:
        yield batch.section_loss(text.case, section, **changes)
        return
    rs = re.match(r"(?:(geo)_rs|(?:rs_)?(token_k\d|seq_\w+?_k\d|binary_kl)(?:_rs)?)_([\d._,e-]+)$", rest)
    if rs is None:
        raise Unmapped("bypass with a rejection that we do not know")
    kinds = "seq_mean_k1" if rs.group(1) else rs.group(2)
    for trained in ("old", text.case["new"]):
        pair = (batch.tokens(trained), batch.tokens("rollout"))
        keep_T = verl_rejection(kinds, rs.group(3), log_ratio(*pair), batch, pair)
        kept = {"loss_mask_T": keep_T, "denominators": batch.denominators(keep_T)}
        yield batch.section_loss(text.case, section, **changes, **kept)


def _openrlhf(text: CaseText, batch: GoldenBatch) -> Readings:
    """Level, action, gate: the ratio of the token (or the row's geometric mean), or a divergence (or its mean over the
    row); tokens inside keep their own ratio.
    """
    match = re.match(r"openrlhf_(token|seq|geo)_(mask|clip)_(ratio|binary_kl|tv)", text.name)
    if match is None:
        raise Unmapped("no correction of ours goes by this name")
    level, action, metric = match.groups()
    low, high = _bounds(text.numbers)
    kinds = {
        ("token", "mask", "ratio"): "icepop",
        ("token", "clip", "ratio"): "tis",
        ("seq", "mask", "ratio"): "geometric_mask",
    }
    if (kind := kinds.get((level, action, metric))) is not None:
        yield from _corrected_ppo(text, batch, CorrectionSection(kind, low=low, high=high))  # type: ignore[arg-type]
        return
    if action != "mask" or metric == "ratio":
        raise Unmapped(f"{level} {action} {metric}")
    divergence_T = token_divergence(batch.tokens("old"), batch.tokens("rollout"), metric)
    if level != "token":
        (row_S,) = batch.segments().means(divergence_T)
        divergence_T = batch.segments().spread(row_S)
    weights_T = torch.exp(_log_rho(batch)) * ((divergence_T >= (low or 0.0)) & (divergence_T <= high))
    for clip_low, clip_high in (HIGHER, PLAIN):
        yield batch.token_loss(
            text.case, "token-mean",
            lambda x, lo=clip_low, hi=clip_high: weights_T * ppo_loss(
                log_ratio(x.policy_logprobs_T, x.old_logprobs_T), x.advantages_T, clip_low=lo, clip_high=hi
            ).loss_T,
        )  # fmt: skip


def _nemo(text: CaseText, batch: GoldenBatch) -> Readings:
    kinds = {"nemo_tis": "tis", "nemo_icepop": "icepop", "nemo_seq-mask-tis": "geometric_mask"}
    kind = next((ours for prefix, ours in kinds.items() if text.name.startswith(prefix)), None)
    if kind is None:
        raise Unmapped("no such kind of NeMo's")
    bounds = {"low": text.case.get("min"), "high": text.case.get("max")}
    yield from _corrected_ppo(text, batch, CorrectionSection(kind, **bounds))  # type: ignore[arg-type]


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
