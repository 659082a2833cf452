import struct
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from megatron_rl.rollout.sglang.cpu_layer.plugin import PATCHES, murmur_hash32, own_experts_only


def murmur3_x86_32(data: bytes) -> int:
    """MurmurHash3 with seed 0 in plain Python integers, from its public definition, for whole 4-byte blocks."""
    state = 0
    for (block,) in struct.iter_unpack("<I", data):
        block = (block * 0xCC9E2D51) % 2**32
        block = (block << 15 | block >> 17) % 2**32
        state ^= (block * 0x1B873593) % 2**32
        state = ((state << 13 | state >> 19) * 5 % 2**32 + 0xE6546B64) % 2**32
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B % 2**32
    state = (state ^ state >> 13) * 0xC2B2AE35 % 2**32
    return state ^ state >> 16


def test_the_reference_is_murmur3():
    # Published test vector: murmur3_x86_32(b"test", seed=0).
    assert murmur3_x86_32(b"test") == 0xBA6BD213


def test_murmur_hash_of_seed_position_and_column():
    rng = np.random.default_rng(4)
    seeds = rng.integers(-(2**63), 2**63 - 1, 5)
    positions, columns = rng.integers(0, 2**31, 5), rng.integers(0, 200_000, 7)
    hashed = murmur_hash32(torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns))
    assert hashed.dtype is torch.uint32 and hashed.shape == (5, 7)
    expected = [
        [murmur3_x86_32(struct.pack("<qII", int(s), int(p), int(c))) for c in columns]
        for s, p in zip(seeds, positions, strict=True)
    ]
    assert hashed.tolist() == expected


class TopK(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor | None


def test_tokens_of_other_ranks_experts_get_weight_zero():
    seen = []
    top_k = TopK(torch.tensor([[0.6, 0.4], [0.7, 0.3]]), torch.tensor([[2, -1], [-1, 0]]), None)
    own_experts_only(lambda *args: seen.append(args), "layer", "x", top_k, SimpleNamespace())
    (_, _, given, _) = seen[0]
    assert torch.equal(given.topk_ids, torch.tensor([[2, 0], [0, 0]]))
    assert torch.equal(given.topk_weights, torch.tensor([[0.6, 0.0], [0.0, 0.3]]))


def test_every_patch_has_a_reason_and_a_distinct_target():
    assert all(patch.reason and patch.target.startswith("sglang.") for patch in PATCHES)
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)
