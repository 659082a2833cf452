"""The rules that decoder families share: attention with RoPE and RMSNorm, a gated dense MLP or routed experts.

A family file names the rules it has; a family that differs in one parameter replaces that one rule.
"""

from __future__ import annotations

from megatron_rl.model_families.declaration import Fused, ModelDims, ParamRule, Shard

_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."


def _is_untied(dims: ModelDims) -> bool:
    return not dims.tied_embeddings


def _is_tied(dims: ModelDims) -> bool:
    return dims.tied_embeddings


def _dense_layers(dims: ModelDims) -> range:
    return dims.dense_layers


def _moe_layers(dims: ModelDims) -> range:
    return dims.moe_layers


EMBEDDING_AND_HEAD = (
    ParamRule(
        "embedding.word_embeddings.weight",
        ("model.embed_tokens.weight",),
        "model.embed_tokens.weight",
        Shard.VOCAB,
        over_attention_tp=True,
    ),
    ParamRule("decoder.final_layernorm.weight", ("model.norm.weight",), "model.norm.weight", Shard.REPLICATED),
    ParamRule("output_layer.weight", ("lm_head.weight",), "lm_head.weight", Shard.VOCAB, when=_is_untied),
    ParamRule("output_layer.weight", ("model.embed_tokens.weight",), None, Shard.VOCAB, when=_is_tied),
)

ATTENTION = (
    ParamRule(
        _LAYER + "input_layernorm.weight",
        (_HF_LAYER + "input_layernorm.weight",),
        _HF_LAYER + "input_layernorm.weight",
        Shard.REPLICATED,
        te_name=_LAYER + "self_attention.linear_qkv.layer_norm_weight",
    ),
    ParamRule(
        _LAYER + "self_attention.linear_qkv.weight",
        tuple(_HF_LAYER + f"self_attn.{part}_proj.weight" for part in "qkv"),
        _HF_LAYER + "self_attn.qkv_proj.weight",
        Shard.COLUMN,
        Fused.QKV,
        over_attention_tp=True,
    ),
    ParamRule(
        _LAYER + "self_attention.linear_proj.weight",
        (_HF_LAYER + "self_attn.o_proj.weight",),
        _HF_LAYER + "self_attn.o_proj.weight",
        Shard.ROW,
        over_attention_tp=True,
    ),
)

QK_NORM = tuple(
    ParamRule(
        _LAYER + f"self_attention.{part}_layernorm.weight",
        (_HF_LAYER + f"self_attn.{part}_norm.weight",),
        _HF_LAYER + f"self_attn.{part}_norm.weight",
        Shard.REPLICATED,
    )
    for part in "qk"
)

DENSE_MLP = (
    ParamRule(
        _LAYER + "pre_mlp_layernorm.weight",
        (_HF_LAYER + "post_attention_layernorm.weight",),
        _HF_LAYER + "post_attention_layernorm.weight",
        Shard.REPLICATED,
        te_name=_LAYER + "mlp.linear_fc1.layer_norm_weight",
        layers=_dense_layers,
    ),
    ParamRule(
        _LAYER + "mlp.linear_fc1.weight",
        (_HF_LAYER + "mlp.gate_proj.weight", _HF_LAYER + "mlp.up_proj.weight"),
        _HF_LAYER + "mlp.gate_up_proj.weight",
        Shard.COLUMN,
        Fused.GATE_UP,
        layers=_dense_layers,
    ),
    ParamRule(
        _LAYER + "mlp.linear_fc2.weight",
        (_HF_LAYER + "mlp.down_proj.weight",),
        _HF_LAYER + "mlp.down_proj.weight",
        Shard.ROW,
        layers=_dense_layers,
    ),
)

ROUTED_EXPERTS = (
    ParamRule(
        _LAYER + "pre_mlp_layernorm.weight",
        (_HF_LAYER + "post_attention_layernorm.weight",),
        _HF_LAYER + "post_attention_layernorm.weight",
        Shard.REPLICATED,
        layers=_moe_layers,
    ),
    ParamRule(
        _LAYER + "mlp.router.weight",
        (_HF_LAYER + "mlp.gate.weight",),
        _HF_LAYER + "mlp.gate.weight",
        Shard.REPLICATED,
        layers=_moe_layers,
    ),
    ParamRule(
        _LAYER + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        (_HF_LAYER + "mlp.experts.{expert}.gate_proj.weight", _HF_LAYER + "mlp.experts.{expert}.up_proj.weight"),
        _HF_LAYER + "mlp.experts.w13_weight",
        Shard.EXPERT_COLUMN,
        Fused.GATE_UP,
        te_name=_LAYER + "mlp.experts.linear_fc1.weight{expert}",
        layers=_moe_layers,
    ),
    ParamRule(
        _LAYER + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        (_HF_LAYER + "mlp.experts.{expert}.down_proj.weight",),
        _HF_LAYER + "mlp.experts.w2_weight",
        Shard.EXPERT_ROW,
        te_name=_LAYER + "mlp.experts.linear_fc2.weight{expert}",
        layers=_moe_layers,
    ),
)


SHARED_EXPERTS = (
    ParamRule(
        _LAYER + "mlp.shared_experts.linear_fc1.weight",
        (_HF_LAYER + "mlp.shared_experts.gate_proj.weight", _HF_LAYER + "mlp.shared_experts.up_proj.weight"),
        _HF_LAYER + "mlp.shared_experts.gate_up_proj.weight",
        Shard.COLUMN,
        Fused.GATE_UP,
        layers=_moe_layers,
    ),
    ParamRule(
        _LAYER + "mlp.shared_experts.linear_fc2.weight",
        (_HF_LAYER + "mlp.shared_experts.down_proj.weight",),
        _HF_LAYER + "mlp.shared_experts.down_proj.weight",
        Shard.ROW,
        layers=_moe_layers,
    ),
)


def hf_shape(name: str, dims: ModelDims) -> tuple[int, ...]:
    """The Hugging Face shape of a template of this file. Raises KeyError for a name that is not in it."""
    hidden, q_size, kv_size = dims.hidden_size, dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    part = name.removeprefix(_HF_LAYER)
    return {
        "model.embed_tokens.weight": (dims.vocab_size, hidden),
        "lm_head.weight": (dims.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "self_attn.q_norm.weight": (dims.head_dim,),
        "self_attn.k_norm.weight": (dims.head_dim,),
        "mlp.gate_proj.weight": (dims.ffn_size, hidden),
        "mlp.up_proj.weight": (dims.ffn_size, hidden),
        "mlp.down_proj.weight": (hidden, dims.ffn_size),
        "mlp.gate.weight": (dims.num_experts, hidden),
        "mlp.shared_experts.gate_proj.weight": (dims.shared_ffn_size, hidden),
        "mlp.shared_experts.up_proj.weight": (dims.shared_ffn_size, hidden),
        "mlp.shared_experts.down_proj.weight": (hidden, dims.shared_ffn_size),
        "mlp.experts.{expert}.gate_proj.weight": (dims.moe_ffn_size, hidden),
        "mlp.experts.{expert}.up_proj.weight": (dims.moe_ffn_size, hidden),
        "mlp.experts.{expert}.down_proj.weight": (hidden, dims.moe_ffn_size),
    }[part]
