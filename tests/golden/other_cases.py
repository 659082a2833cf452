"""`kl.json`, `aggregation.json`, `misc.json` and `routing_replay.json`."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from golden_batch import GoldenBatch, Unmapped, loss_and_grad, named_number, numbers

from megatron_rl.algorithms.advantages.whitening import whiten
from megatron_rl.algorithms.aggregation import aggregate, token_weights
from megatron_rl.algorithms.corrections import off_policy_sequence_mask
from megatron_rl.algorithms.kl import adapt_kl_coefficient, kl_estimate
from megatron_rl.algorithms.losses.soft import vespo_phi
from megatron_rl.algorithms.losses.value import value_loss
from megatron_rl.algorithms.ratios import log_ratio
from megatron_rl.algorithms.routing_replay import expert_probabilities, select_experts
from megatron_rl.rewards.length import soft_overlong_punishment

Case = dict[str, Any]
Result = dict[str, Any]


def compute_kl(name: str, case: Case, batch: GoldenBatch, _: dict[str, Any]) -> Result:
    if name.startswith("verl_"):
        estimator = name.removeprefix("verl_")
    elif "unbiased" in name:
        estimator = "unbiased"
    else:
        raise Unmapped("no estimator of ours goes by this name")
    policy_T = batch.tokens(case.get("new", "new_wide")).requires_grad_()
    value_T = kl_estimate(estimator, policy_T, batch.tokens("ref"), log_ratio(policy_T, batch.tokens("old")))
    weights_T = token_weights("token-mean", batch.segments(), batch.denominators())
    grad_T = loss_and_grad(aggregate(value_T, weights_T), policy_T)["grad"]
    result = {"grad_of_token_mean": grad_T}
    if "value" in case:
        result["value"] = value_T.detach()
    return result


def compute_aggregation(name: str, case: Case, batch: GoldenBatch, file: dict[str, Any]) -> Result:
    mode, _, which = name.partition("|")
    loss_T = batch.pack(file["loss_mat_values"])
    mask_T = batch.mask()
    if which == "row0_fully_masked":
        mask_T[: batch.lens[0]] = False
    elif which != "len":
        raise Unmapped(f"mask {which!r}")
    denominators = batch.denominators(mask_T)
    weights_T = token_weights(mode, batch.segments(mask_T), denominators, case["loss_scale_factor"])
    ranks = [tuple(map(int, span)) for span in re.findall(r"\[(\d+):(\d+)\]", file["ranks"])]
    shares = []
    for first, last in ranks:
        part = slice(int(batch.cu_seqlens[first]), int(batch.cu_seqlens[last]))
        shares.append(float(aggregate(loss_T[part], weights_T[part])) * len(ranks))  # a data-parallel mean follows
    return {"full": aggregate(loss_T, weights_T), "dp2_rank_losses": shares, "dp2_mean": float(np.mean(shares))}


def compute_misc(name: str, case: Case, batch: GoldenBatch, _: dict[str, Any]) -> Result:
    for pattern, function in MISC_PATTERNS:
        if re.match(pattern, name):
            return function(name, case, batch)
    raise Unmapped("no function of ours goes by this name")


def _value_loss(name: str, case: Case, batch: GoldenBatch) -> Result:
    values_T = batch.tokens("vpred").requires_grad_()
    clip = named_number(name, "clip")
    loss_T = value_loss(values_T, batch.tokens("values"), batch.pack(case["returns"]), clip)
    weights_T = token_weights("token-mean", batch.segments(), batch.denominators())
    return loss_and_grad(aggregate(loss_T, weights_T), values_T)


def _soft_overlong(name: str, case: Case, batch: GoldenBatch) -> Result:
    max_length, cache_length = (int(x) for x in numbers(name))
    return {"trl": [soft_overlong_punishment(length, max_length, cache_length) for length in case["lens"]]}


def _opsm(name: str, case: Case, batch: GoldenBatch) -> Result:
    keep_T = off_policy_sequence_mask(
        batch.tokens("new_wide"), batch.tokens("rollout"), batch.tokens("adv_seq"), batch.segments(),
        named_number(case["peer"], "threshold"),
    )  # fmt: skip
    return {"keep": keep_T[batch.cu_seqlens[:-1]].double()}


def _vespo_phi(name: str, case: Case, batch: GoldenBatch) -> Result:
    log_ratio_T = log_ratio(batch.tokens("new_wide"), batch.tokens("old"))
    return {"phi": vespo_phi(log_ratio_T, batch.tokens("adv_seq"), batch.segments())}


def _whiten(name: str, case: Case, batch: GoldenBatch) -> Result:
    values_T, mask_T = batch.tokens("adv_tok").numpy(), batch.mask().numpy()
    if "areal" in name:
        return {"out": whiten(values_T, mask_T, ddof=0, epsilon=1e-5, epsilon_on="std")}
    if name.startswith("dp_whiten_2rank"):
        return {"out": _whiten_on_ranks(values_T, mask_T, int(batch.cu_seqlens[3]))}
    return {"out": whiten(values_T, mask_T)}


def _whiten_on_ranks(values_T: np.ndarray, mask_T: np.ndarray, border: int) -> np.ndarray:
    """Whitened on two ranks (threads that add up at a barrier), tokens before and after `border`."""
    barrier = threading.Barrier(2, timeout=30.0)
    board: list[Any] = [None, None]

    def whiten_on(rank: int) -> np.ndarray:
        part = slice(0, border) if rank == 0 else slice(border, None)

        def add_up(local: np.ndarray) -> np.ndarray:
            board[rank] = local
            barrier.wait()
            total = board[0] + board[1]
            barrier.wait()  # nobody writes the next call before everyone has read this one
            return total

        return whiten(values_T[part], mask_T[part], add_up)

    with ThreadPoolExecutor(2) as pool:
        return np.concatenate(list(pool.map(whiten_on, range(2))))


def _kl_controller(name: str, case: Case, batch: GoldenBatch) -> Result:
    coefficient, target, horizon = (float(x) for x in re.findall(r"(?:init|target|horizon) ([\d.]+)", case["peer"]))
    values = []
    for kl, num_samples in case["updates"]:
        coefficient = adapt_kl_coefficient(coefficient, kl, target=target, horizon=horizon, num_samples=num_samples)
        values.append(coefficient)
    return {"values": values}


MISC_PATTERNS = (
    (r"value_loss_clip", _value_loss),
    (r"soft_overlong_", _soft_overlong),
    (r"opsm_mask_", _opsm),
    (r"vespo_phi_", _vespo_phi),
    (r".*(masked_normalization|whiten)", _whiten),
    (r"adaptive_kl_controller", _kl_controller),
)


def compute_routing(name: str, case: Case, batch: GoldenBatch, file: dict[str, Any]) -> Result:
    match = re.match(r"(softmax_post|softmax_pre|sigmoid)(_bias)?(?:_x([\d.]+))?(?:_groups(\d+)_top(\d+))?$", name)
    if match is None:
        raise Unmapped("no score function of ours goes by this name")
    score, bias, scaling, num_groups, group_topk = match.groups()
    expert_bias_E = torch.tensor(file["expert_bias"], dtype=torch.float64) if bias else None
    options: dict[str, Any] = {"score_function": score, "expert_bias_E": expert_bias_E}
    if num_groups is not None:
        options |= {"num_groups": int(num_groups), "group_topk": int(group_topk)}
    scale = float(scaling or 1.0)
    logits_TE = torch.tensor(file["train_logits"], dtype=torch.float64).requires_grad_()
    replayed_Tk = select_experts(torch.tensor(file["rollout_logits"], dtype=torch.float64), file["topk"], **options)
    native_Tk = select_experts(logits_TE, file["topk"], **options)
    replay_TE = expert_probabilities(logits_TE, replayed_Tk, score, scale)
    (grad_TE,) = torch.autograd.grad((replay_TE * torch.tensor(file["coef"], dtype=torch.float64)).sum(), logits_TE)
    replayed_Tk, native_Tk = replayed_Tk.sort(dim=-1).values, native_Tk.sort(dim=-1).values
    return {
        "replay_indices": replayed_Tk.tolist(),
        "replay_probs": replay_TE.tolist(),
        "replay_grad": grad_TE.tolist(),
        "native_indices": native_Tk.tolist(),
        "native_probs": expert_probabilities(logits_TE, native_Tk, score, scale).tolist(),
        "tokens_rerouted": int((replayed_Tk != native_Tk).any(dim=-1).sum()),
    }
