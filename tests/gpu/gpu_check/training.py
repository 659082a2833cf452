"""Does training work, and how fast? A loss that must fall, then tokens per second and model FLOPs utilisation."""

from __future__ import annotations

import time
from typing import Any

import torch

from gpu_check.flops import compute_train_flops, peak_flops
from gpu_check.models import draw_samples, max_difference, one_rank_policy, section
from gpu_check.sizes import Sizes
from megatron_rl.algorithms.algorithm import build_algorithm
from megatron_rl.batching.build import build_train_batch
from megatron_rl.config.algorithm_sections import AlgorithmSection
from megatron_rl.model_families.registry import get_family
from megatron_rl.platforms.platform import Platform
from megatron_rl.scheduling.colocation import TRAINER_STATES
from megatron_rl.trainer.optimizer import inner_optimizers

NUM_STEPS = 8
FALLING = 0.9
"""The last loss must be below this share of the first: the batch stays the same, so the model learns it by heart."""


def check_training(platform: Platform, sizes: Sizes, *, fused_optimizer: str = "torch") -> dict[str, Any]:
    """Supervised steps on one batch in bf16, then a GSPO step with old log-probs. Call it inside `process_group`."""
    family, dims = get_family("qwen3_moe"), sizes.models["qwen3_moe"]
    samples = draw_samples(dims, sizes.lengths)
    minibatch = build_train_batch(
        samples, dp_size=1, num_minibatches=1, max_tokens_per_microbatch=max(sizes.lengths) * 2, seed=1
    ).minibatches[0]
    microbatches, denominators = minibatch.microbatches[0], minibatch.denominators
    algorithm = build_algorithm(AlgorithmSection(name="gspo", loss="gspo"))
    with one_rank_policy(platform, family, dims, "bf16", section(fused_optimizer=fused_optimizer)) as trainer:
        steps = [trainer.sft_minibatch(microbatches, denominators) for _ in range(NUM_STEPS)]
        annotated = trainer.annotate(microbatches, algorithm.needs)
        policy_step = trainer.train_minibatch(annotated, denominators, algorithm, policy_version=0)
        optimizers = sorted({type(inner).__module__.split(".")[0] for inner in inner_optimizers(trainer.optimizer)})
    losses = [step["loss/supervised"] for step in steps]
    return {
        "losses": [round(loss, 4) for loss in losses],
        "grad_norm": steps[-1]["grad_norm"],
        "policy_grad_norm": policy_step["grad_norm"],
        "optimizer_from": optimizers,
        "ok": bool(losses[-1] < FALLING * losses[0] and policy_step["grad_norm"] > 0),
    }


def check_offload(platform: Platform, sizes: Sizes) -> dict[str, Any]:
    """A step, everything given up and taken back, another step. Call it inside `process_group`."""
    dims = sizes.models["qwen3_moe"]
    minibatch = build_train_batch(
        draw_samples(dims, sizes.lengths),
        dp_size=1,
        num_minibatches=1,
        max_tokens_per_microbatch=max(sizes.lengths) * 2,
        seed=1,
    ).minibatches[0]
    microbatches, denominators = minibatch.microbatches[0], minibatch.denominators
    on_gpu = platform.device.type == "cuda"
    with one_rank_policy(platform, get_family("qwen3_moe"), dims, "bf16", section()) as trainer:
        first = trainer.sft_minibatch(microbatches, denominators)
        expected = trainer.compute_logprobs(microbatches)
        before = torch.cuda.memory_allocated() if on_gpu else 0
        held = trainer.offload(("gradients", "optimizer")) | trainer.offload(("parameters",))
        freed = before - torch.cuda.memory_allocated() if on_gpu else 0
        started = time.perf_counter()
        trainer.onload(TRAINER_STATES)
        onload_s = time.perf_counter() - started
        difference = max_difference(expected, trainer.compute_logprobs(microbatches))
        second = trainer.sft_minibatch(microbatches, denominators)
    losses = [step["loss/supervised"] for step in (first, second)]
    freed_share = freed / sum(held.values())
    return {
        **{f"{state}_bytes": num_bytes for state, num_bytes in held.items()},
        "freed_share": freed_share,
        "onload_s": onload_s,
        "logprob_difference": difference,
        "losses": losses,
        "ok": bool(difference < 1e-3 and losses[1] < losses[0] and (freed_share > 0.95 or not on_gpu)),
    }


def measure_training(platform: Platform, sizes: Sizes) -> dict[str, Any]:
    """Whole optimizer steps in bf16 with fp32 masters, after one to warm up. Call it inside `process_group`."""
    dims = sizes.speed_dims
    num_sequences = sizes.speed_sequences_per_microbatch * sizes.speed_microbatches
    lengths = [sizes.speed_length] * num_sequences
    minibatch = build_train_batch(
        draw_samples(dims, lengths),
        dp_size=1,
        num_minibatches=1,
        max_tokens_per_microbatch=sizes.speed_length * sizes.speed_sequences_per_microbatch,
        seed=1,
    ).minibatches[0]
    settings = section(1e-5, layer_spec="auto", fused_optimizer="auto", logprob_chunk_tokens=2048, recompute="selective")
    with one_rank_policy(platform, get_family("qwen3_moe"), dims, "bf16", settings, load=False) as trainer:
        seconds = []
        for _ in range(1 + sizes.speed_steps):
            platform.synchronize()
            started = time.perf_counter()
            metrics = trainer.sft_minibatch(minibatch.microbatches[0], minibatch.denominators)
            platform.synchronize()
            seconds.append(time.perf_counter() - started)
        layer_spec = "transformer_engine" if trainer.uses_transformer_engine else "local"
        num_weights = sum(p.numel() for chunk in trainer.chunks for p in chunk.parameters())
    step_s = sum(seconds[1:]) / sizes.speed_steps
    flops = compute_train_flops(dims, lengths)
    peak = peak_flops(torch.cuda.get_device_name(platform.device)) if platform.device.type == "cuda" else None
    return {
        "layer_spec": layer_spec,
        "weights": num_weights,
        "tokens_per_step": sum(lengths),
        "first_step_s": seconds[0],
        "step_s": step_s,
        "tokens_per_s": sum(lengths) / step_s,
        "model_tflops_per_s": flops / step_s / 1e12,
        "mfu": None if peak is None else flops / step_s / peak,
        "peak_memory_gb": platform.peak_memory_bytes() / 1e9,
        "ok": metrics["grad_norm"] > 0,
    }
