"""What each process does in the layout tests: for every layout, build policy and critic, score the batch and train.

All processes see the same global batch of sequences of unequal lengths and the same weights, drawn by tensor name.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch

from megatron_rl.algorithms.algorithm import build_algorithm
from megatron_rl.checkpoint.hf_folder import RandomSource
from megatron_rl.checkpoint.hf_shards import import_params
from megatron_rl.config.algorithm_sections import AlgorithmSection, CorrectionSection, CovarianceSection, KlSection
from megatron_rl.config.sections import MegatronSection, OptimizerSection, TrainerSection
from megatron_rl.controller.loss_check_rank import measure_objective, score_batch
from megatron_rl.layout.coords import coords_of
from megatron_rl.model_families.declaration import ModelDims, ModelFamily
from megatron_rl.model_families.registry import get_family
from megatron_rl.model_families.value_model import value_model_of
from megatron_rl.platforms.platform import Platform, select_platform
from megatron_rl.trainer.critic import CriticTrainer
from megatron_rl.trainer.parallel import (
    destroy_distributed,
    destroy_model_parallel,
    init_distributed,
    init_model_parallel,
)
from megatron_rl.trainer.policy import PolicyTrainer
from megatron_rl.trainer.role import MegatronRole, empty_microbatch
from megatron_rl.trainer.token_advantages import add_token_advantages
from megatron_rl.types.layout import ParallelLayout
from megatron_rl.types.training import Denominators, Microbatch
from tests.distributed.launch import Rank

LENGTHS = (5, 17, 9, 30, 2, 12, 7, 23)
GROUPS = {0: "a", 1: "a", 3: "a", 7: "a", 2: "b", 5: "b", 6: "b"}  # sequence 4 stands alone
PROMPT_LENGTHS = {"a": 4, "b": 6}
WEIGHT_SEED, DATA_SEED = 3, 11
ALGORITHMS = {
    "vapo": AlgorithmSection(
        name="vapo",
        advantage="gae",
        gamma=0.98,
        lambda_critic=0.95,
        lambda_alpha=0.4,
        loss="ppo",
        clip_low=0.2,
        clip_high=0.28,
        aggregation="token-mean",
        entropy_coefficient=0.05,
        positive_nll_coefficient=0.1,
    ),
    "gspo": AlgorithmSection(name="gspo", loss="gspo", clip_low=0.9, clip_high=9.0, aggregation="seq-mean-token-mean"),
}


WIDE = {"clip_low": 0.2, "clip_high": 0.28}
CONSTANT = {"aggregation": "seq-mean-token-sum-norm", "aggregation_constant": 37.0}
OBJECTIVES = {
    "grpo": AlgorithmSection(name="grpo", loss="ppo", **WIDE, kl=KlSection(0.04)),
    "dapo": AlgorithmSection(name="dapo", loss="ppo", **WIDE, aggregation="token-mean", masked_sequences="count"),
    "dr_grpo": AlgorithmSection(name="dr_grpo", advantage="dr_grpo", loss="ppo", **WIDE, **CONSTANT),
    "gspo_token": AlgorithmSection(loss="gspo_token", **WIDE, aggregation="token-mean"),
    "vapo": AlgorithmSection(
        name="vapo", advantage="gae", lambda_alpha=0.4, loss="ppo", **WIDE, aggregation="token-mean",
        positive_nll_coefficient=0.1, entropy_coefficient=0.01,
    ),
    "cispo": AlgorithmSection(loss="cispo", clip_low=1.0, clip_high=0.2, aggregation="token-mean"),
    "rloo": AlgorithmSection(advantage="rloo", loss="reinforce", aggregation="seq-mean-token-sum", kl=KlSection(0.1, "k2")),
    "reinforce_pp": AlgorithmSection(advantage="reinforce_pp", loss="ppo", **WIDE, kl=KlSection(0.1, "k1", "reward")),
    "sapo": AlgorithmSection(loss="sapo", tau_negative=1.3),
    "gmpo": AlgorithmSection(loss="gmpo", clip_low=0.4, clip_high=0.4),
    "clip_cov": AlgorithmSection(loss="clip_cov", **WIDE, covariance=CovarianceSection(0.2, 0.01, 50.0)),
    "distillation": AlgorithmSection(loss="none", kl=KlSection(1.0, "unbiased"), aggregation="token-mean"),
    "remaining": AlgorithmSection(
        loss="ppo", **WIDE, aggregation="token-mean", correction=CorrectionSection("icepop", 0.9, 1.1, "remaining")
    ),
    "corrected": AlgorithmSection(
        loss="ppo", **WIDE, correction=CorrectionSection("geometric_mask", 0.8, 1.2, max_version_age=1)
    ),
}  # fmt: skip
"""The named algorithms, every aggregation, and a correction over whole rows, on `controller.synthetic_batch`."""
SMALLER = {"num_layers": 2}
"""The model of the objectives: what a loss does to gradients does not hang on depth, and there are many losses."""


class SpreadSource(RandomSource):
    """Random weights whose norm gains differ from 1, so that a lost or doubled norm shows."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(WEIGHT_SEED, num_layers, std=0.15)

    def _draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = super()._draw(name, shape)
        if len(shape) == 1:
            generator = torch.Generator().manual_seed(sum(name.encode()))
            tensor = tensor + 0.2 * torch.randn(shape, generator=generator)
        return tensor


def sequences(vocab_size: int) -> list[dict[str, Any]]:
    """The global batch: per sequence its tokens, mask and the arrays that a loss reads."""
    rng = np.random.default_rng(DATA_SEED)
    prompts = {group: rng.integers(0, vocab_size, length) for group, length in PROMPT_LENGTHS.items()}
    batch = []
    for member, length in enumerate(LENGTHS):
        tokens = rng.integers(0, vocab_size, length)
        if member in GROUPS:
            tokens[: PROMPT_LENGTHS[GROUPS[member]]] = prompts[GROUPS[member]]
        mask = np.arange(length) >= max(1, length // 3)
        batch.append(
            {
                "token_ids": tokens,
                "mask": mask & (rng.random(length) < 0.9),
                "rollout_logprobs": rng.normal(-4.0, 0.5, length).astype(np.float32),
                "advantages": np.full(length, rng.normal(), dtype=np.float32),
                "experts": experts_of(member, length),
                "reward": rng.normal(),
                "is_correct": rng.random() < 0.5,
            }
        )
    return batch


def experts_of(member: int, length: int) -> np.ndarray:
    """Experts [length, layers, k] that no router chose; common prompts have the same; the last token's are unknown."""
    shape = debug_dims("qwen3_moe").routing
    experts = shape.empty(length)
    for number in range(length - 1):
        is_common = member in GROUPS and number < PROMPT_LENGTHS[GROUPS[member]]
        rng = np.random.default_rng((sum(GROUPS[member].encode()) if is_common else member, number, is_common))
        experts[number] = rng.permuted(np.tile(np.arange(shape.num_experts), (shape.num_layers, 1)), axis=1)[:, : shape.top_k]
    return experts


def pack(batch: list[dict[str, Any]], members: list[int], *, share: bool = False, replay: bool = False) -> Microbatch:
    """One microbatch of the given members of the batch.

    With `share`, neighbours of one group share their prompt; with `replay` the microbatch brings experts.
    """
    if not members:
        return empty_microbatch()
    chosen = [batch[i] for i in members]
    lengths = [len(item["token_ids"]) for item in chosen]
    mask = np.concatenate([item["mask"] for item in chosen])
    groups = [GROUPS.get(member) for member in members]
    shared = [
        PROMPT_LENGTHS[group] if share and group and group == before else 0
        for before, group in zip([None, *groups], groups, strict=False)
    ]
    return Microbatch(
        token_ids_T=np.concatenate([item["token_ids"] for item in chosen]),
        cu_seqlens=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        loss_mask_T=mask,
        versions_T=np.zeros(len(mask), dtype=np.int32),
        rewards_S=np.array([item["reward"] for item in chosen], dtype=np.float32),
        is_correct_S=np.array([item["is_correct"] for item in chosen]),
        sample_index_S=np.asarray(members, dtype=np.int32),
        token_arrays={
            name: np.where(mask, np.concatenate([item[name] for item in chosen]), 0).astype(np.float32)
            for name in ("rollout_logprobs", "advantages")
        },
        shared_prefix_S=np.array(shared, dtype=np.int32),
        experts_TYK=np.concatenate([item["experts"] for item in chosen]) if replay else None,
    )


def count(batch: list[dict[str, Any]]) -> Denominators:
    return Denominators(
        num_tokens=int(sum(item["mask"].sum() for item in batch)),
        num_sequences=sum(bool(item["mask"].any()) for item in batch),
        num_positive_tokens=int(sum(item["mask"].sum() for item in batch if item["is_correct"])),
    )


def split(members: list[int], num_microbatches: int) -> list[list[int]]:
    return [list(part) for part in np.array_split(np.asarray(members), num_microbatches)]


def debug_dims(family: str) -> ModelDims:
    """The family's smallest model, with at most four experts: each is a loop of its own on the CPU."""
    dims = get_family(family).debug_dims
    return dataclasses.replace(dims, num_experts=min(dims.num_experts, 4))


@contextmanager
def joined(me: Rank) -> Iterator[Platform]:
    """The process group for the length of a test."""
    logging.basicConfig(level=logging.WARNING)
    platform = select_platform()
    platform.prepare_megatron()
    init_distributed(
        platform, rank=me.rank, world_size=me.world_size, master_address="127.0.0.1", master_port=me.port, timeout_s=60
    )
    try:
        yield platform
    finally:
        destroy_distributed()


def trainer_section(distributed_optimizer: bool = True, **section: Any) -> TrainerSection:
    # Adam makes a whole step of a gradient that is nothing but rounding: the rate bounds how far layouts drift apart by that.
    optimizer = OptimizerSection(learning_rate=4e-4, clip_grad=0.5, distributed=distributed_optimizer)
    return TrainerSection(optimizer=optimizer, logprob_chunk_tokens=13, **section)


def critic_beside(trainer: PolicyTrainer, me: Rank, family: str) -> CriticTrainer:
    """A critic with the policy's layout and the test's weights, head included."""
    optimizer = dataclasses.replace(trainer.trainer.optimizer, learning_rate=1e-4)
    section = dataclasses.replace(trainer.trainer, optimizer=optimizer)
    critic = CriticTrainer(trainer.dims, "fp32", section, trainer.layout, trainer.platform, seed=1)
    critic.load_parameters(weights_of(value_model_of(get_family(family)), critic, me.rank))
    return critic


def weights_of(family: ModelFamily, role: MegatronRole, rank: int) -> list[dict[str, torch.Tensor]]:
    return import_params(
        SpreadSource(role.dims.num_layers),
        family,
        role.dims,
        role.layout,
        rank,
        spec="local",
        vocab_multiple=1,
        dtype=role.config.params_dtype,
    )


@contextmanager
def policy(
    me: Rank,
    platform: Platform,
    family: str,
    layout: ParallelLayout,
    *,
    dtype: str = "fp32",
    dims: ModelDims | None = None,
    distributed_optimizer: bool = True,
    replays_routing: bool = False,
    is_trained: bool = True,
    **section: Any,
) -> Iterator[PolicyTrainer]:
    """A policy with the test's weights under `layout`."""
    dims = dims or debug_dims(family)
    init_model_parallel(layout, seed=1)
    trainer = PolicyTrainer(
        dims,
        dtype,
        trainer_section(distributed_optimizer, **section),
        layout,
        platform,
        seed=1,
        temperature=0.8,
        replays_routing=replays_routing,
        is_trained=is_trained,
    )
    trainer.load_parameters(weights_of(get_family(family), trainer, me.rank))
    try:
        yield trainer
    finally:
        destroy_model_parallel()


def walk_layouts(me: Rank, *, family: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per case: log-probs and values by sequence, metrics of `num_steps` optimizer steps per algorithm, and what every
    objective gives if it asks for `objectives`.

    A case has `layout` and optionally `num_steps` (2), `num_microbatches` (2), `order`, `distributed_optimizer`, `section`,
    `share` (compute common prompts once), `replay` (visit the batch's experts), `untrained` (log-probs are those of a role
    without an optimizer) and `algorithms` (names; default: all).
    """
    results = []
    with joined(me) as platform:
        for case in cases:
            layout = ParallelLayout(**case["layout"])
            section = dict(case.get("section", {}))
            if "megatron" in section:
                section["megatron"] = MegatronSection(**section["megatron"])
            options = {
                "distributed_optimizer": case.get("distributed_optimizer", True),
                "replays_routing": case.get("replay", False),
            }
            with policy(me, platform, family, layout, **options, **section) as trainer:
                results.append(run_case(me, trainer, critic_beside(trainer, me, family), family, case))
            if case.get("untrained"):
                with policy(me, platform, family, layout, is_trained=False, **section) as reference:
                    parts, microbatches = cut(reference, me.rank, case)
                    scores = reference.compute_logprobs(microbatches, score_all=True)
                    results[-1]["logprobs"] = by_sequence(parts, microbatches, scores)
            if case.get("objectives"):
                with policy(me, platform, family, layout, dims=dims_with(family, **SMALLER)) as trainer:
                    results[-1]["objectives"] = measure_all(trainer, me.rank, case)
    return results


def measure_all(trainer: PolicyTrainer, rank: int, case: dict[str, Any]) -> dict[str, list[float]]:
    """Loss and gradient norm of every objective on one policy, whose weights a learning rate of 0 leaves alone."""
    trainer.begin_phase(OptimizerSection(learning_rate=0.0, clip_grad=0.0), len(OBJECTIVES))
    options: dict[str, Any] = {"num_microbatches": case.get("num_microbatches", 2), "is_reversed": "order" in case}
    scored = score_batch(trainer, rank, **options)
    return {
        name: list(measure_objective(trainer, section, rank, scored=scored, **options)) for name, section in OBJECTIVES.items()
    }


def run_case(
    me: Rank, trainer: PolicyTrainer, critic: CriticTrainer, family: str, case: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Score the batch, then train with one algorithm after the other, each from the test's weights."""
    batch = sequences(trainer.dims.vocab_size)
    parts, microbatches = cut(trainer, me.rank, case)
    result: dict[str, dict[str, Any]] = {
        "logprobs": by_sequence(parts, microbatches, trainer.compute_logprobs(microbatches, score_all=True)),
        "values": by_sequence(parts, microbatches, critic.compute_scores(microbatches, score_all=True)),
        "steps": {},
    }
    if case.get("replay"):
        result["own_choice"] = own_choice_gap(trainer, microbatches)
    for number, name in enumerate(case.get("algorithms", ALGORITHMS)):
        if number:
            trainer.load_parameters(weights_of(get_family(family), trainer, me.rank))
        has_critic = ALGORITHMS[name].advantage == "gae"
        steps = train(trainer, critic if has_critic else None, ALGORITHMS[name], microbatches, count(batch))
        result["steps"][name] = list(islice(steps, case.get("num_steps", 2)))
    return result


def cut(trainer: PolicyTrainer, rank: int, case: dict[str, Any]) -> tuple[list[list[int]], list[Microbatch]]:
    """This data-parallel rank's members of the batch by microbatch, and the microbatches."""
    batch = sequences(trainer.dims.vocab_size)
    members = case.get("order", list(range(len(batch))))
    mine = members[coords_of(trainer.layout, rank).dp :: trainer.layout.dp]
    parts = split(mine, case.get("num_microbatches", 2))
    share, replay = case.get("share", False), case.get("replay", False)
    if share:
        parts = [sorted(part, key=lambda member: GROUPS.get(member, "")) for part in parts]
    return parts, [pack(batch, part, share=share, replay=replay) for part in parts]


def train(
    trainer: PolicyTrainer,
    critic: CriticTrainer | None,
    section: AlgorithmSection,
    microbatches: list[Microbatch],
    denominators: Denominators,
) -> Iterator[dict[str, float]]:
    """The metrics of one optimizer step after the other on one batch, the critic's before the policy's."""
    algorithm = build_algorithm(section)
    annotated, metrics = trainer.annotate(microbatches, algorithm.needs), {}
    if critic is not None:
        (annotated,), metrics = add_token_advantages([critic.annotate(annotated)], section, trainer.sum_over_data_parallel)
    while True:
        values = {} if critic is None else critic.train_minibatch(annotated, denominators, section, value_clip=0.05)
        yield metrics | values | trainer.train_minibatch(annotated, denominators, algorithm)


def by_sequence(parts: list[list[int]], microbatches: list[Microbatch], scores: list[np.ndarray]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for part, microbatch, scores_T in zip(parts, microbatches, scores, strict=True):
        for position, member in enumerate(part):
            rows = slice(*microbatch.cu_seqlens[position : position + 2].tolist())
            found[str(member)] = scores_T[rows].tolist()
    return found


def own_choice_gap(trainer: PolicyTrainer, microbatches: list[Microbatch]) -> dict[str, float]:
    """Largest difference between log-probs with experts chosen freely and with the same experts replayed, and with others."""
    experts: list[np.ndarray] = []
    free = [dataclasses.replace(microbatch, experts_TYK=None) for microbatch in microbatches]
    chosen_freely = np.concatenate(trainer.compute_logprobs(free, score_all=True, experts_out=experts))
    own = [dataclasses.replace(m, experts_TYK=e) for m, e in zip(microbatches, experts, strict=True)]
    replayed = np.concatenate(trainer.compute_logprobs(own, score_all=True))
    forced = np.concatenate(trainer.compute_logprobs(microbatches, score_all=True))
    return {
        "replayed": float(np.abs(replayed - chosen_freely).max(initial=0.0)),
        "forced": float(np.abs(forced - chosen_freely).max(initial=0.0)),
    }


def dims_with(family: str, **changes: Any) -> ModelDims:
    return dataclasses.replace(debug_dims(family), **changes)
