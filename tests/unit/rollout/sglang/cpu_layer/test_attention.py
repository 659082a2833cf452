"""The batched attention against a loop over sequences, heads and queries."""

import pytest
import torch

from megatron_rl.rollout.sglang.cpu_layer.attention import batched_decode, batched_extend

SCALING = 0.37
PLAIN = {"scaling": SCALING, "enable_gqa": True, "is_cross_attn": False, "sliding_window_size": None}
NUM_HEADS, NUM_KV, DIM = 6, 2, 5


def never(*_args, **_options):
    raise AssertionError("the loop of the backend was called")


def cache(seed: int, seq_lens: list[int]):
    """Key and value caches of which every sequence has scattered slots; slots of nobody hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_slots = sum(seq_lens) + 9
    keys, values = (torch.randn(num_slots, NUM_KV, DIM, generator=generator) for _ in range(2))
    free = torch.randperm(num_slots, generator=generator)
    req_to_token = torch.full((len(seq_lens) + 3, max(seq_lens) + 4), 10**6, dtype=torch.int32)
    pool = torch.randperm(len(seq_lens) + 3, generator=generator)[: len(seq_lens)]
    for row, length in zip(pool.tolist(), seq_lens, strict=True):
        req_to_token[row, :length], free = free[:length], free[length:]
    keys[free], values[free] = float("nan"), float("nan")
    return keys, values, req_to_token, pool


def reference(query, keys, values, req_to_token, pool, prefix_lens, query_lens):
    rows, token = [], 0
    for request, prefix, count in zip(pool.tolist(), prefix_lens, query_lens, strict=True):
        for position in range(prefix, prefix + count):
            slots = req_to_token[request, : position + 1].long()
            heads = []
            for head in range(NUM_HEADS):
                kv = head // (NUM_HEADS // NUM_KV)
                weights = (keys[slots, kv] @ query[token, head] * SCALING).softmax(0)
                heads.append(weights @ values[slots, kv])
            rows.append(torch.stack(heads))
            token += 1
    return torch.stack(rows)


def test_decode():
    seq_lens = [4, 1, 11, 7]
    keys, values, req_to_token, pool = cache(1, seq_lens)
    query = torch.randn(4, NUM_HEADS, DIM, generator=torch.Generator().manual_seed(2))
    output = torch.full_like(query, 7.0)
    lengths = torch.tensor(seq_lens)
    batched_decode(never, None, query, output, keys, values, req_to_token, pool, lengths, None, causal=False, **PLAIN)
    expected = reference(query, keys, values, req_to_token, pool, [n - 1 for n in seq_lens], [1] * 4)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)


def test_extend_after_cached_prefixes_of_every_length():
    prefix_lens, query_lens = [0, 5, 1, 8], [3, 1, 6, 2]
    seq_lens = [a + b for a, b in zip(prefix_lens, query_lens, strict=True)]
    keys, values, req_to_token, pool = cache(3, seq_lens)
    query = torch.randn(sum(query_lens), NUM_HEADS, DIM, generator=torch.Generator().manual_seed(4))
    output = torch.full_like(query, 7.0)
    lengths = [torch.tensor(x) for x in (seq_lens, prefix_lens, query_lens)]
    batched_extend(never, None, query, output, keys, values, req_to_token, pool, *lengths, None, causal=True, **PLAIN)
    expected = reference(query, keys, values, req_to_token, pool, prefix_lens, query_lens)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("changed", [{"sliding_window_size": 4}, {"is_cross_attn": True}, {"causal": False}])
def test_what_it_does_not_compute_goes_to_the_backend(changed):
    def original(*args, **options):
        return "the loop", len(args), options["causal"]

    keys, values, req_to_token, pool = cache(5, [2, 3])
    query = torch.zeros(5, NUM_HEADS, DIM)
    lengths = [torch.tensor(x) for x in ([2, 3], [0, 0], [2, 3])]
    options = PLAIN | {"causal": True} | changed
    result = batched_extend(original, None, query, query, keys, values, req_to_token, pool, *lengths, None, **options)
    assert result == ("the loop", 11, options["causal"])
