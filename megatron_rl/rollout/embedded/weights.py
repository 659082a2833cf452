"""The engine's weights: SGLang's fused parameters, one shard per tensor-parallel rank, all in this process.

Shape suffixes: R tensor-parallel ranks, V padded vocabulary, H hidden, E experts.
"""

from __future__ import annotations

import math

import torch

from megatron_rl.layout.intervals import padded_engine_vocab
from megatron_rl.model_families.declaration import ModelDims


def engine_param_shapes(dims: ModelDims, tp: int, vocab_multiple: int = 64) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one tensor-parallel shard. Raises ValueError naming the size that `tp` does not divide."""
    check_tensor_parallel(dims, tp)
    hidden, head = dims.hidden_size, dims.head_dim
    num_heads, num_kv = dims.num_heads // tp, local_kv_heads(dims, tp)
    vocab = padded_engine_vocab(dims.vocab_size, tp, vocab_multiple) // tp
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.qkv_proj.weight": ((num_heads + 2 * num_kv) * head, hidden),
        "self_attn.o_proj.weight": (hidden, num_heads * head),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if dims.qk_norm:
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    if dims.num_experts:
        ffn = dims.moe_ffn_size // tp
        layer |= {
            "mlp.gate.weight": (dims.num_experts, hidden),
            "mlp.experts.w13_weight": (dims.num_experts, 2 * ffn, hidden),
            "mlp.experts.w2_weight": (dims.num_experts, hidden, ffn),
        }
    else:
        ffn = dims.ffn_size // tp
        layer |= {"mlp.gate_up_proj.weight": (2 * ffn, hidden), "mlp.down_proj.weight": (hidden, ffn)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not dims.tied_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    for index in range(dims.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_tensor_parallel(dims: ModelDims, tp: int) -> None:
    """Raises ValueError with one line when these dims cannot be split over `tp` ranks."""
    ffn_key, ffn = ("moe_ffn_size", dims.moe_ffn_size) if dims.num_experts else ("ffn_size", dims.ffn_size)
    for key, size in (("num_heads", dims.num_heads), (ffn_key, ffn)):
        if tp < 1 or size % tp:
            raise ValueError(f"embedded engine: tp {tp} does not divide {key} {size}; choose a tp that does")
    if dims.num_kv_heads % tp and tp % dims.num_kv_heads:
        raise ValueError(f"embedded engine: tp {tp} neither divides num_kv_heads {dims.num_kv_heads} nor is a multiple of it")


def local_kv_heads(dims: ModelDims, tp: int) -> int:
    """Key-value heads that one shard holds: its part, or one replica when there are fewer heads than ranks."""
    return max(dims.num_kv_heads // tp, 1)


class ShardedWeights:
    """All shards, zero until somebody fills them.

    `stacked[name]` is [R, ...], contiguous, so that a column-parallel layer of all ranks is one matrix product;
    `shards[r][name]` is a contiguous view of it, to be written in place. Both stay the same tensors when their memory is
    released and resumed; whoever made other views makes them anew.
    """

    def __init__(
        self,
        dims: ModelDims,
        tp: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        vocab_multiple: int = 64,
    ) -> None:
        self.dims, self.tp, self.dtype, self.device = dims, tp, dtype, torch.device(device)
        self._vocab_multiple = vocab_multiple
        self.stacked: dict[str, torch.Tensor] = {
            name: torch.zeros((tp, *shape), dtype=dtype, device=self.device)
            for name, shape in engine_param_shapes(dims, tp, vocab_multiple).items()
        }
        self.shards: list[dict[str, torch.Tensor]] = [
            {name: stacked[rank] for name, stacked in self.stacked.items()} for rank in range(tp)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(stacked.nbytes for stacked in self.stacked.values())

    def release(self) -> None:
        """Give the memory up, and the weights with it."""
        for tensors in (self.stacked, *self.shards):
            for tensor in tensors.values():
                tensor.set_(torch.UntypedStorage(0, device=self.device), 0, (0,))  # type: ignore[call-overload]

    def resume(self) -> None:
        """Memory again, zero."""
        for name, shape in engine_param_shapes(self.dims, self.tp, self._vocab_multiple).items():
            storage = torch.zeros((self.tp, *shape), dtype=self.dtype, device=self.device).untyped_storage()
            self.stacked[name].set_(storage, 0, (self.tp, *shape))  # type: ignore[call-overload]
            for rank, shard in enumerate(self.shards):
                shard[name].set_(storage, rank * math.prod(shape), shape)  # type: ignore[call-overload]
