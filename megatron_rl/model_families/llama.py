"""Llama: dense gated MLP, embeddings tied or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.model_families.declaration import ModelDims, ModelFamily
from megatron_rl.model_families.hf_config import optional, reject_features, required, rope_theta, single_token
from megatron_rl.model_families.transformer_rules import ATTENTION, DENSE_MLP, EMBEDDING_AND_HEAD, hf_shape


def dims_from_hf(config: Mapping[str, Any]) -> ModelDims:
    reject_features(config, {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "rope_scaling": None})
    num_heads, hidden = required(config, "num_attention_heads"), required(config, "hidden_size")
    return ModelDims(
        num_layers=required(config, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=optional(config, "num_key_value_heads", num_heads),
        head_dim=optional(config, "head_dim", hidden // num_heads),
        vocab_size=required(config, "vocab_size"),
        ffn_size=required(config, "intermediate_size"),
        num_experts=0,
        top_k=0,
        moe_ffn_size=0,
        norm_epsilon=optional(config, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta(config),
        max_positions=optional(config, "max_position_embeddings", 2048),
        tied_embeddings=optional(config, "tie_word_embeddings", False),
        qk_norm=False,
        norm_topk_prob=False,
        bos_token_id=single_token(config, "bos_token_id"),
        eos_token_id=single_token(config, "eos_token_id"),
    )


def hf_from_dims(dims: ModelDims) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "num_hidden_layers": dims.num_layers,
        "hidden_size": dims.hidden_size,
        "num_attention_heads": dims.num_heads,
        "num_key_value_heads": dims.num_kv_heads,
        "head_dim": dims.head_dim,
        "vocab_size": dims.vocab_size,
        "intermediate_size": dims.ffn_size,
        "rms_norm_eps": dims.norm_epsilon,
        "rope_theta": dims.rope_theta,
        "max_position_embeddings": dims.max_positions,
        "tie_word_embeddings": dims.tied_embeddings,
        "bos_token_id": dims.bos_token_id,
        "eos_token_id": dims.eos_token_id,
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
