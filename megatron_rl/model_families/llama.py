"""Llama: dense gated MLP, embeddings tied or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.model_families.declaration import ModelDims, ModelFamily
from megatron_rl.model_families.hf_config import decoder_fields, hf_decoder_keys, optional, reject_features, required
from megatron_rl.model_families.transformer_rules import ATTENTION, DENSE_MLP, EMBEDDING_AND_HEAD, hf_shape


def dims_from_hf(config: Mapping[str, Any]) -> ModelDims:
    reject_features(config, {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "rope_scaling": None})
    return ModelDims(
        **decoder_fields(config),
        ffn_size=required(config, "intermediate_size"),
        num_experts=0,
        top_k=0,
        moe_ffn_size=0,
        max_positions=optional(config, "max_position_embeddings", 2048),
        qk_norm=False,
        norm_topk_prob=False,
    )


def hf_from_dims(dims: ModelDims) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **hf_decoder_keys(dims),
        "attention_bias": False,
        "mlp_bias": False,
    }


FAMILY = ModelFamily(
    name="llama",
    hf_architectures=("LlamaForCausalLM",),
    dims_from_hf=dims_from_hf,
    hf_from_dims=hf_from_dims,
    params=(*EMBEDDING_AND_HEAD, *ATTENTION, *DENSE_MLP),
    shape_of=hf_shape,
    debug_dims=ModelDims(
        num_layers=4,
        hidden_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=20,
        vocab_size=101,
        ffn_size=112,
        num_experts=0,
        top_k=0,
        moe_ffn_size=0,
        norm_epsilon=1e-6,
        rope_theta=10000.0,
        max_positions=256,
        tied_embeddings=True,
        qk_norm=False,
        norm_topk_prob=False,
    ),
)
