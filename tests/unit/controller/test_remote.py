"""The trainers of a run whose critic has ranks of its own."""

from __future__ import annotations

import asyncio
from typing import Any

from megatron_rl.config.sections import OptimizerSection
from megatron_rl.controller.batcher import StepBatch
from megatron_rl.controller.remote import PolicyAndCritic
from megatron_rl.types.training import TrainBatch


class Group:
    """Records calls. The policy's training step ends only when the critic's has begun."""

    def __init__(self, name: str, calls: list[str], both: asyncio.Event) -> None:
        self.name, self.calls, self.both = name, calls, both

    async def load_policy(self, folder: str) -> None:
        self.calls.append(f"{self.name} load {folder}")

    async def begin_phase(self, section: OptimizerSection, num_steps: int) -> None:
        self.calls.append(f"{self.name} begin {num_steps}")

    async def compute_values(self, batch: TrainBatch) -> Any:
        self.calls.append(f"{self.name} values of {batch.num_samples}")
        return "reference"

    async def value_step(self, batch: TrainBatch) -> dict[str, float]:
        self.calls.append(f"{self.name} value step {batch.num_samples}")
        return {"loss/value": 1.0}

    async def train_step(self, batch: Any, *args: Any) -> dict[str, float]:
        self.calls.append(f"{self.name} train {args}")
        if self.name == "policy":
            await asyncio.wait_for(self.both.wait(), 10)
        self.both.set()
        return {f"{self.name}/grad_norm": 1.0}


def test_the_critic_starts_from_the_policy_once_and_both_train_together() -> None:
    async def run() -> tuple[list[str], dict[str, float]]:
        calls: list[str] = []
        both = asyncio.Event()

        async def export() -> str:
            calls.append("export")
            return "folder"

        trainers: Any = PolicyAndCritic(Group("policy", calls, both), Group("critic", calls, both), export)  # type: ignore[arg-type]
        section, batch = OptimizerSection(), StepBatch(TrainBatch((), 3), TrainBatch((), 4))
        await trainers.begin_phase(section, 9)
        await trainers.begin_critic_phase(section, 5)
        await trainers.value_step(batch)
        await trainers.begin_critic_phase(section, 6)
        return calls, await trainers.train_step(batch, 2)

    calls, metrics = asyncio.run(run())
    assert calls == [
        "policy begin 9", "export", "critic load folder", "critic begin 5", "critic value step 4", "critic begin 6",
        "critic values of 4", "policy train (2, 'reference')", "critic train ()",
    ]  # fmt: skip
    assert metrics == {"policy/grad_norm": 1.0, "critic/grad_norm": 1.0}
