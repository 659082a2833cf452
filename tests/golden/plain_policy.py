"""Objectives as plain loops, in the golden format."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from plain_loops import Rows, case_of, clipped, mean_over, per_token, spread


def policy_cases(batch: dict[str, Any]) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    add_clipped(batch, cases)
    add_ratio_based(batch, cases)
    add_covariance(batch, cases)
    add_gmpo(batch, cases)
    add_decoupled(batch, cases)
    return cases


def adder(batch: dict[str, Any], cases: dict[str, Any]) -> Callable[..., None]:

    def add(name: str, new: str, adv: str, mode: str, function: Callable[..., float], peer: str, **fields: Any) -> None:
        losses = per_token(batch, adv, function)
        constant = fields.pop("constant", 1.0)
        loss = lambda new, frozen: mean_over(mode, losses(new, frozen), constant)  # noqa: E731
        cases[name] = case_of(batch, new, adv, loss, peer, **fields)

    return add


def add_clipped(batch: dict[str, Any], cases: dict[str, Any]) -> None:
    add = adder(batch, cases)

    def ppo(low: float, high: float, dual: float | None = None) -> Callable[..., float]:
        return lambda new, frozen, old, a, i, t: clipped(math.exp(new - old), a, low, high, dual)

    vanilla = "verl==0.9.1 core_algos.compute_policy_loss_vanilla"
    add("ppo_clip_0.1_token-mean", "new_wide", "adv_tok", "token-mean", ppo(0.1, 0.1), vanilla)
    add("ppo_dualclip_c1.5", "new_wide", "adv_tok", "token-mean", ppo(0.2, 0.2, 1.5), f"{vanilla} clip_ratio_c=1.5")
    add("dapo_cliphigher_0.15_0.35_token-mean", "new_wide", "adv_seq", "token-mean", ppo(0.15, 0.35, 2.5), vanilla,
        clip_ratio_c=2.5)  # fmt: skip
    for mode in ("token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        peer = f"{vanilla} agg={mode} loss_scale_factor=24 (constant)"
        add(f"grpo_clip0.3_{mode}", "new_wide", "adv_seq", mode, ppo(0.3, 0.3), peer, constant=24.0)
    add("trl_dapo_0.1_0.4", "new_wide", "adv_seq", "token-mean", ppo(0.1, 0.4), "trl==1.16.0 loss_type=dapo {}")
    add("trl_dr_grpo_0.2_0.28", "new_wide", "adv_seq", "seq-mean-token-sum-norm", ppo(0.2, 0.28),
        "trl==1.16.0 loss_type=dr_grpo {'max_completion_length': 40}", constant=40.0)  # fmt: skip
    add("trl_twosided_delta1.3", "new_wide", "adv_seq", "token-mean", ppo(0.2, 0.28, 1.3), "trl loss_type=dapo delta=1.3")
    add("openrlhf_ppo_dual2_cliphigher", "new_wide", "adv_tok", "token-mean", ppo(0.2, 0.28, 2.0), "openrlhf PolicyLoss")

    def with_kl(new: float, frozen: float, old: float, a: float, i: int, t: int) -> float:
        x = new - batch["ref"][i][t]
        return clipped(math.exp(new - old), a, 0.2, 0.2) + 0.1 * (math.exp(-x) - 1 + x)

    add("trl_grpo_beta0.1_kl_is0", "new_wide", "adv_seq", "seq-mean-token-mean", with_kl,
        "trl==1.16.0 loss_type=grpo beta=.1 use_bias_correction_kl=False")  # fmt: skip


def add_ratio_based(batch: dict[str, Any], cases: dict[str, Any]) -> None:
    add = adder(batch, cases)

    def mean_log_ratio(rows: Rows, i: int) -> float:
        return sum(a - b for a, b in zip(rows[i], batch["old"][i], strict=True)) / len(rows[i])

    frozen_of: dict[str, Rows] = {name: batch[name] for name in ("new_wide", "new_narrow")}

    def gspo(which: str, low: float, high: float) -> Callable[..., float]:
        def loss(new: float, frozen: float, old: float, a: float, i: int, t: int) -> float:
            ratio = math.exp(mean_log_ratio(frozen_of[which], i)) * math.exp(new - frozen)
            return clipped(ratio, a, low, high)

        return loss

    add("gspo_1e-4_2e-4_seqmean", "new_narrow", "adv_seq", "seq-mean-token-mean", gspo("new_narrow", 1e-4, 2e-4),
        "verl compute_policy_loss_gspo agg=seq-mean-token-mean")  # fmt: skip
    add("gspo_0.1_0.3_wide_seqmean", "new_wide", "adv_seq", "seq-mean-token-mean", gspo("new_wide", 0.1, 0.3), "verl gspo")
    add("gspo_token_adv_tok_0.1_0.3", "new_wide", "adv_tok", "seq-mean-token-mean", gspo("new_wide", 0.1, 0.3),
        "verl compute_policy_loss_gspo with per-token advantages")  # fmt: skip
    add("gspo_0.1_0.1_tokenmean_NOT_PAPER", "new_wide", "adv_seq", "token-mean", gspo("new_wide", 0.1, 0.1),
        "verl compute_policy_loss_gspo agg=token-mean")  # fmt: skip

    def sapo(positive: float, negative: float) -> Callable[..., float]:
        def loss(new: float, frozen: float, old: float, a: float, i: int, t: int) -> float:
            tau = positive if a > 0 else negative
            return -(4 / tau) * a / (1 + math.exp(-tau * (math.exp(new - old) - 1)))

        return loss

    add("sapo_0.7_1.3", "new_wide", "adv_seq", "seq-mean-token-mean", sapo(0.7, 1.3), "verl compute_policy_loss_sapo")
    add("trl_sapo", "new_wide", "adv_seq", "seq-mean-token-mean", sapo(0.9, 1.4),
        "trl loss_type=sapo sapo_temperature_pos=0.9 sapo_temperature_neg=1.4")  # fmt: skip

    def cispo(low: float, high: float) -> Callable[..., float]:
        return lambda new, frozen, old, a, i, t: -min(max(math.exp(frozen - old), 1 - low), 1 + high) * a * new

    add("cispo_verl_0.1_0.3", "new_wide", "adv_seq", "token-mean", cispo(0.1, 0.3), "verl compute_policy_loss_cispo")
    add("cispo_verl_onesided_b", "new_wide", "adv_seq", "token-mean", cispo(1.0, 0.5),
        "verl compute_policy_loss_cispo clip_ratio_low=1.0 (no lower bound) clip_ratio_high=0.5 (cap 1.5)")  # fmt: skip
    add("trl_cispo", "new_wide", "adv_seq", "token-mean", cispo(1.0, 0.4), "trl==1.16.0 loss_type=cispo epsilon_high=1.4")

    def dppo(bound: float, cap: float) -> Callable[..., float]:
        def loss(new: float, frozen: float, old: float, a: float, i: int, t: int) -> float:
            moved = math.exp(frozen) - math.exp(old)
            is_outside = moved > bound if a > 0 else moved < -bound
            return 0.0 if is_outside else -min(math.exp(frozen - old), cap) * a * new

        return loss

    add("dppo_tv_0.05", "new_wide", "adv_seq", "token-mean", dppo(0.05, 20.0), "verl dppo_tv clip 0.05/0.05 c=20")
    add("dppo_tv_0.3", "new_wide", "adv_seq", "token-mean", dppo(0.3, 1.1), "verl dppo_tv clip 0.3/0.3 c=1.1")
    add("reinforce_gpg_seq-mean-token-sum", "new_wide", "adv_seq", "seq-mean-token-sum",
        lambda new, frozen, old, a, i, t: -a * new, "verl compute_policy_loss_gpg")  # fmt: skip


def add_covariance(batch: dict[str, Any], cases: dict[str, Any]) -> None:
    """KL-Cov on the top tenth, and Clip-Cov that takes every candidate out."""
    advantages = spread(batch["adv_seq"], batch["lens"])
    tokens = [(i, t) for i, row in enumerate(batch["old"]) for t in range(len(row))]
    mean_a = sum(advantages[i][t] for i, t in tokens) / len(tokens)
    mean_p = sum(batch["new_wide"][i][t] for i, t in tokens) / len(tokens)
    cov = {(i, t): (advantages[i][t] - mean_a) * (batch["new_wide"][i][t] - mean_p) for i, t in tokens}
    top = set(sorted(cov, key=lambda key: -cov[key])[: max(1, int(0.1 * len(tokens)))])
    low = sum(sorted(cov.values())[len(tokens) // 2 :][:2]) / 2

    def kl_cov(new: float, frozen: float, old: float, a: float, i: int, t: int) -> float:
        return -a * math.exp(new - old) + (0.5 * abs(new - old) if (i, t) in top else 0.0)

    def clip_cov(new: float, frozen: float, old: float, a: float, i: int, t: int) -> float:
        ratio = math.exp(frozen - old)
        is_clipped_anyway = ratio > 1.2 if a > 0 else ratio < 0.8
        is_taken = low < cov[i, t] < 50 and not is_clipped_anyway
        return 0.0 if is_taken else clipped(math.exp(new - old), a, 0.2, 0.2)

    for name, function, peer in (
        ("kl_cov_0.1_coef0.5", kl_cov, "verl kl_cov_ratio=.1 ppo_kl_coef=0.5"),
        ("clip_cov_take_all", clip_cov, f"verl compute_policy_loss_clip_cov ratio=1.0 lb={low:.17g} ub=50"),
    ):
        losses = per_token(batch, "adv_seq", function)
        loss = lambda new, frozen, losses=losses: mean_over("token-mean", losses(new, frozen))  # noqa: E731
        cases[name] = case_of(batch, "new_wide", "adv_seq", loss, peer)


def add_gmpo(batch: dict[str, Any], cases: dict[str, Any]) -> None:
    def loss(new: Rows, frozen: Rows) -> float:
        total, count = 0.0, 0
        for row, old, advantage in zip(new, batch["old"], batch["adv_seq"], strict=True):
            if row:
                sign = 1 if advantage > 0 else -1
                kept = [sign * min(sign * (a - b), sign * min(max(a - b, -0.25), 0.25)) for a, b in zip(row, old, strict=True)]
                total, count = total - advantage * math.exp(sum(kept) / len(kept)), count + 1
        return total / count

    cases["gmpo_geo_mean_0.25"] = case_of(batch, "new_wide", "adv_seq", loss, "verl geo_mean, log-clip [-0.25,0.25]")


def add_decoupled(batch: dict[str, Any], cases: dict[str, Any]) -> None:
    rho = [[math.exp(a - b) for a, b in zip(*rows, strict=True)] for rows in zip(batch["old"], batch["rollout"], strict=True)]
    geometric = [[math.exp(sum(map(math.log, row)) / len(row))] * len(row) if row else [] for row in rho]

    def masked(rows: Rows, low: float, high: float) -> Rows:
        return [[w if low <= w <= high else 0.0 for w in row] for row in rows]

    settings = {
        "token_mask_0.8_1.2": (masked(rho, 0.8, 1.2), {"level": "token", "action": "mask", "lower": 0.8, "upper": 1.2}),
        "token_clamp1.1": (
            [[min(w, 1.1) for w in row] for row in rho],
            {"level": "token", "action": "clamp", "lower": None, "upper": 1.1},
        ),
        "seq_mask_geo": (
            masked(geometric, 0.9, 1.1),
            {"level": "sequence", "action": "mask", "agg": "mean", "lower": 0.9, "upper": 1.1},
        ),
    }
    for name, (weights, rs) in settings.items():

        def corrected(new: float, frozen: float, old: float, a: float, i: int, t: int, weights: Rows = weights) -> float:
            return weights[i][t] * clipped(math.exp(new - old), a, 0.2, 0.28)

        losses = per_token(batch, "adv_seq", corrected)
        loss = lambda new, frozen, losses=losses: mean_over("token-mean", losses(new, frozen))  # noqa: E731
        peer = "AReaL ppo_actor_loss_fn proximal=old behaviour=rollout clip .2/.28"
        fields = {"behav": "rollout", "rs": {"metric": "ratio", "agg": "mean", **rs}}
        cases[f"decoupled_ppo_{name}"] = case_of(batch, "new_wide", "adv_seq", loss, peer, **fields)
