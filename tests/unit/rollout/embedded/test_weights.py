from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_rl.model_families.registry import FAMILIES
from megatron_rl.model_families.shards import engine_shapes
from megatron_rl.rollout.embedded.weights import ShardedWeights, engine_param_shapes
from tests.unit.rollout.embedded.engine_models import DENSE, MOE


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("vocab_multiple", [1, 64])
def test_names_and_shapes_are_those_that_the_families_declare(name: str, tp: int, vocab_multiple: int) -> None:
    family = FAMILIES[name]
    expected = engine_shapes(family, family.debug_dims, tp, vocab_multiple)
    assert engine_param_shapes(family.debug_dims, tp, vocab_multiple) == expected


def test_moe_shapes_by_hand() -> None:
    shapes = engine_param_shapes(MOE, tp=4)  # 8 query heads and 2 kv heads of 12; experts 6 of 36
    layer = "model.layers.2."
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (32, 40)
    assert shapes[layer + "self_attn.qkv_proj.weight"] == ((2 + 1 + 1) * 12, 40)
    assert shapes[layer + "self_attn.o_proj.weight"] == (40, 24)
    assert shapes[layer + "self_attn.k_norm.weight"] == (12,)
    assert shapes[layer + "mlp.gate.weight"] == (6, 40)
    assert shapes[layer + "mlp.experts.w13_weight"] == (6, 18, 40)
    assert shapes[layer + "mlp.experts.w2_weight"] == (6, 40, 9)
    assert not any("layers.3." in name or "gate_up_proj" in name for name in shapes)


def test_shards_are_zero_contiguous_views_that_write_through() -> None:
    weights = ShardedWeights(DENSE, 3, torch.bfloat16)
    assert [list(shard) for shard in weights.shards] == [list(engine_param_shapes(DENSE, 3))] * 3
    assert "lm_head.weight" not in weights.shards[0]
    for shard in weights.shards:
        assert all(tensor.is_contiguous() and not tensor.any() for tensor in shard.values())
    weights.shards[1]["model.layers.0.mlp.down_proj.weight"].view(-1)[5] = 2.0
    assert weights.stacked["model.layers.0.mlp.down_proj.weight"][1, 0, 5] == 2.0


@pytest.mark.parametrize(
    ("dims", "tp", "named"),
    [
        (MOE, 3, "num_heads 8"),
        (MOE, 8, "moe_ffn_size 36"),
        (DENSE, 0, "num_heads 6"),
        (dataclasses.replace(DENSE, num_heads=12, num_kv_heads=3, ffn_size=64), 2, "num_kv_heads 3"),
    ],
)
def test_a_size_that_tp_does_not_divide_is_named(dims, tp: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        engine_param_shapes(dims, tp)
