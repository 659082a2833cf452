"""fp8 with block scales: bit for bit what a plain reference computes, in the engine's layout, through a real sync."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from megatron_rl.model_families.registry import get_family
from megatron_rl.resharding import precision
from megatron_rl.resharding.channel import ChannelError
from megatron_rl.resharding.verify import SyncError, check_receiver
from megatron_rl.types.layout import EngineLayout, ParallelLayout
from tests.unit.resharding.rig import World, expected_shard


def reference(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block by block, element by element in float32."""
    rows, cols = weight.shape
    values = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // 128), -(-cols // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = weight[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)].float()
            top = block.abs().max()
            scales[i, j] = top / 448.0 if top > 0 else 1.0
            values[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] = (block / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (300, 130), (1, 1), (127, 257)])
def test_equals_the_plain_reference_bit_for_bit(shape):
    generator = torch.Generator().manual_seed(sum(shape))
    weight = (torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 4).to(torch.bfloat16)
    weight[: shape[0] // 2, : min(shape[1], 128)] = 0
    values, scales = precision.quantize_blocks(weight)
    want_values, want_scales = reference(weight)
    assert torch.equal(values.view(torch.uint8), want_values.view(torch.uint8))
    assert torch.equal(scales, want_scales)
    back = values.float() * scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    assert float((back - weight.float()).abs().max()) <= float(weight.float().abs().max()) / 16


class Fp8World(World):
    """Engines that hold attention and experts in fp8 with scales, everything else in bf16."""

    dims_changes: ClassVar[dict] = {
        "hidden_size": 256, "head_dim": 128, "num_heads": 8, "num_kv_heads": 4, "moe_ffn_size": 256,
    }  # fmt: skip

    def is_quantised(self, name: str) -> bool:
        return any(part in name for part in ("qkv_proj", "o_proj", "w13", "w2"))

    def make_params(self):
        params = super().make_params()
        for name in [n for n in params if self.is_quantised(n)]:
            *stacked, rows, cols = params[name].shape
            params[name] = torch.zeros(params[name].shape, dtype=torch.float8_e4m3fn)
            params[name + "_scale_inv"] = torch.zeros(*stacked, -(-rows // 128), -(-cols // 128))
        return params


@pytest.mark.parametrize("transport", ["p2p", "ipc", "relay"])
@pytest.mark.parametrize("trainer_dtype", [torch.float32, torch.bfloat16])
def test_a_sync_brings_the_engines_fp8_values_and_scales(transport, trainer_dtype):
    layout, engine = ParallelLayout(tp=2, ep=2, dp=1), EngineLayout(2, 2 if transport == "relay" else 1)
    options = {} if transport == "relay" else {"transport": transport}
    one = Fp8World("qwen3_moe", layout, engine, torch.bfloat16, trainer_dtype, options, relay=transport == "relay")
    try:
        one.sync()
        one.load(12)
        one.sync()
        family, num_quantised = get_family("qwen3_moe"), 0
        for rank in range(engine.num_ranks):
            held = one.params(rank)
            for name, weight in expected_shard(family, one.dims, engine, one.source, torch.bfloat16, rank % 2).items():
                if not one.is_quantised(name):
                    continue
                num_quantised += 1
                values, scales = held[name], held[name + "_scale_inv"]
                for part in range(weight.shape[0]) if weight.ndim == 3 else [slice(None)]:
                    want_values, want_scales = reference(weight[part])
                    assert torch.equal(values[part].view(torch.uint8), want_values.view(torch.uint8)), name
                    assert torch.equal(scales[part], want_scales), name
        assert num_quantised == engine.num_ranks * 4 * one.dims.num_layers
    finally:
        one.close()


def test_slices_that_cut_through_blocks_are_refused_in_one_line():
    class Cut(Fp8World):
        dims_changes: ClassVar[dict] = Fp8World.dims_changes | {"head_dim": 24}

    one = Cut("qwen3_moe", ParallelLayout(tp=2, ep=2), EngineLayout(2, 1), torch.bfloat16)
    try:
        order = one.begin()
        with pytest.raises(ValueError, match=r"fp8: the slice .*qkv_proj\.weight' .*whole 128 x 128 blocks"):
            one.senders[0].send(one.chunks[0], order)
        with pytest.raises(ChannelError, match="incomplete"):
            one.controls[0].finish(order.sync)
    finally:
        one.close()


def test_scales_that_the_engine_does_not_have_are_named():
    one = Fp8World("qwen3_moe", ParallelLayout(), EngineLayout(2, 1), torch.bfloat16)
    try:
        described = one.controls[0].describe()
        name = "model.layers.1.mlp.experts.w2_weight_scale_inv"
        with pytest.raises(SyncError, match=rf"'{name}' is absent, fp8 needs \(\d+, 2, 1\) in float32"):
            check_receiver(one.plan, 0, {n: d for n, d in described.items() if n != name})
    finally:
        one.close()
