"""Corrections, advantages, KL and aggregation as plain loops, in the golden format."""

from __future__ import annotations

import math
from typing import Any

from plain_loops import Rows, case_of, clipped, mean_over, per_token, spread


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
