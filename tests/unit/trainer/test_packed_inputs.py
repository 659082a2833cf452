from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.trainer.packed_inputs import PackedInputs, plan_attention, plan_packed_inputs
from megatron_rl.types.training import Microbatch


def make_microbatch(lengths: list[int], seed: int = 0, shared: list[int] | None = None) -> Microbatch:
    """Sequences of the given lengths; `shared[i]` leading tokens of sequence i are those of the one before."""
    rng = np.random.default_rng(seed)
    total, count = sum(lengths), len(lengths)
    parts: list[np.ndarray] = []
    for number, length in enumerate(lengths):
        parts.append(rng.integers(1, 1000, length))
        if shared and shared[number]:
            parts[number][: shared[number]] = parts[number - 1][: shared[number]]
    return Microbatch(
        token_ids_T=np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64),
        cu_seqlens=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        loss_mask_T=rng.random(total) < 0.6,
        versions_T=np.zeros(total, dtype=np.int32),
        rewards_S=np.zeros(count, dtype=np.float32),
        is_correct_S=np.zeros(count, dtype=bool),
        sample_index_S=np.arange(count, dtype=np.int32),
        shared_prefix_S=np.array(shared or [], dtype=np.int32),
    )


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Runs of sequences with a common prompt: (lengths, shared). Answers may be empty, runs may have one member."""
    lengths: list[int] = []
    shared: list[int] = []
    for prompt, answers in draw(st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(0, 30), min_size=1)), max_size=4)):
        lengths += [prompt + answer for answer in answers]
        shared += [0] + [prompt] * (len(answers) - 1)
    return lengths, shared


LENGTHS = st.lists(st.integers(1, 23), min_size=0, max_size=7)
SIZES = st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (1, 3), (4, 3)])


def all_ranks(microbatch: Microbatch, tp: int, cp: int, *, score_all: bool) -> list[PackedInputs]:
    return [plan_packed_inputs(microbatch, tp=tp, cp=cp, cp_rank=rank, score_all=score_all) for rank in range(cp)]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, SIZES, st.booleans())
def test_every_scored_token_is_predicted_by_its_predecessor(
    lengths: list[int], sizes: tuple[int, int], score_all: bool
) -> None:
    tp, cp = sizes
    microbatch = make_microbatch(lengths)
    ranks = all_ranks(microbatch, tp, cp, score_all=score_all)
    tokens_P = np.concatenate([inputs.token_ids_N for inputs in ranks])
    positions_P = np.concatenate([inputs.positions_N for inputs in ranks])
    width, num_slots = len(ranks[0].token_ids_N), ranks[0].num_slots
    assert all(inputs.num_slots == num_slots for inputs in ranks)
    slots = np.full((cp * num_slots, 2), -1)  # row that predicts, token that is predicted
    for rank, inputs in enumerate(ranks):
        mine = slice(rank * num_slots, rank * num_slots + len(inputs.scored_rows_K))
        slots[mine] = np.stack((rank * width + inputs.scored_rows_K, inputs.target_ids_K), axis=1)
    num_scored = 0
    for start, stop in zip(microbatch.cu_seqlens[:-1], microbatch.cu_seqlens[1:], strict=True):
        for t in range(start, stop):
            is_scored = t > start and (score_all or microbatch.loss_mask_T[t])
            for inputs in ranks:
                assert inputs.is_scored_T[t] == is_scored
            if is_scored:
                num_scored += 1
                row, target = slots[ranks[0].prediction_of_T[t]]
                assert tokens_P[row] == microbatch.token_ids_T[t - 1]
                assert positions_P[row] == t - 1 - start
                assert target == microbatch.token_ids_T[t]
    assert (slots[:, 1] >= 0).sum() == num_scored


@settings(max_examples=80, deadline=None)
@given(runs(), st.sampled_from([1, 3]), st.booleans())
def test_a_row_of_a_shared_prompt_sees_and_predicts_what_it_does_unshared(
    sequences: tuple[list[int], list[int]], tp: int, score_all: bool
) -> None:
    lengths, shared = sequences
    microbatch = make_microbatch(lengths, shared=shared)
    inputs = plan_packed_inputs(microbatch, tp=tp, cp=1, cp_rank=0, score_all=score_all)
    num_computed = sum(lengths) - sum(shared)
    assert len(inputs.token_ids_N) == max(-(-num_computed // tp) * tp, tp)
    seen = rows_seen(inputs)
    for start, stop in pairwise(microbatch.cu_seqlens.tolist()):
        for t in range(start + 1, stop):
            assert inputs.is_scored_T[t] == (score_all or microbatch.loss_mask_T[t])
            if inputs.is_scored_T[t]:
                slot = inputs.prediction_of_T[t]
                row = inputs.scored_rows_K[slot]
                assert inputs.target_ids_K[slot] == microbatch.token_ids_T[t]
                assert inputs.token_ids_N[seen[row]].tolist() == microbatch.token_ids_T[start:t].tolist()
                assert inputs.positions_N[seen[row]].tolist() == list(range(t - start))
    assert max(inputs.positions_N) < inputs.max_seqlen
    unshared = plan_packed_inputs(microbatch, tp=tp, cp=1, cp_rank=0, share_prompts=False)
    assert len(unshared.token_ids_N) >= sum(lengths) and not (unshared.prefix_of_segment >= 0).any()


def rows_seen(inputs: PackedInputs) -> dict[int, list[int]]:
    """Row -> the rows that it attends to, in order, by the attention plan."""
    plan = plan_attention(inputs, cp=1)
    seen: dict[int, list[int]] = {}
    offset = 0
    for group in plan.groups:
        _, width = group.query_rows.shape
        assert group.mask is None
        for row in np.flatnonzero((plan.place_of_N >= offset) & (plan.place_of_N < offset + group.query_rows.size)):
            segment, column = divmod(int(plan.place_of_N[row] - offset), width)
            assert group.query_rows[segment, column] == row
            prompt = group.prompt_rows[group.prompt_of[segment]]
            seen[int(row)] = [*prompt.tolist(), *group.key_rows[segment, : column + 1].tolist()]
        offset += group.query_rows.size
    assert sorted(seen) == list(range(len(inputs.token_ids_N)))
    return seen


def test_a_prompt_that_is_not_shared_is_refused() -> None:
    wrong = replace(make_microbatch([5, 6]), shared_prefix_S=np.array([0, 3], dtype=np.int32))
    with pytest.raises(ValueError, match="does not begin with the prompt"):
        plan_packed_inputs(wrong, tp=1, cp=1, cp_rank=0)
    uneven = make_microbatch([5, 6, 7], shared=[0, 3, 2])
    with pytest.raises(ValueError, match="share 3 and 2 tokens"):
        plan_packed_inputs(uneven, tp=1, cp=1, cp_rank=0)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, SIZES)
def test_padding_divides_and_shares_are_even(lengths: list[int], sizes: tuple[int, int]) -> None:
    tp, cp = sizes
    ranks = all_ranks(make_microbatch(lengths), tp, cp, score_all=True)
    widths = {len(inputs.token_ids_N) for inputs in ranks}
    assert len(widths) == 1
    width = widths.pop()
    assert width > 0 and width % tp == 0
    padded_lengths = np.diff(ranks[0].cu_seqlens)
    assert padded_lengths.sum() == width * cp and padded_lengths.max() == ranks[0].max_seqlen
    if cp > 1:
        assert not (padded_lengths % (2 * cp)).any()
    assert sorted(ranks[0].full_order_P) == list(range(width * cp))


def test_zigzag_gives_a_rank_the_outer_or_the_inner_chunks() -> None:
    first, second = all_ranks(make_microbatch([8]), 1, 2, score_all=True)
    assert first.positions_N.tolist() == [0, 1, 6, 7]
    assert second.positions_N.tolist() == [2, 3, 4, 5]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, SIZES)
def test_the_attention_plan_shows_each_row_its_own_past(lengths: list[int], sizes: tuple[int, int]) -> None:
    tp, cp = sizes
    ranks = all_ranks(make_microbatch(lengths), tp, cp, score_all=True)
    cu_seqlens = ranks[0].cu_seqlens
    padded_of_row = np.argsort(ranks[0].full_order_P)  # place in the concatenation of ranks -> padded token
    for rank, inputs in enumerate(ranks):
        plan = plan_attention(inputs, cp=cp)
        rows = np.concatenate([group.query_rows.reshape(-1) for group in plan.groups])
        assert np.array_equal(rows[plan.place_of_N], np.arange(len(inputs.token_ids_N)))
        offset = 0
        for group in plan.groups:
            _, width = group.query_rows.shape
            for place in plan.place_of_N[(plan.place_of_N >= offset) & (plan.place_of_N < offset + group.query_rows.size)]:
                sequence, column = divmod(int(place - offset), width)
                row = group.query_rows[sequence, column]
                padded = padded_of_row[rank * len(inputs.token_ids_N) + row]
                start = cu_seqlens[np.searchsorted(cu_seqlens, padded, side="right") - 1]
                if group.mask is None:
                    visible = group.key_rows[sequence, : column + 1]
                else:
                    visible = group.key_rows[sequence][group.mask[sequence, 0, column]]
                assert padded_of_row[visible].tolist() == list(range(start, padded + 1))
            offset += group.query_rows.size


def test_similar_lengths_share_a_group_and_different_ones_do_not() -> None:
    inputs = plan_packed_inputs(make_microbatch([200, 40, 190, 33]), tp=1, cp=1, cp_rank=0)
    groups = plan_attention(inputs, cp=1).groups
    assert [group.query_rows.shape for group in groups] == [(2, 200), (2, 40)]


@pytest.mark.parametrize("tp", [1, 4])
def test_an_empty_microbatch_becomes_padding(tp: int) -> None:
    inputs = plan_packed_inputs(make_microbatch([]), tp=tp, cp=1, cp_rank=0)
    assert len(inputs.token_ids_N) == tp
    assert len(inputs.scored_rows_K) == 0 and len(inputs.prediction_of_T) == 0
