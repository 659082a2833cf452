"""Speed of advantages, balancing and packing, as ratios within one run.

    python tests/benchmarks/algorithms.py [--json]

* `gae_vs_loop`, `gae_vs_chunked`: length-adaptive GAE on 256 ragged sequences of 700k tokens, one thread, against the
  per-step torch loop over a padded batch that most systems run, and against a chunked scan with matrix products.
  `gae_max_error` is the largest difference from the fp64 recurrence.
* `balance_ratio`, `balance_ms`: 8,192 sequences on 64 ranks, makespan over mean and the time it took.
* `packing_bins`, `packing_lower_bound`: the same sequences in bins of 32k tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.advantages.gae import gae, length_adaptive_lambda, scan_vectorised
from megatron_rl.batching.balance import balance_equal_counts, compute_costs
from megatron_rl.batching.packing import compute_lower_bound, pack_first_fit_decreasing

ALPHA = 0.05
CHUNK = 128


def make_batch(num_sequences: int = 256, num_tokens: int = 700_000) -> dict[str, Any]:
    """Log-normal lengths that sum to `num_tokens`; the reward on the last token; every token trained."""
    rng = np.random.default_rng(1)
    lengths = rng.lognormal(0.0, 0.7, num_sequences)
    lengths = np.maximum(1, np.floor(lengths * num_tokens / lengths.sum())).astype(np.int64)
    lengths[-1] += num_tokens - lengths.sum()
    rewards_T = np.zeros(num_tokens, dtype=np.float32)
    rewards_T[np.cumsum(lengths) - 1] = rng.integers(0, 2, num_sequences)
    return {
        "lengths": lengths,
        "cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]),
        "rewards_T": rewards_T,
        "values_T": rng.normal(0.5, 0.3, num_tokens).astype(np.float32),
        "mask_T": np.ones(num_tokens, dtype=bool),
        "lambda_S": length_adaptive_lambda(lengths, ALPHA),
    }


def pad(batch: dict[str, Any], name: str) -> Tensor:
    """[S, L] fp32, zeros on the right."""
    parts = np.split(batch[name].astype(np.float32), batch["cu_seqlens"][1:-1])
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(part) for part in parts], batch_first=True)


def gae_loop(rewards: Tensor, values: Tensor, mask: Tensor, lambda_S: Tensor) -> tuple[Tensor, Tensor]:
    """One torch step per token position, mask-aware: the common implementation. gamma and the critic's lambda are 1."""
    advantages, returns = [], []
    next_value = actor = critic = torch.zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        m = mask[:, t]
        delta = rewards[:, t] + next_value - values[:, t]
        actor = m * (delta + lambda_S * actor) + (1 - m) * actor
        critic = m * (delta + critic) + (1 - m) * critic
        next_value = m * values[:, t] + (1 - m) * next_value
        advantages.append(actor)
        returns.append(critic + values[:, t])
    return torch.stack(advantages[::-1], dim=1), torch.stack(returns[::-1], dim=1)


def gae_chunked(rewards: Tensor, values: Tensor, mask: Tensor, lambda_S: Tensor) -> tuple[Tensor, Tensor]:
    """A scan by chunks: inside a chunk one product with the matrix of powers of lambda, between chunks a carry."""
    num_steps = values.shape[1]
    length = -(-num_steps // CHUNK) * CHUNK
    rewards, values, mask = (torch.nn.functional.pad(x, (0, length - num_steps)) for x in (rewards, values, mask))
    next_values = torch.nn.functional.pad(values[:, 1:], (0, 1)) * torch.nn.functional.pad(mask[:, 1:], (0, 1))
    delta = (rewards + next_values - values) * mask
    offsets = torch.arange(CHUNK)
    distance = offsets[None, :] - offsets[:, None]  # [t, u]: u - t
    results = []
    for decay_S in (lambda_S, torch.ones_like(lambda_S)):
        powers = torch.where(distance >= 0, decay_S[:, None, None] ** distance.clamp(min=0), 0.0)  # [S, t, u]
        to_end = decay_S[:, None] ** (CHUNK - offsets)  # [S, t]
        output = torch.empty_like(values)
        carry = torch.zeros(len(values), 1)
        for start in range(length - CHUNK, -1, -CHUNK):
            chunk = torch.bmm(powers, delta[:, start : start + CHUNK, None]).squeeze(2) + to_end * carry
            output[:, start : start + CHUNK] = chunk
            carry = chunk[:, :1]
        results.append(output)
    return results[0][:, :num_steps], (results[1] + values)[:, :num_steps]


def best_seconds(function: Callable[[], Any], repeats: int) -> float:
    """The shortest of `repeats` runs: other processes only ever add."""
    function()
    times = []
    gc.disable()
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    gc.enable()
    return min(times)


def measure_gae() -> dict[str, float]:
    batch = make_batch()
    padded = [pad(batch, name) for name in ("rewards_T", "values_T", "mask_T")]
    lambda_S = torch.from_numpy(batch["lambda_S"]).float()
    arguments = (batch["rewards_T"], batch["values_T"], batch["mask_T"], batch["cu_seqlens"])

    def ours() -> tuple[np.ndarray, np.ndarray]:
        return gae(*arguments, lambda_actor_S=batch["lambda_S"], lambda_critic=1.0)

    exact = scan_vectorised(
        arguments[0].astype(np.float64), arguments[1].astype(np.float64), *arguments[2:], 1.0, batch["lambda_S"], 1.0
    )
    error = max(float(np.abs(x - y).max()) for x, y in zip(ours(), exact, strict=True))
    inside = torch.arange(padded[0].shape[1])[None, :] < torch.from_numpy(batch["lengths"])[:, None]
    for other in (gae_loop, gae_chunked):  # a baseline counts only if it computes the same thing
        for ours_T, padded_SL in zip(exact, other(*padded, lambda_S), strict=True):
            np.testing.assert_allclose(padded_SL[inside].numpy(), ours_T, atol=5e-3)
    seconds = best_seconds(ours, 30)
    return {
        "gae_vs_loop": best_seconds(lambda: gae_loop(*padded, lambda_S), 2) / seconds,
        "gae_vs_chunked": best_seconds(lambda: gae_chunked(*padded, lambda_S), 3) / seconds,
        "gae_max_error": error,
        "gae_ms": seconds * 1e3,
    }


def measure_batching() -> dict[str, float]:
    lengths = np.clip(np.random.default_rng(0).lognormal(7.5, 0.8, 8192), 16, 32_768).astype(np.int64)
    costs = compute_costs(lengths)
    loads = np.array([costs[share].sum() for share in balance_equal_counts(costs, 64)])
    return {
        "balance_ratio": float(loads.max() / loads.mean()),
        "balance_ms": best_seconds(lambda: balance_equal_counts(costs, 64), 30) * 1e3,
        "packing_bins": len(pack_first_fit_decreasing(lengths, 32_768)),
        "packing_lower_bound": compute_lower_bound(lengths, 32_768),
        "packing_ms": best_seconds(lambda: pack_first_fit_decreasing(lengths, 32_768), 3) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    torch.set_num_threads(1)
    figures = {**measure_gae(), **measure_batching()}
    if as_json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:22s} {value:.6g}")


if __name__ == "__main__":
    main()
