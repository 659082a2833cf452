"""The table of commands is right, stays light, and mistakes are one line."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.cli import main as cli

BODY = "model: {family: llama, path: p}\ndata: {sources: [{name: s, kind: jsonl, path: q}]}\nrun: {num_steps: 3}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_has_its_file_and_shows_an_example(name: str) -> None:
    """Read as source: importing `train` takes ten seconds."""
    module = name.replace("-", "_")
    assert cli.COMMANDS[name].module == f"megatron_rl.cli.{module}"
    source = Path(cli.__file__).with_name(f"{module}.py").read_text()
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    assert {"add_parser", "run"} <= functions.keys()
    assert f"example:\\n  megatron-rl {name}" in ast.unparse(functions["add_parser"])


@pytest.mark.parametrize("name", ["config", "doctor", "reshard-plan"])
def test_help_of_one_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"example:\n  megatron-rl {name} " in capsys.readouterr().out


def test_help_lists_every_command_with_its_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())  # as argparse breaks no line
    assert all(command.help in shown and command.example in shown for command in cli.COMMANDS.values())


@pytest.mark.parametrize("argv", [[], ["trian"]])
def test_no_command_is_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_a_mistake_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(BODY)
    assert cli.main(["config", str(path), "run.num_stepz=3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    expected = "megatron-rl: override 'run.num_stepz=3': run.num_stepz: unknown key; did you mean run.num_steps?\n"
    assert captured.err == expected


def test_an_absent_package_is_one_line(tmp_path: Path) -> None:
    """The light base install: `config` works without torch, ray and friends."""
    (tmp_path / "e.yaml").write_text(BODY)
    blocker = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "ray", "megatron", "sglang", "transformers", "numpy", "tensorboard"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from megatron_rl.cli import main as cli
cli.COMMANDS["probe"] = cli.Command("probe", "", "")
sys.exit(cli.main(sys.argv[1:]))
"""
    (tmp_path / "probe.py").write_text("import ray\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def call(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", blocker, *argv]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)

    assert call("config", "e.yaml").returncode == 0
    answer = call("probe")
    assert answer.returncode == 2
    assert answer.stderr == "megatron-rl: probe needs the Python package of ray; see megatron-rl doctor\n"
