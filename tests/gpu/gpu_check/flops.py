"""Model FLOPs of a training step, and what a GPU could do."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.model_families.declaration import ModelDims

PEAK_BF16_FLOPS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
}
"""Dense bf16 peak from the vendor's data sheets, by a part of the device's name; the first that fits counts."""


def compute_train_flops(dims: ModelDims, lengths: Sequence[int]) -> float:
    """FLOPs of one forward and backward pass over causal sequences, recomputation not counted.

    Each weight that a token meets costs 6 (2 forward, 4 backward): projections, the chosen experts, the router and the
    output layer; the embedding is a lookup. Causal attention costs 6 * heads * head_dim * length^2 per layer: half of the
    square, twice (scores and values), at 2 forward and 4 backward.
    """
    head_size = dims.num_heads * dims.head_dim
    attention = dims.hidden_size * (2 * head_size + 2 * dims.num_kv_heads * dims.head_dim)
    if dims.num_experts:
        mlp = dims.hidden_size * (3 * dims.top_k * dims.moe_ffn_size + dims.num_experts)
    else:
        mlp = 3 * dims.hidden_size * dims.ffn_size
    weights_per_token = dims.num_layers * (attention + mlp) + dims.hidden_size * dims.vocab_size
    squares = sum(length * length for length in lengths)
    return 6.0 * weights_per_token * sum(lengths) + 6.0 * dims.num_layers * head_size * squares


def peak_flops(device_name: str) -> float | None:
    """None for a device that is not in the table."""
    return next((peak for name, peak in PEAK_BF16_FLOPS.items() if name in device_name), None)
