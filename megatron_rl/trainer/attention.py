"""Attention over packed sequences without Transformer Engine: a core attention that Megatron takes through the layer spec.

Shape suffixes: _N rows of this rank, _M rows of all context-parallel ranks, n query heads, m key-value heads, d head
size, s sequences of a group, q and k its padded lengths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from megatron_rl.trainer.packed_inputs import AttentionPlan, PackedInputs, plan_attention


@dataclass(frozen=True, slots=True)
class _Group:
    query_rows: Tensor  # int64 [s * q]
    key_rows: Tensor  # int64 [s * k]
    mask: Tensor | None  # bool [s, 1, q, k]
    num_sequences: int
    prompt_rows: Tensor  # int64 [prompts * length]
    prompt_of: Tensor  # int64 [s]
    num_prompts: int


@dataclass
class ReplayedSequences(PackedSeqParams):
    """Megatron's packed parameters, and the experts that its layers shall visit (`router_replay`), by layer number."""

    experts_by_layer: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass
class PackedSequences(ReplayedSequences):
    """Megatron's packed parameters, and what `PackedAttention` needs of them on the device.

    `cu_seqlens_*` stay None, because the positions of every row are looked up once (`positions_N`) instead of being cut
    out per sequence in each layer.
    """

    positions_N: Tensor | None = None
    groups: tuple[_Group, ...] = ()
    place_of_N: Tensor | None = None


def pack_for_local_attention(inputs: PackedInputs, cp: int, device: torch.device) -> PackedSequences:
    """The packed parameters for `PackedAttention`."""
    plan: AttentionPlan = plan_attention(inputs, cp=cp)

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    groups = tuple(
        _Group(
            on_device(group.query_rows.reshape(-1)),
            on_device(group.key_rows.reshape(-1)),
            None if group.mask is None else on_device(group.mask),
            len(group.query_rows),
            on_device(group.prompt_rows.reshape(-1)),
            on_device(group.prompt_of),
            len(group.prompt_rows),
        )
        for group in plan.groups
    )
    return PackedSequences(
        qkv_format="thd",
        max_seqlen_q=inputs.max_seqlen,
        max_seqlen_kv=inputs.max_seqlen,
        positions_N=on_device(inputs.positions_N),
        groups=groups,
        place_of_N=on_device(plan.place_of_N),
    )


def pack_for_transformer_engine(inputs: PackedInputs, device: torch.device) -> ReplayedSequences:
    """The packed parameters for Transformer Engine's attention and rotary kernels."""
    cu_seqlens = torch.from_numpy(inputs.cu_seqlens).to(device)
    return ReplayedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=inputs.max_seqlen,
        max_seqlen_kv=inputs.max_seqlen,
    )


class PackedAttention(MegatronModule):
    """Causal scaled-dot-product attention within each packed sequence, and from an answer to its shared prompt.

    Sequences of similar length are laid side by side with padding at the end, which causality hides from real tokens.
    The keys of a shared prompt stand before an answer's own, once per answer: that costs memory traffic only, and the
    gradients of all answers add up in the prompt. Under context parallelism keys and values are gathered, and their
    gradients summed back.
    """

    def __init__(
        self, config: TransformerConfig, softmax_scale: float | None = None, pg_collection: Any = None, **_placement: Any
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """query [N, n, d], key and value [N, m, d] -> [N, n * d]."""
        if packed_seq_params is None:
            raise ValueError("PackedAttention serves packed sequences only; packed_seq_params is missing")
        num_kv_heads, dtype = key.shape[1], query.dtype
        if query.device.type == "cpu":  # its bf16 backward takes five times as long where bf16 is emulated
            query, key, value = query.float(), key.float(), value.float()
        key_value_M = torch.cat((key, value), dim=1)
        if self.cp_group.size() > 1:
            key_value_M = gather_from_sequence_parallel_region(key_value_M, group=self.cp_group)
        repeats = query.shape[1] // num_kv_heads
        outputs = []
        for group in packed_seq_params.groups:
            q = _lay_out(query, group.query_rows, group.num_sequences)
            kv = _lay_out(key_value_M, group.key_rows, group.num_sequences)
            mask = group.mask
            if len(group.prompt_rows):
                prompts = _lay_out(key_value_M, group.prompt_rows, group.num_prompts)
                kv = torch.cat((prompts.index_select(0, group.prompt_of), kv), dim=2)
                mask = causal_lower_right(q.shape[2], kv.shape[2])
            k, v = kv.split(num_kv_heads, dim=1)
            out = scaled_dot_product_attention(
                q,
                k.repeat_interleave(repeats, dim=1),
                v.repeat_interleave(repeats, dim=1),
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.softmax_scale,
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1).flatten(1))
        return torch.cat(outputs).index_select(0, packed_seq_params.place_of_N).to(dtype)


def _lay_out(rows: Tensor, index: Tensor, num_sequences: int) -> Tensor:
    """Rows [R, h, d] gathered into [s, h, length, d]."""
    return rows.index_select(0, index).unflatten(0, (num_sequences, -1)).transpose(1, 2)
