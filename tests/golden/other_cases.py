"""`kl.json`, `aggregation.json`, `misc.json` and `routing_replay.json`."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from case_text import NUMBER, CaseText, Unmapped
from golden_batch import GoldenBatch, loss_and_grad
from policy_cases import vespo_shape

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
Readings = Iterator[Result]
KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "kl+": "k1+", "low_var_kl+": "k3+", "k2+": "k2", "mse+": "k2"}


def compute_kl(name: str, case: Case, batch: GoldenBatch, _: dict[str, Any]) -> Readings:
    """The estimator stands in the name, or in the brackets after the peer's function. Where an unbiased gradient is
    asked for, a peer may print the plain estimate as the value (straight through).
    """
    text = CaseText(name, case)
    stated = re.search(r"(?:^|_)(k[123]\+?|abs|kl\+?|mse\+?|low_var_kl\+?)$", name)
    stated = stated or re.search(r"\((k[123]\+?|abs|kl|mse|low_var_kl)\b", text.peer)
    kind = KL_ALIASES.get(stated.group(1), stated.group(1)) if stated else None
    if text.has("unbiased"):
        estimators = ["unbiased"]
    elif kind is None:
        raise Unmapped("no estimator of ours goes by this name")
    else:
        estimators = [kind]
    for estimator in estimators:
        policy_T = batch.tokens(case.get("new", "new_wide")).requires_grad_()
        value_T = kl_estimate(estimator, policy_T, batch.tokens("ref"), log_ratio(policy_T, batch.tokens("old")))
        weights_T = token_weights("token-mean", batch.segments(), batch.denominators())
        result = {"grad_of_token_mean": loss_and_grad(aggregate(value_T, weights_T), policy_T)["grad"]}
        if "value" not in case:
            yield result
            continue
        yield result | {"value": value_T.detach()}
        if estimator == "unbiased" and kind is not None:
            yield result | {"value": kl_estimate(kind, policy_T, batch.tokens("ref")).detach()}


def compute_aggregation(name: str, case: Case, batch: GoldenBatch, file: dict[str, Any]) -> Readings:
    mode, _, which = name.partition("|")
    loss_T = batch.pack(file["loss_mat_values"])
    mask_T = batch.mask()
    if which in batch.raw:
        mask_T = batch.tokens(which).bool()
    elif (rows := re.fullmatch(r"rows?_?([\d,_]+?)_(?:fully_)?masked", which)) is not None:
        for row in map(int, re.findall(r"\d+", rows.group(1))):
            mask_T[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]] = False
    elif which == "all_masked":
        mask_T[:] = False
    elif which != "len":
        raise Unmapped(f"mask {which!r}")
    constant = case.get("loss_scale_factor")
    if mode == "seq-mean-token-sum-norm" and constant is None:
        constant = max(batch.lens)  # verl then takes the padded width
    weights_T = token_weights(mode, batch.segments(mask_T), batch.denominators(mask_T), constant)
    ranks = [tuple(map(int, span)) for span in re.findall(r"\[(\d+):(\d+)\]", case.get("ranks", file["ranks"]))]
    shares = []
    for first, last in ranks:
        part = slice(int(batch.cu_seqlens[first]), int(batch.cu_seqlens[last]))
        shares.append(float(aggregate(loss_T[part], weights_T[part])) * len(ranks))  # a data-parallel mean follows
    result: Result = {"full": aggregate(loss_T, weights_T)}
    optional = {"rank_losses": shares, "mean": float(np.mean(shares))}
    yield result | {f"dp{len(ranks)}_{key}": value for key, value in optional.items()}


def compute_misc(name: str, case: Case, batch: GoldenBatch, _: dict[str, Any]) -> Readings:
    for pattern, function in MISC_PATTERNS:
        if re.match(pattern, name):
            return function(CaseText(name, case), batch)
    raise Unmapped("no function of ours goes by this name")


def _value_loss(text: CaseText, batch: GoldenBatch) -> Readings:
    is_unclipped = text.has("no_?clip|unclipped|clip_?none|cliprange_value=none")
    clip = None if is_unclipped else text.required("clip", "cliprange_value")
    for mode in text.modes("token-mean"):
        values_T = batch.tokens("vpred").requires_grad_()
        loss_T = value_loss(values_T, batch.tokens("values"), batch.pack(text.case["returns"]), clip)
        weights_T = token_weights(mode, batch.segments(), batch.denominators())
        yield loss_and_grad(aggregate(loss_T, weights_T), values_T)


def _soft_overlong(text: CaseText, batch: GoldenBatch) -> Readings:
    max_length, cache_length = (int(x) for x in text.numbers[:2])
    values = [soft_overlong_punishment(length, max_length, cache_length) for length in text.case["lens"]]
    yield {key: values for key in ("trl", "openrlhf", "values") if key in text.case}


def _opsm(text: CaseText, batch: GoldenBatch) -> Readings:
    """Against the engine's log-probs (TRL, the paper), or against the trainer's own old ones (slime)."""
    threshold = text.required("threshold", "opsm_delta", "delta", "opsm_mask")
    stated = {key: re.search(rf"{key}=(\w+)", text.peer) for key in ("advantages", "sampling", "new")}
    names = {key: match.group(1) if match else None for key, match in stated.items()}
    for sampling in [names["sampling"]] if names["sampling"] else ["rollout", "old"]:
        keep_T = off_policy_sequence_mask(
            batch.tokens(text.case.get("new", names["new"] or "new_wide")), batch.tokens(sampling),
            batch.tokens(text.case.get("adv", names["advantages"] or "adv_seq")), batch.segments(), threshold,
        )  # fmt: skip
        per_row = [bool(keep_T[start]) if length else True for start, length in zip(batch.cu_seqlens, batch.lens)]
        is_per_row = not isinstance(text.case["keep"][0], list)
        yield {"keep": np.array(per_row, dtype=float) if is_per_row else keep_T.double()}


def _vespo_phi(text: CaseText, batch: GoldenBatch) -> Readings:
    shape = vespo_shape(text)
    log_ratio_T = log_ratio(batch.tokens(text.case.get("new", "new_wide")), batch.tokens("old"))
    yield {
        "phi": vespo_phi(
            log_ratio_T, batch.tokens(text.case.get("adv", "adv_seq")), batch.segments(),
            k_positive=shape.k_positive, lambda_positive=shape.lambda_positive,
            k_negative=shape.k_negative, lambda_negative=shape.lambda_negative,
        )
    }  # fmt: skip


def _whiten(text: CaseText, batch: GoldenBatch) -> Readings:
    values_T = batch.tokens(text.case.get("values_of", "adv_tok")).numpy()
    mask_T = batch.mask(text.case.get("mask", "tool_mask" if text.has("tool_?mask") else None)).numpy()
    options: dict[str, Any] = {"ddof": 0 if text.has("(?<!un)biased|population") else 1}
    if text.has("added to std|areal"):
        options |= {"epsilon": text.number("eps added to std", "eps") or 1e-5, "epsilon_on": "std"}
    spans = re.findall(r"\[(\d+):(\d+)\]", text.peer)
    if spans:
        out_T = _whiten_on_ranks(values_T, mask_T, [int(batch.cu_seqlens[int(last)]) for _, last in spans[:-1]], options)
    else:
        out_T = whiten(values_T, mask_T, **options)
    trained = values_T[mask_T]
    moments = {"mean": trained.mean(), "var": trained.var(ddof=options["ddof"])}
    if text.has("shift_mean=false"):
        out_T = np.where(mask_T, out_T + moments["mean"], 0.0)
    yield {"out": out_T} | {key: value for key, value in moments.items() if isinstance(text.case.get(key), float)}


def _whiten_on_ranks(values_T: np.ndarray, mask_T: np.ndarray, borders: list[int], options: dict[str, Any]) -> np.ndarray:
    """Whitened on ranks (threads that add up at a barrier), tokens cut at `borders`."""
    num_ranks = len(borders) + 1
    barrier = threading.Barrier(num_ranks, timeout=30.0)
    board: list[Any] = [None] * num_ranks
    parts = list(zip(np.split(values_T, borders), np.split(mask_T, borders), strict=True))

    def whiten_on(rank: int) -> np.ndarray:
        def add_up(local: np.ndarray) -> np.ndarray:
            board[rank] = local
            barrier.wait()
            total = np.sum(board, axis=0)
            barrier.wait()  # nobody writes the next call before everyone has read this one
            return total

        return whiten(*parts[rank], add_up, **options)

    with ThreadPoolExecutor(num_ranks) as pool:
        return np.concatenate(list(pool.map(whiten_on, range(num_ranks))))


def _kl_controller(text: CaseText, batch: GoldenBatch) -> Readings:
    coefficient = text.required("init_kl_coef", "init", "kl_coef")
    target, horizon = text.number("target_kl", "target"), text.number("horizon")
    values = []
    for kl, num_samples in text.case["updates"]:
        if target is not None and horizon is not None:  # a controller without a target keeps its coefficient
            coefficient = adapt_kl_coefficient(coefficient, kl, target=target, horizon=horizon, num_samples=num_samples)
        values.append(coefficient)
    yield {"values": values}


MISC_PATTERNS = (
    (r".*value_loss", _value_loss),
    (r".*soft_overlong_", _soft_overlong),
    (r".*opsm", _opsm),
    (r".*vespo_phi", _vespo_phi),
    (r".*(masked_normalization|whiten)", _whiten),
    (r".*kl_controller", _kl_controller),
)


def compute_routing(name: str, case: Case, batch: GoldenBatch, file: dict[str, Any]) -> Readings:
    match = re.match(r"(softmax_post|softmax_pre|sigmoid)(.*)$", name)
    if match is None:
        raise Unmapped("no score function of ours goes by this name")
    score, suffixes = match.groups()
    known = rf"_bias|_x{NUMBER}|_groups\d+_top\d+|_top\d+"
    if re.sub(known, "", suffixes):
        raise Unmapped(f"routing option {re.sub(known, '', suffixes)!r}")
    bias = torch.tensor(file["expert_bias"], dtype=torch.float64) if "_bias" in suffixes else None
    options: dict[str, Any] = {"score_function": score, "expert_bias_E": bias}
    if (groups := re.search(r"_groups(\d+)_top(\d+)", suffixes)) is not None:
        options |= {"num_groups": int(groups.group(1)), "group_topk": int(groups.group(2))}
    topk = re.search(r"(?<!\d)_top(\d+)", suffixes)
    num_chosen = int(topk.group(1)) if topk and groups is None else case.get("topk", file["topk"])
    scaling = re.search(rf"_x({NUMBER})", suffixes)
    scale = float(scaling.group(1)) if scaling else 1.0
    logits_TE = torch.tensor(file["train_logits"], dtype=torch.float64).requires_grad_()
    replayed_Tk = select_experts(torch.tensor(file["rollout_logits"], dtype=torch.float64), num_chosen, **options)
    native_Tk = select_experts(logits_TE, num_chosen, **options)
    replay_TE = expert_probabilities(logits_TE, replayed_Tk, score, scale)
    (grad_TE,) = torch.autograd.grad((replay_TE * torch.tensor(file["coef"], dtype=torch.float64)).sum(), logits_TE)
    replayed_Tk, native_Tk = replayed_Tk.sort(dim=-1).values, native_Tk.sort(dim=-1).values
    yield {
        "replay_indices": replayed_Tk.tolist(),
        "replay_probs": replay_TE.tolist(),
        "replay_grad": grad_TE.tolist(),
        "native_indices": native_Tk.tolist(),
        "native_probs": expert_probabilities(logits_TE, native_Tk, score, scale).tolist(),
        "tokens_rerouted": int((replayed_Tk != native_Tk).any(dim=-1).sum()),
    }
