"""What cannot be with engines on the trainers' GPUs is refused at its key; what can be is the default on 8 to 64 GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.checks import check_experiment
from megatron_rl.config.errors import ConfigError
from megatron_rl.config.load import load_experiment
from megatron_rl.config.resolve import resolve

BODY = """\
model: {family: llama, path: some/folder}
data: {sources: [{name: sums, kind: reasoning_gym, task: chain_sum}]}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "exp.yaml"
    file.write_text(BODY)
    return file


COLOCATED = ["cluster.placement=colocated", "trainer.layout.num_ranks=4", "rollout={engine: sglang, sglang: {tp_size: 4}}"]


@pytest.mark.parametrize(
    ("override", "key_path", "reason"),
    [
        ("rollout.partial.kv=keep", "rollout.partial.kv", "expected drop with cluster.placement colocated"),
        ("rollout.partial.kv=auto", "rollout.partial.kv", "the KV cache is released"),
        ("sync.pause_mode=in_place", "sync.pause_mode", "expected retract or abort with"),
        ("rollout.schedule=asynchronous", "rollout.schedule", "expected lockstep"),
        ("sync.staging=host", "sync.staging", "no old version serves"),
        ("sync.full_sync_interval=3", "sync.full_sync_interval", "holds nothing that a delta could change"),
        ("cluster.gpus_per_trainer_rank=1", "cluster.gpus_per_engine_rank", "they are the same GPUs, got 0"),
        ("trainer.layout.num_ranks=8", "trainer.layout.num_ranks", "1 x rollout.sglang.tp_size 4 = 4"),
        ("rollout={engine: embedded, num_engines: 3}", "trainer.layout.num_ranks", "a multiple of rollout.num_engines 3"),
        (
            "rollout.sglang={urls: [a], key_file: k, receiver_dirs: [b]}",
            "rollout.sglang.urls",
            "engines that run elsewhere share no GPU",
        ),
        ("critic.layout={num_ranks: 2}", "critic.layout", "the critic takes turns with the policy"),
        ("critic.pretraining.num_steps=5", "critic.pretraining.num_steps", "would need the engines back), got 5"),
    ],
)
def test_what_does_not_go_with_shared_gpus_is_refused(path: Path, override: str, key_path: str, reason: str) -> None:
    assert not check_experiment(load_experiment(path, COLOCATED).config)
    with pytest.raises(ConfigError) as caught:
        load_experiment(path, [*COLOCATED, override])
    assert caught.value.key_path == key_path
    assert reason in str(caught.value)


ON_16_GPUS = [
    "trainer.layout.num_ranks=16", "rollout={engine: sglang, num_engines: 2, sglang: {tp_size: 8}}",
    "cluster={gpus_per_trainer_rank: 1, gpus_per_engine_rank: 1}",
]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "placement"),
    [
        ("cluster.placement=null", "colocated"),
        ("cluster.placement=disaggregated", "disaggregated"),
        ("cluster={gpus_per_trainer_rank: 0, gpus_per_engine_rank: 0}", "disaggregated"),
        ("rollout.schedule=one_step_off", "disaggregated"),
        ("rollout.partial.kv=keep", "disaggregated"),
        ("rollout.num_engines=1", "disaggregated"),
        ("trainer.layout.num_ranks=32", "disaggregated"),
        ("critic.layout={num_ranks: 2}", "disaggregated"),
    ],
)
def test_where_nobody_chose(path: Path, override: str, placement: str) -> None:
    config = resolve(load_experiment(path, [*ON_16_GPUS, override]).config)
    assert config.cluster.placement == placement
    assert resolve(config) == config


COUNTS = [(1, "disaggregated"), (2, "colocated"), (16, "colocated"), (17, "disaggregated")]


@pytest.mark.parametrize(("num_engines", "placement"), COUNTS)
def test_from_8_to_64_gpus(path: Path, num_engines: int, placement: str) -> None:
    sizes = [f"trainer.layout.num_ranks={4 * num_engines}", f"rollout.num_engines={num_engines}", "rollout.sglang.tp_size=4"]
    assert resolve(load_experiment(path, [*ON_16_GPUS, *sizes]).config).cluster.placement == placement
