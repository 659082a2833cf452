"""Drawing tokens: counter-based randomness, temperature, top-k, top-p, and the log-prob of what was drawn.

Shape suffixes: N sequences, V padded vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

BLOCK = 64
"""Columns per block of the two-level inverse transform."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling settings of N sequences, on the host."""

    temperatures_N: np.ndarray  # float32; 0: greedy
    top_ps_N: np.ndarray  # float32; 1: all
    top_ks_N: np.ndarray  # int64; 0: all


def counter_uniforms(seeds_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
    """float64 in (0, 1], a pure function of (seed, position): a sequence draws the same alone and in any batch.

    `positions` are absolute, so that a continued answer draws what the uninterrupted one would have drawn. Two rounds
    of SplitMix64's finaliser (Steele, Lea, Flood 2014), which passes BigCrush as a counter-based generator.
    """
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds_N.astype(np.uint64)) + (positions_N.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def sample_tokens(logits_NV: torch.Tensor, uniforms_N: np.ndarray, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [N] and their log-probs [N] under the distribution that was sampled (after temperature, top-k, top-p).

    A greedy row reports the log-prob of the unscaled distribution. Overwrites `logits_NV`.
    """
    device = logits_NV.device
    greedy_N = rows.temperatures_N == 0
    scaled_NV = logits_NV
    if not np.all(greedy_N | (rows.temperatures_N == 1)):
        temperatures = torch.from_numpy(np.where(greedy_N, 1.0, rows.temperatures_N).astype(np.float32)).to(device)
        scaled_NV = logits_NV.div_(temperatures[:, None])
    filtered = np.flatnonzero(~greedy_N & ((rows.top_ps_N < 1) | (rows.top_ks_N > 0)))
    if len(filtered):
        index = torch.from_numpy(filtered).to(device)
        top_ps, top_ks = (torch.from_numpy(x[filtered]).to(device) for x in (rows.top_ps_N, rows.top_ks_N))
        scaled_NV[index] = mask_tail(scaled_NV[index], top_ps, top_ks)
    if len(scaled_NV[0]) % BLOCK:
        scaled_NV = F.pad(scaled_NV, (0, -len(scaled_NV[0]) % BLOCK), value=float("-inf"))
    best_N = scaled_NV.argmax(dim=-1) if greedy_N.any() else None
    weights_NV = scaled_NV.sub_(scaled_NV.amax(dim=-1, keepdim=True)).exp_()
    tokens_N, totals_N = _inverse_transform(weights_NV, torch.from_numpy(uniforms_N).to(device))
    if best_N is not None:
        tokens_N = torch.where(torch.from_numpy(greedy_N).to(device), best_N, tokens_N)
    chosen_N = weights_NV.gather(1, tokens_N[:, None]).squeeze(1)
    return tokens_N, (chosen_N.double() / totals_N).log().float()


def _inverse_transform(weights_NV: torch.Tensor, uniforms_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw columns in proportion to the weights; also their totals [N] (float64).

    First the block, then the column in it: one pass over the vocabulary, and cumulative sums that are short enough for
    float64. A column of weight 0 is never drawn, because a target in (0, total] is first reached at a positive weight.
    """
    blocks = weights_NV.view(len(weights_NV), -1, BLOCK)
    ends = blocks.sum(dim=-1).double().cumsum(dim=-1)
    totals_N = ends[:, -1]
    targets = (uniforms_N * totals_N)[:, None]
    # The clamps matter for NaN weights only: the log-prob then is NaN and the caller raises.
    block = torch.searchsorted(ends, targets).clamp_max_(ends.shape[1] - 1)
    start = torch.where(block > 0, ends.gather(1, (block - 1).clamp_min(0)), 0.0)
    first_rows_N = torch.arange(len(blocks), device=blocks.device) * blocks.shape[1]
    inside = blocks.flatten(0, 1).index_select(0, first_rows_N + block.squeeze(1)).double().cumsum(dim=-1)
    # The block's fp32 sum may exceed the float64 one by its rounding.
    column = torch.searchsorted(inside, torch.minimum(targets - start, inside[:, -1:])).clamp_max_(BLOCK - 1)
    return (block * BLOCK + column).squeeze(1), totals_N


def mask_tail(logits_NV: torch.Tensor, top_ps_N: torch.Tensor, top_ks_N: torch.Tensor) -> torch.Tensor:
    """Logits with everything outside top-k and top-p at -inf.

    Both filters look at the same (temperature-scaled) distribution, as SGLang's joint order does: a token stays when
    its rank is below k and the mass before it is below p. The best token always stays.
    """
    sorted_NV, order_NV = logits_NV.sort(dim=-1, descending=True, stable=True)
    probs_NV = sorted_NV.softmax(dim=-1)
    mass_before_NV = probs_NV.double().cumsum(dim=-1) - probs_NV
    ranks_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    keep_NV = (mass_before_NV < top_ps_N[:, None]) | (top_ps_N[:, None] >= 1)
    keep_NV &= (ranks_V < top_ks_N[:, None]) | (top_ks_N[:, None] <= 0)
    keep_NV[:, 0] = True
    return logits_NV.masked_fill(~torch.zeros_like(keep_NV).scatter_(1, order_NV, keep_NV), float("-inf"))
