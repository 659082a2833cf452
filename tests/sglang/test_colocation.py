"""Three steps of the quick start on a real SGLang server that shares its bundle with the trainers."""

from __future__ import annotations

import itertools
import json

import pytest
from safetensors import safe_open

from megatron_rl.scheduling.colocation import Move
from tests.e2e.runs import running

pytestmark = [pytest.mark.sglang, pytest.mark.ray, pytest.mark.slow]

SHORT = (
    "run.num_steps=3", "run.eval_interval=0", "run.prompts_per_step=8", "trainer.warm_start.num_steps=2",
    "telemetry.progress=plain", "rollout.engine=sglang", "rollout.num_engines=1", "rollout.sglang.tp_size=2",
    "checkpoint.export_hf_at_end=true", "sync.probe_interval=1", "cluster.start_timeout_s=900",
)  # fmt: skip
BEFORE_SYNC = [Move.OFFLOAD_OPTIMIZER, Move.RESUME_WEIGHTS, Move.SYNC, Move.OFFLOAD_PARAMETERS, Move.RESUME_CACHE]


def train(directory, placement):
    with running(directory, "configs/quickstart.yaml", *SHORT, f"cluster.placement={placement}") as run:
        assert run.wait(1500) == 0, run.output[-4000:]
        run.check_nothing_left()
        rollouts = [sorted((directory / "rollouts").iterdir())[number].read_text() for number in range(3)]
        moves = []
        for line in (directory / "trace.json").read_text().splitlines():
            event = line.strip().rstrip(",")
            if event.startswith("{") and "colocation/" in event:
                moves.append(json.loads(event)["name"].removeprefix("colocation/"))
        return run.metrics(), rollouts, moves


def tensors_of(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}
    return found


def test_shared_and_separate_bundles_train_the_same_weights(tmp_path):
    results = {placement: train(tmp_path / placement, placement) for placement in ("disaggregated", "colocated")}
    (metrics, rollouts, none), (shared_metrics, shared_rollouts, moves) = results.values()
    assert rollouts == shared_rollouts and none == []
    weights, shared = (tensors_of(tmp_path / placement / "checkpoints/final") for placement in results)
    assert weights.keys() == shared.keys() and len(weights) > 10
    assert all(weights[name].equal(shared[name]) for name in weights)
    assert [row["loss/policy"] for row in shared_metrics[1:]] == [row["loss/policy"] for row in metrics[1:]]
    turns = [list(turn) for is_train, turn in itertools.groupby(moves, lambda move: move == Move.TRAIN) if not is_train]
    first, *others = turns
    assert first == [Move.RELEASE_ENGINES, Move.ONLOAD_TRAINERS]
    assert others == [[*BEFORE_SYNC, Move.RELEASE_ENGINES, Move.ONLOAD_TRAINERS]] * 4
    row = shared_metrics[-1]
    for state in ("trainer_parameters", "trainer_gradients", "trainer_optimizer", "engine_kv_cache", "engine_weights"):
        assert f"memory/{state}_bytes" in row
    assert row["memory/trainer_optimizer_bytes"] > row["memory/trainer_parameters_bytes"] > 0
