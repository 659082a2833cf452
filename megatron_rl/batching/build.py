"""Samples -> `TrainBatch`: minibatches, data-parallel shares, packed microbatches and global denominators.

Shape suffixes: _S sequences in a microbatch, _T packed tokens, _L tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rl.batching.balance import balance_equal_counts, compute_costs
from megatron_rl.batching.packing import pack_first_fit_decreasing, pack_into, round_up
from megatron_rl.batching.shared_prompts import Units, order_by_group, share_units, shared_lengths
from megatron_rl.types.routing import unknown_expert
from megatron_rl.types.training import Denominators, Microbatch, Minibatch, TrainBatch, TrainSample


def build_train_batch(
    samples: Sequence[TrainSample],
    *,
    dp_size: int,
    num_minibatches: int,
    inner_epochs: int = 1,
    max_tokens_per_microbatch: int,
    microbatch_multiple: int = 1,
    length_multiple: int = 1,
    seed: int,
    attention_crossover: float = float("inf"),
    min_shared_prompt: int | None = None,
    counts_masked: bool = False,
) -> TrainBatch:
    """Shuffle, split, balance and pack one training step.

    Each inner epoch shuffles all samples anew (from `seed`) and cuts them into `num_minibatches` parts whose sizes
    differ by at most one. Within a minibatch the samples are spread over `dp_size` ranks by cost with equal counts,
    then packed. All ranks get the same number of microbatches, a multiple of `microbatch_multiple` (pipelines with
    virtual stages); some may be empty. A sample takes its length rounded up to `length_multiple` of the token budget,
    which is what the trainer pads it to (context and sequence parallelism). Denominators are counted over the whole
    minibatch before anything is split.

    With `min_shared_prompt`, prompts of at least so many tokens are computed once per microbatch: minibatches, ranks and
    microbatches are made of whole groups where that balances (at most one group is cut between two minibatches), and the
    budget counts a prompt once. It does not go with a `length_multiple`.

    Raises ValueError when there are fewer samples than minibatches or one sample exceeds the budget.
    """
    if len(samples) < num_minibatches:
        raise ValueError(
            f"{len(samples)} samples cannot be split into trainer.minibatches_per_step={num_minibatches} minibatches"
        )
    _check_lengths(samples, max_tokens_per_microbatch, length_multiple)
    rng = np.random.default_rng(seed)
    orders = (rng.permutation(len(samples)) for _ in range(inner_epochs))
    if shared_lengths(samples, min_shared_prompt).any():
        orders = (order_by_group(samples, order) for order in orders)
    minibatches = [
        _build_minibatch(
            samples,
            np.sort(part),
            dp_size=dp_size,
            budget=max_tokens_per_microbatch,
            microbatch_multiple=microbatch_multiple,
            length_multiple=length_multiple,
            attention_crossover=attention_crossover,
            min_shared_prompt=min_shared_prompt,
            counts_masked=counts_masked,
        )
        for order in orders
        for part in np.array_split(order, num_minibatches)
    ]
    return TrainBatch(minibatches=tuple(minibatches), num_samples=len(samples))


def compute_denominators(samples: Sequence[TrainSample], counts_masked: bool = False) -> Denominators:
    """Global counts of one minibatch. A fully masked sample counts as no token, and with `counts_masked` as a sequence."""
    counts = [int(sample.loss_mask_L.sum()) for sample in samples]
    return Denominators(
        num_tokens=sum(counts),
        num_sequences=len(samples) if counts_masked else sum(count > 0 for count in counts),
        num_positive_tokens=sum(count for count, sample in zip(counts, samples, strict=True) if sample.is_correct),
    )


def build_microbatch(
    samples: Sequence[TrainSample], indices: Sequence[int], min_shared_prompt: int | None = None
) -> Microbatch:
    """Pack `samples[i] for i in indices` one after another. No index: an empty microbatch.

    Neighbours of one group share their prompt if it has at least `min_shared_prompt` tokens.
    """
    chosen = [samples[i] for i in indices]
    lengths = [len(sample.token_ids_L) for sample in chosen]
    shared_S = shared_lengths(chosen, min_shared_prompt)
    follows_S = [number > 0 and chosen[number - 1].group_id == s.group_id for number, s in enumerate(chosen)]

    def pack(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype=dtype)

    return Microbatch(
        token_ids_T=pack([s.token_ids_L for s in chosen], np.int64),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_mask_T=pack([s.loss_mask_L for s in chosen], np.bool_),
        versions_T=pack([s.versions_L for s in chosen], np.int32),
        rewards_S=np.array([s.reward for s in chosen], dtype=np.float32),
        is_correct_S=np.array([s.is_correct for s in chosen], dtype=bool),
        sample_index_S=np.array(indices, dtype=np.int32),
        token_arrays={
            "rollout_logprobs": pack([s.rollout_logprobs_L for s in chosen], np.float32),
            "advantages": np.repeat(np.array([s.advantage for s in chosen], dtype=np.float32), lengths),
        },
        shared_prefix_S=np.where(np.array(follows_S, dtype=bool), shared_S, 0).astype(np.int32),
        experts_TYK=_pack_experts([s.experts_LYK for s in chosen], lengths),
    )


def _pack_experts(parts: Sequence[np.ndarray | None], lengths: Sequence[int]) -> np.ndarray | None:
    """One after another, unknown for a sample that has none; None when no sample has any."""
    first = next((part for part in parts if part is not None), None)
    if first is None:
        return None
    return np.concatenate([
        np.full((length, *first.shape[1:]), unknown_expert(first.dtype), dtype=first.dtype) if part is None else part
        for part, length in zip(parts, lengths, strict=True)
    ])  # fmt: skip


def _check_lengths(samples: Sequence[TrainSample], budget: int, length_multiple: int) -> None:
    for sample in samples:
        length = round_up(len(sample.token_ids_L), length_multiple)
        if length > budget:
            raise ValueError(
                f"sample {sample.sample_id} takes {length} tokens (rounded up to a multiple of {length_multiple}), "
                f"more than trainer.max_tokens_per_microbatch={budget}: raise it to at least {length}"
            )


def _build_minibatch(
    samples: Sequence[TrainSample],
    indices: np.ndarray,
    *,
    dp_size: int,
    budget: int,
    microbatch_multiple: int,
    length_multiple: int,
    attention_crossover: float,
    min_shared_prompt: int | None,
    counts_masked: bool,
) -> Minibatch:
    chosen = [samples[i] for i in indices]
    lengths_S = np.array([round_up(len(sample.token_ids_L), length_multiple) for sample in chosen], dtype=np.int64)
    shared_S = shared_lengths(chosen, min_shared_prompt)
    if shared_S.any():
        units, shares = share_units(
            chosen, lengths_S, shared_S, num_ranks=dp_size, budget=budget, attention_crossover=attention_crossover
        )
    else:
        costs_S = compute_costs(lengths_S, attention_crossover)
        units = Units(list(np.arange(len(chosen))[:, None]), lengths_S, costs_S)
        shares = balance_equal_counts(costs_S, dp_size)
    num_bins = max(len(pack_first_fit_decreasing(units.lengths_U[share], budget)) for share in shares)
    num_bins = round_up(max(num_bins, 1), microbatch_multiple)
    ranks = []
    for share in shares:
        bins = pack_into(units.lengths_U[share], units.costs_U[share], budget, num_bins)
        members = [np.array([p for unit in share[b] for p in units.members[unit]], dtype=np.int64) for b in bins]
        if shared_S.any():
            members = [order_by_group(chosen, part) for part in members]
        ranks.append(tuple(build_microbatch(samples, indices[part].tolist(), min_shared_prompt) for part in members))
    return Minibatch(microbatches=tuple(ranks), denominators=compute_denominators(chosen, counts_masked))
