import struct
from typing import NamedTuple

import numpy as np
import torch

from megatron_rl.rollout.sglang.cpu_layer import plugin
from megatron_rl.rollout.sglang.cpu_layer.plugin import PATCHES, murmur_hash32, own_experts_only, rest_while_paused


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


def test_only_the_experts_of_this_rank_are_run():
    """Three tokens of width 2, two choices each; expert e multiplies by 10 ** (e + 1)."""

    def original(layer, x, top_k, config):
        assert (layer, config) == ("layer", "config") and top_k.topk_ids.min() >= 0
        return x * 10.0 ** (top_k.topk_ids + 1) * top_k.topk_weights

    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    top_k = TopK(torch.tensor([[0.5, 0.25], [0.5, 1.0], [1.0, 1.0]]), torch.tensor([[1, 0], [-1, 0], [-1, -1]]), None)
    out = own_experts_only(original, "layer", x, top_k, "config")
    assert torch.equal(out, torch.tensor([[52.5, 105.0], [30.0, 40.0], [0.0, 0.0]]))
    none = top_k._replace(topk_ids=torch.full((3, 2), -1))
    assert torch.equal(own_experts_only(original, "layer", x, none, "config"), torch.zeros(3, 2))


def test_a_paused_scheduler_rests_after_its_own_work(monkeypatch):
    calls = []
    monkeypatch.setattr(plugin.time, "sleep", lambda seconds: calls.append(seconds))
    rest_while_paused(lambda scheduler: calls.append(scheduler), "scheduler")
    assert calls == ["scheduler", plugin.PAUSED_POLL_S]


def test_every_patch_has_a_reason_and_a_distinct_target():
    assert all(patch.reason and patch.target.startswith("sglang.") for patch in PATCHES)
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)
