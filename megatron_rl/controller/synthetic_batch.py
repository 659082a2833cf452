"""A seeded minibatch that an objective's check trains on: ragged, with every case that a layout can get wrong.

Shape suffix: _L tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.algorithms.advantages.token import token_advantages
from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.batching.build import build_microbatch, compute_denominators
from megatron_rl.config.algorithm_sections import AlgorithmSection
from megatron_rl.types.training import Denominators, Microbatch, TrainSample

GROUP_SIZES = (4, 3, 4, 1)
LENGTHS = (5, 17, 9, 30, 2, 12, 7, 23, 6, 14, 3, 11)
"""Prompt and answer; unequal, so that no transposed index can pass."""
VERSION = 5
"""The weight version being trained; tokens are up to two versions older."""
MAX_OFFSET = 0.5


@dataclass(frozen=True, slots=True)
class SyntheticSample:
    """A sample and the token arrays that an annotation would make of it."""

    sample: TrainSample
    arrays: dict[str, np.ndarray]  # float32 [L]


def synthetic_samples(algorithm: Algorithm, vocab_size: int, seed: int) -> list[SyntheticSample]:
    """Groups of 4, 3, 4 and 1; one answer fully masked, one of a single token, a gap in another's mask.

    `*_logprobs_offset` are what old, rollout and reference log-probs differ by from the policy's: of the size of the
    objective's clip, so that tokens fall on both sides of it.
    """
    tokens, rng = (np.random.default_rng([seed, stream]) for stream in range(2))  # tokens are those of every objective
    section = algorithm.section
    rewards = [rng.normal(size=size).tolist() for size in GROUP_SIZES]
    masks = []
    for number, length in enumerate(LENGTHS):
        mask_L = np.arange(length) >= max(1, length // 3)
        mask_L &= (tokens.random(length) < 0.9) | (length < 4)
        masks.append(mask_L & (number != 6))
    counts = np.split([int(mask_L.sum()) for mask_L in masks], np.cumsum(GROUP_SIZES)[:-1])
    scalars = np.concatenate(algorithm.group_advantages(rewards, counts))
    advantages = _token_advantages(algorithm, np.concatenate(rewards), masks, rng) if algorithm.has_token_advantages else None
    scale = min(MAX_OFFSET, 2.0 * max(section.clip_low, section.clip_high))
    samples = []
    for number, (length, mask_L) in enumerate(zip(LENGTHS, masks, strict=True)):
        offsets = {name: scale * rng.normal(size=length) for name in ("old", "rollout", "ref")}
        arrays = {f"{name}_logprobs_offset": np.where(mask_L, values, 0.0) for name, values in offsets.items()}
        arrays["advantages"] = np.full(length, scalars[number]) if advantages is None else advantages[number]
        sample = TrainSample(
            sample_id=str(number),
            group_id=str(int(np.searchsorted(np.cumsum(GROUP_SIZES), number, side="right"))),
            token_ids_L=tokens.integers(0, vocab_size, length),
            loss_mask_L=mask_L,
            rollout_logprobs_L=np.zeros(length, dtype=np.float32),
            versions_L=np.where(mask_L, rng.integers(VERSION - 2, VERSION + 1, length), -1).astype(np.int32),
            reward=float(np.concatenate(rewards)[number]),
            advantage=float(scalars[number]),
            is_correct=bool(rng.random() < 0.5),
            is_truncated=False,
            num_prompt_tokens=max(1, length // 3),
        )
        samples.append(SyntheticSample(sample, {name: array.astype(np.float32) for name, array in arrays.items()}))
    return samples


def microbatches_of(samples: Sequence[SyntheticSample], members: Sequence[int], count: int) -> list[Microbatch]:
    """The members packed into `count` microbatches in their order; with fewer members some are empty."""
    return [_pack(samples, part.tolist()) for part in np.array_split(np.asarray(members, dtype=np.int64), count)]


def denominators_of(samples: Sequence[SyntheticSample], section: AlgorithmSection) -> Denominators:
    return compute_denominators([item.sample for item in samples], section.masked_sequences == "count")


def _pack(samples: Sequence[SyntheticSample], members: list[int]) -> Microbatch:
    microbatch = build_microbatch([item.sample for item in samples], members)
    extra = {
        name: np.concatenate([samples[i].arrays[name] for i in members] or [np.zeros(0, dtype=np.float32)])
        for name in samples[0].arrays
    }
    return replace(microbatch, token_arrays={**microbatch.token_arrays, **extra})


def _token_advantages(
    algorithm: Algorithm, rewards_S: np.ndarray, masks: list[np.ndarray], rng: np.random.Generator
) -> list[np.ndarray]:
    """Advantages per token from seeded values and a seeded KL."""
    cu_seqlens = np.concatenate([[0], np.cumsum(LENGTHS)])
    advantages_T, _ = token_advantages(
        algorithm.section,
        rewards_S=rewards_S,
        mask_T=np.concatenate(masks),
        cu_seqlens=cu_seqlens,
        values_T=rng.normal(size=cu_seqlens[-1]),
        kl_T=0.1 * rng.normal(size=cu_seqlens[-1]),
    )
    return np.split(advantages_T, cu_seqlens[1:-1])
