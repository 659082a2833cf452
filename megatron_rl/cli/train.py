"""`megatron-rl train CONFIG [key=value ...]`: run an experiment."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.hf_folder import CheckpointError
from megatron_rl.config.algorithm_sections import ReferenceSection
from megatron_rl.config.load import LoadedExperiment, load_experiment
from megatron_rl.config.provenance import Problem
from megatron_rl.config.resolve import resolve
from megatron_rl.config.sections import ExperimentConfig
from megatron_rl.controller.experiment import Experiment, UnservedError
from megatron_rl.controller.layouts import engine_layout, trainer_layout
from megatron_rl.controller.loop import PhaseTimeoutError
from megatron_rl.controller.model_setup import ModelSetup, build_model_setup, reference_model
from megatron_rl.controller.placement import PlacementError
from megatron_rl.controller.remote import ActorDiedError
from megatron_rl.controller.run_directory import RunDirectoryError
from megatron_rl.controller.stop_signals import Interrupted
from megatron_rl.data.errors import DataError
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.layout.checks import check_context, check_engine_layout, check_router_replay, check_trainer_layout
from megatron_rl.model_families.hf_config import UnsupportedModelError
from megatron_rl.resharding.verify import SyncError
from megatron_rl.rewards.registry import RewardError
from megatron_rl.rollout.generate.client import GenerateError
from megatron_rl.rollout.sglang.errors import EngineDeadError, EngineReplyError

PERSONS_MISTAKES = (
    *(CheckpointError, UnsupportedModelError, DataError, RunDirectoryError),
    *(RewardError, GenerateError, UnservedError),
)
"""What a person can mend: one line, exit code 2."""
RUN_FAILURES = (
    *(ActorDiedError, EngineDeadError, EngineReplyError, SyncError),
    *(PhaseTimeoutError, PlacementError, FloatingPointError, TimeoutError),
)
"""What stopped a run: one line, exit code 1."""


def run(args: argparse.Namespace) -> int:
    """Train to the end; returns the exit status. Messages go to stderr. A ConfigError is the caller's to print."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    try:
        experiment = build_experiment(args.config, args.overrides)
        asyncio.run(experiment.execute())
    except PERSONS_MISTAKES as error:
        return _fail(error, 2)
    except Interrupted as error:
        return _fail(error, 130)
    except RUN_FAILURES as error:
        return _fail(error, 1)
    print(next_steps(experiment.directory.path, args.config), file=sys.stderr)
    return 0


def next_steps(directory: Path, config: str) -> str:
    """What a person reads at the end of a run."""
    programs = Path(sys.executable).parent  # this environment need not be on the PATH
    return (
        f"\ndone: everything is in {directory}\n"
        f"  {programs}/tensorboard --logdir {directory}/tensorboard     the curves and sample texts\n"
        f"  less {directory}/rollouts/step-000001.jsonl      what the model wrote, step by step\n"
        f"  {programs}/megatron-rl train {config} run.name=tp2 trainer.layout.ep=1 trainer.layout.tp=2     another layout"
    )


def build_experiment(path: str, overrides: list[str]) -> Experiment:
    """Load, resolve and check everything that needs no process. Raises one of `PERSONS_MISTAKES` or ConfigError."""
    loaded = load_experiment(path, overrides)
    config = resolve(loaded.config)
    tokenizer = load_tokenizer(config.data.tokenizer, config.model.path)
    model = build_model_setup(config.model, config.run.seed, tokenizer.vocab_size)
    check_model(loaded, config, model)
    return Experiment(config, model, tokenizer)


def _fail(error: Exception, status: int) -> int:
    print(f"megatron-rl: {error}", file=sys.stderr)
    return status


def check_model(loaded: LoadedExperiment, config: ExperimentConfig, model: ModelSetup) -> None:
    """Refuse sizes that the model does not divide into. Raises ConfigError with file and line."""
    loaded.provenance.reject(check_trainer_layout(model.dims, trainer_layout(config.trainer.layout)))
    if config.critic.layout is not None:
        loaded.provenance.reject(check_trainer_layout(model.dims, trainer_layout(config.critic.layout), "critic.layout"))
    loaded.provenance.reject(check_engine_layout(model.dims, engine_layout(config.rollout), f"rollout.{config.rollout.engine}"))
    loaded.provenance.reject(check_router_replay(model.dims, config.algorithm.router_replay))
    for name in ("sampling", "eval_sampling"):
        most = getattr(config.rollout, name).max_new_tokens
        positions, prompt = model.dims.max_positions, config.data.max_prompt_tokens
        loaded.provenance.reject(check_context(positions, prompt, most, f"rollout.{name}"))
    reference = config.algorithm.reference
    loaded.provenance.reject(check_teacher(reference, model))
    if reference.layout is not None:
        dims, layout = reference_model(reference, model).dims, trainer_layout(reference.layout)
        loaded.provenance.reject(check_trainer_layout(dims, layout, "algorithm.reference.layout"))


def check_teacher(section: ReferenceSection, model: ModelSetup) -> Iterator[Problem]:
    """A teacher scores the policy's tokens; where its weights are swapped into the policy's model, it must be one of the
    same dimensions."""
    if section.path is None:
        return
    teacher = reference_model(section, model)
    if section.layout is not None:
        if teacher.dims.vocab_size != model.dims.vocab_size:
            reason = f"has a vocabulary of {teacher.dims.vocab_size}; expected the policy's {model.dims.vocab_size}"
            yield "algorithm.reference.path", reason
    elif (teacher.family_name, teacher.dims) != (model.family_name, model.dims):
        reason = "is swapped into the policy's model; expected a folder of the policy's own family and dimensions"
        yield "algorithm.reference.path", f"{reason}, or ranks of its own (algorithm.reference.layout)"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        description="Run an experiment to its end. Everything it leaves is in its run directory.",
        epilog="example:\n  megatron-rl train configs/quickstart.yaml run.seed=2 trainer.optimizer.learning_rate=2e-4",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="experiment file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example run.num_steps=20")
