"""What is left when an engine does not start."""

import sys
import tempfile
from pathlib import Path

import pytest

from megatron_rl.config.rollout_sections import SglangSection
from megatron_rl.rollout.sglang.errors import EngineDeadError
from megatron_rl.rollout.sglang.launch_args import EnginePlace, ServedModel
from megatron_rl.rollout.sglang.start import start_engine


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where private directories are made."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def start(tmp_path: Path, python: str, **server_args: object) -> None:
    start_engine(
        "broken",
        SglangSection(start_timeout_s=20.0, server_args=server_args),
        EnginePlace(cpu_cores=(0,)),
        ServedModel(python, str(tmp_path / "absent"), "fp32", max_context=64),
        receiver_dir=tmp_path / "receivers",
        log_path=tmp_path / "logs" / "broken.log",
    )


def test_an_interpreter_without_sglang_is_told_in_one_line(tmp_path, temporary):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    with pytest.raises(EngineDeadError, match=r"engine broken ended with exit code 1; see .*broken\.log: .*sglang") as caught:
        start(tmp_path, str(python))
    assert "\n" not in str(caught.value)
    assert list(temporary.iterdir()) == []


def test_a_missing_interpreter_is_told_too(tmp_path, temporary):
    with pytest.raises(EngineDeadError, match=r"exit code 127.*cannot start /no/such/python"):
        start(tmp_path, "/no/such/python")
    assert list(temporary.iterdir()) == []


def test_a_refused_option_leaves_nothing(tmp_path, temporary):
    with pytest.raises(ValueError, match=r"server_args\.host"):
        start(tmp_path, sys.executable, host="0.0.0.0")
    assert list(temporary.iterdir()) == []
