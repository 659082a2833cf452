"""Qwen3-MoE: every layer routed, query and key norms, untied embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.model_families.declaration import ModelDims, ModelFamily
from megatron_rl.model_families.hf_config import decoder_fields, hf_decoder_keys, optional, reject_features, required
from megatron_rl.model_families.transformer_rules import (
    ATTENTION,
    EMBEDDING_AND_HEAD,
    QK_NORM,
    ROUTED_EXPERTS,
    hf_shape,
)


def dims_from_hf(config: Mapping[str, Any]) -> ModelDims:
    only = {"attention_bias": False, "mlp_only_layers": [], "decoder_sparse_step": 1, "hidden_act": "silu"}
    reject_features(config, only)
    return ModelDims(
        **decoder_fields(config),
        ffn_size=optional(config, "intermediate_size", 0),
        num_experts=_num_experts(config),
        top_k=required(config, "num_experts_per_tok"),
        moe_ffn_size=required(config, "moe_intermediate_size"),
        max_positions=optional(config, "max_position_embeddings", 32768),
        qk_norm=True,
        norm_topk_prob=optional(config, "norm_topk_prob", False),
    )


def _num_experts(config: Mapping[str, Any]) -> int:
    """`num_experts`, which transformers 5 writes as `num_local_experts`."""
    return optional(config, "num_local_experts", None) or required(config, "num_experts")


def hf_from_dims(dims: ModelDims) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **hf_decoder_keys(dims),
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": dims.num_experts,
        "num_experts_per_tok": dims.top_k,
        "moe_intermediate_size": dims.moe_ffn_size,
        "norm_topk_prob": dims.norm_topk_prob,
    }


FAMILY = ModelFamily(
    name="qwen3_moe",
    hf_architectures=("Qwen3MoeForCausalLM",),
    dims_from_hf=dims_from_hf,
    hf_from_dims=hf_from_dims,
    params=(*EMBEDDING_AND_HEAD, *ATTENTION, *QK_NORM, *ROUTED_EXPERTS),
    shape_of=hf_shape,
    debug_dims=ModelDims(
        num_layers=4,
        hidden_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=20,
        vocab_size=101,
        ffn_size=112,
        num_experts=8,
        top_k=2,
        moe_ffn_size=36,
        norm_epsilon=1e-6,
        rope_theta=10000.0,
        max_positions=256,
        tied_embeddings=False,
        qk_norm=True,
        norm_topk_prob=True,
    ),
)
