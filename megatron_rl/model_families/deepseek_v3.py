"""DeepSeek-V3: latent attention (MLA), first layers dense, routed experts beside a shared one, a bias on the router.

Declared for plans (`registry.DECLARED_ONLY`). The layers of multi-token prediction are not among the rules: engines load
them for speculative decoding only. SGLang must keep the shared expert apart (`disable_shared_experts_fusion`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.model_families.declaration import ModelDims, ModelFamily, ParamRule, Shard
from megatron_rl.model_families.hf_config import decoder_fields, hf_decoder_keys, optional, reject_features, required
from megatron_rl.model_families.transformer_rules import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING_AND_HEAD,
    ROUTED_EXPERTS,
    SHARED_EXPERTS,
    hf_shape,
)

_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."
_ATTENTION, _HF_ATTENTION = _LAYER + "self_attention.", _HF_LAYER + "self_attn."


def dims_from_hf(config: Mapping[str, Any]) -> ModelDims:
    """RoPE scaling (YaRN) is no matter of weights and is ignored. A model without query compression is refused."""
    reject_features(config, {"attention_bias": False, "hidden_act": "silu", "moe_layer_freq": 1})
    plain = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_parameters", "head_dim")}
    plain["rope_theta"] = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta"))
    rope = required(config, "qk_rope_head_dim")
    return ModelDims(
        **decoder_fields(plain) | {"head_dim": required(config, "qk_nope_head_dim") + rope},
        ffn_size=required(config, "intermediate_size"),
        num_experts=optional(config, "num_local_experts", None) or required(config, "n_routed_experts"),
        top_k=required(config, "num_experts_per_tok"),
        moe_ffn_size=required(config, "moe_intermediate_size"),
        max_positions=optional(config, "max_position_embeddings", 4096),
        qk_norm=False,
        norm_topk_prob=optional(config, "norm_topk_prob", True),
        num_dense_layers=optional(config, "first_k_dense_replace", 0),
        shared_ffn_size=optional(config, "n_shared_experts", 0) * required(config, "moe_intermediate_size"),
        q_lora_rank=required(config, "q_lora_rank"),
        kv_lora_rank=required(config, "kv_lora_rank"),
        rope_head_dim=rope,
        value_head_dim=required(config, "v_head_dim"),
    )


def hf_from_dims(dims: ModelDims) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **{key: value for key, value in hf_decoder_keys(dims).items() if key != "head_dim"},
        "attention_bias": False,
        "n_routed_experts": dims.num_experts,
        "n_shared_experts": dims.shared_ffn_size // dims.moe_ffn_size,
        "num_experts_per_tok": dims.top_k,
        "moe_intermediate_size": dims.moe_ffn_size,
        "first_k_dense_replace": dims.num_dense_layers,
        "norm_topk_prob": dims.norm_topk_prob,
        "q_lora_rank": dims.q_lora_rank,
        "kv_lora_rank": dims.kv_lora_rank,
        "qk_rope_head_dim": dims.rope_head_dim,
        "qk_nope_head_dim": dims.head_dim - dims.rope_head_dim,
        "v_head_dim": dims.value_head_dim,
        "num_nextn_predict_layers": 0,
    }


def _q_lora_rank(dims: ModelDims) -> int:
    return dims.q_lora_rank


def _moe_layers(dims: ModelDims) -> range:
    return dims.moe_layers


LATENT_ATTENTION = (
    # Transformer Engine's spec fuses a norm into a projection only where it has one; here the input norm stands alone.
    replace(ATTENTION[0], te_name=None),
    ParamRule(
        _ATTENTION + "linear_q_down_proj.weight",
        (_HF_ATTENTION + "q_a_proj.weight",),
        _HF_ATTENTION + "fused_qkv_a_proj_with_mqa.weight",
        Shard.COLUMN,
        te_shard=Shard.REPLICATED,
        engine_shard=Shard.REPLICATED,
    ),
    ParamRule(
        _ATTENTION + "linear_kv_down_proj.weight",
        (_HF_ATTENTION + "kv_a_proj_with_mqa.weight",),
        _HF_ATTENTION + "fused_qkv_a_proj_with_mqa.weight",
        Shard.COLUMN,
        te_shard=Shard.REPLICATED,
        engine_shard=Shard.REPLICATED,
        engine_offset=_q_lora_rank,
    ),
    ParamRule(
        _ATTENTION + "q_layernorm.weight",
        (_HF_ATTENTION + "q_a_layernorm.weight",),
        _HF_ATTENTION + "q_a_layernorm.weight",
        Shard.REPLICATED,
        te_name=_ATTENTION + "linear_q_up_proj.layer_norm_weight",
    ),
    ParamRule(
        _ATTENTION + "kv_layernorm.weight",
        (_HF_ATTENTION + "kv_a_layernorm.weight",),
        _HF_ATTENTION + "kv_a_layernorm.weight",
        Shard.REPLICATED,
        te_name=_ATTENTION + "linear_kv_up_proj.layer_norm_weight",
    ),
    ParamRule(
        _ATTENTION + "linear_q_up_proj.weight",
        (_HF_ATTENTION + "q_b_proj.weight",),
        _HF_ATTENTION + "q_b_proj.weight",
        Shard.COLUMN,
        over_attention_tp=True,
    ),
    ParamRule(
        _ATTENTION + "linear_kv_up_proj.weight",
        (_HF_ATTENTION + "kv_b_proj.weight",),
        _HF_ATTENTION + "kv_b_proj.weight",
        Shard.COLUMN,
        over_attention_tp=True,
    ),
    ATTENTION[2],
)

ROUTER_BIAS = ParamRule(
    _LAYER + "mlp.router.expert_bias",
    (_HF_LAYER + "mlp.gate.e_score_correction_bias",),
    _HF_LAYER + "mlp.gate.e_score_correction_bias",
    Shard.REPLICATED,
    layers=_moe_layers,
)


def shape_of(name: str, dims: ModelDims) -> tuple[int, ...]:
    """The Hugging Face shape of a template of this family."""
    hidden, heads = dims.hidden_size, dims.num_heads
    nope = dims.head_dim - dims.rope_head_dim
    own = {
        "self_attn.q_a_proj.weight": (dims.q_lora_rank, hidden),
        "self_attn.q_a_layernorm.weight": (dims.q_lora_rank,),
        "self_attn.q_b_proj.weight": (heads * dims.head_dim, dims.q_lora_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (dims.kv_lora_rank + dims.rope_head_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (dims.kv_lora_rank,),
        "self_attn.kv_b_proj.weight": (heads * (nope + dims.value_head_dim), dims.kv_lora_rank),
        "self_attn.o_proj.weight": (hidden, heads * dims.value_head_dim),
        "mlp.gate.e_score_correction_bias": (dims.num_experts,),
    }
    return own.get(name.removeprefix(_HF_LAYER)) or hf_shape(name, dims)


FAMILY = ModelFamily(
    name="deepseek_v3",
    hf_architectures=("DeepseekV3ForCausalLM",),
    dims_from_hf=dims_from_hf,
    hf_from_dims=hf_from_dims,
    params=(*EMBEDDING_AND_HEAD, *LATENT_ATTENTION, *DENSE_MLP, *ROUTED_EXPERTS, ROUTER_BIAS, *SHARED_EXPERTS),
    shape_of=shape_of,
    debug_dims=ModelDims(
        num_layers=4,
        hidden_size=48,
        num_heads=4,
        num_kv_heads=4,
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
        qk_norm=False,
        norm_topk_prob=True,
        num_dense_layers=1,
        shared_ffn_size=72,
        q_lora_rank=28,
        kv_lora_rank=24,
        rope_head_dim=8,
        value_head_dim=16,
    ),
)
