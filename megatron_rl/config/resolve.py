"""Every value that follows from others without looking at a model or a machine, and an experiment as text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from megatron_rl.config.algorithm_sections import AlgorithmSection
from megatron_rl.config.colocation import derive_placement
from megatron_rl.config.layout_section import LayoutSection
from megatron_rl.config.sections import CriticSection, ExperimentConfig, RolloutSection, SyncSection
from megatron_rl.config.yaml_tree import dump_plain


def resolve(config: ExperimentConfig) -> ExperimentConfig:
    """`config` with each derivable None filled in. Idempotent; a value that was given is never changed."""
    run, tokenizer = config.run, config.data.tokenizer
    if tokenizer.kind == "hf" and tokenizer.path is None:
        tokenizer = dataclasses.replace(tokenizer, path=config.model.path)
    rollout, sync = _resolve_pause(config.rollout, config.sync)
    return dataclasses.replace(
        config,
        sync=sync,
        cluster=dataclasses.replace(config.cluster, placement=derive_placement(config)),
        run=dataclasses.replace(run, directory=run.directory.replace("{name}", run.name)),
        data=dataclasses.replace(config.data, tokenizer=tokenizer),
        algorithm=_resolve_algorithm(config.algorithm, config.rollout.sampling.max_new_tokens),
        rollout=_resolve_rollout(rollout, config.data.max_prompt_tokens, config.model.dtype),
        trainer=dataclasses.replace(config.trainer, layout=_resolve_layout(config.trainer.layout)),
        critic=_resolve_critic(config.critic, config.trainer.inner_epochs),
    )


def _resolve_layout(layout: LayoutSection) -> LayoutSection:
    dp = layout.num_ranks // (layout.tp * layout.cp * layout.pp) if layout.dp is None else layout.dp
    return dataclasses.replace(layout, dp=dp, etp=derive_etp(layout))


def derive_etp(layout: LayoutSection) -> int:
    """Experts that are not spread (ep 1) are split over TP: Megatron reduces no gradient over copies there."""
    if layout.etp is not None:
        return layout.etp
    return layout.tp if layout.ep == 1 else 1


def _resolve_algorithm(algorithm: AlgorithmSection, max_new_tokens: int) -> AlgorithmSection:
    """Dr. GRPO (2503.20783) divides by a constant, the generation budget, never by the lengths of a batch."""
    punishment = algorithm.overlong_punishment
    if punishment.buffer_tokens is not None and punishment.max_tokens is None:
        punishment = dataclasses.replace(punishment, max_tokens=max_new_tokens)
    constant = algorithm.aggregation_constant
    if algorithm.aggregation == "seq-mean-token-sum-norm" and constant is None:
        constant = float(max_new_tokens)
    reference = algorithm.reference
    if reference.layout is not None:
        reference = dataclasses.replace(reference, layout=_resolve_layout(reference.layout))
    return dataclasses.replace(
        algorithm, aggregation_constant=constant, overlong_punishment=punishment, reference=reference
    )


def _resolve_critic(critic: CriticSection, inner_epochs: int) -> CriticSection:
    return dataclasses.replace(
        critic,
        layout=None if critic.layout is None else _resolve_layout(critic.layout),
        inner_epochs=inner_epochs if critic.inner_epochs is None else critic.inner_epochs,
    )


def _resolve_rollout(rollout: RolloutSection, max_prompt_tokens: int, dtype: Any) -> RolloutSection:
    eval_sampling = rollout.eval_sampling or rollout.sampling
    longest = max_prompt_tokens + max(rollout.sampling.max_new_tokens, eval_sampling.max_new_tokens)
    embedded = rollout.embedded
    embedded = dataclasses.replace(
        embedded,
        max_context=longest if embedded.max_context is None else embedded.max_context,
        dtype=dtype if embedded.dtype is None else embedded.dtype,
    )
    max_staleness = derive_max_staleness(rollout)
    return dataclasses.replace(rollout, eval_sampling=eval_sampling, embedded=embedded, max_staleness=max_staleness)


def derive_max_staleness(rollout: RolloutSection) -> int:
    """The least with which every group that is started can be trained; one more than it needs when asynchronous."""
    if rollout.max_staleness is not None:
        return rollout.max_staleness
    if rollout.schedule == "asynchronous":
        return 2
    if rollout.leftover != "resume":
        return 0
    return math.ceil(rollout.oversample) - (1 if rollout.schedule == "lockstep" else 0)


def _resolve_pause(rollout: RolloutSection, sync: SyncSection) -> tuple[RolloutSection, SyncSection]:
    """`rollout.partial.kv` and `sync.pause_mode` say the same; either may be left out. `auto` leaves the mode open."""
    kv, mode = rollout.partial.kv, sync.pause_mode
    if kv is None:
        kv = "keep" if mode == "in_place" else "drop"
    if mode is None and kv != "auto":
        mode = "in_place" if kv == "keep" else "retract"
    partial = dataclasses.replace(rollout.partial, kv=kv)
    return dataclasses.replace(rollout, partial=partial), dataclasses.replace(sync, pause_mode=mode)


def dump_yaml(config: ExperimentConfig) -> str:
    """The experiment as YAML; `load_experiment` of that text gives an equal config."""
    return dump_plain(_plain(config))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def batch_equation(config: ExperimentConfig) -> str:
    """How one training step is cut: prompts x samples -> minibatches -> samples per rank -> microbatches, in words."""
    run, trainer = config.run, config.trainer
    layout = _resolve_layout(trainer.layout)
    num_samples = run.prompts_per_step * run.samples_per_prompt
    per_minibatch = num_samples // trainer.minibatches_per_step
    per_rank = -(-per_minibatch // (layout.dp or 1))
    num_optimizer_steps = trainer.minibatches_per_step * trainer.inner_epochs
    longest = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    fit = max(1, trainer.max_tokens_per_microbatch // longest)
    multiple = f", a multiple of pp {layout.pp}" if layout.virtual_pp > 1 else ""
    return "\n".join(
        (
            f"{run.prompts_per_step} prompts x {run.samples_per_prompt} samples = {num_samples} samples per step",
            f"-> {trainer.minibatches_per_step} minibatches of {per_minibatch} samples,"
            f" {trainer.inner_epochs} inner epochs = {num_optimizer_steps} optimizer steps",
            f"-> about {per_rank} samples per data-parallel rank (dp {layout.dp},"
            f" {layout.num_ranks} ranks = tp {layout.tp} x cp {layout.cp} x pp {layout.pp} x dp {layout.dp})",
            f"-> microbatches of at most {trainer.max_tokens_per_microbatch} tokens:"
            f" {-(-per_rank // fit)} per rank if every sequence has all of its {longest} tokens, else fewer{multiple}",
        )
    )
