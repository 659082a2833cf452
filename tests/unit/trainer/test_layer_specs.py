"""Transformer Engine and NVIDIA apex, where they are installed: a recording stand-in on the path, in processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STAND_INS = Path(__file__).parent / "stand_ins"
ROOT = Path(__file__).parents[3]

PROBE = """
import importlib, json, logging, sys
import numpy as np, torch
family_name, port, part, sections = sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
lines = []
class Keep(logging.Handler):
    def emit(self, record): lines.append(record.getMessage())
logging.getLogger("megatron_rl").addHandler(Keep())
logging.getLogger("megatron_rl").setLevel(logging.INFO)
from tests.distributed.launch import Rank
from tests.distributed.walk import (OptimizerSection, ParallelLayout, PolicyTrainer, SpreadSource, TrainerSection, count,
    debug_dims, get_family, import_params, init_model_parallel, joined, pack, sequences)
record = importlib.import_module(part).RECORD
results, dims = [], debug_dims(family_name)
with joined(Rank(0, 1, port)) as platform:
    init_model_parallel(ParallelLayout(), seed=1)
    for section in sections:
        record.clear(); lines.clear()
        section = TrainerSection(optimizer=OptimizerSection(learning_rate=1e-3, clip_grad=0.1), **section)
        trainer = PolicyTrainer(dims, "fp32", section, ParallelLayout(), platform, seed=1)
        trainer.load_parameters(import_params(SpreadSource(dims.num_layers), get_family(family_name), dims, ParallelLayout(), 0,
            spec="te" if trainer.uses_transformer_engine else "local", vocab_multiple=1, dtype=torch.float32))
        batch = sequences(dims.vocab_size)
        packed = pack(batch, [0, 2, 3])
        logprobs = trainer.compute_logprobs([packed], score_all=True)[0].tolist()
        steps = [trainer.sft_minibatch([packed], count(batch)) for _ in range(2)]
        results.append({"record": list(record), "lines": list(lines), "logprobs": logprobs, "steps": steps})
print("RESULT" + json.dumps(results))
"""


def run_probe(part: str, family: str, sections: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = {"transformer_engine": "te", "apex": "apex"}[part]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(STAND_INS / folder), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-c", PROBE, family, str(port), part, json.dumps(sections)]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)


def probe_results(part: str, family: str, sections: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = run_probe(part, family, sections)
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return list(json.loads(line.removeprefix("RESULT")))


def names(result: dict[str, Any]) -> set[str]:
    return {name for name, _ in result["record"]}


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_transformer_engine_serves_layers_attention_experts_and_optimizer(family: str) -> None:
    fused, local = probe_results("transformer_engine", family, [{}, {"layer_spec": "local", "fused_optimizer": "torch"}])
    assert {"LayerNormLinear", "DotProductAttention", "RMSNorm", "attention", "rope", "FusedAdam"} <= names(fused)
    assert ("GroupedLinear" in names(fused)) == (family == "qwen3_moe")
    assert "multi_tensor_l2norm" in names(fused) and "multi_tensor_scale" in names(fused)
    attention = next(call for name, call in fused["record"] if name == "attention")
    assert attention == {"mask": "padding_causal", "format": "thd", "cu_seqlens": [0, 5, 14, 44]}
    assert any("layer spec: transformer_engine" in line for line in fused["lines"])
    assert any("optimizer: transformer_engine.FusedAdam" in line for line in fused["lines"])

    assert any("layer spec: local" in line for line in local["lines"])
    assert any("optimizer: torch.optim.adamw.AdamW" in line for line in local["lines"])
    assert fused["logprobs"] == pytest.approx(local["logprobs"], abs=2e-5)
    for mine, theirs in zip(fused["steps"], local["steps"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


def test_apex_serves_the_optimizer_and_clipping() -> None:
    (result,) = probe_results("apex", "llama", [{"fused_optimizer": "apex"}])
    assert names(result) == {"FusedAdam", "multi_tensor_l2norm", "multi_tensor_scale"}
    assert next(call for name, call in result["record"] if name == "FusedAdam") == {"adam_w_mode": True}
    assert any("optimizer: apex.optimizers.FusedAdam" in line for line in result["lines"])


def test_asking_for_an_absent_transformer_engine_stops_with_one_line() -> None:
    done = run_probe("apex", "llama", [{"layer_spec": "transformer_engine"}])
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "trainer.layer_spec=transformer_engine" in last and "not installed" in last


def test_asking_for_an_absent_apex_stops_with_one_line() -> None:
    from megatron.core.optimizer import OptimizerConfig

    from megatron_rl.trainer.optimizer import build_optimizer

    with pytest.raises(ModuleNotFoundError, match=r"trainer\.fused_optimizer=apex: NVIDIA apex is not installed"):
        build_optimizer(OptimizerConfig(), [], "apex")
