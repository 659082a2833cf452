"""Is every form of the model the same function? Log-probs of Megatron and of the engine against transformers.

In fp32 the difference itself is judged. In bf16 rounding follows the order of operations, and now and then it flips the
choice of an expert, so what is judged is that the distance to the fp32 truth is not larger than that of transformers' own
bf16: the median over tokens closely, the mean, which single flips move, loosely.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_check.models import (
    DTYPES,
    SpreadSource,
    draw_samples,
    engine_params,
    hf_tensors,
    max_difference,
    one_rank_policy,
    section,
    token_differences,
    transformers_logprobs,
)
from gpu_check.sizes import Sizes
from megatron_rl.batching.build import build_microbatch
from megatron_rl.model_families.declaration import ModelDims, ModelFamily
from megatron_rl.model_families.registry import get_family
from megatron_rl.platforms.platform import Platform
from megatron_rl.rollout.embedded.engine import EmbeddedEngine
from megatron_rl.types.rollout import GenerationRequest, SamplingParams
from megatron_rl.types.training import TrainSample

FP32_TOLERANCE = 1e-3
BF16_MEDIAN_RATIO, BF16_MEAN_RATIO, BF16_SLACK = 1.5, 4.0, 1e-3

Reference = dict[str, list[np.ndarray]]
"""dtype -> transformers' log-probs."""


def check_equality(platform: Platform, sizes: Sizes, *, layer_spec: str = "local") -> dict[str, Any]:
    """Megatron and engine against transformers, for each family. Call it inside `process_group`."""
    results: dict[str, Any] = {}
    for name, dims in sizes.models.items():
        family, samples = get_family(name), draw_samples(dims, sizes.lengths)
        reference = {dtype: transformers_logprobs(family, dims, dtype, samples, platform.device) for dtype in DTYPES}
        # Transformer Engine's packed attention has no fp32 kernel.
        dtypes = ("bf16",) if layer_spec == "transformer_engine" else tuple(DTYPES)
        megatron = {dtype: megatron_logprobs(platform, family, dims, dtype, samples, layer_spec) for dtype in dtypes}
        results[name] = {"megatron": compare(megatron, reference)}
        if layer_spec == "local":
            engine = {dtype: engine_logprobs(platform, family, dims, dtype, samples) for dtype in dtypes}
            results[name]["engine"] = compare({dtype: scores for dtype, (scores, _) in engine.items()}, reference)
            gap = engine["fp32"][1]
            results[name]["decode"] = {"fp32_max_diff": gap, "ok": gap <= FP32_TOLERANCE}
    return results | {"ok": all(part["ok"] for parts in results.values() for part in parts.values())}


def megatron_logprobs(
    platform: Platform, family: ModelFamily, dims: ModelDims, dtype: str, samples: Sequence[TrainSample], layer_spec: str
) -> list[np.ndarray]:
    """All sequences packed into two microbatches."""
    half = len(samples) // 2
    microbatches = [build_microbatch(samples, part) for part in (range(half), range(half, len(samples)))]
    with one_rank_policy(platform, family, dims, dtype, section(layer_spec=layer_spec)) as trainer:
        scores = trainer.compute_logprobs(microbatches, score_all=True)
    return [
        part
        for microbatch, logprobs in zip(microbatches, scores, strict=True)
        for part in np.split(logprobs, microbatch.cu_seqlens[1:-1])
    ]


def engine_logprobs(
    platform: Platform, family: ModelFamily, dims: ModelDims, dtype: str, samples: Sequence[TrainSample]
) -> tuple[list[np.ndarray], float]:
    """Log-probs of whole sequences from an engine of two shards; and how far those that it reports while it decodes token by
    token are from scoring the same tokens at once."""
    tp = 2
    longest = max(len(sample.token_ids_L) for sample in samples)
    engine = EmbeddedEngine(
        dims, tp, DTYPES[dtype], platform.device, num_slots=4, max_context=longest + 16, stop_token_ids=()
    )
    try:
        tensors = hf_tensors(family, dims, SpreadSource(dims))
        for rank, shard in enumerate(engine.weights.shards):
            for name, value in engine_params(family, dims, tensors, DTYPES[dtype], tp, rank).items():
                shard[name].copy_(value)
        sampling = SamplingParams(max_new_tokens=12)
        prompts = [tuple(sample.token_ids_L[: 5 + number].tolist()) for number, sample in enumerate(samples)]

        async def run() -> tuple[list[np.ndarray], float]:
            scores = await engine.score([sample.token_ids_L.tolist() for sample in samples])
            requests = [GenerationRequest(str(i), prompt, sampling, seed=i) for i, prompt in enumerate(prompts)]
            answers = await asyncio.gather(*(engine.generate(request) for request in requests))
            decoded = [np.array(segments[0].logprobs) for segments in answers]
            whole = [(*prompt, *a[0].token_ids) for prompt, a in zip(prompts, answers, strict=True)]
            rescored = [s[-len(d) :] for s, d in zip(await engine.score(whole), decoded, strict=True)]
            return scores, max_difference(decoded, rescored)

        return asyncio.run(run())
    finally:
        engine.close()


def compare(found: Reference, reference: Reference) -> dict[str, Any]:
    """Differences per dtype and the verdict."""
    result: dict[str, Any] = {f"{dtype}_max_diff": max_difference(found[dtype], reference[dtype]) for dtype in found}
    is_close = result.get("fp32_max_diff", 0.0) <= FP32_TOLERANCE
    own = token_differences(found["bf16"], reference["fp32"])
    theirs = token_differences(reference["bf16"], reference["fp32"])
    for name, ratio, reduce in (("median", BF16_MEDIAN_RATIO, np.median), ("mean", BF16_MEAN_RATIO, np.mean)):
        mine, yours = float(reduce(own)), float(reduce(theirs))
        result |= {f"bf16_{name}_error": mine, f"transformers_bf16_{name}_error": yours}
        is_close = is_close and mine <= ratio * yours + BF16_SLACK
    return result | {"ok": bool(is_close)}
