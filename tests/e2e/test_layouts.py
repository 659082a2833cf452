"""The quick start under every trainer layout, by overrides alone: same rollouts, same loss, same gradient norm."""

from __future__ import annotations

import json

import pytest

from tests.e2e.runs import running

pytestmark = [pytest.mark.e2e, pytest.mark.ray]

LAYOUTS = {
    "EP2": ("trainer.layout.ep=2",),
    "TP2": ("trainer.layout.ep=1", "trainer.layout.tp=2"),
    "PP2": ("trainer.layout.ep=1", "trainer.layout.pp=2"),
}
COMMON = (
    "run.num_steps=2", "run.eval_interval=0", "trainer.warm_start.num_steps=0", "model.dtype=fp32",
    "run.prompts_per_step=8", "data.sources.0.reward=reasoning_gym", "telemetry.progress=plain",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    results = {}
    for name, overrides in LAYOUTS.items():
        directory = tmp_path_factory.mktemp(name) / "run"
        with running(directory, "configs/quickstart.yaml", *COMMON, *overrides) as run:
            assert run.wait(240) == 0, run.output[-4000:]
            rollouts = (directory / "rollouts" / "step-000001.jsonl").read_text().splitlines()
            results[name] = (run.metrics(), [json.loads(line) for line in rollouts])
    return results


@pytest.mark.parametrize("name", ["TP2", "PP2"])
def test_layouts_agree(runs, name):
    (expected, expected_rollouts), (metrics, rollouts) = runs["EP2"], runs[name]
    assert [row["response"] for row in rollouts] == [row["response"] for row in expected_rollouts]
    assert expected[1]["grad_norm"] > 0
    for step in (1, 2):
        for key in ("loss/policy", "grad_norm", "reward/mean"):
            assert metrics[step][key] == pytest.approx(expected[step][key], abs=1e-4, rel=1e-4), f"step {step}: {key}"
