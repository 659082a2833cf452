"""One rank of `controller.loss_check`: layout by layout, one optimizer step of an objective on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_rl.algorithms.algorithm import Algorithm, build_algorithm
from megatron_rl.checkpoint.hf_folder import RandomSource
from megatron_rl.checkpoint.hf_shards import import_params
from megatron_rl.config.algorithm_sections import AlgorithmSection
from megatron_rl.config.sections import OptimizerSection, TrainerSection
from megatron_rl.controller.synthetic_batch import (
    VERSION,
    SyntheticSample,
    denominators_of,
    microbatches_of,
    synthetic_samples,
)
from megatron_rl.layout.coords import coords_of
from megatron_rl.model_families.registry import get_family
from megatron_rl.platforms.platform import CpuPlatform
from megatron_rl.trainer.choice import annotate_choice
from megatron_rl.trainer.parallel import (
    destroy_distributed,
    destroy_model_parallel,
    init_distributed,
    init_model_parallel,
)
from megatron_rl.trainer.policy import PolicyTrainer
from megatron_rl.trainer.rejection import drop_rejected
from megatron_rl.types.layout import ParallelLayout
from megatron_rl.types.training import Microbatch

OFFSETS = ("old_logprobs", "rollout_logprobs", "ref_logprobs")


def run_rank(
    section: AlgorithmSection,
    family: str,
    cases: Sequence[tuple[ParallelLayout, int, bool]],
    rank: int,
    world_size: int,
    port: int,
    seed: int,
    timeout_s: float,
) -> Iterator[tuple[float, float]]:
    """(loss, gradient norm) of each (layout, number of microbatches, reversed order). Rank 0 listens on `port`."""
    torch.set_num_threads(1)
    platform = CpuPlatform()
    platform.prepare_megatron()
    init_distributed(
        platform, rank=rank, world_size=world_size, master_address="127.0.0.1", master_port=port, timeout_s=timeout_s
    )
    for layout, num_microbatches, is_reversed in cases:
        with _tiny_policy(family, layout, rank, platform) as trainer:
            options: dict[str, Any] = {"num_microbatches": num_microbatches, "is_reversed": is_reversed, "seed": seed}
            result = measure_objective(trainer, section, rank, **options)
        yield result
    destroy_distributed()


def measure_objective(
    trainer: PolicyTrainer,
    section: AlgorithmSection,
    rank: int,
    *,
    num_microbatches: int,
    is_reversed: bool = False,
    seed: int = 1,
    scored: Sequence[np.ndarray] | None = None,
) -> tuple[float, float]:
    """(loss, gradient norm) of one optimizer step on the synthetic minibatch; collective. The step moves the weights unless
    the learning rate is 0. `scored`: what `score_batch` gave; None: score now.
    """
    algorithm = build_algorithm(section)
    cut: dict[str, Any] = {"num_microbatches": num_microbatches, "is_reversed": is_reversed, "seed": seed}
    samples, microbatches = _own_microbatches(algorithm, trainer, rank, **cut)
    # Near the policy, so that both sides of a clip are reached.
    annotated = [
        replace(
            microbatch,
            token_arrays={
                **microbatch.token_arrays,
                **{name: logprobs_T + microbatch.token_arrays[f"{name}_offset"] for name in OFFSETS},
            },
        )
        for microbatch, logprobs_T in zip(microbatches, scored or score_batch(trainer, rank, **cut), strict=True)
    ]
    denominators = denominators_of(samples, section)
    if "remaining" in algorithm.needs:
        reduce_sum = trainer.sum_over_data_parallel
        annotated, denominators, _ = drop_rejected(annotated, denominators, algorithm, VERSION, reduce_sum)
    if "chosen" in algorithm.needs:
        annotated = annotate_choice(annotated, section, seed)
    metrics = trainer.train_minibatch(annotated, denominators, algorithm, policy_version=VERSION)
    return metrics["loss/total"], metrics["grad_norm"]


def score_batch(
    trainer: PolicyTrainer, rank: int, *, num_microbatches: int, is_reversed: bool = False, seed: int = 1
) -> list[np.ndarray]:
    """The policy's log-probs [T] of this rank's microbatches, whose tokens are the same for every objective; collective."""
    any_algorithm = build_algorithm(AlgorithmSection())
    _, microbatches = _own_microbatches(
        any_algorithm, trainer, rank, num_microbatches=num_microbatches, is_reversed=is_reversed, seed=seed
    )
    return trainer.compute_logprobs(microbatches)


def _own_microbatches(
    algorithm: Algorithm, trainer: PolicyTrainer, rank: int, *, num_microbatches: int, is_reversed: bool, seed: int
) -> tuple[list[SyntheticSample], list[Microbatch]]:
    """The whole batch, and this data-parallel rank's part of it as microbatches."""
    samples = synthetic_samples(algorithm, trainer.dims.vocab_size, seed)
    order = list(range(len(samples)))[:: -1 if is_reversed else 1]
    mine = order[coords_of(trainer.layout, rank).dp :: trainer.layout.dp]
    return samples, microbatches_of(samples, mine, num_microbatches)


@contextmanager
def _tiny_policy(family: str, layout: ParallelLayout, rank: int, platform: CpuPlatform) -> Iterator[PolicyTrainer]:
    """The family's smallest model with weights drawn by their names, under `layout`."""
    dims = get_family(family).debug_dims
    init_model_parallel(layout, seed=1)
    try:
        section = TrainerSection(optimizer=OptimizerSection(learning_rate=0.0, clip_grad=0.0), layer_spec="local")
        trainer = PolicyTrainer(dims, "fp32", section, layout, platform, seed=1)
        source = RandomSource(1, dims.num_layers, std=0.15)
        options: dict[str, Any] = {"spec": "local", "vocab_multiple": 1, "dtype": torch.float32}
        trainer.load_parameters(import_params(source, get_family(family), dims, layout, rank, **options))
        yield trainer
    finally:
        destroy_model_parallel()
