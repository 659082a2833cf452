"""From a packed microbatch to what one rank feeds its model. Pure numpy.

Shape suffixes: _S sequences, _T tokens of the microbatch, _P tokens with padding (all ranks of the context-parallel
group), _N = P / cp rows of this rank, _K rows of this rank whose prediction is scored.

Three views of a token: where it stands in the microbatch (T), where it stands after padding (P), and which row of which
context-parallel rank computes it (N). Under context parallelism a sequence is cut into 2*cp chunks and rank r takes
chunks r and 2*cp-1-r ("zig-zag"), which gives every rank the same share of causal attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_rl.types.training import Microbatch


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """One microbatch as one context-parallel rank sees it.

    `cu_seqlens` and `max_seqlen` count padded tokens over all context-parallel ranks, as Megatron wants them.
    `target_ids_K` are the tokens that the rows `scored_rows_K` predict. The log-prob of token t is entry
    `prediction_of_T[t]` of the predictions of all context-parallel ranks one after another, where `is_scored_T[t]`.
    `full_order_P[p]` is the place of padded token p in that same concatenation.
    """

    token_ids_N: np.ndarray  # int64
    positions_N: np.ndarray  # int64
    scored_rows_K: np.ndarray  # int64
    target_ids_K: np.ndarray  # int64
    cu_seqlens: np.ndarray  # int32
    max_seqlen: int
    prediction_of_T: np.ndarray  # int64
    is_scored_T: np.ndarray  # bool
    full_order_P: np.ndarray  # int64


def plan_packed_inputs(microbatch: Microbatch, *, tp: int, cp: int, cp_rank: int, score_all: bool = False) -> PackedInputs:
    """Pad, cut and index one microbatch for context-parallel rank `cp_rank`.

    Every sequence is padded at its end to a multiple of 2*cp, and a last sequence of padding tops the whole up to what
    sequence parallelism needs. An empty microbatch becomes padding only. Predictions are scored for the tokens of the
    loss mask, or for all that have a predecessor with `score_all`.
    """
    sequence_multiple = 2 * cp if cp > 1 else 1
    total_multiple = math.lcm(sequence_multiple, cp * tp)
    lengths_S = np.diff(microbatch.cu_seqlens).astype(np.int64)
    padded_S = -(-lengths_S // sequence_multiple) * sequence_multiple
    num_real = int(padded_S.sum())
    filler = -num_real % total_multiple if num_real else total_multiple
    if filler:
        padded_S = np.append(padded_S, filler)
    cu_seqlens = np.concatenate(([0], np.cumsum(padded_S)))
    num_padded = int(cu_seqlens[-1])

    starts_T = np.repeat(microbatch.cu_seqlens[:-1].astype(np.int64), lengths_S)
    offset_T = np.arange(microbatch.num_tokens) - starts_T
    place_T = np.repeat(cu_seqlens[: len(lengths_S)], lengths_S) + offset_T
    token_ids_P = np.zeros(num_padded, dtype=np.int64)
    token_ids_P[place_T] = microbatch.token_ids_T

    order_P = _rank_order(cu_seqlens, cp)
    full_order_P = np.empty(num_padded, dtype=np.int64)
    full_order_P[order_P] = np.arange(num_padded)
    rows = slice(cp_rank * num_padded // cp, (cp_rank + 1) * num_padded // cp)
    mine_N = order_P[rows]

    is_scored_T = offset_T > 0
    if not score_all:
        is_scored_T &= microbatch.loss_mask_T
    target_P = np.full(num_padded, -1, dtype=np.int64)
    scored_places = place_T[is_scored_T] - 1  # the row before a token predicts it
    target_P[scored_places] = microbatch.token_ids_T[is_scored_T]
    scored_rows_K = np.flatnonzero(target_P[mine_N] >= 0)
    prediction_of_T = np.zeros(microbatch.num_tokens, dtype=np.int64)
    prediction_of_T[is_scored_T] = full_order_P[scored_places]

    positions_P = np.arange(num_padded) - np.repeat(cu_seqlens[:-1], padded_S)
    return PackedInputs(
        token_ids_N=token_ids_P[mine_N],
        positions_N=positions_P[mine_N],
        scored_rows_K=scored_rows_K,
        target_ids_K=target_P[mine_N][scored_rows_K],
        cu_seqlens=cu_seqlens.astype(np.int32),
        max_seqlen=int(padded_S.max()),
        prediction_of_T=prediction_of_T,
        is_scored_T=is_scored_T,
        full_order_P=full_order_P,
    )


def _rank_order(cu_seqlens: np.ndarray, cp: int) -> np.ndarray:
    """Padded tokens in the order in which the context-parallel ranks hold them, rank after rank."""
    if cp == 1:
        return np.arange(int(cu_seqlens[-1]))
    starts_S, lengths_S = cu_seqlens[:-1], np.diff(cu_seqlens)
    chunk_S = lengths_S // (2 * cp)
    pieces: list[np.ndarray] = []
    for rank in range(cp):
        for start, chunk in zip(starts_S.tolist(), chunk_S.tolist(), strict=True):
            for index in (rank, 2 * cp - 1 - rank):
                pieces.append(np.arange(start + index * chunk, start + (index + 1) * chunk))
    return np.concatenate(pieces)


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences of similar length that attend in one call. Rows beyond a sequence's end point at row 0.

    `mask` [s, 1, q, k] says who sees whom; None means plain causal attention.
    """

    query_rows: np.ndarray  # int64 [s, q], rows of this rank
    key_rows: np.ndarray  # int64 [s, k], rows of the keys of all context-parallel ranks one after another
    mask: np.ndarray | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Groups, and for each row of this rank its place in the groups' outputs laid one after another."""

    groups: tuple[AttentionGroup, ...]
    place_of_N: np.ndarray  # int64


def plan_attention(inputs: PackedInputs, *, cp: int, max_waste: float = 0.25, slack_tokens: int = 16) -> AttentionPlan:
    """Group sequences so that padding a group to its longest wastes at most `max_waste` of a sequence or `slack_tokens`."""
    lengths_S = np.diff(inputs.cu_seqlens).astype(np.int64)
    starts_S = inputs.cu_seqlens[:-1].astype(np.int64)
    order = np.argsort(-lengths_S, kind="stable")
    groups: list[AttentionGroup] = []
    place_of_N = np.empty(len(inputs.token_ids_N), dtype=np.int64)
    offset = first = 0
    while first < len(order):
        longest = int(lengths_S[order[first]])
        shortest = min(longest * (1 - max_waste), longest - slack_tokens)
        last = first
        while last < len(order) and lengths_S[order[last]] >= shortest:
            last += 1
        members = order[first:last]
        first = last
        query_rows, query_valid = _rows(starts_S[members] // cp, lengths_S[members] // cp, longest // cp)
        if cp == 1:
            groups.append(AttentionGroup(query_rows, query_rows, None))
        else:
            places, _ = _rows(starts_S[members], lengths_S[members], longest)
            position = np.where(query_valid, inputs.positions_N[query_rows], longest)
            mask = np.arange(longest)[None, None, None, :] <= position[:, None, :, None]
            groups.append(AttentionGroup(query_rows, inputs.full_order_P[places], mask))
        flat = offset + np.arange(query_rows.size).reshape(query_rows.shape)
        place_of_N[query_rows[query_valid]] = flat[query_valid]
        offset += query_rows.size
    return AttentionPlan(tuple(groups), place_of_N)


def _rows(starts: np.ndarray, lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers [s, width] and which of them are real."""
    column = np.arange(width)[None, :]
    is_real = column < lengths[:, None]
    return np.where(is_real, starts[:, None] + column, 0), is_real
