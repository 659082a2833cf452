from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_rl.trainer.attention import PackedAttention, pack_for_local_attention, pack_for_transformer_engine
from megatron_rl.trainer.packed_inputs import PackedInputs, plan_packed_inputs
from megatron_rl.types.training import Microbatch

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 3, 10
ONE_RANK = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))


def plan(lengths: list[int], shared: tuple[int, ...] = ()) -> PackedInputs:
    total = sum(lengths)
    microbatch = Microbatch(
        token_ids_T=np.zeros(total, dtype=np.int64),
        cu_seqlens=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        loss_mask_T=np.ones(total, dtype=bool),
        versions_T=np.zeros(total, dtype=np.int32),
        rewards_S=np.zeros(len(lengths), dtype=np.float32),
        is_correct_S=np.zeros(len(lengths), dtype=bool),
        sample_index_S=np.arange(len(lengths), dtype=np.int32),
        shared_prefix_S=np.array(shared, dtype=np.int32),
    )
    return plan_packed_inputs(microbatch, tp=1, cp=1, cp_rank=0)


@pytest.mark.parametrize("lengths", [[7], [5, 5, 5], [90, 3, 41, 38, 1, 77]])
def test_packed_equals_one_by_one_with_gradients(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(sum(lengths), heads, HEAD_DIM, generator=generator, requires_grad=True)
        for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    ]
    attention = PackedAttention(config=SimpleNamespace(kv_channels=HEAD_DIM), pg_collection=ONE_RANK)
    packed = pack_for_local_attention(plan(lengths), 1, torch.device("cpu"))
    out = attention(*inputs, None, packed_seq_params=packed)

    expected = []
    for start, stop in pairwise(np.cumsum([0, *lengths]).tolist()):
        q, k, v = (part[start:stop].transpose(0, 1) for part in inputs)
        one = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        expected.append(one.transpose(0, 1).flatten(1))
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-5, atol=1e-6)

    factors = torch.randn(out.shape, generator=generator)
    got = torch.autograd.grad((out * factors).sum(), inputs)
    wanted = torch.autograd.grad((torch.cat(expected) * factors).sum(), inputs)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_shared_prompt_equals_one_per_answer_with_gradients() -> None:
    """Two groups of unequal prompts, one of them with an empty answer, and a sequence of its own."""
    lengths, shared = [12 + 5, 12 + 31, 12 + 4, 9, 30 + 2, 30, 30 + 7], (0, 12, 12, 0, 0, 30, 30)
    inputs = plan(lengths, shared)
    num_rows = len(inputs.token_ids_N)
    assert num_rows == sum(lengths) - sum(shared)
    generator = torch.Generator().manual_seed(2)
    rows = [
        torch.randn(num_rows, heads, HEAD_DIM, generator=generator, requires_grad=True)
        for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    ]
    attention = PackedAttention(config=SimpleNamespace(kv_channels=HEAD_DIM), pg_collection=ONE_RANK)
    out = attention(*rows, None, packed_seq_params=pack_for_local_attention(inputs, 1, torch.device("cpu")))

    expected, places, first, leader = [], [], 0, 0
    for length, prefix in zip(lengths, shared, strict=True):
        start = first if prefix == 0 else leader
        leader, own = start, length - prefix
        mine = [*range(start, start + prefix), *range(first, first + own)]
        places += mine[prefix:]
        first += own
        q, k, v = (part[mine].transpose(0, 1) for part in rows)
        one = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)
        expected.append(one[prefix:])
    assert places == list(range(num_rows))
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-5, atol=1e-6)
    factors = torch.randn(out.shape, generator=generator)
    got = torch.autograd.grad((out * factors).sum(), rows)
    wanted = torch.autograd.grad((torch.cat(expected) * factors).sum(), rows)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_attention_without_packing_is_refused() -> None:
    attention = PackedAttention(config=SimpleNamespace(kv_channels=HEAD_DIM), pg_collection=ONE_RANK)
    query = torch.zeros(4, NUM_HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match="packed_seq_params is missing"):
        attention(query, query, query, None)


def test_transformer_engine_gets_the_padded_lengths() -> None:
    packed = pack_for_transformer_engine(plan([4, 9]), torch.device("cpu"))
    assert packed.qkv_format == "thd" and packed.max_seqlen_q == 9
    assert packed.cu_seqlens_q_padded.tolist() == [0, 4, 13]
