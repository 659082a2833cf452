"""One short quick start: it learns beyond its warm start, and everything that it should leave is there."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.runs import running

KEYS = """
    step policy_version reward/mean time/generate_s time/reward_s time/train_s time/sync_s time/step_s rollout/efficiency
    rollout/tokens_per_s rollout/logprob_gap loss/policy loss/clip_fraction loss/entropy loss/kl_to_rollout length/mean
    length/max grad_norm learning_rate
""".split()
NUM_STEPS = 14

pytestmark = [pytest.mark.e2e, pytest.mark.ray]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("quickstart") / "run"
    overrides = (
        f"run.num_steps={NUM_STEPS}", f"run.eval_interval={NUM_STEPS}", "telemetry.progress=plain",
        "trainer.optimizer.schedule=constant",  # the decay of a whole run, squeezed into a few steps, would teach little
    )  # fmt: skip
    with running(directory, "configs/quickstart.yaml", *overrides) as run:
        assert run.wait(300) == 0, run.output[-4000:]
        run.check_nothing_left()
        yield run


def test_it_beats_its_warm_start(run):
    first, *_, last = [row["eval/accuracy"] for row in run.metrics() if "eval/accuracy" in row]
    assert first < 0.45, "the warm start alone should not solve the task"
    assert last > first + 0.05


def test_every_key_stands_at_every_step(run):
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
    for row in rows[1:]:
        assert set(KEYS) <= row.keys(), set(KEYS) - row.keys()
        assert all(math.isfinite(row[key]) for key in KEYS)
        assert row["policy_version"] == row["step"]


def test_the_engines_sample_from_the_trainers_policy(run):
    """In fp32 the two sides' log-probs agree to rounding at every step, so every sync brought the right weights."""
    assert max(row["rollout/logprob_gap"] for row in run.metrics()[1:]) < 1e-4


def test_minibatches_leave_the_old_policy(run):
    assert max(row["loss/clip_fraction"] for row in run.metrics()[1:]) > 0


def test_tensorboard_returns_the_same_values(run):
    events = EventAccumulator(str(run.directory / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    rows = run.metrics()
    for key in set(KEYS) - {"step"}:
        written = {event.step: event.value for event in events.Scalars(key)}
        for row in rows:
            if key in row:
                assert written[row["step"]] == pytest.approx(row[key], rel=1e-6, abs=1e-7)
    assert events.Tags()["tensors"], "sample texts"


def test_the_run_directory_is_complete(run):
    directory: Path = run.directory
    for name in ("resolved.yaml", "git_revision", "metrics.jsonl", "tensorboard", "rollouts", "checkpoints", "logs"):
        assert (directory / name).exists(), name
    resolved = yaml.safe_load((directory / "resolved.yaml").read_text())
    assert resolved["trainer"]["layout"]["ep"] == 2
    assert (directory / "git_revision").read_text().strip()
    assert len(list((directory / "rollouts").iterdir())) == NUM_STEPS


def test_it_says_what_to_do_next(run):
    assert str(run.directory) in run.output
    assert "tensorboard --logdir" in run.output


def test_a_run_is_not_overwritten_unasked(run):
    with running(run.directory, "configs/quickstart.yaml", "run.overwrite=false") as second:
        assert second.wait(60) == 2
        assert "already holds a run" in second.output
        assert len(second.output.strip().splitlines()) <= 3
