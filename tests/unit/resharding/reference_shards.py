"""Shards of both sides, written down from the definitions of Megatron and SGLang with whole-array numpy alone.

Nothing here reads a family's rules, boxes or a plan: it is what they are compared with. Every element of every Hugging Face
tensor is a different number, so that no wrong element can pass for the right one.
"""

from __future__ import annotations

import numpy as np

MLA_NAMES = {"q_a": "linear_q_down", "q_b": "linear_q_up", "kv_a": "linear_kv_down", "kv_b": "linear_kv_up"}
VOCAB = ("model.embed_tokens.weight", "lm_head.weight")


class HfModel:
    """The Hugging Face tensors of a model of one of the three families, as int32 numbers that are all different."""

    def __init__(self, dims, is_mla: bool) -> None:
        self.dims, self.is_mla, self._next = dims, is_mla, 0
        d = dims
        self.tensors = {"model.embed_tokens.weight": self._new(d.vocab_size, d.hidden_size)}
        self.tensors["model.norm.weight"] = self._new(d.hidden_size, 1)
        if not d.tied_embeddings:
            self.tensors["lm_head.weight"] = self._new(d.vocab_size, d.hidden_size)
        self.layers = [self._layer(number) for number in range(d.num_layers)]

    def _new(self, rows: int, cols: int) -> np.ndarray:
        start, self._next = self._next, self._next + rows * cols
        return np.arange(start, self._next, dtype=np.int32).reshape(rows, cols)

    def _layer(self, number: int) -> dict[str, np.ndarray]:
        d = self.dims
        h = d.hidden_size
        layer = {name: self._new(h, 1) for name in ("input_layernorm", "post_attention_layernorm")}
        if self.is_mla:
            nope = d.head_dim - d.rope_head_dim
            layer |= {
                "q_a": self._new(d.q_lora_rank, h), "q_a_norm": self._new(d.q_lora_rank, 1),
                "q_b": self._new(d.num_heads * d.head_dim, d.q_lora_rank),
                "kv_a": self._new(d.kv_lora_rank + d.rope_head_dim, h), "kv_a_norm": self._new(d.kv_lora_rank, 1),
                "kv_b": self._new(d.num_heads * (nope + d.value_head_dim), d.kv_lora_rank),
                "o": self._new(h, d.num_heads * d.value_head_dim),
            }  # fmt: skip
        else:
            layer |= {
                "q": self._new(d.num_heads * d.head_dim, h), "k": self._new(d.num_kv_heads * d.head_dim, h),
                "v": self._new(d.num_kv_heads * d.head_dim, h), "o": self._new(h, d.num_heads * d.head_dim),
            }  # fmt: skip
            if d.qk_norm:
                layer |= {"q_norm": self._new(d.head_dim, 1), "k_norm": self._new(d.head_dim, 1)}
        if not d.num_experts or number < d.num_dense_layers:
            return layer | self._mlp("", d.ffn_size)
        layer["router"] = self._new(d.num_experts, h)
        if self.is_mla:
            layer["router_bias"] = self._new(d.num_experts, 1)
        if d.shared_ffn_size:
            layer |= self._mlp("shared_", d.shared_ffn_size)
        for expert in range(d.num_experts):
            layer |= self._mlp(f"e{expert}_", d.moe_ffn_size)
        return layer

    def _mlp(self, prefix: str, ffn: int) -> dict[str, np.ndarray]:
        h = self.dims.hidden_size
        sizes = (("gate", ffn, h), ("up", ffn, h), ("down", h, ffn))
        return {prefix + name: self._new(rows, cols) for name, rows, cols in sizes}


def rows_of(tensor: np.ndarray, parts: int, part: int) -> np.ndarray:
    size, rest = divmod(len(tensor), parts)
    assert rest == 0
    return tensor[part * size : (part + 1) * size]


def cols_of(tensor: np.ndarray, parts: int, part: int) -> np.ndarray:
    return rows_of(tensor.T, parts, part).T


def gate_up(layer: dict[str, np.ndarray], prefix: str, parts: int, part: int) -> np.ndarray:
    return np.concatenate([rows_of(layer[prefix + name], parts, part) for name in ("gate", "up")])


def padded_rows(tensor: np.ndarray, rows: int) -> np.ndarray:
    return np.concatenate([tensor, np.full((rows - len(tensor), tensor.shape[1]), -1, tensor.dtype)])


def megatron_chunk(
    model: HfModel, layers: range, *, first: bool, last: bool, tied_copy: bool, coords, layout, multiple: int
) -> dict[str, np.ndarray]:
    """What one rank holds in one chunk, under the local layer spec: its own names, its own indices."""
    d, tp, t = model.dims, layout.tp, coords.tp
    padded = -(-d.vocab_size // (multiple * tp)) * multiple * tp
    held = {}
    if first:
        embedding = padded_rows(model.tensors["model.embed_tokens.weight"], padded)
        held["embedding.word_embeddings.weight"] = rows_of(embedding, tp, t)
    if last:
        held["decoder.final_layernorm.weight"] = model.tensors["model.norm.weight"]
        name = "model.embed_tokens.weight" if d.tied_embeddings else "lm_head.weight"
        if tied_copy or not d.tied_embeddings:
            held["output_layer.weight"] = rows_of(padded_rows(model.tensors[name], padded), tp, t)
    for local, number in enumerate(layers):
        layer, p = model.layers[number], f"decoder.layers.{local}."
        held[p + "input_layernorm.weight"] = layer["input_layernorm"]
        held[p + "pre_mlp_layernorm.weight"] = layer["post_attention_layernorm"]
        a = p + "self_attention."
        held[a + "linear_proj.weight"] = cols_of(layer["o"], tp, t)
        if model.is_mla:
            for ours, theirs in MLA_NAMES.items():
                held[a + theirs + "_proj.weight"] = rows_of(layer[ours], tp, t)
            held[a + "q_layernorm.weight"], held[a + "kv_layernorm.weight"] = layer["q_a_norm"], layer["kv_a_norm"]
        else:
            groups, h = d.num_kv_heads, d.hidden_size
            parts = [layer[name].reshape(groups, -1, h) for name in "qkv"]
            held[a + "linear_qkv.weight"] = rows_of(np.concatenate(parts, axis=1).reshape(-1, h), tp, t)
            for name in "qk" if d.qk_norm else "":
                held[a + f"{name}_layernorm.weight"] = layer[f"{name}_norm"]
        if "gate" in layer:
            held[p + "mlp.linear_fc1.weight"] = gate_up(layer, "", tp, t)
            held[p + "mlp.linear_fc2.weight"] = cols_of(layer["down"], tp, t)
            continue
        held[p + "mlp.router.weight"] = layer["router"]
        if "router_bias" in layer:
            held[p + "mlp.router.expert_bias"] = layer["router_bias"]
        if d.shared_ffn_size:
            held[p + "mlp.shared_experts.linear_fc1.weight"] = gate_up(layer, "shared_", tp, t)
            held[p + "mlp.shared_experts.linear_fc2.weight"] = cols_of(layer["shared_down"], tp, t)
        per_rank = d.num_experts // layout.ep
        for expert in range(per_rank):
            e, q = f"e{coords.ep * per_rank + expert}_", f"{p}mlp.experts.local_experts.{expert}."
            held[q + "linear_fc1.weight"] = gate_up(layer, e, layout.etp, coords.etp)
            held[q + "linear_fc2.weight"] = cols_of(layer[e + "down"], layout.etp, coords.etp)
    return held


def engine_shard(model: HfModel, engine, rank: int) -> dict[str, np.ndarray]:
    """What SGLang's rank `rank` of one engine holds, as matrices; vocabulary padding is -1."""
    d, tp = model.dims, engine.tp
    attention_tp, a = tp // engine.attention_dp, rank % (tp // engine.attention_dp)
    held = {"model.norm.weight": model.tensors["model.norm.weight"]}
    for name, parts, part in ((VOCAB[0], attention_tp, a), (VOCAB[1], tp, rank)):
        if name in model.tensors:
            multiple = engine.vocab_multiple
            if -(-d.vocab_size // multiple) * multiple % parts:
                multiple *= parts
            padded = -(-d.vocab_size // multiple) * multiple
            held[name] = rows_of(padded_rows(model.tensors[name], padded), parts, part)
    moe_tp = tp // engine.ep
    ep_rank, moe_rank = rank // moe_tp, rank % moe_tp
    for number, layer in enumerate(model.layers):
        p = f"model.layers.{number}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            held[f"{p}{name}.weight"] = layer[name]
        held[p + "self_attn.o_proj.weight"] = cols_of(layer["o"], attention_tp, a)
        if model.is_mla:
            held[p + "self_attn.fused_qkv_a_proj_with_mqa.weight"] = np.concatenate([layer["q_a"], layer["kv_a"]])
            for name in ("q", "kv"):
                held[f"{p}self_attn.{name}_b_proj.weight"] = rows_of(layer[f"{name}_b"], attention_tp, a)
                held[f"{p}self_attn.{name}_a_layernorm.weight"] = layer[f"{name}_a_norm"]
        else:
            heads = min(attention_tp, d.num_kv_heads)
            kv = a * heads // attention_tp
            parts = [rows_of(layer["q"], attention_tp, a), rows_of(layer["k"], heads, kv), rows_of(layer["v"], heads, kv)]
            held[p + "self_attn.qkv_proj.weight"] = np.concatenate(parts)
            for name in "qk" if d.qk_norm else "":
                held[f"{p}self_attn.{name}_norm.weight"] = layer[f"{name}_norm"]
        if "gate" in layer:
            held[p + "mlp.gate_up_proj.weight"] = gate_up(layer, "", tp, rank)
            held[p + "mlp.down_proj.weight"] = cols_of(layer["down"], tp, rank)
            continue
        held[p + "mlp.gate.weight"] = layer["router"]
        if "router_bias" in layer:
            held[p + "mlp.gate.e_score_correction_bias"] = layer["router_bias"]
        if d.shared_ffn_size:
            held[p + "mlp.shared_experts.gate_up_proj.weight"] = gate_up(layer, "shared_", tp, rank)
            held[p + "mlp.shared_experts.down_proj.weight"] = cols_of(layer["shared_down"], tp, rank)
        per_rank = d.num_experts // engine.ep
        mine = [f"e{ep_rank * per_rank + expert}_" for expert in range(per_rank)]
        held[p + "mlp.experts.w13_weight"] = np.concatenate([gate_up(layer, e, moe_tp, moe_rank) for e in mine])
        held[p + "mlp.experts.w2_weight"] = np.concatenate([cols_of(layer[e + "down"], moe_tp, moe_rank) for e in mine])
    return held
