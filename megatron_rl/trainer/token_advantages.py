"""Per-token advantages and returns of a training step, on the trainer ranks. Shape suffixes: _T packed tokens, _S sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_rl.algorithms.advantages.explained_variance import explained_variance
from megatron_rl.algorithms.advantages.token import token_advantages
from megatron_rl.algorithms.advantages.whitening import SumOverRanks
from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.config.algorithm_sections import AlgorithmSection
from megatron_rl.types.training import Microbatch


def add_token_advantages(
    minibatches: Sequence[Sequence[Microbatch]], section: AlgorithmSection, reduce_sum: SumOverRanks
) -> tuple[list[list[Microbatch]], dict[str, float]]:
    """The microbatches with `advantages` and `returns` in their token_arrays, and metrics, equal on every rank.

    `minibatches` are this data-parallel rank's share of a whole training step, over which advantages are whitened (with
    inner epochs each sequence counts once per epoch). `reduce_sum` adds over data-parallel ranks; every rank calls. Reads
    `values` (GAE) and, for a KL in the reward, `old_logprobs` and `ref_logprobs`.
    """
    flat = [microbatch for microbatches in minibatches for microbatch in microbatches]
    mask_T = np.concatenate([microbatch.loss_mask_T for microbatch in flat])
    lengths_S = np.concatenate([np.diff(microbatch.cu_seqlens) for microbatch in flat])
    values_T = _gather(flat, "values").astype(np.float64) if section.advantage == "gae" else None
    kl_T = None
    if section.kl.coefficient != 0 and section.kl.placement == "reward":
        old_T, ref_T = (torch.from_numpy(_gather(flat, name)) for name in ("old_logprobs", "ref_logprobs"))
        kl_T = kl_estimate(section.kl.estimator, old_T, ref_T).numpy()
    advantages_T, returns_T = token_advantages(
        section,
        rewards_S=np.concatenate([microbatch.rewards_S for microbatch in flat]),
        mask_T=mask_T,
        cu_seqlens=np.concatenate(([0], np.cumsum(lengths_S))),
        values_T=values_T,
        kl_T=kl_T,
        reduce_sum=reduce_sum,
        is_whitened=section.whiten_advantages,
    )
    metrics = {}
    if values_T is not None:
        metrics["loss/explained_variance"] = explained_variance(values_T, returns_T, mask_T, reduce_sum)
    offsets = np.cumsum([microbatch.num_tokens for microbatch in flat])[:-1]
    new = zip(flat, np.split(advantages_T, offsets), np.split(returns_T, offsets), strict=True)
    annotated = iter(
        [
            replace(
                microbatch,
                token_arrays={
                    **microbatch.token_arrays,
                    "advantages": mine_T.astype(np.float32),
                    "returns": targets_T.astype(np.float32),
                },
            )
            for microbatch, mine_T, targets_T in new
        ]
    )
    return [[next(annotated) for _ in microbatches] for microbatches in minibatches], metrics


def _gather(microbatches: Sequence[Microbatch], name: str) -> np.ndarray:
    for microbatch in microbatches:
        if name not in microbatch.token_arrays:
            raise ValueError(f"a microbatch lacks token_arrays[{name!r}], from which advantages are made; annotate it first")
    return np.concatenate([microbatch.token_arrays[name] for microbatch in microbatches])
