"""When trainers and engines may share GPUs, and when they do without being told."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.layout_section import LayoutSection
from megatron_rl.config.provenance import Problem
from megatron_rl.config.sections import ClusterSection, CriticSection, ExperimentConfig, Placement, RolloutSection, SyncSection

FEWEST_GPUS, MOST_GPUS = 8, 64
"""Of the trainers, where colocation is the default: below there is little to share, above asynchrony pays more."""


def derive_placement(config: ExperimentConfig) -> Placement:
    """What was asked for, else `colocated` on 8 to 64 GPUs where nothing stands against it."""
    if config.cluster.placement is not None:
        return config.cluster.placement
    num_gpus = config.trainer.layout.num_ranks * config.cluster.gpus_per_trainer_rank
    fits = FEWEST_GPUS <= num_gpus <= MOST_GPUS and not any(check_colocation(config))
    return "colocated" if fits else "disaggregated"


def check_colocation(config: ExperimentConfig) -> Iterator[Problem]:
    """What of an experiment cannot be with `cluster.placement: colocated`."""
    yield from _check_engines(config.cluster, config.rollout, config.sync)
    yield from _check_layout(config.trainer.layout, config.rollout, config.critic)
    if config.algorithm.reference.layout is not None:
        reason = "expected null with cluster.placement colocated: its weights are swapped into the policy"
        yield "algorithm.reference.layout", reason


def _check_engines(cluster: ClusterSection, rollout: RolloutSection, sync: SyncSection) -> Iterator[Problem]:
    """Engines give up weights and KV cache for every training step: nothing of theirs outlives it."""
    why = "with cluster.placement colocated"
    if rollout.schedule != "lockstep":
        yield "rollout.schedule", f"expected lockstep {why} (engines rest while trainers train), got {rollout.schedule}"
    if rollout.partial.kv in ("keep", "auto"):
        yield "rollout.partial.kv", f"expected drop {why} (the KV cache is released), got {rollout.partial.kv}"
    if sync.pause_mode == "in_place":
        yield "sync.pause_mode", f"expected retract or abort {why} (the KV cache is released), got in_place"
    if sync.staging == "host":
        yield "sync.staging", f"expected none {why} (no old version serves while the new one comes), got host"
    if sync.full_sync_interval > 1:
        reason = f"expected 1 {why} (a released engine holds nothing that a delta could change)"
        yield "sync.full_sync_interval", f"{reason}, got {sync.full_sync_interval}"
    if rollout.engine == "sglang" and rollout.sglang.urls:
        yield "rollout.sglang.urls", f"expected none {why}: engines that run elsewhere share no GPU"
    if cluster.gpus_per_engine_rank != cluster.gpus_per_trainer_rank:
        expected = f"expected cluster.gpus_per_trainer_rank ({cluster.gpus_per_trainer_rank:g}) {why}"
        yield "cluster.gpus_per_engine_rank", f"{expected}: they are the same GPUs, got {cluster.gpus_per_engine_rank:g}"


def _check_layout(layout: LayoutSection, rollout: RolloutSection, critic: CriticSection) -> Iterator[Problem]:
    """Every node of an engine shares its bundle with equally many trainer ranks; of SGLang, one for each of its ranks."""
    if critic.layout is not None:
        yield "critic.layout", "expected null with cluster.placement colocated: the critic takes turns with the policy"
    if critic.pretraining.num_steps:
        reason = "expected 0 with cluster.placement colocated (each of its steps would need the engines back)"
        yield "critic.pretraining.num_steps", f"{reason}, got {critic.pretraining.num_steps}"
    is_sglang = rollout.engine == "sglang"
    num_nodes = rollout.sglang.num_nodes if is_sglang else 1
    num_places = rollout.num_engines * num_nodes
    needed = num_places * max(rollout.sglang.tp_size // num_nodes, 1)
    if is_sglang and layout.num_ranks != needed:
        engines = f"rollout.num_engines {rollout.num_engines} x rollout.sglang.tp_size {rollout.sglang.tp_size} = {needed}"
        yield "trainer.layout.num_ranks", f"expected {engines} with cluster.placement colocated, got {layout.num_ranks}"
    elif layout.num_ranks % num_places:
        reason = f"expected a multiple of rollout.num_engines {num_places} with cluster.placement colocated"
        yield "trainer.layout.num_ranks", f"{reason}, got {layout.num_ranks}"
