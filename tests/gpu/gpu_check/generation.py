"""How fast does the embedded engine sample?"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import torch

from gpu_check.sizes import Sizes
from megatron_rl.platforms.platform import Platform
from megatron_rl.rollout.embedded.engine import EmbeddedEngine
from megatron_rl.types.rollout import GenerationRequest, SamplingParams


def measure_generation(platform: Platform, sizes: Sizes) -> dict[str, Any]:
    """Random weights in bf16, all requests at once, temperature 1 over the full vocabulary; the second round counts."""
    dims, context = sizes.speed_dims, sizes.engine_prompt_tokens + sizes.engine_new_tokens
    engine = EmbeddedEngine(
        dims, 1, torch.bfloat16, platform.device,
        num_slots=sizes.engine_requests, max_context=context, stop_token_ids=(),
    )  # fmt: skip
    platform.seed(1)
    for name, tensor in engine.weights.stacked.items():
        tensor.fill_(1.0) if "norm" in name else tensor.normal_(std=0.02)
    rng = np.random.default_rng(5)
    prompts = rng.integers(0, dims.vocab_size, (sizes.engine_requests, sizes.engine_prompt_tokens)).tolist()
    sampling = SamplingParams(max_new_tokens=sizes.engine_new_tokens)

    async def generate(new_seed: int) -> int:
        requests = [
            GenerationRequest(f"{new_seed}-{i}", tuple(prompt), sampling, seed=new_seed + i)
            for i, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*(engine.generate(request) for request in requests))
        return sum(len(segment.token_ids) for segments in answers for segment in segments)

    try:
        asyncio.run(generate(0))
        platform.synchronize()
        started = time.perf_counter()
        num_tokens = asyncio.run(generate(len(prompts)))
        platform.synchronize()
        seconds = time.perf_counter() - started
    finally:
        engine.close()
    return {
        "requests": len(prompts),
        "prompt_tokens": sizes.engine_prompt_tokens,
        "new_tokens": sizes.engine_new_tokens,
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
        "ok": num_tokens == len(prompts) * sizes.engine_new_tokens,
    }
