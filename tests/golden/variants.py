"""Cases in the golden format with other parameters and other batches, computed by plain loops over rows and tokens.

An independent reference: nothing of `megatron_rl` is imported. Gradients are central differences; what an objective
detaches is read from a frozen copy of the log-probs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Rows = list[list[float]]
Loss = Callable[[Rows, Rows], float]
"""(log-probs, frozen copy of them) -> loss."""


def write_variants(folder: Path, seed: int) -> int:
    """Write `batch.json` and five files of cases; returns how many."""
    batch = make_batch(seed)
    files = {
        "policy_losses.json": policy_cases(batch),
        "rollout_correction.json": correction_cases(batch),
        "advantages.json": advantage_cases(batch),
        "kl.json": kl_cases(batch),
    }
    (folder / "batch.json").write_text(json.dumps(batch))
    for name, cases in files.items():
        (folder / name).write_text(json.dumps({"cases": cases}))
    loss_matrix = [[float(abs(a) + 0.1) for a in row] for row in batch["adv_tok"]]
    aggregation = {"loss_mat_values": loss_matrix, "ranks": "rows [0:2] and [2:6] and [6:9]"}
    aggregation["cases"] = aggregation_cases(loss_matrix)
    (folder / "aggregation.json").write_text(json.dumps(aggregation))
    return sum(map(len, files.values())) + len(aggregation["cases"])


def make_batch(seed: int) -> dict[str, Any]:
    """Groups of 4, 1, 3 and 1 rows; rows of 0 to 9 tokens, the first of one token."""
    rng = np.random.default_rng(seed)
    lens = [1, *rng.integers(2, 10, 6).tolist(), 0, int(rng.integers(2, 10))]
    old = [(-rng.exponential(1.0, n)).tolist() for n in lens]

    def near(scale: float) -> Rows:
        return [[x + scale * rng.normal() for x in row] for row in old]

    def free() -> Rows:
        return [rng.normal(size=n).tolist() for n in lens]

    batch: dict[str, Any] = {
        "group_index": [0, 0, 0, 0, 1, 2, 2, 2, 3],
        "lens": lens,
        "rewards": rng.normal(size=9).round(3).tolist(),
        "old": old, "new_wide": near(0.4), "new_narrow": near(2e-4), "ref": near(0.3), "rollout": near(0.3),
        "values": free(), "vpred": free(), "adv_tok": free(), "adv_seq": rng.normal(size=9).tolist(),
        "tool_mask": [[1] * n for n in lens], "behaviour_version": [[3] * n for n in lens],
    }  # fmt: skip
    longest = int(np.argmax(lens))
    batch["tool_mask"][longest][1 : max(lens) // 2] = [0] * (max(lens) // 2 - 1)
    return batch


# -- objectives -------------------------------------------------------------------------------------------------------


def mean_over(mode: str, rows: Rows, constant: float = 1.0) -> float:
    """The aggregation of per-token losses; rows without a token do not count."""
    filled = [row for row in rows if row]
    if mode == "token-sum":
        return sum(map(sum, filled))
    if mode == "token-mean":
        return sum(map(sum, filled)) / sum(map(len, filled))
    if mode == "seq-mean-token-sum":
        return sum(map(sum, filled)) / len(filled)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in filled) / len(filled)
    return sum(map(sum, filled)) / (len(filled) * constant)


def clipped(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -dual * advantage) if dual is not None and advantage < 0 else loss


def per_token(batch: dict[str, Any], adv: str, function: Callable[..., float]) -> Callable[[Rows, Rows], Rows]:
    """`function(new, frozen, old, advantage, i, t)` of every token."""
    advantages = batch[adv] if isinstance(batch[adv][0], list) else spread(batch[adv], batch["lens"])

    def losses(new: Rows, frozen: Rows) -> Rows:
        return [
            [function(new[i][t], frozen[i][t], batch["old"][i][t], advantages[i][t], i, t) for t in range(len(row))]
            for i, row in enumerate(new)
        ]

    return losses


def spread(values: list[float], lens: list[int]) -> Rows:
    return [[value] * n for value, n in zip(values, lens, strict=True)]


def case_of(batch: dict[str, Any], new: str, adv: str, loss: Loss, peer: str, **fields: Any) -> dict[str, Any]:
    """Loss and gradient, by central differences."""
    rows, step = batch[new], 2e-7
    grad = []
    for i, row in enumerate(rows):
        grad.append([])
        for t in range(len(row)):
            ends = []
            for sign in (1, -1):
                moved = [list(r) for r in rows]
                moved[i][t] += sign * step
                ends.append(loss(moved, rows))
            grad[i].append((ends[0] - ends[1]) / (2 * step))
    return {"peer": peer, "loss": loss(rows, rows), "grad": grad, "new": new, "adv": adv, **fields}


def policy_cases(batch: dict[str, Any]) -> dict[str, Any]:
    cases: dict[str, Any] = {}

    def add(name: str, new: str, adv: str, mode: str, function: Callable[..., float], peer: str, **fields: Any) -> None:
        losses = per_token(batch, adv, function)
        constant = fields.pop("constant", 1.0)
        loss = lambda new, frozen: mean_over(mode, losses(new, frozen), constant)  # noqa: E731
        cases[name] = case_of(batch, new, adv, loss, peer, **fields)

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
    add_covariance(batch, cases)
    add_gmpo(batch, cases)
    add_decoupled(batch, cases)
    return cases


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


# -- everything else --------------------------------------------------------------------------------------------------


def correction_cases(batch: dict[str, Any]) -> dict[str, Any]:
    pairs = list(zip(batch["old"], batch["rollout"], strict=True))
    log_rho = [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]
    rho = [[math.exp(x) for x in row] for row in log_rho]
    product = [[math.exp(sum(row))] * len(row) for row in log_rho]
    cases: dict[str, Any] = {
        "verl_is_token_1.3": {"weights": [[min(w, 1.3) for w in row] for row in rho]},
        "verl_is_token_0.7_1.4": {"weights": [[w if 0.7 <= w <= 1.4 else 0.0 for w in row] for row in rho]},
        "verl_is_sequence_1.5": {"weights": [[min(w, 1.5) for w in row] for row in product]},
        "trl_sequence_mask_max2_min0.6": {"weights": [[w if 0.6 <= w <= 2 else 0.0 for w in row] for row in product]},
        "trl_token_truncate_max1.2_minNone": {"weights": [[min(w, 1.2) for w in row] for row in rho]},
        "slime_tis_0.5_1.5": {"weights": [[min(max(w, 0.5), 1.5) for w in row] for row in rho]},
        "slime_icepop_0.7_1.3": {"weights": [[w if 0.7 <= w <= 1.3 else 0.0 for w in row] for row in rho]},
        "verl_rs_token_k2_0.02": {"mask": [[float(0.5 * x * x <= 0.02) for x in row] for row in log_rho]},
        "verl_rs_seq_sum_k2_0.2": {"mask": [[float(sum(0.5 * x * x for x in row) <= 0.2)] * len(row) for row in log_rho]},
        "verl_rs_seq_max_k2_0.1": {
            "mask": [[float(max(0.5 * x * x for x in row) <= 0.1)] * len(row) if row else [] for row in log_rho]
        },
        "verl_rs_seq_mean_k1_1.25": {
            "mask": [[float(abs(sum(row) / len(row)) <= math.log(1.25))] * len(row) if row else [] for row in log_rho]
        },
    }
    settings = {
        "loss_ppo_x_token_tis1.2": [[min(w, 1.2) for w in row] for row in rho],
        "loss_ppo_x_token_icepop_0.8_1.3": [[w if 0.8 <= w <= 1.3 else 0.0 for w in row] for row in rho],
        "loss_ppo_x_seq_tis1.1": [[min(w, 1.1) for w in row] for row in product],
        "openrlhf_token_mask_ratio_0.8_1.3": [[w if 0.8 <= w <= 1.3 else 0.0 for w in row] for row in rho],
        "openrlhf_token_mask_tv_0.0_0.05": [
            [math.exp(a - b) if abs(math.exp(a) - math.exp(b)) <= 0.05 else 0.0 for a, b in zip(*pair, strict=True)]
            for pair in pairs
        ],
    }
    for name, weights in settings.items():

        def corrected(new: float, frozen: float, old: float, a: float, i: int, t: int, weights: Rows = weights) -> float:
            return weights[i][t] * clipped(math.exp(new - old), a, 0.2, 0.28)

        losses = per_token(batch, "adv_seq", corrected)
        loss = lambda new, frozen, losses=losses: mean_over("token-mean", losses(new, frozen))  # noqa: E731
        cases[name] = case_of(batch, "new_wide", "adv_seq", loss, "a peer")
    return {name: {"peer": "a peer", **case} for name, case in cases.items()}


def advantage_cases(batch: dict[str, Any]) -> dict[str, Any]:
    rewards, groups, lens = batch["rewards"], batch["group_index"], batch["lens"]
    others = [[rewards[j] for j in range(9) if groups[j] == groups[i] and j != i] for i in range(9)]
    members = [[*others[i], rewards[i]] for i in range(9)]
    mean = [sum(row) / len(row) for row in members]

    def std(i: int, ddof: int) -> float:
        return math.sqrt(sum((x - mean[i]) ** 2 for x in members[i]) / (len(members[i]) - ddof))

    alone = [not row for row in others]
    one_is_zero = [0.0 if alone[i] else rewards[i] - mean[i] for i in range(9)]
    cases: dict[str, Any] = {
        "grpo": {
            "adv": spread([rewards[i] / (1 + 1e-6) if alone[i] else (rewards[i] - mean[i]) / (std(i, 1) + 1e-6)
                           for i in range(9)], lens),
            "eps": 1e-6, "std": "unbiased (ddof=1)",
        },
        "megatron_grpo": {
            "adv": [0.0 if alone[i] else (rewards[i] - mean[i]) / (std(i, 0) + 1e-3) for i in range(9)],
            "eps": 1e-3, "std": "population (ddof=0)",
        },
        "dr_grpo": {"adv": spread([rewards[i] if alone[i] else rewards[i] - mean[i] for i in range(9)], lens)},
        "trl_scale_none": {"adv": one_is_zero},
        "rloo": {"adv": [0.0 if alone[i] else rewards[i] - sum(others[i]) / len(others[i]) for i in range(9)]},
    }  # fmt: skip
    for lam, gamma, mask_name in ((0.8, 1.0, None), (0.9, 0.95, "tool_mask")):
        mask = batch["tool_mask"] if mask_name else [[1] * n for n in lens]
        adv, ret = plain_gae(batch, mask, [lam] * 9, lam, gamma)
        suffix = "_toolmask" if mask_name else ""
        cases[f"gae_raw_lam{lam}_gam{gamma}{suffix}"] = {"adv": adv, "ret": ret} | ({"mask": mask_name} if mask_name else {})
    lambdas = [max(0.0, 1 - 1 / (0.3 * max(n, 1e-9))) for n in lens]
    adv, ret = plain_gae(batch, [[1] * n for n in lens], lambdas, 1.0, 1.0)
    cases["vapo_alpha0.3"] = {"adv": adv, "ret": ret, "lambda_policy": lambdas}
    flat = [x for row in adv for x in row]
    centre = sum(flat) / len(flat)
    variance = sum((x - centre) ** 2 for x in flat) / (len(flat) - 1)
    cases["vapo_alpha0.3"]["adv_whitened"] = [[(x - centre) / math.sqrt(variance + 1e-8) for x in row] for row in adv]
    return {name: {"peer": "a peer", **case} for name, case in cases.items()}


def plain_gae(
    batch: dict[str, Any], mask: list[list[int]], lambdas: list[float], critic: float, gamma: float
) -> tuple[Rows, Rows]:
    """The recurrence over trained tokens, carried across gaps."""
    all_advantages, all_returns = [], []
    for i, row in enumerate(batch["values"]):
        advantages, returns = [0.0] * len(row), [0.0] * len(row)
        next_value = actor = critic_sum = 0.0
        reward = batch["rewards"][i]
        for t in reversed([t for t in range(len(row)) if mask[i][t]]):
            delta = reward + gamma * next_value - row[t]
            actor, critic_sum = delta + gamma * lambdas[i] * actor, delta + gamma * critic * critic_sum
            advantages[t], returns[t], next_value, reward = actor, critic_sum + row[t], row[t], 0.0
        all_advantages.append(advantages)
        all_returns.append(returns)
    return all_advantages, all_returns


def kl_cases(batch: dict[str, Any]) -> dict[str, Any]:
    number = sum(batch["lens"])
    forms = {
        "verl_k1": (lambda x: x, lambda x: 1.0),
        "verl_low_var_kl": (lambda x: math.exp(-x) - 1 + x, lambda x: 1 - math.exp(-x)),
        "nemo_k2": (lambda x: x * x / 2, lambda x: x),
        "openrlhf_k3": (lambda x: math.exp(-x) - 1 + x, lambda x: 1 - math.exp(-x)),
        "verl_k1+": (lambda x: x, lambda x: x),
    }
    x = [[a - b for a, b in zip(*rows, strict=True)] for rows in zip(batch["new_wide"], batch["ref"], strict=True)]
    return {
        name: {
            "peer": "a peer", "new": "new_wide",
            "value": [[value(v) for v in row] for row in x],
            "grad_of_token_mean": [[slope(v) / number for v in row] for row in x],
        }
        for name, (value, slope) in forms.items()
    }  # fmt: skip


def aggregation_cases(loss_matrix: Rows) -> dict[str, Any]:
    """Every mode, whole and with row 3 masked, over three ranks."""
    spans = ((0, 2), (2, 6), (6, 9))
    cases = {}
    for which in ("len", "row3_fully_masked"):
        kept = [row if which == "len" or i != 3 else [] for i, row in enumerate(loss_matrix)]
        filled, tokens = sum(bool(row) for row in kept), sum(map(len, kept))
        for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
            constant = 11 if mode.endswith("norm") else None
            over = {"token-mean": tokens, "token-sum": 1}.get(mode, filled * (constant or 1))
            totals = [sum(row) / (len(row) or 1) if mode == "seq-mean-token-mean" else sum(row) for row in kept]
            ranks = [3 * sum(totals[first:last]) / over for first, last in spans]
            cases[f"{mode}|{which}"] = {
                "full": mean_over(mode, kept, constant or 1.0), "dp3_rank_losses": ranks, "dp3_mean": sum(ranks) / 3,
                "loss_scale_factor": constant,
            }  # fmt: skip
    return cases
