"""Signals and deaths: a run that must stop stops, says why, and leaves nothing behind."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.runs import running

pytestmark = [pytest.mark.e2e, pytest.mark.ray]

SMALL = (
    "run.eval_interval=1", "run.num_eval_prompts=64", "run.num_steps=1000", "rollout.num_engines=1",
    "telemetry.progress=live", "trainer.layout.num_ranks=1", "trainer.layout.ep=1", "trainer.warm_start.num_steps=2",
)  # fmt: skip
PHASES = [
    ("warm_start", signal.SIGINT, ("trainer.warm_start.num_steps=1000",)),
    ("rollout", signal.SIGTERM, ()),
    ("train", signal.SIGINT, ()),
    ("sync", signal.SIGTERM, ()),
    ("eval", signal.SIGINT, ()),
]


@pytest.mark.parametrize(("phase", "number", "overrides"), PHASES, ids=[phase for phase, *_ in PHASES])
def test_a_signal_in_any_phase_stops_everything(tmp_path, phase, number, overrides):
    with running(tmp_path / "run", "configs/quickstart.yaml", *SMALL, *overrides) as run:
        run.wait_for(f"[{phase}]", 120)
        os.kill(run.process.pid, number)
        assert run.wait(60) == 130, run.output[-4000:]
        assert number.name in run.output
        run.check_nothing_left()


def test_a_signal_while_starting_stops_everything(tmp_path):
    with running(tmp_path / "run", "configs/quickstart.yaml", *SMALL) as run:
        run.wait_for("starting 2 processes", 60)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait(90) == 130, run.output[-4000:]
        run.check_nothing_left()


@pytest.mark.parametrize(("title", "name"), [("ray::EngineActor", "engine-0"), ("ray::TrainerActor", "trainer-0")])
def test_a_process_that_dies_stops_the_run_and_is_named(tmp_path, title, name):
    with running(tmp_path / "run", "configs/quickstart.yaml", *SMALL) as run:
        run.wait_for("step 1/", 120)
        victim = next(pid for pid, command in run.processes().items() if command.startswith(title))
        os.kill(victim, signal.SIGKILL)
        assert run.wait(60) == 1, run.output[-4000:]
        assert f"{name} died" in run.output
        run.check_nothing_left()
