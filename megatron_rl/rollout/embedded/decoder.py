"""The forward pass: prefill of whole prompts, decode of one token per running sequence, logits.

All tensor-parallel shards are computed together: a column-parallel layer is one product with the stacked weights, a
row-parallel layer accumulates over the shards, which is the all-reduce of a real group.

Shape suffixes: B sequences of a padded batch, L length, N running sequences, T = B*L or N tokens, R ranks, H hidden,
Q query heads per rank, K key-value heads of all ranks, G query heads per key-value head, D head dim, V padded
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_rl.rollout.embedded.experts import route, routed_mlp
from megatron_rl.rollout.embedded.kv_cache import KVCache
from megatron_rl.rollout.embedded.products import is_widened, linear, row_parallel, widened
from megatron_rl.rollout.embedded.weights import ShardedWeights, local_kv_heads

CONTEXT_STEP = 16
"""Decode attends to the longest running context rounded up to this, which keeps shapes (and the allocator) steady."""

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, query [T, K, G, D], key [T, K, D], value [T, K, D]) -> [T, K, G, D]."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's stacked weights: views, or fp32 copies of the matrices where products need them."""

    input_norm: torch.Tensor
    qkv: torch.Tensor  # [R * rows, H]
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor  # [R, H, Q * D]
    mlp_norm: torch.Tensor
    router: torch.Tensor | None
    up: torch.Tensor  # dense [R * 2I, H], experts [R, E, 2I, H]
    down: torch.Tensor  # dense [R, H, I], experts [R, E, H, I]


@dataclass(frozen=True, slots=True)
class PromptSlots:
    """Sequence `rows_M[m]` of a prefill goes to slot `slots_M[m]`: slots that share a prompt share its computation."""

    cache: KVCache
    rows_M: torch.Tensor
    slots_M: torch.Tensor


class Decoder:
    """Computes with the weights as they are at the call, or, on processors that emulate bf16, at the last
    `forget_weights`: there fp32 copies are made at the first use after it."""

    def __init__(self, weights: ShardedWeights, max_context: int, *, records_experts: bool = False) -> None:
        dims = self.dims = weights.dims
        self._records_experts = records_experts
        self._experts: list[torch.Tensor] = []
        self._weights = weights
        self.tp, self.max_context, self.device = weights.tp, max_context, weights.device
        self.attach_weights()
        self._cos, self._sin = _rope_tables(max_context, dims.head_dim, dims.rope_theta, weights.dtype, weights.device)
        self._context = torch.arange(max_context, device=weights.device)

    def attach_weights(self) -> None:
        """Look where the weights lie: at the start, and when they have new memory."""
        weights = self._weights
        self._embedding_VH = weights.stacked["model.embed_tokens.weight"].flatten(0, 1)
        self._final_norm = weights.stacked["model.norm.weight"][0]
        self._keeps_copies = is_widened(self._embedding_VH)
        self._layers: list[_Layer] = []
        self._head_VH = self._embedding_VH[:0]
        if not self._keeps_copies:
            self._prepare()

    def detach_weights(self) -> None:
        """Hold on to no memory of theirs."""
        self._embedding_VH = self._final_norm = self._head_VH = self._embedding_VH.new_empty(0)
        self._layers = []

    def forget_weights(self) -> None:
        """To be called when the weights may have been written, or are about to be."""
        if self._keeps_copies:
            self._layers = []
            self._head_VH = self._embedding_VH[:0]

    def _prepare(self) -> None:
        head = "model.embed_tokens.weight" if self.dims.tied_embeddings else "lm_head.weight"
        self._layers = [self._layer(f"model.layers.{index}.") for index in range(self.dims.num_layers)]
        self._head_VH = widened(self._weights.stacked[head].flatten(0, 1))

    def _layer(self, prefix: str) -> _Layer:
        dims = self.dims

        def ranks(name: str) -> torch.Tensor:
            return self._weights.stacked[prefix + name]

        up = ranks("mlp.experts.w13_weight") if dims.num_experts else ranks("mlp.gate_up_proj.weight").flatten(0, 1)
        down = ranks("mlp.experts.w2_weight" if dims.num_experts else "mlp.down_proj.weight")

        return _Layer(
            input_norm=ranks("input_layernorm.weight")[0],
            qkv=widened(ranks("self_attn.qkv_proj.weight").flatten(0, 1)),
            q_norm=ranks("self_attn.q_norm.weight")[0] if dims.qk_norm else None,
            k_norm=ranks("self_attn.k_norm.weight")[0] if dims.qk_norm else None,
            output=widened(ranks("self_attn.o_proj.weight")),
            mlp_norm=ranks("post_attention_layernorm.weight")[0],
            router=ranks("mlp.gate.weight")[0] if dims.num_experts else None,
            up=widened(up),
            down=widened(down),
        )

    def prefill(self, ids_BL: torch.Tensor, into: PromptSlots | None = None) -> torch.Tensor:
        """Hidden states [B, L, H] after the final norm, of sequences padded on the right (causality hides the padding).

        Keys and values go `into` slots; without it they are forgotten.
        """
        batch, length = ids_BL.shape

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            heads, group, dim = query.shape[1:]
            key, value = key.reshape(batch, length, heads, dim), value.reshape(batch, length, heads, dim)
            if into is not None:
                into.cache.write_prompts(
                    layer, into.slots_M, key.index_select(0, into.rows_M), value.index_select(0, into.rows_M)
                )
            query = query.reshape(batch, length, heads * group, dim).transpose(1, 2)
            key, value = (x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (key, value))
            output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            return output.transpose(1, 2).reshape(batch * length, heads, group, dim)

        positions = self._context[:length].repeat(batch)
        return self._forward(ids_BL.flatten(), positions, attend).view(batch, length, -1)

    def decode(self, ids_N: torch.Tensor, positions_N: torch.Tensor, longest: int, cache: KVCache) -> torch.Tensor:
        """Hidden states [N, H] after one token for slots 0..N-1; `longest` is the greatest position + 1."""
        num_sequences = len(ids_N)
        length = min(-(-longest // CONTEXT_STEP) * CONTEXT_STEP, self.max_context)
        rows_N = self._context_rows(num_sequences) + positions_N
        mask = torch.zeros(num_sequences, 1, 1, length, dtype=self._cos.dtype, device=ids_N.device)
        mask.masked_fill_(self._context[:length] > positions_N[:, None, None, None], float("-inf"))

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            cache.write_tokens(layer, rows_N, key, value)
            # The G query heads of one key-value head stand where a query sequence would: no key is repeated.
            return F.scaled_dot_product_attention(query, *cache.read(layer, num_sequences, length), attn_mask=mask)

        return self._forward(ids_N, positions_N, attend)

    def last_experts(self) -> torch.Tensor:
        """The experts [T, MoE layers, k] that the last forward pass chose, of a decoder that records them."""
        return torch.stack(self._experts, dim=1)

    def logits(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """fp32 logits [T, V]; columns of the padded vocabulary are -inf."""
        logits_TV = linear(hidden_TH, self._head_VH).float()
        logits_TV[:, self.dims.vocab_size :] = float("-inf")
        return logits_TV

    def _context_rows(self, num_sequences: int) -> torch.Tensor:
        return torch.arange(num_sequences, device=self._context.device) * self.max_context

    def _forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Attention) -> torch.Tensor:
        if not self._layers:
            self._prepare()
        self._experts = []
        epsilon = self.dims.norm_epsilon
        cos_TD, sin_TD = self._cos.index_select(0, positions_T), self._sin.index_select(0, positions_T)
        hidden_TH = F.embedding(ids_T, self._embedding_VH)
        for index, layer in enumerate(self._layers):
            normed_TH = F.rms_norm(hidden_TH, layer.input_norm.shape, layer.input_norm, epsilon)
            hidden_TH = hidden_TH + self._attention(index, layer, normed_TH, cos_TD, sin_TD, attend)
            normed_TH = F.rms_norm(hidden_TH, layer.mlp_norm.shape, layer.mlp_norm, epsilon)
            hidden_TH = hidden_TH + self._mlp(layer, normed_TH)
        return F.rms_norm(hidden_TH, self._final_norm.shape, self._final_norm, epsilon)

    def _attention(
        self,
        index: int,
        layer: _Layer,
        normed_TH: torch.Tensor,
        cos_TD: torch.Tensor,
        sin_TD: torch.Tensor,
        attend: Attention,
    ) -> torch.Tensor:
        dims, num_tokens = self.dims, len(normed_TH)
        num_query, num_kv = dims.num_heads // self.tp, local_kv_heads(dims, self.tp)
        qkv = linear(normed_TH, layer.qkv).view(num_tokens, self.tp, num_query + 2 * num_kv, dims.head_dim)
        query_key, value = qkv.split((num_query + num_kv, num_kv), dim=2)
        if layer.q_norm is not None and layer.k_norm is not None:
            scale = torch.cat((layer.q_norm.expand(num_query, -1), layer.k_norm.expand(num_kv, -1)))
            query_key = F.rms_norm(query_key, layer.q_norm.shape, eps=dims.norm_epsilon) * scale
        query, key = _rotate(query_key, cos_TD, sin_TD).split((num_query, num_kv), dim=2)
        heads = self.tp * num_kv
        query = query.reshape(num_tokens, heads, num_query // num_kv, dims.head_dim)
        key = key.reshape(num_tokens, heads, dims.head_dim)
        value = value.reshape(num_tokens, heads, dims.head_dim)
        return row_parallel(attend(index, query, key, value).reshape(num_tokens, self.tp, -1), layer.output)

    def _mlp(self, layer: _Layer, normed_TH: torch.Tensor) -> torch.Tensor:
        if layer.router is not None:
            weights, experts = route(F.linear(normed_TH, layer.router), self.dims.top_k, self.dims.norm_topk_prob)
            if self._records_experts:
                self._experts.append(experts)
            return routed_mlp(normed_TH.to(layer.up.dtype), weights, experts, layer.up, layer.down).to(normed_TH.dtype)
        gate, up = linear(normed_TH, layer.up).view(len(normed_TH), self.tp, 2, -1).unbind(2)
        return row_parallel(F.silu(gate) * up, layer.down)


def _rope_tables(
    length: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [length, D] of the half-rotation form (RoPE, arXiv 2104.09864, as Hugging Face lays it out).

    The first half of sin is negated, so that rotating is x * cos + roll(x) * sin.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    return cos.to(device, dtype), sin.to(device, dtype)


def _rotate(heads: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotate [T, R, heads, D] by each token's position."""
    return torch.addcmul(heads * cos_TD[:, None, None], heads.roll(heads.shape[-1] // 2, -1), sin_TD[:, None, None])
