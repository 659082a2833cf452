"""What router replay (R3) does to the gap between engine and trainer: one batch of a real SGLang's answers, scored twice.

    python -m tests.acceptance.router_replay [--seed 1] [--warm-start 72]

The quick start's MoE in bf16: one Megatron rank learns `--warm-start` supervised steps and exports; a SGLang server of one rank
(CPU) answers the run's first prompts and returns its routed experts; the trainer scores the answers with its own experts and
with the engine's. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import secrets
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from megatron_rl.algorithms.algorithm import build_algorithm
from megatron_rl.batching.build import build_train_batch
from megatron_rl.batching.samples import build_samples
from megatron_rl.checkpoint.hf_export import merge_export, write_export_part
from megatron_rl.checkpoint.hf_shards import import_params
from megatron_rl.config.load import load_experiment
from megatron_rl.config.resolve import resolve
from megatron_rl.config.rollout_sections import SglangSection
from megatron_rl.config.sections import ExperimentConfig
from megatron_rl.controller.batcher import Batcher
from megatron_rl.controller.interfaces import free_address
from megatron_rl.controller.model_setup import ModelSetup, build_model_setup
from megatron_rl.controller.run_directory import git_revision
from megatron_rl.data.bundle import DataBundle, build_data, sft_pairs
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.platforms.platform import select_platform
from megatron_rl.rollout.sglang.launch_args import EnginePlace, ServedModel
from megatron_rl.rollout.sglang.receiver_dir import create_receiver_dir
from megatron_rl.rollout.sglang.start import start_engine
from megatron_rl.trainer.parallel import destroy_distributed, init_distributed, init_model_parallel
from megatron_rl.trainer.policy import PolicyTrainer
from megatron_rl.types.layout import ParallelLayout
from megatron_rl.types.rollout import (
    GenerationRequest,
    Prompt,
    RewardResult,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
    TrajectoryState,
)
from megatron_rl.types.training import Microbatch

ROOT = Path(__file__).resolve().parents[2]
NUM_PROMPTS, NUM_SAMPLES = 32, 8


def measure(seed: int, num_warm_start: int) -> dict[str, object]:
    overrides = [
        f"run.seed={seed}", "model.dtype=bf16", "trainer.layout={num_ranks: 1, ep: 1}", "algorithm.router_replay=r3",
        f"trainer.warm_start.num_steps={num_warm_start}",
    ]  # fmt: skip
    config = resolve(load_experiment(str(ROOT / "configs/quickstart.yaml"), overrides).config)
    tokenizer = load_tokenizer(config.data.tokenizer, config.model.path)
    model = build_model_setup(config.model, seed, tokenizer.vocab_size)
    data = build_data(config.data, config.run.num_eval_prompts, tokenizer)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainer = build_trainer(config, model)
        try:
            loss = warm_start(trainer, config, data, tokenizer)
            export = (model.family, model.dims)
            write_export_part(
                folder / "parts", trainer.chunk_parameters(), *export, trainer.layout, 0, spec="local", vocab_multiple=1
            )
            merge_export(folder / "parts", folder / "model", *export, torch.bfloat16)
            tokenizer.save(folder / "model")
            prompts = data.train_sampler.next(NUM_PROMPTS)
            stop = (tokenizer.eos_id,)
            groups = asyncio.run(generate(folder, model, config, prompts, stop, seed))
            figures = compare(trainer, groups)
        finally:
            destroy_distributed()
    command = f"python -m tests.acceptance.router_replay --seed {seed} --warm-start {num_warm_start}"
    return {"command": command, "seed": seed, "revision": git_revision(), "warm_start_loss": round(loss, 3), **figures}


def build_trainer(config: ExperimentConfig, model: ModelSetup) -> PolicyTrainer:
    platform, layout = select_platform(), ParallelLayout()
    platform.prepare_megatron()
    torch.set_num_threads(config.trainer.num_threads)
    host, port = free_address("127.0.0.1")
    init_distributed(platform, rank=0, world_size=1, master_address=host, master_port=port, timeout_s=60)
    init_model_parallel(layout, seed=config.run.seed)
    section = dataclasses.replace(config.trainer, layer_spec="local")
    trainer = PolicyTrainer(model.dims, "bf16", section, layout, platform, seed=config.run.seed, replays_routing=True)
    options = {"spec": "local", "vocab_multiple": 1, "dtype": torch.float32}
    trainer.load_parameters(import_params(model.source(), model.family, model.dims, layout, 0, **options))
    return trainer


def warm_start(trainer: PolicyTrainer, config: ExperimentConfig, data: DataBundle, tokenizer) -> float:
    """The quick start's supervised steps; the last loss."""
    section = config.trainer.warm_start
    optimizer = dataclasses.replace(
        config.trainer.optimizer, learning_rate=section.learning_rate, num_warmup_steps=section.num_warmup_steps
    )
    trainer.begin_phase(optimizer, section.num_steps)
    batcher = Batcher(build_algorithm(config.algorithm), config.trainer, trainer.layout, config.run)
    loss = float("nan")
    for step in range(1, section.num_steps + 1):
        pairs = sft_pairs(data.warm_start_sampler.next(section.batch_size), tokenizer)
        (minibatch,) = batcher.build_supervised(pairs, step).minibatches
        loss = trainer.sft_minibatch(minibatch.microbatches[0], minibatch.denominators)["loss/supervised"]
    return loss


async def generate(
    folder: Path, model: ModelSetup, config: ExperimentConfig, prompts: list[Prompt], stop: tuple[int, ...], seed: int
) -> list[TrajectoryGroup]:
    """Answers of a real server, with the experts that it visited."""
    create_receiver_dir(folder / "receivers", secrets.token_bytes(32))
    section = SglangSection(tp_size=1, num_concurrent=64, start_timeout_s=600.0, request_timeout_s=600.0)
    engine = start_engine(
        "router-replay",
        section,
        EnginePlace(cpu_cores=tuple(sorted(os.sched_getaffinity(0)))),
        ServedModel(sys.executable, str(folder / "model"), "bf16", 64, "auto", model.dims.routing),
        receiver_dir=folder / "receivers",
        log_path=folder / "server.log",
        on_progress=lambda line: print(line, file=sys.stderr),
    )
    sampling = SamplingParams(config.rollout.sampling.max_new_tokens, stop_token_ids=stop)
    try:
        requests = [
            GenerationRequest(f"{place}/{number}", prompt.token_ids, sampling, seed=seed * 10_000 + place * 10 + number)
            for place, prompt in enumerate(prompts)
            for number in range(NUM_SAMPLES)
        ]
        answers = await asyncio.gather(*(engine.generate(request) for request in requests))
    finally:
        await engine.close()
    nothing = RewardResult(0.0, False)
    trajectories = [
        Trajectory(request.request_id, prompts[index // NUM_SAMPLES], tuple(segments), TrajectoryState.DONE, nothing)
        for index, (request, segments) in enumerate(zip(requests, answers, strict=True))
    ]
    return [
        TrajectoryGroup(prompt.prompt_id, prompt, tuple(trajectories[place * NUM_SAMPLES : (place + 1) * NUM_SAMPLES]))
        for place, prompt in enumerate(prompts)
    ]


def compare(trainer: PolicyTrainer, groups: list[TrajectoryGroup]) -> dict[str, object]:
    """KL(engine, trainer) (k3) and mean |difference of log-probs| of the answers' tokens without and with replay."""
    samples = build_samples(groups, [[0.0] * NUM_SAMPLES for _ in groups], mask_truncated=False)
    batch = build_train_batch(samples, dp_size=1, num_minibatches=1, max_tokens_per_microbatch=2048, seed=1)
    replayed = list(batch.minibatches[0].microbatches[0])
    assert all(microbatch.experts_TYK is not None for microbatch in replayed), "the engine returned no experts"
    free = [dataclasses.replace(microbatch, experts_TYK=None) for microbatch in replayed]
    own: list[np.ndarray] = []
    without = trainer.compute_logprobs(free, experts_out=own)
    own_replayed = trainer.compute_logprobs(
        [dataclasses.replace(m, experts_TYK=experts) for m, experts in zip(free, own, strict=True)]
    )
    result: dict[str, object] = {
        "num_tokens": sum(int(m.loss_mask_T.sum()) for m in replayed),
        "own_replay_is_bit_equal": all(np.array_equal(a, b) for a, b in zip(without, own_replayed, strict=True)),
        "tokens_with_other_experts": round(_other_experts(replayed, own), 4),
    }
    for name, scores in {"off": without, "on": trainer.compute_logprobs(replayed)}.items():
        gaps = np.concatenate([
            (logprobs_T - m.token_arrays["rollout_logprobs"])[m.loss_mask_T].astype(np.float64)
            for m, logprobs_T in zip(replayed, scores, strict=True)
        ])  # fmt: skip
        result[f"kl_{name}"] = float((np.exp(gaps) - 1 - gaps).mean())
        result[f"gap_{name}"] = float(np.abs(gaps).mean())
    return result


def _other_experts(replayed: list[Microbatch], own: list[np.ndarray]) -> float:
    """The share of predicted answer tokens on whose way some layer of the trainer visits other experts than the engine."""
    differs = []
    for microbatch, experts_TYK in zip(replayed, own, strict=True):
        assert microbatch.experts_TYK is not None
        inputs = np.flatnonzero(microbatch.loss_mask_T) - 1
        mine, theirs = (np.sort(array[inputs], axis=-1) for array in (experts_TYK, microbatch.experts_TYK))
        differs.append((mine != theirs).any(axis=(1, 2)))
    return float(np.concatenate(differs).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warm-start", type=int, default=72)
    args = parser.parse_args()
    print(json.dumps(measure(args.seed, args.warm_start)))


if __name__ == "__main__":
    main()
