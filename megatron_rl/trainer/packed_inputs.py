"""From a packed microbatch to what one rank feeds its model. Pure numpy.

Shape suffixes: _S sequences, _T tokens of the microbatch, _P computed tokens with padding (all ranks of the
context-parallel group), _N = P / cp rows of this rank, _K predictions of this rank that are scored.

Three views of a token: where it stands in the microbatch (T), where it stands among the computed ones (P), and which row
of which context-parallel rank computes it (N). Under context parallelism a sequence is cut into 2*cp chunks and rank r
takes chunks r and 2*cp-1-r ("zig-zag"), which gives every rank the same share of causal attention. A shared prompt is
computed once: several tokens of the microbatch then stand at one place, and its last row predicts the first token of
every answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_rl.types.training import Microbatch


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """One microbatch as one context-parallel rank sees it.

    `cu_seqlens` and `max_seqlen` count padded tokens over all context-parallel ranks, as Megatron wants them. A segment
    between two entries attends causally to itself, and to all of segment `prefix_of_segment[i]` (-1: none), which its
    positions continue: an answer and its shared prompt.

    Row `scored_rows_K[k]` predicts token `target_ids_K[k]`; a row may do so several times. Every context-parallel rank
    lays its predictions into `num_slots` slots; the log-prob of token t is entry `prediction_of_T[t]` of the slots of all
    ranks one after another, where `is_scored_T[t]`. `full_order_P[p]` is the place of computed token p in the rows of all
    ranks one after another, `row_of_T[t]` that of the row which computes token t.
    """

    token_ids_N: np.ndarray  # int64
    positions_N: np.ndarray  # int64
    scored_rows_K: np.ndarray  # int64
    target_ids_K: np.ndarray  # int64
    num_slots: int
    cu_seqlens: np.ndarray  # int32
    prefix_of_segment: np.ndarray  # int64
    max_seqlen: int
    prediction_of_T: np.ndarray  # int64
    is_scored_T: np.ndarray  # bool
    full_order_P: np.ndarray  # int64
    row_of_T: np.ndarray  # int64


def plan_packed_inputs(
    microbatch: Microbatch, *, tp: int, cp: int, cp_rank: int, score_all: bool = False, share_prompts: bool = True
) -> PackedInputs:
    """Pad, cut and index one microbatch for context-parallel rank `cp_rank`.

    Every sequence is padded at its end to a multiple of 2*cp, and a last sequence of padding tops the whole up to what
    sequence parallelism needs. An empty microbatch becomes padding only. Predictions are scored for the tokens of the
    loss mask, or for all that have a predecessor with `score_all`. Prompts that the microbatch marks as shared are
    computed once where `share_prompts` and cp is 1, else with every sequence.

    Raises ValueError when a sequence does not begin with the tokens that it is said to share.
    """
    sequence_multiple = 2 * cp if cp > 1 else 1
    total_multiple = math.lcm(sequence_multiple, cp * tp)
    lengths_S = np.diff(microbatch.cu_seqlens).astype(np.int64)
    shared_S = np.zeros(len(lengths_S), dtype=np.int64)
    if share_prompts and cp == 1 and len(microbatch.shared_prefix_S):
        shared_S = microbatch.shared_prefix_S.astype(np.int64)
    padded_S = -(-(lengths_S - shared_S) // sequence_multiple) * sequence_multiple
    num_real = int(padded_S.sum())
    filler = -num_real % total_multiple if num_real else total_multiple
    starts_S = np.concatenate(([0], np.cumsum(padded_S)))
    num_padded = int(starts_S[-1]) + filler
    place_T, offset_T = _places(lengths_S, shared_S, starts_S)
    token_ids_P = np.zeros(num_padded, dtype=np.int64)
    token_ids_P[place_T] = microbatch.token_ids_T
    if not np.array_equal(token_ids_P[place_T], microbatch.token_ids_T):
        raise ValueError("a sequence of the microbatch does not begin with the prompt that it is said to share")
    base_P = np.zeros(num_padded, dtype=np.int64)
    base_P[:num_real] = np.repeat(starts_S[:-1] - shared_S, padded_S)
    base_P[num_real:] = num_real

    cu_seqlens, prefix_of_segment = _segments(starts_S, shared_S, num_padded)
    order_P = _rank_order(cu_seqlens, cp)
    full_order_P = np.empty(num_padded, dtype=np.int64)
    full_order_P[order_P] = np.arange(num_padded)
    num_rows = num_padded // cp
    mine_N = order_P[cp_rank * num_rows : (cp_rank + 1) * num_rows]

    is_scored_T = offset_T > 0
    if not score_all:
        is_scored_T &= microbatch.loss_mask_T
    scored = np.flatnonzero(is_scored_T)
    row_of_T = full_order_P[place_T]
    rank_of, row_of = np.divmod(row_of_T[scored - 1], num_rows)  # the row before a token predicts it
    num_slots = max(1, int(np.bincount(rank_of, minlength=cp).max()))
    prediction_of_T = np.zeros(microbatch.num_tokens, dtype=np.int64)
    for rank in range(cp):
        of_rank = scored[rank_of == rank]
        prediction_of_T[of_rank] = rank * num_slots + np.arange(len(of_rank))
    return PackedInputs(
        token_ids_N=token_ids_P[mine_N],
        positions_N=(np.arange(num_padded) - base_P)[mine_N],
        scored_rows_K=row_of[rank_of == cp_rank],
        target_ids_K=microbatch.token_ids_T[scored[rank_of == cp_rank]].astype(np.int64),
        num_slots=num_slots,
        cu_seqlens=cu_seqlens.astype(np.int32),
        prefix_of_segment=prefix_of_segment,
        max_seqlen=max(filler, int((padded_S + shared_S).max(initial=0))),
        prediction_of_T=prediction_of_T,
        is_scored_T=is_scored_T,
        full_order_P=full_order_P,
        row_of_T=row_of_T,
    )


def _places(lengths_S: np.ndarray, shared_S: np.ndarray, starts_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each token is computed, and its offset in its sequence. A shared token stands where the first of its run is."""
    first_S = np.maximum.accumulate(np.where(shared_S == 0, np.arange(len(shared_S)), 0))
    offset_T = np.arange(int(lengths_S.sum())) - np.repeat(np.cumsum(lengths_S) - lengths_S, lengths_S)
    own_T = np.repeat(starts_S[:-1] - shared_S, lengths_S) + offset_T
    in_first_T = np.repeat(starts_S[:-1][first_S], lengths_S) + offset_T
    return np.where(offset_T < np.repeat(shared_S, lengths_S), in_first_T, own_T), offset_T


def _segments(starts_S: np.ndarray, shared_S: np.ndarray, num_padded: int) -> tuple[np.ndarray, np.ndarray]:
    """Borders of what attends to itself, and the segment of the prompt that each one sees besides (-1: none)."""
    if not shared_S.any():
        cu_seqlens = starts_S if starts_S[-1] == num_padded else np.append(starts_S, num_padded)
        return cu_seqlens, np.full(len(cu_seqlens) - 1, -1, dtype=np.int64)
    borders = [0]
    prefixes: list[int] = []
    prompt = -1
    lengths = [*shared_S.tolist(), 0]
    for number, (start, stop) in enumerate(pairwise(starts_S.tolist())):
        if lengths[number] == 0:
            prompt = -1
            if lengths[number + 1]:
                prompt = len(prefixes)
                borders.append(start + lengths[number + 1])
                prefixes.append(-1)
        elif lengths[number + 1] not in (0, lengths[number]):
            raise ValueError(f"sequences share {lengths[number]} and {lengths[number + 1]} tokens with one before them")
        if stop > borders[-1]:
            borders.append(stop)
            prefixes.append(prompt)
    if num_padded > borders[-1]:
        borders.append(num_padded)
        prefixes.append(-1)
    return np.array(borders), np.array(prefixes, dtype=np.int64)


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
    """Segments of similar length that attend in one call. Rows beyond a segment's end point at row 0.

    `mask` [s, 1, q, k] says who sees whom; None means plain causal attention. Segment i also sees all of prompt
    `prompt_of[i]`; prompts of one group are equally long, 0 without shared prompts.
    """

    query_rows: np.ndarray  # int64 [s, q], rows of this rank
    key_rows: np.ndarray  # int64 [s, k], rows of the keys of all context-parallel ranks one after another
    mask: np.ndarray | None
    prompt_rows: np.ndarray  # int64 [prompts, length]
    prompt_of: np.ndarray  # int64 [s]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Groups, and for each row of this rank its place in the groups' outputs laid one after another."""

    groups: tuple[AttentionGroup, ...]
    place_of_N: np.ndarray  # int64


def plan_attention(inputs: PackedInputs, *, cp: int, max_waste: float = 0.25, slack_tokens: int = 16) -> AttentionPlan:
    """Group segments so that padding a group to its longest wastes at most `max_waste` of a segment or `slack_tokens`."""
    lengths_S = np.diff(inputs.cu_seqlens).astype(np.int64)
    starts_S = inputs.cu_seqlens[:-1].astype(np.int64)
    prompt_lengths_S = np.where(inputs.prefix_of_segment >= 0, lengths_S[inputs.prefix_of_segment], 0)
    order = np.lexsort((-lengths_S, -prompt_lengths_S))
    groups: list[AttentionGroup] = []
    place_of_N = np.empty(len(inputs.token_ids_N), dtype=np.int64)
    offset = first = 0
    while first < len(order):
        longest, prompt_length = int(lengths_S[order[first]]), int(prompt_lengths_S[order[first]])
        shortest = min(longest * (1 - max_waste), longest - slack_tokens)
        last = first
        while last < len(order) and lengths_S[order[last]] >= shortest and prompt_lengths_S[order[last]] == prompt_length:
            last += 1
        members = order[first:last]
        first = last
        query_rows, query_valid = _rows(starts_S[members] // cp, lengths_S[members] // cp, longest // cp)
        key_rows, mask = query_rows, None
        if cp > 1:
            places, _ = _rows(starts_S[members], lengths_S[members], longest)
            position = np.where(query_valid, inputs.positions_N[query_rows], longest)
            key_rows = inputs.full_order_P[places]
            mask = np.arange(longest)[None, None, None, :] <= position[:, None, :, None]
        prompts, prompt_of = np.unique(inputs.prefix_of_segment[members], return_inverse=True)
        prompt_rows = starts_S[prompts][:, None] + np.arange(prompt_length)[None, :]
        groups.append(AttentionGroup(query_rows, key_rows, mask, prompt_rows, prompt_of))
        flat = offset + np.arange(query_rows.size).reshape(query_rows.shape)
        place_of_N[query_rows[query_valid]] = flat[query_valid]
        offset += query_rows.size
    return AttentionPlan(tuple(groups), place_of_N)


def _rows(starts: np.ndarray, lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers [s, width] and which of them are real."""
    column = np.arange(width)[None, :]
    is_real = column < lengths[:, None]
    return np.where(is_real, starts[:, None] + column, 0), is_real
