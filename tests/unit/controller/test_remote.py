"""The trainers of a run in which the critic or the reference has ranks of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from megatron_rl.config.sections import OptimizerSection
from megatron_rl.controller.batcher import StepBatch
from megatron_rl.controller.remote import RoleGroups
from megatron_rl.types.training import TrainBatch


class Group:
    """Records calls. The policy's training step ends only when the critic's has begun."""

    def __init__(self, name: str, calls: list[str], both: asyncio.Event) -> None:
        self.name, self.calls, self.both = name, calls, both

    async def begin_phase(self, section: OptimizerSection, num_steps: int) -> None:
        self.calls.append(f"{self.name} begin {num_steps}")

    async def compute_values(self, batch: TrainBatch) -> Any:
        self.calls.append(f"{self.name} values of {batch.num_samples}")
        return {0: np.ones(2)}

    async def compute_logprobs(self, batch: TrainBatch) -> Any:
        self.calls.append(f"{self.name} logprobs of {batch.num_samples}")
        return {0: np.zeros(2)}

    async def begin_critic_phase(self, section: OptimizerSection, num_steps: int) -> None:
        self.calls.append(f"{self.name} begin critic {num_steps}")

    async def sft_step(self, batch: TrainBatch) -> dict[str, float]:
        self.calls.append(f"{self.name} sft {batch.num_samples}")
        return {}

    async def value_step(self, batch: TrainBatch) -> dict[str, float]:
        self.calls.append(f"{self.name} value step {batch.num_samples}")
        return {"loss/value": 1.0}

    async def train_step(self, batch: Any, *args: Any) -> dict[str, float]:
        self.calls.append(f"{self.name} train {sorted(args[1]) if args else ''}".strip())
        if self.name == "policy":
            await asyncio.wait_for(self.both.wait(), 10)
        self.both.set()
        return {f"{self.name}/grad_norm": 1.0}


def roles(calls: list[str], both: asyncio.Event, *others: str, **options: Any) -> RoleGroups:
    async def load_policy(group: Any) -> None:
        calls.append(f"{group.name} becomes the policy")

    groups: list[Any] = [Group(name, calls, both) if name in others else None for name in ("critic", "reference")]
    return RoleGroups(Group("policy", calls, both), *groups, load_policy, **options)  # type: ignore[arg-type]


def test_the_critic_starts_from_the_policy_once_and_both_train_together() -> None:
    async def run() -> tuple[list[str], dict[str, float]]:
        calls: list[str] = []
        trainers = roles(calls, asyncio.Event(), "critic", critic_starts_anew=True)
        section, batch = OptimizerSection(), StepBatch(TrainBatch((), 3), TrainBatch((), 4))
        await trainers.begin_phase(section, 9)
        await trainers.begin_critic_phase(section, 5)
        await trainers.value_step(batch)
        await trainers.begin_critic_phase(section, 6)
        return calls, await trainers.train_step(batch, 2)

    calls, metrics = asyncio.run(run())
    assert calls == [
        "policy begin 9", "critic becomes the policy", "critic begin 5", "critic value step 4", "critic begin 6",
        "critic values of 4", "policy train ['values']", "critic train",
    ]  # fmt: skip
    assert metrics == {"policy/grad_norm": 1.0, "critic/grad_norm": 1.0}


def reference_calls(*others: str, **options: Any) -> list[str]:
    """What is called in a warm start of one step and RL of three."""

    async def run() -> list[str]:
        calls: list[str] = []
        both = asyncio.Event()
        both.set()
        trainers = roles(calls, both, "reference", *others, **options)
        section = OptimizerSection()
        batch = StepBatch(TrainBatch((), 3), TrainBatch((), 4) if "critic" in others else None, TrainBatch((), 5))
        await trainers.begin_phase(section, 1)
        await trainers.sft_step(TrainBatch((), 2))
        await trainers.begin_phase(section, 9)
        await trainers.begin_critic_phase(section, 7)
        for step in range(3):
            await trainers.train_step(batch, step)
        return calls

    return asyncio.run(run())


def test_the_reference_is_the_policy_as_rl_began_and_as_it_was_at_a_refresh() -> None:
    step = ["reference logprobs of 5", "policy train ['ref_logprobs']"]
    becomes = "reference becomes the policy"
    start = ["policy begin 1", "policy sft 2", "policy begin 9"]
    assert reference_calls() == [*start, becomes, "policy begin critic 7", *step, *step, *step]
    refreshed = reference_calls(refresh_interval=2)
    assert refreshed == [*start, becomes, "policy begin critic 7", *step, *step, becomes, *step]
    assert reference_calls(is_teacher=True) == [*start, "policy begin critic 7", *step, *step, *step]


def test_critic_and_reference_score_before_anyone_trains() -> None:
    assert reference_calls("critic")[-4:] == [
        "critic values of 4", "reference logprobs of 5", "policy train ['ref_logprobs', 'values']", "critic train",
    ]  # fmt: skip


def test_a_policy_that_has_not_moved_is_what_the_reference_started_from() -> None:
    async def run() -> list[str]:
        calls: list[str] = []
        await roles(calls, asyncio.Event(), "reference").begin_phase(OptimizerSection(), 9)
        return calls

    assert asyncio.run(run()) == ["policy begin 9"]
