"""The learning-rate schedule that a phase asks for is the one that the parameters get."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_rl.config.sections import OptimizerSection
from megatron_rl.trainer.optimizer import build_schedule


def rates(section: OptimizerSection, num_steps: int, num_taken: int) -> list[float]:
    groups = [{"lr": 0.0, "max_lr": 9.0, "min_lr": 8.0, "weight_decay": 0.0} for _ in range(2)]
    schedule = build_schedule(SimpleNamespace(param_groups=groups), section, num_steps)
    taken = []
    for _ in range(num_taken):
        schedule.step(increment=1)
        assert groups[0]["lr"] == groups[1]["lr"]
        taken.append(groups[0]["lr"])
    return taken


def test_the_phase_decides_not_what_the_optimizer_was_built_with():
    section = OptimizerSection(learning_rate=2e-3, num_warmup_steps=4)
    assert rates(section, 10, 6) == pytest.approx([5e-4, 1e-3, 1.5e-3, 2e-3, 2e-3, 2e-3])


def test_linear_decay_ends_at_the_minimum():
    section = OptimizerSection(learning_rate=1e-2, min_learning_rate=2e-3, schedule="linear")
    taken = rates(section, 5, 7)
    assert taken == sorted(taken, reverse=True)
    assert taken[4:] == pytest.approx([2e-3] * 3)
