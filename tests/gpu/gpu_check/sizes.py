"""How large each check is: tiny on a CPU, where it only has to run; on a GPU large enough for its figures to mean something."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.model_families.registry import FAMILIES
from megatron_rl.platforms.platform import Platform

_MOE, _LLAMA = FAMILIES["qwen3_moe"].debug_dims, FAMILIES["llama"].debug_dims


@dataclass(frozen=True, slots=True)
class Sizes:
    """`models` by family for the checks of equality; `speed_*` for the checks of speed, on a Qwen3-MoE."""

    models: Mapping[str, ModelDims]
    lengths: tuple[int, ...]
    """Tokens of the sequences that are scored and trained on."""
    speed_dims: ModelDims
    speed_length: int
    speed_sequences_per_microbatch: int
    speed_microbatches: int
    speed_steps: int
    engine_requests: int
    engine_prompt_tokens: int
    engine_new_tokens: int


CPU = Sizes(
    models={"qwen3_moe": _MOE, "llama": _LLAMA},
    lengths=(5, 17, 9, 30),
    speed_dims=_MOE,
    speed_length=24,
    speed_sequences_per_microbatch=2,
    speed_microbatches=2,
    speed_steps=1,
    engine_requests=5,
    engine_prompt_tokens=7,
    engine_new_tokens=6,
)
GPU = Sizes(
    models={
        "qwen3_moe": replace(
            _MOE, hidden_size=768, num_heads=8, num_kv_heads=2, head_dim=128, vocab_size=4001,
            num_experts=16, top_k=4, ffn_size=1536, moe_ffn_size=384, max_positions=1024,
        ),
        "llama": replace(
            _LLAMA, hidden_size=768, num_heads=8, num_kv_heads=4, head_dim=64, vocab_size=4001,
            ffn_size=1792, max_positions=1024,
        ),
    },
    lengths=(700, 33, 512, 129, 64, 257, 8, 401),
    # Three layers of Qwen3-30B-A3B's width with its vocabulary: 2.5 billion weights, 45 GB with fp32 masters, gradients
    # and moments. 8192 tokens in a microbatch leave it room on 80 GB.
    speed_dims=replace(
        _MOE, num_layers=3, hidden_size=2048, num_heads=32, num_kv_heads=4, head_dim=128, vocab_size=151936,
        num_experts=128, top_k=8, ffn_size=6144, moe_ffn_size=768, max_positions=4096, rope_theta=1e6,
    ),
    speed_length=2048,
    speed_sequences_per_microbatch=4,
    speed_microbatches=8,
    speed_steps=4,
    engine_requests=256,
    engine_prompt_tokens=128,
    engine_new_tokens=256,
)  # fmt: skip


def sizes_for(platform: Platform) -> Sizes:
    return GPU if platform.device.type == "cuda" else CPU
