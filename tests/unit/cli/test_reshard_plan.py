"""The command on the quick start and on a published model: table, JSON, picture, and mistakes in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_rl.cli.main import main

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
QWEN = str(ROOT / "configs" / "experiments" / "qwen3_30b_a3b_2x8.yaml")
SMALL = ["model.dims.num_hidden_layers=4", "model.dims.num_experts=16"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["reshard-plan", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_table_names_bytes_messages_and_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, QWEN, *SMALL)
    assert (status, err) == (0, "")
    assert out.startswith("qwen3_moe: 16 trainer ranks (tp4 pp2 ep8 dp2) -> 2 engines x TP 8\n")
    for words in ("coverage 100 %", "received over held 1.00", "largest bucket", "trainer rank", "engine rank",
                  "x the NIC bound", "gather and broadcast"):  # fmt: skip
        assert words in out
    assert "sending decides" not in out


def test_json_has_every_rank_and_follows_the_network(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, QWEN, *SMALL, "--json")[1])
    assert len(found["sent_bytes"]) == len(found["received_bytes"]) == 16
    assert max(found["sent_bytes"]) == found["sent_bytes_max"] <= 1.05 * found["sender_bound_bytes"]
    assert found["receive_ratio"] == 1.0 and found["received_bytes_max"] == found["shard_bytes"]
    assert found["predicted_s"] <= 1.5 * found["nic_bound_s"]
    assert found["num_messages"] == sum(found["num_sent"]) == sum(found["num_received"])
    slower = json.loads(run(capsys, QWEN, *SMALL, "--json", "--nic", "5")[1])
    assert 9 < slower["predicted_s"] / found["predicted_s"] < 11
    assert slower["fingerprint"] == found["fingerprint"]


def test_the_placement_of_the_config_counts(capsys: pytest.CaptureFixture[str]) -> None:
    separate, asked, colocated = (
        json.loads(run(capsys, QWEN, *SMALL, *words, "--json")[1])
        for words in ((), ("--colocated",), ("cluster.placement=colocated",))
    )
    assert asked["predicted_s"] == colocated["predicted_s"] < separate["predicted_s"]


def test_more_engines_than_trainers_ask_for_a_relay(capsys: pytest.CaptureFixture[str]) -> None:
    many = [QWEN, *SMALL, "rollout.num_engines=8", "sync.bucket_bytes=4194304"]
    assert "sending decides" in run(capsys, *many)[1]
    direct = json.loads(run(capsys, *many, "--json")[1])
    relayed = json.loads(run(capsys, *many, "--json", "--relay")[1])
    assert relayed["sent_bytes_mean"] == direct["sent_bytes_mean"] / 8
    assert relayed["predicted_s"] < 0.5 * direct["predicted_s"]
    assert "passed on by an engine" in run(capsys, *many, "--relay")[1]


def test_the_quickstart_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    status, _, err = run(capsys, QUICKSTART, "--svg", str(picture))
    assert (status, err) == (0, "")
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert list(tmp_path.iterdir()) == [picture]


MISTAKES = [
    (["trainer.layout.tp=8"], "'trainer.layout.tp=8': trainer.layout.tp: 8 does not divide the key-value heads (4)"),
    (
        ["trainer.layout.ep=16", "trainer.layout.num_ranks=32", "model.dims.num_experts=24"],
        "trainer.layout.ep: 16 does not divide the experts (24); possible: 1, 2, 3, 4, 6, 8, 12, 24",
    ),
    (["rollout.sglang.tp_size=3"], "rollout.sglang.tp_size: 3 does not divide the query heads (32)"),
    (
        ["model.dims.num_key_value_heads=16", "model.dims.num_attention_heads=48", "rollout.sglang.tp_size=24"],
        "rollout.sglang.tp_size: 24 neither divides nor is a multiple of the key-value heads (16)",
    ),
    (["rollout.sglang.ep_size=3"], "rollout.sglang.ep_size: 3 does not divide the engine's ranks (8)"),
    (["trainer.layout.layers_per_chunk=[40,9]"], "expected counts that add up to the 48 layers, got [40, 9]"),
    (["trainer.layout.layers_per_chunk=[48]"], "expected one entry per chunk (pp 2 x virtual_pp 1 = 2), got 1"),
    (["rollout.num_engines=20", "--svg", "x.svg"], "--svg draws at most 64 ranks a side, this layout has 16 and 160"),
    (["--nic", "0"], "--nic: expected a value above 0, got 0"),
    (["--efficiency", "1.5"], "--efficiency: expected a value above 0 and at most 1, got 1.5"),
    (["model.family=gpt2"], "model.family: 'gpt2' is unknown; known: qwen3_moe, llama"),
    (["model.path=nowhere", "model.dims=null"], "nowhere/config.json: not found; model.path must be"),
]


@pytest.mark.parametrize(("words", "line"), MISTAKES)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], line: str) -> None:
    status, out, err = run(capsys, QWEN, *words)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("megatron-rl: ") and line in err


def test_torch_is_not_needed() -> None:
    code = "from megatron_rl.cli.main import main; import sys; main(sys.argv[1:]); print('torch' in sys.modules)"
    words = ["reshard-plan", QWEN, *SMALL, "--json"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True,
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.stdout.splitlines()[-1] == "False"
