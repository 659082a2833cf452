"""What a training step costs with each group's prompt computed once per microbatch and with every sequence computed whole.

    python tests/benchmarks/shared_prompts.py [--json] [--prompt 512] [--answer 128] [--samples 8] [--groups 1] [--layers 30]
                                              [--only shared]

One Megatron rank, a dense model of SmolLM2-135M's sizes with random weights, PPO clip without an old-log-prob pass. The two
take turns on the same samples, so that a busy machine slows both; the figures are the best of the repeats, in seconds and
in CPU-seconds of this process (which a busy machine hardly moves). The peak of the memory is of both, or with `--only` of one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import socket
import time
from dataclasses import replace

import numpy as np
import torch

from megatron_rl.algorithms.algorithm import build_algorithm
from megatron_rl.batching.build import build_train_batch
from megatron_rl.checkpoint.hf_folder import RandomSource
from megatron_rl.checkpoint.hf_shards import import_params
from megatron_rl.config.sections import AlgorithmSection, OptimizerSection, TrainerSection
from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.model_families.registry import get_family
from megatron_rl.platforms.platform import select_platform
from megatron_rl.trainer.parallel import destroy_distributed, init_distributed, init_model_parallel
from megatron_rl.trainer.policy import PolicyTrainer
from megatron_rl.types.layout import ParallelLayout
from megatron_rl.types.training import Minibatch, TrainSample

DIMS = ModelDims(
    num_layers=30, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, vocab_size=49152, ffn_size=1536,
    num_experts=0, top_k=0, moe_ffn_size=0, tied_embeddings=True, qk_norm=False, norm_topk_prob=False,
    norm_epsilon=1e-5, rope_theta=100000.0, max_positions=8192,
)  # fmt: skip


def build_trainer(args: argparse.Namespace) -> PolicyTrainer:
    dims = dataclasses.replace(DIMS, num_layers=args.layers)
    platform, layout = select_platform(), ParallelLayout()
    platform.prepare_megatron()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    init_distributed(platform, rank=0, world_size=1, master_address="127.0.0.1", master_port=port, timeout_s=60)
    init_model_parallel(layout, seed=1)
    section = TrainerSection(
        optimizer=OptimizerSection(learning_rate=1e-5),
        shared_prompts="on",
        layer_spec="local",
        recompute=args.recompute,
        num_threads=args.threads,
    )
    trainer = PolicyTrainer(dims, args.dtype, section, layout, platform, seed=1)
    source, family = RandomSource(1, dims.num_layers), get_family("llama")
    weights = import_params(source, family, dims, layout, 0, spec="local", vocab_multiple=1, dtype=torch.float32)
    trainer.load_parameters(weights)
    return trainer


def draw_samples(args: argparse.Namespace) -> list[TrainSample]:
    """Groups with a common prompt; answers of half to all of `--answer` tokens, or of exactly that with `--even`."""
    rng = np.random.default_rng(1)
    samples = []
    for group in range(args.groups):
        prompt = rng.integers(0, DIMS.vocab_size, args.prompt)
        for number in range(args.samples):
            num_answer = args.answer if args.even else int(rng.integers(args.answer // 2, args.answer + 1))
            length = args.prompt + num_answer
            samples.append(
                TrainSample(
                    sample_id=f"{group}/{number}",
                    group_id=str(group),
                    token_ids_L=np.concatenate((prompt, rng.integers(0, DIMS.vocab_size, num_answer))),
                    loss_mask_L=np.arange(length) >= args.prompt,
                    rollout_logprobs_L=np.zeros(length, dtype=np.float32),
                    versions_L=np.zeros(length, dtype=np.int32),
                    reward=0.0,
                    advantage=float(rng.normal()),
                    is_correct=False,
                    is_truncated=False,
                    num_prompt_tokens=args.prompt,
                )
            )
    return samples


def pack(samples: list[TrainSample], budget: int, min_shared_prompt: int | None) -> Minibatch:
    return build_train_batch(
        samples, dp_size=1, num_minibatches=1, max_tokens_per_microbatch=budget, seed=1, min_shared_prompt=min_shared_prompt
    ).minibatches[0]


def measure(trainer: PolicyTrainer, minibatch: Minibatch) -> tuple[float, float, dict[str, float]]:
    """(seconds, CPU-seconds, metrics) of one optimizer step."""
    section = AlgorithmSection(name="grpo", loss="ppo", clip_low=0.2, clip_high=0.2, aggregation="token-mean")
    algorithm = build_algorithm(section)
    first = replace(algorithm, needs=algorithm.needs - {"old_logprobs"})
    start, cpu_start = time.perf_counter(), time.process_time()
    metrics = trainer.train_minibatch(minibatch.microbatches[0], minibatch.denominators, first)
    return time.perf_counter() - start, time.process_time() - cpu_start, metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "prompt": 512, "answer": 128, "samples": 8, "groups": 1, "layers": 30, "budget": 8192, "repeats": 2, "threads": 1
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--even", action="store_true", help="all answers have --answer tokens")
    parser.add_argument("--only", choices=("shared", "whole"), help="measure one of the two: its peak memory is its own then")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    trainer, samples = build_trainer(args), draw_samples(args)
    batches = {"shared": pack(samples, args.budget, 1), "whole": pack(samples, args.budget, None)}
    if args.only:
        batches = {args.only: batches[args.only]}
    best: dict[str, tuple[float, float]] = {}
    for repeat in range(args.repeats + 1):  # the first warms up
        for name, minibatch in batches.items():
            seconds, cpu_seconds, _ = measure(trainer, minibatch)
            if repeat:
                before = best.get(name, (np.inf, np.inf))
                best[name] = (min(before[0], seconds), min(before[1], cpu_seconds))
    destroy_distributed()
    computed = {
        name: sum(m.num_tokens - int(m.shared_prefix_S.sum()) for m in batch.microbatches[0]) for name, batch in batches.items()
    }
    result = {
        "prompt_tokens": args.prompt,
        "answer_tokens": args.answer,
        "samples_per_prompt": args.samples,
        **{f"tokens_{name}": count for name, count in computed.items()},
        **{f"step_s_{name}": round(seconds, 3) for name, (seconds, _) in best.items()},
        **{f"cpu_s_{name}": round(cpu_seconds, 3) for name, (_, cpu_seconds) in best.items()},
        **({} if args.only else {"shared_prompt_gain": round(best["whole"][1] / best["shared"][1], 2)}),
        "peak_memory_gib": round(select_platform().peak_memory_bytes() / 2**30, 2),
    }
    print(json.dumps(result) if args.json else "\n".join(f"{name:>20} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
