"""What the doctor says of machines that lack this and that, and of this one."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.cli.doctor import GIB, PACKAGES, Finding, Surroundings, diagnose, look_around, render

WHOLE = Surroundings(
    python=(3, 11, 7),
    versions={package.name: "1.0" for package in PACKAGES},
    apex_has_fused_adam=True,
    apex_has_extensions=True,
    gpus=("NVIDIA H100 80GB HBM3, 81559 MiB",),
    num_cores=16,
    memory_bytes=64 * GIB,
    shm_bytes=32 * GIB,
)


def without(here: Surroundings, *names: str) -> Surroundings:
    return dataclasses.replace(here, versions={k: v for k, v in here.versions.items() if k not in names})


def finding_of(here: Surroundings, name: str) -> Finding:
    (finding,) = (finding for finding in diagnose(here).findings if finding.name == name)
    return finding


def test_a_whole_machine_is_ready_for_everything() -> None:
    diagnosis = diagnose(WHOLE)
    assert {finding.status for finding in diagnosis.findings} == {"ok"}
    assert set(diagnosis.works.values()) == {"yes"}
    assert diagnosis.is_ready


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_an_absent_package_is_named_with_a_way_to_get_it(package) -> None:
    here = without(WHOLE, package.name)
    finding = finding_of(here, package.name)
    assert finding.status == ("missing" if package.needed else "note")
    assert finding.advice == package.advice != ""
    diagnosis = diagnose(here)
    assert diagnosis.is_ready is not package.needed
    assert any(package.name in answer for answer in diagnosis.works.values())
    assert package.advice in render(diagnosis)


@pytest.mark.parametrize(
    ("change", "name", "status", "words"),
    [
        ({"apex_has_fused_adam": False}, "apex", "wrong", "another product of that name"),
        ({"apex_has_extensions": False}, "apex", "wrong", "without its CUDA extensions"),
        ({"sglang_torch_pin": "2.14.1"}, "sglang", "note", "made for torch 2.14.1, beside torch 1.0"),
        ({"sglang_torch_pin": "1.0"}, "sglang", "ok", "1.0"),
        ({"python": (3, 10, 2)}, "python", "wrong", "3.10.2"),
        ({"gpus": ()}, "gpus", "note", "none"),
        ({"num_cores": 1}, "cores", "note", "1"),
        ({"memory_bytes": 4 * GIB}, "memory", "note", "4.0 GiB"),
        ({"shm_bytes": 64 << 20}, "/dev/shm", "note", "0.06 GiB"),
    ],
)
def test_judgements(change: dict[str, object], name: str, status: str, words: str) -> None:
    finding = finding_of(dataclasses.replace(WHOLE, **change), name)
    assert finding.status == status
    assert words in finding.detail
    assert (finding.advice == "") is (status == "ok" or name == "gpus")


def test_a_cpu_build_of_torch_beside_gpus_is_wrong_but_trains_on_the_cpu() -> None:
    here = dataclasses.replace(WHOLE, versions={**WHOLE.versions, "torch": "2.13.0+cpu"})
    assert finding_of(here, "torch").status == "wrong"
    diagnosis = diagnose(here)
    assert diagnosis.works["training on GPUs"] == "no: torch"
    assert diagnosis.works["training and embedded engine on the CPU"] == "yes"
    assert diagnosis.is_ready


def run_doctor(python_path: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_rl.cli.main", "doctor", *argv]
    environment = {**os.environ, "PYTHONPATH": str(python_path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_this_machine_is_ready_and_the_wrong_apex_is_named(tmp_path: Path) -> None:
    def apex_status() -> str:
        answer = run_doctor(tmp_path, "--json")
        assert answer.returncode == 0, answer.stderr
        report = json.loads(answer.stdout)
        assert report["ready"] is True
        (finding,) = (finding for finding in report["findings"] if finding["name"] == "apex")
        return finding["status"]

    folder = tmp_path / "apex"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('the doctor must not import what it looks for')\n")
    assert apex_status() == "wrong"
    assert "another product" in run_doctor(tmp_path).stdout
    (folder / "optimizers").mkdir()
    (folder / "optimizers" / "fused_adam.py").touch()
    (tmp_path / "amp_C.py").touch()
    assert apex_status() == "ok"


def test_looking_around_imports_nothing_heavy() -> None:
    code = """
import sys
from megatron_rl.cli.doctor import look_around
look_around()
heavy = {"torch", "ray", "megatron.core", "sglang", "transformers", "tensorboard", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_versions_are_those_of_the_installed_packages() -> None:
    here = look_around()
    import torch

    assert here.versions["torch"] == torch.__version__
    assert here.num_cores >= 1
    assert here.memory_bytes > 0
