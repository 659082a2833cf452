"""What one process does to show a worker with a critic: value pretraining on a task that can be learned, then VAPO steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.batching.build import build_train_batch
from megatron_rl.checkpoint.hf_folder import CheckpointError, write_folder
from megatron_rl.config.algorithm_sections import AlgorithmSection, KlSection, ReferenceSection
from megatron_rl.config.layout_section import LayoutSection
from megatron_rl.config.sections import (
    CriticSection,
    OptimizerSection,
    SyncSection,
    TrainerSection,
)
from megatron_rl.controller.critic_worker import CriticWorker
from megatron_rl.controller.model_setup import ModelSetup
from megatron_rl.controller.policy_worker import PolicyWorker
from megatron_rl.controller.reference_worker import ReferenceWorker
from megatron_rl.controller.setups import WorkerSetup
from megatron_rl.model_families.registry import get_family
from megatron_rl.model_families.value_model import value_model_of
from megatron_rl.types.layout import EngineLayout, ParallelLayout
from megatron_rl.types.training import TrainBatch, TrainSample
from tests.distributed.walk import SpreadSource, debug_dims

FAMILY = "llama"
RATE = OptimizerSection(learning_rate=2e-3, weight_decay=0.0)


def show_worker(folder: Path) -> dict[str, Any]:
    """On one rank, with the weights of a folder that is a reward model too."""
    model = write_reward_model(folder / "model")
    results: dict[str, Any] = {}
    kl = KlSection(coefficient=0.1, estimator="k1", placement="reward")
    with_kl = AlgorithmSection(name="ppo", advantage="gae", loss="ppo", clip_low=0.2, aggregation="token-mean", kl=kl)
    worker = start(model, with_kl, CriticSection(inner_epochs=2, optimizer=RATE))
    try:
        worker.begin_phase(RATE, 8)
        results["start"] = weights_in(worker)
        worker.begin_critic_phase(RATE, 48)
        results["pretraining"] = [worker.value_step(batch_of(step)) for step in range(24)]
        results["pretrained"] = weights_in(worker)
        worker.begin_critic_phase(RATE, 4)
        results["step"] = worker.train_step(batch_of(99), 0)
        results["stepped"] = weights_in(worker)
    finally:
        worker.stop()
    worker = start(model, with_kl, CriticSection(path=model, inner_epochs=1))
    try:
        worker.begin_phase(RATE, 8)
        results["from_folder"] = weights_in(worker)
    finally:
        worker.stop()
    try:
        start(model, with_kl, CriticSection(path=str(folder / "none"), inner_epochs=1))
    except CheckpointError as error:
        results["no_folder"] = str(error).replace(str(folder), "")
    return results | compare_placements(model) | compare_reference_placements(model)


def compare_placements(model: str) -> dict[str, Any]:
    """The same step with a critic beside the policy, and with one that has ranks of its own."""
    vapo = AlgorithmSection(
        name="vapo", advantage="gae", lambda_alpha=0.4, loss="ppo", clip_low=0.2, clip_high=0.28, aggregation="token-mean"
    )
    section, batch = CriticSection(path=model, inner_epochs=2, optimizer=RATE), batch_of(7)
    together = start(model, vapo, section)
    try:
        together.begin_phase(RATE, 8)
        together.begin_critic_phase(RATE, 16)
        results = {"together": together.train_step(batch, 0)}
    finally:
        together.stop()
    critic = CriticWorker(setup_of(model, vapo, section), 0)
    try:
        critic.start(critic.free_address())
        critic.begin_phase(RATE, 16)
        values = critic.compute_values(batch)
        apart = critic.train_step(batch) or {}
        critic.load_policy(model)
        untrained = critic.compute_values(batch)
    finally:
        critic.stop()
    policy = start(model, vapo, None)
    try:
        policy.begin_phase(RATE, 8)
        results["apart"] = apart | (policy.train_step(batch, 0, {"values": values}) or {})
    finally:
        policy.stop()
    results["num_values"] = [len(values), max(len(values_L) for values_L in values.values())]
    results["untrained_values"] = max(float(np.abs(values_L).max()) for values_L in untrained.values())
    return results


def compare_reference_placements(model: str) -> dict[str, Any]:
    """Two steps with the reference's weights swapped into the policy, and with a reference that has ranks of its own."""
    swapped = AlgorithmSection(
        loss="ppo", clip_low=0.2, clip_high=0.2, aggregation="token-mean", kl=KlSection(0.5), positive_nll_coefficient=1.0
    )
    own = dataclasses.replace(swapped, reference=ReferenceSection(layout=LayoutSection()))
    batches = [batch_of(7), batch_of(8)]
    reference = ReferenceWorker(setup_of(model, own, None), 0)
    try:
        reference.start(reference.free_address())
        scores = [reference.compute_logprobs(batch) for batch in batches]
    finally:
        reference.stop()
    results = {}
    for name, algorithm, others in (
        ("swapped", swapped, [None, None]),
        ("own_ranks", own, [{"ref_logprobs": logprobs} for logprobs in scores]),
    ):
        policy = start(model, algorithm, None)
        try:
            policy.begin_phase(RATE, 8)
            results[name] = [policy.train_step(batch, 0, scored) for batch, scored in zip(batches, others, strict=True)]
        finally:
            policy.stop()
    return results


def start(model: str, algorithm: AlgorithmSection, critic: CriticSection | None) -> PolicyWorker:
    worker = PolicyWorker(setup_of(model, algorithm, critic), 0)
    try:
        worker.start(worker.free_address())
    except CheckpointError:
        worker.stop()
        raise
    return worker


def setup_of(model: str, algorithm: AlgorithmSection, critic: CriticSection | None) -> WorkerSetup:
    dims = debug_dims(FAMILY)
    return WorkerSetup(
        model=ModelSetup(FAMILY, dims, model, seed=1, vocab_multiple=1),
        dtype="fp32",
        section=TrainerSection(optimizer=RATE, minibatches_per_step=2),
        critic=critic,
        algorithm=algorithm,
        sync=SyncSection(),
        layout=ParallelLayout(),
        engine_layout=EngineLayout(tp=1, num_engines=1),
        temperature=1.0,
        seed=1,
        start_timeout_s=60.0,
        is_single_node=True,
    )


def batch_of(seed: int) -> TrainBatch:
    """Answers whose reward the first token tells: 1 if its id is below half of the vocabulary, else 0."""
    rng, vocab_size = np.random.default_rng(seed), debug_dims(FAMILY).vocab_size
    samples = []
    for number in range(24):
        length = int(rng.integers(4, 12))
        tokens = rng.integers(0, vocab_size, length)
        reward = float(tokens[0] < vocab_size // 2)
        samples.append(
            TrainSample(
                sample_id=f"{number}",
                group_id=f"{number // 4}",
                token_ids_L=tokens,
                loss_mask_L=np.arange(length) >= 2,
                rollout_logprobs_L=np.full(length, -4.0, dtype=np.float32),
                versions_L=np.zeros(length, dtype=np.int32),
                reward=reward,
                advantage=0.0,
                is_correct=reward == 1,
                is_truncated=False,
            )
        )
    return build_train_batch(samples, dp_size=1, num_minibatches=2, max_tokens_per_microbatch=96, seed=seed)


def weights_in(worker: PolicyWorker) -> dict[str, float]:
    """How far the critic is from the policy (embedding and decoder), and the size of its head."""
    policy, critic = worker._trainer.chunk_parameters()[0], worker._critic.trainer.chunk_parameters()[0]
    shared = policy.keys() & critic.keys()
    return {
        "num_shared": len(shared),
        "only_policy": sorted(policy.keys() - shared),
        "only_critic": sorted(critic.keys() - shared),
        "gap": max(float((policy[name] - critic[name]).abs().max()) for name in shared),
        "head": float(critic["value_head.weight"].abs().max()),
        "policy_sum": float(sum(tensor.double().sum() for tensor in policy.values())),
    }


def write_reward_model(folder: Path) -> str:
    """A folder with the language model's tensors and `score.weight`."""
    dims = debug_dims(FAMILY)
    source, tensors = SpreadSource(dims.num_layers), dict[str, torch.Tensor]()
    for family in (get_family(FAMILY), value_model_of(get_family(FAMILY))):
        for rule in family.rules_for(dims):
            for layer in range(dims.num_layers if rule.is_layered else 1):
                for template in rule.hf_names:
                    name = template.format(layer=layer)
                    tensors[name] = source.whole(name, family.shape_of(template, dims))
    write_folder(folder, get_family(FAMILY).hf_from_dims(dims), [tensors])
    return str(folder)
