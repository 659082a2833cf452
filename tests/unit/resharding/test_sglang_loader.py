"""The loader as SGLang calls it, with its rank lookup replaced."""

import json
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_rl.resharding import sglang_loader
from megatron_rl.resharding.channel import connect

KEY = b"k" * 32


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(5, 3)
        self.refreshed = 0

    def post_load_weights(self) -> None:
        self.refreshed += 1


@pytest.fixture
def directory(tmp_path, monkeypatch):
    path = tmp_path / "receivers"
    path.mkdir(mode=0o700)
    (path / "key").write_bytes(KEY)
    (path / "key").chmod(0o600)
    context = ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: SimpleNamespace(tp_rank=3)
    for name, module in (("sglang", ModuleType("sglang")), ("sglang.srt", ModuleType("sglang.srt"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setenv(sglang_loader.DIR_ENV, str(path))
    monkeypatch.setattr(sglang_loader, "_receivers", [])
    switch_interval = sys.getswitchinterval()
    yield path
    sys.setswitchinterval(switch_interval)
    for receiver in sglang_loader._receivers:
        receiver.close()


def test_the_first_call_opens_a_receiver_and_later_ones_refresh(directory):
    model = Model()
    sglang_loader.load(model, [])
    address = json.loads((directory / "receiver-3.json").read_text())
    assert address["pid"] == os.getpid() and model.refreshed == 0
    assert sys.getswitchinterval() == pytest.approx(sglang_loader.SWITCH_INTERVAL_S), "else a busy scheduler starves it"
    channel = connect(address["host"], address["port"], KEY, timeout_s=5.0)
    assert channel.ask({"kind": "describe"})["params"] == {
        "proj.weight": [[3, 5], "float32"],
        "proj.bias": [[3], "float32"],
    }
    channel.close()
    sglang_loader.load(model, [])
    assert model.refreshed == 1 and len(sglang_loader._receivers) == 1
    assert sorted(p.name for p in directory.iterdir()) == ["key", "receiver-3.json"]


def test_no_failure_reaches_sglang(directory):
    model = Model()
    (directory / "key").chmod(0o644)
    sglang_loader.load(model, [])
    error = directory / "receiver-3.error"
    assert error.read_text() == f"TP rank 3: PermissionError: {directory}/key: mode 644, expected 600\n"
    (directory / "key").chmod(0o600)
    sglang_loader.load(model, [])
    assert not error.exists() and (directory / "receiver-3.json").exists()
    sglang_loader.load(model, [("proj.weight", torch.zeros(1))])
    assert "ValueError: the control call carries 1 tensors" in error.read_text()


def test_packed_weights_are_refused(directory):
    model = Model()
    model.proj.use_intel_amx_backend = True
    sglang_loader.load(model, [])
    assert "proj keeps its weight packed for AMX" in (directory / "receiver-3.error").read_text()
