"""Whole runs on SGLang engines that span nodes, pass weights on, or were started elsewhere."""

from __future__ import annotations

import secrets

import pytest

from megatron_rl.config.load import load_experiment
from megatron_rl.config.resolve import resolve
from megatron_rl.config.rollout_sections import SglangSection
from megatron_rl.controller.model_setup import build_model_setup
from megatron_rl.controller.sglang_host import write_model_config
from megatron_rl.data.tokenizer import load_tokenizer
from tests.e2e.runs import ROOT, running
from tests.sglang.conftest import started

pytestmark = [pytest.mark.sglang, pytest.mark.ray, pytest.mark.slow]

CONFIG = "configs/quickstart.yaml"
SHORT = (
    "run.num_steps=2", "run.eval_interval=0", "run.prompts_per_step=4", "trainer.warm_start.num_steps=1",
    "telemetry.progress=plain", "rollout.engine=sglang", "rollout.num_engines=1", "rollout.sglang.tp_size=2",
)  # fmt: skip


def check(run) -> None:
    assert run.wait(400) == 0, run.output[-4000:]
    rows = run.metrics()
    assert [row["policy_version"] for row in rows] == [0, 1, 2]
    # What the engine sampled with is what the trainer computes: the synced weights, not the random ones it began with.
    assert all(row["rollout/logprob_gap"] < 1e-4 for row in rows[1:]), rows
    run.check_nothing_left()


def test_an_engine_over_two_nodes(tmp_path):
    with running(tmp_path / "run", CONFIG, *SHORT, "rollout.sglang.num_nodes=2") as run:
        check(run)
    assert (tmp_path / "run/logs/engine-0-node-1.log").exists()


def test_the_death_of_a_further_node_names_it(tmp_path):
    with running(tmp_path / "run", CONFIG, *SHORT, "rollout.sglang.num_nodes=2", "run.num_steps=500") as run:
        run.wait_for("step 1/", 400)
        # Of the two servers, the second node's: its log is the one that its process writes.
        for pid, command in run.processes().items():
            if "sglang.launch_server" in command and "--node-rank 1" in command and "guardian" not in command:
                run.kill_process(pid)
        assert run.wait(120) == 1
        assert "engine-0-node-1" in run.output.strip().splitlines()[-1]
        run.check_nothing_left()


def test_engines_pass_weights_on(tmp_path):
    engines = ("rollout.num_engines=2", "rollout.sglang.tp_size=1")
    with running(tmp_path / "run", CONFIG, *SHORT, *engines, "sync.relay=true", "sync.probe_interval=1") as run:
        check(run)  # trainers send each weight to one engine: both are probed, and both sample


def test_an_engine_that_was_started_elsewhere(tmp_path, loop):
    config = resolve(load_experiment(ROOT / CONFIG, list(SHORT)).config)
    tokenizer = load_tokenizer(config.data.tokenizer, config.model.path)
    model = build_model_setup(config.model, config.run.seed, tokenizer.vocab_size)
    folder = write_model_config(model, tmp_path / "model")
    directory = tmp_path / "engine"
    with started(folder, directory, SglangSection(tp_size=2, num_concurrent=64), loop, load_format="dummy") as server:
        attached = (
            f"rollout.sglang.urls=[{server.server.url}]",
            f"rollout.sglang.key_file={server.work_dir / 'keys.yaml'}",
            f"rollout.sglang.receiver_dirs=[{server.receiver_dir}]",
        )
        for number in range(2):  # and a second run finds it as the first left it
            with running(tmp_path / f"run-{number}", CONFIG, *SHORT, *attached) as run:
                check(run)
        server.server.raise_if_dead()
        assert secrets.compare_digest((server.receiver_dir / "key").read_bytes(), server.receiver_key)
