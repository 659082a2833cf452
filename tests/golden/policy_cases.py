"""`policy_losses.json`: which section of ours each case is, with its parameters. Several readings where the case is silent."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from case_text import CaseText, Excepted, Unmapped
from golden_batch import GoldenBatch

from megatron_rl.algorithms.corrections import importance_weights, rejection_mask, token_divergence
from megatron_rl.algorithms.covariance_choice import choose_tokens, token_covariance
from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.algorithms.losses.ppo import ppo_loss
from megatron_rl.algorithms.ratios import log_ratio
from megatron_rl.config.algorithm_sections import (
    AlgorithmSection,
    CorrectionSection,
    CovarianceSection,
    KlSection,
    VespoSection,
)

Case = dict[str, Any]
Result = dict[str, Any]
Readings = Iterator[Result]
PLAIN, HIGHER = (0.2, 0.2), (0.2, 0.28)


def compute(name: str, case: Case, batch: GoldenBatch, _: dict[str, Any]) -> Readings:
    text = CaseText(name, case)
    for pattern, function in OBJECTIVES:
        if text.has(pattern):
            return function(text, batch)
    raise Unmapped("no objective of ours goes by this name")


def readings(text: CaseText, batch: GoldenBatch, loss: str, **choices: list[Any]) -> Readings:
    """Loss and gradient of every combination of `choices` (fields of the section; `clips` are both), likeliest first."""
    for values in itertools.product(*choices.values()):
        fields: dict[str, Any] = {"loss": loss, **dict(zip(choices, values, strict=True))}
        if "clips" in fields:
            fields["clip_low"], fields["clip_high"] = fields.pop("clips")
        if fields.get("aggregation") == "seq-mean-token-sum-norm":
            fields["aggregation_constant"] = _constant(text, batch)
        yield batch.section_loss(text.case, AlgorithmSection(**{"name": "golden", **fields}))


def _constant(text: CaseText, batch: GoldenBatch) -> float:
    """Stated, or the padded width of the batch, which verl takes when nothing is set."""
    stated = text.number("loss_scale_factor", "max_completion_length", "constant")
    return float(max(batch.lens)) if stated is None else stated


def _ppo(text: CaseText, batch: GoldenBatch) -> Readings:
    dual = text.number("clip_ratio_c", "ratio_clip_c", "dual_?clip_?c?", "dual", r"(?<!opsm_)delta", r"c(?==)")
    if text.has("opsm|off_policy_mask"):
        dual = None
    duals = [dual] if dual is not None else [None, 3.0, 10.0]
    clips = text.clips(PLAIN, HIGHER)
    if text.has("delta") and dual is not None:  # TRL's two-sided clip, whose cases do not state the clip
        clips = text.clips(HIGHER, PLAIN)
    yield from readings(
        text, batch, "ppo",
        clips=clips, aggregation=text.modes("token-mean", "seq-mean-token-mean"), kl=_kl(text),
        positive_nll_coefficient=[text.number("positive_example_nll_weight", r"mu") or 0.0],
        correction=_opsm(text), dual_clip=duals,
    )  # fmt: skip


def _kl(text: CaseText) -> list[KlSection]:
    keys = ("kl_loss_coef", "reference_policy_kl_penalty", "kl_coef", "kl_beta", "beta")
    coefficient = text.number(*keys)
    if coefficient is None:
        return [KlSection()]
    if text.has(r"kl_is1|bias_correction_kl=true|unbiased"):
        return [KlSection(coefficient, "unbiased")]
    stated = re.search(r"(?<![a-z0-9])(k[123])(?![0-9])|(low_var_kl)", text.peer)
    if stated is not None:
        return [KlSection(coefficient, stated.group(1) or "k3")]  # type: ignore[arg-type]
    return [KlSection(coefficient, "k3"), KlSection(coefficient, "unbiased"), KlSection(coefficient, "k2")]


def _opsm(text: CaseText) -> list[CorrectionSection]:
    if not text.has("opsm|off_policy_mask"):
        return [CorrectionSection()]
    return [CorrectionSection("opsm", high=text.required("off_policy_mask_threshold", "opsm_delta", "delta", "opsm"))]


def _gspo(text: CaseText, batch: GoldenBatch) -> Readings:
    has_token_advantages = isinstance(batch.raw[text.case["adv"]][0], list)
    is_token_form = has_token_advantages or text.has("gspo_token|gspo-token|sequence_token")
    names = ["gspo_token", "gspo"] if is_token_form else ["gspo", "gspo_token"]
    clips = text.clips((3e-4, 4e-4), PLAIN, HIGHER, (0.2, 0.27))
    for mode in text.modes("seq-mean-token-mean", "token-mean"):
        for name in names:
            if name == "gspo_token" or mode == "seq-mean-token-mean":
                yield from readings(text, batch, name, clips=clips, aggregation=[mode], kl=_kl(text))


def _luspo(text: CaseText, batch: GoldenBatch) -> Readings:
    """LUSPO multiplies GSPO's row loss by the row's length: GSPO-token summed instead of averaged over the row."""
    clips = text.clips((3e-4, 4e-4), PLAIN, HIGHER)
    return readings(text, batch, "gspo_token", clips=clips, aggregation=["seq-mean-token-sum"])


def _sapo(text: CaseText, batch: GoldenBatch) -> Readings:
    stated = (text.number("tau_pos", "sapo_temperature_pos"), text.number("tau_neg", "sapo_temperature_neg"))
    if None in stated:
        stated = (text.numbers[0], text.numbers[1]) if len(text.numbers) >= 2 else (1.0, 1.05)
    return readings(text, batch, "sapo", tau_positive=[stated[0]], tau_negative=[stated[1]])


def _gmpo(text: CaseText, batch: GoldenBatch) -> Readings:
    return readings(text, batch, "gmpo", clips=text.clips((0.4, 0.4)))


def _cispo(text: CaseText, batch: GoldenBatch) -> Readings:
    """The cap is 1 + clip_high; TRL's epsilon_high is the cap itself, and it has no lower bound."""
    cap = text.number("cap")
    low = text.number("clip_ratio_low", "ratio_clip_min", "epsilon_low")
    if text.has("trl") and (cap is not None or text.number("epsilon_high") is not None):
        cap = text.number("epsilon_high") if cap is None else cap
        clips = [(1.0, cap - 1.0)]
    elif cap is not None and low is not None:
        clips = [(low, cap - 1.0)]
    elif text.has("trl") and text.numbers:
        clips = [(1.0, text.numbers[-1] - 1.0)]
    else:
        clips = text.clips((1.0, 4.0), HIGHER, PLAIN)
        clips = [(1.0, high) for _, high in clips] if text.has("one-?sided") and low is None else clips
    return readings(text, batch, "cispo", clips=clips, aggregation=text.modes("token-mean", "seq-mean-token-mean"))


def _dppo(text: CaseText, batch: GoldenBatch) -> Readings:
    bound = 0.15 if text.has("dppo_tv") else 0.05
    return readings(
        text, batch, "dppo_tv" if text.has("dppo_tv") else "dppo_kl",
        clips=text.clips((bound, bound)), aggregation=text.modes("token-mean"),
        max_ratio=[text.number("clip_ratio_c", r"c(?==)") or 20.0],
    )  # fmt: skip


def _clip_cov(text: CaseText, batch: GoldenBatch) -> Readings:
    fraction = text.number("clip_cov_ratio", "ratio")
    section = CovarianceSection(
        fraction=2e-4 if fraction is None else fraction,
        low=text.number("clip_cov_lb", "lb") or 1.0,
        high=text.number("clip_cov_ub", "ub") or 5.0,
    )
    clips = text.clips(PLAIN, HIGHER) if "cov" not in text.name or text.pair("clip ") else [PLAIN, HIGHER]
    for low, high in clips:
        base = ppo_loss(_log_ratio(text, batch), batch.tokens(text.case["adv"]), clip_low=low, clip_high=high)
        cov_T, _ = token_covariance(batch.tokens(text.case["new"]), batch.tokens(text.case["adv"]), batch.mask().numpy())
        num_candidates = int(((cov_T > section.low) & (cov_T < section.high) & ~base.is_clipped_T.numpy()).sum())
        if num_candidates > max(1, int(section.fraction * sum(batch.lens))):
            raise Excepted("the tokens that Clip-Cov takes out are drawn at random from more candidates")
        yield from _with_choice(text, batch, "clip_cov", section, base.is_clipped_T.numpy(), clips=[(low, high)])


def _kl_cov(text: CaseText, batch: GoldenBatch) -> Readings:
    fraction = text.number("kl_cov_ratio", "kl_cov")
    coefficient = text.number("ppo_kl_coef", "coef")
    section = CovarianceSection(
        fraction=2e-4 if fraction is None else fraction, kl_coefficient=1.0 if coefficient is None else coefficient
    )
    return _with_choice(text, batch, "kl_cov", section, None)


def _with_choice(
    text: CaseText, batch: GoldenBatch, kind: str, section: CovarianceSection, is_excluded_T: Any, **choices: list[Any]
) -> Readings:
    """The peers choose by the current policy: hand in its log-probs."""
    chosen_T = choose_tokens(
        kind, section,
        logprobs_T=batch.tokens(text.case["new"]).numpy(), advantages_T=batch.tokens(text.case["adv"]).numpy(),
        mask_T=batch.mask().numpy(), draws_T=np.random.default_rng(0).random(sum(batch.lens)), is_excluded_T=is_excluded_T,
    )  # fmt: skip
    for clip_low, clip_high in choices.get("clips", [PLAIN]):
        for mode in text.modes("token-mean"):
            whole = AlgorithmSection(
                loss=kind, covariance=section, clip_low=clip_low, clip_high=clip_high, aggregation=mode,  # type: ignore[arg-type]
            )  # fmt: skip
            yield batch.section_loss(text.case, whole, is_chosen_T=torch.from_numpy(chosen_T))


def _log_ratio(text: CaseText, batch: GoldenBatch) -> torch.Tensor:
    return log_ratio(batch.tokens(text.case["new"]), batch.tokens("old"))


def _reinforce(text: CaseText, batch: GoldenBatch) -> Readings:
    return readings(text, batch, "reinforce", aggregation=text.modes("token-mean", "seq-mean-token-sum"), kl=_kl(text))


def _aipo(text: CaseText, batch: GoldenBatch) -> Readings:
    cap = text.number("rho_max", "cap", "aipo") or (text.numbers or [2.0])[-1]
    return readings(text, batch, "aipo", clip_high=[cap - 1.0], aggregation=text.modes("token-mean", "seq-mean-token-mean"))


def _vespo(text: CaseText, batch: GoldenBatch) -> Readings:
    return readings(text, batch, "vespo", vespo=[vespo_shape(text)], aggregation=text.modes("token-mean"))


def vespo_shape(text: CaseText) -> VespoSection:
    default = VespoSection()
    return VespoSection(
        k_positive=text.number("k_pos") or default.k_positive,
        lambda_positive=text.number("lam_pos", "lambda_pos") or default.lambda_positive,
        k_negative=text.number("k_neg") or default.k_negative,
        lambda_negative=text.number("lam_neg", "lambda_neg") or default.lambda_negative,
    )


def _per_token(text: CaseText, batch: GoldenBatch) -> Readings:
    """PPO plus the k3 penalty, before any reduction (Megatron)."""
    beta = text.number("kl_beta", "beta") or 0.0
    for low, high in text.clips(HIGHER, PLAIN):
        x = batch.inputs(text.case)
        ppo = ppo_loss(log_ratio(x.policy_logprobs_T, x.old_logprobs_T), x.advantages_T, clip_low=low, clip_high=high)
        loss_T = ppo.loss_T + beta * kl_estimate("k3", x.policy_logprobs_T, x.ref_logprobs_T)
        result: Result = {"per_token": loss_T.detach()}
        if "grad" in text.case:
            (result["grad"],) = torch.autograd.grad(loss_T.sum(), x.policy_logprobs_T)
        yield result


def _decoupled(text: CaseText, batch: GoldenBatch) -> Readings:
    """Decoupled PPO is PPO on policy/old times a detached f(old/rollout)."""
    behaviour_T = batch.tokens(text.case.get("behav", "rollout"))
    weights_T = _areal_weights(text.case.get("rs"), batch.tokens("old"), behaviour_T, batch)
    for low, high in text.clips(HIGHER, PLAIN):
        for mode in text.modes("token-mean"):
            yield batch.token_loss(
                text.case, mode,
                lambda x, low=low, high=high: weights_T * ppo_loss(
                    log_ratio(x.policy_logprobs_T, x.old_logprobs_T), x.advantages_T, clip_low=low, clip_high=high
                ).loss_T,
            )  # fmt: skip


def _areal_weights(rs: Any, old_T: torch.Tensor, behaviour_T: torch.Tensor, batch: GoldenBatch) -> torch.Tensor:
    """AReaL's rejection sampling {level, action, metric, agg, lower, upper}: which weights stay, which become 0 or are
    clamped.
    """
    log_rho_T, segments = log_ratio(old_T, behaviour_T), batch.segments()
    if rs is None:
        return torch.ones_like(log_rho_T)
    low, high, metric = rs.get("lower"), rs["upper"], rs.get("metric", "ratio").removeprefix("kl_")
    is_row = rs["level"] == "sequence"
    weights_T = importance_weights(log_rho_T, segments, "geometric" if is_row and metric == "ratio" else "token",
                                   "truncate", None, None)  # fmt: skip
    over = rs.get("agg", "mean") if is_row else "token"
    if metric == "binary_kl":
        divergence_T = token_divergence(old_T, behaviour_T, "max_binary_kl")
        if is_row:
            (row_S,) = segments.means(divergence_T) if over == "mean" else segments.sums(divergence_T)
            divergence_T = segments.spread(row_S)
        is_inside_T = divergence_T <= high
    elif metric in ("ratio", "k2"):
        is_inside_T = rejection_mask(log_rho_T, segments, metric, over, low, high)
    elif metric == "k3":  # AReaL's distance is that of behaviour from the trainer: k3 of the negated log-ratio
        is_inside_T = rejection_mask(-log_rho_T, segments, "k3", over, low, high)
    else:
        raise Unmapped(f"rejection sampling by {metric}")
    if rs["action"] == "mask":
        return weights_T * is_inside_T
    return torch.where(is_inside_T, weights_T, weights_T.clamp(min=low or 0.0, max=high))


OBJECTIVES: tuple[tuple[str, Callable[[CaseText, GoldenBatch], Readings]], ...] = (
    (r"decoupled|ppo_actor_loss_fn", _decoupled),
    (r"luspo", _luspo),
    (r"gmpo|geo_mean", _gmpo),
    (r"gspo|importance_sampling_level=sequence|sequence_level_importance_ratios", _gspo),
    (r"cispo", _cispo),
    (r"sapo", _sapo),
    (r"dppo", _dppo),
    (r"clip_cov", _clip_cov),
    (r"kl_cov", _kl_cov),
    (r"vespo", _vespo),
    (r"aipo", _aipo),
    (r"reinforce(?!_pp)|gpg|disable_ppo_ratio", _reinforce),
    (r"per_token|per-token \(no reduction", _per_token),
    (r"ppo|grpo|dapo|bnpo|vanilla|policyloss|clippedpg|vapo|trl_|two-?sided|clip", _ppo),
)
