"""`megatron-rl doctor`: what is installed, what works, what to do about the rest. Imports none of what it looks for."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

GIB = 1 << 30
Status = Literal["ok", "note", "missing", "wrong"]


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution, its module, what it is for and how to get it. `needed`: by the quick start on a CPU."""

    name: str
    module: str
    purpose: str
    advice: str
    needed: bool = False


def _extra(name: str) -> str:
    return f"pip install 'megatron-rl[{name}]'"


_GPU = "only on GPUs: docs/install_gpu.md"
PACKAGES = (
    Package("numpy", "numpy", "everything", "pip install megatron-rl", needed=True),
    Package("pyyaml", "yaml", "configuration", "pip install megatron-rl", needed=True),
    Package("torch", "torch", "trainer and engines", _extra("train"), needed=True),
    Package("megatron-core", "megatron.core", "trainer", _extra("train"), needed=True),
    Package("transformers", "transformers", "tokenizers, Hugging Face configurations", _extra("train"), needed=True),
    Package("safetensors", "safetensors", "weights on disk", _extra("train"), needed=True),
    Package("psutil", "psutil", "process watching, distributed checkpoints", _extra("train"), needed=True),
    Package("xxhash", "xxhash", "digests of synced weights", _extra("train"), needed=True),
    Package("ray", "ray", "placement and supervision", _extra("control"), needed=True),
    Package("reasoning-gym", "reasoning_gym", "prompts and their verification", _extra("data"), needed=True),
    Package("math-verify", "math_verify", "verification of mathematics", _extra("data")),
    Package("pyarrow", "pyarrow", "Parquet prompt files", _extra("data")),
    Package("tensorboard", "tensorboard", "scalars and sample texts", _extra("telemetry"), needed=True),
    Package("sglang", "sglang", "rollout.engine: sglang", "see docs/rollout.md for CPU, docs/install_gpu.md for GPUs"),
    Package("gguf", "gguf", "reading GGUF weights", _extra("gguf")),
    Package("transformer-engine", "transformer_engine", "layers, packed attention, grouped GEMM, fp8", _GPU),
    Package("apex", "apex", "FusedAdam, multi-tensor clip", f"{_GPU}, from NVIDIA's source"),
)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What was found, gathered before anything is judged. `versions` lacks what is absent; "?" is without metadata."""

    python: tuple[int, int, int]
    versions: Mapping[str, str]
    apex_has_fused_adam: bool = False
    apex_has_extensions: bool = False
    sglang_torch_pin: str | None = None
    gpus: tuple[str, ...] = ()
    num_cores: int = 1
    memory_bytes: int = 0
    shm_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    status: Status
    detail: str
    advice: str = ""
    needed: bool = False


@dataclass(frozen=True, slots=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    works: Mapping[str, str] = field(default_factory=dict)
    """Capability -> "yes", or what is missing."""

    @property
    def is_ready(self) -> bool:
        """Whether nothing that the CPU quick start needs is missing."""
        return not any(finding.needed and finding.status in ("missing", "wrong") for finding in self.findings)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        description="Say what is installed, what works and what to do about the rest. Exit status 1 when something that"
        " the quick start on a CPU needs is missing.",
        epilog="example:\n  megatron-rl doctor --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    diagnosis = diagnose(look_around())
    if args.json:
        print(json.dumps({"ready": diagnosis.is_ready, **dataclasses.asdict(diagnosis)}, indent=1))
    else:
        print(render(diagnosis))
    return 0 if diagnosis.is_ready else 1


def look_around() -> Surroundings:
    """Gathers what is here, without importing a package that is looked for."""
    versions = {package.name: version for package in PACKAGES if (version := _version(package))}
    apex = find_spec("apex")
    apex_folders = [Path(folder) for folder in (apex.submodule_search_locations or ())] if apex else []
    shm = Path("/dev/shm")
    return Surroundings(
        python=sys.version_info[:3],
        versions=versions,
        apex_has_fused_adam=any((folder / "optimizers" / "fused_adam.py").is_file() for folder in apex_folders),
        apex_has_extensions=find_spec("amp_C") is not None,
        sglang_torch_pin=_torch_pin("sglang") if "sglang" in versions else None,
        gpus=_gpus(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
    )


def _version(package: Package) -> str | None:
    try:
        is_there = find_spec(package.module) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is absent
        is_there = False
    if not is_there:
        return None
    try:
        return metadata.version(package.name)
    except metadata.PackageNotFoundError:
        return "?"


def _torch_pin(distribution: str) -> str | None:
    try:
        requirements = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return None
    pins = (r.partition(";")[0].replace(" ", "") for r in requirements if "extra" not in r)
    return next((pin.removeprefix("torch==") for pin in pins if pin.startswith("torch==")), None)


def _gpus() -> tuple[str, ...]:
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return ()  # a driver without a device exits with an error
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip())


def _memory_bytes() -> int:
    """Physical memory, or the limit of this control group where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def diagnose(here: Surroundings) -> Diagnosis:
    """Pure: judges what was found."""
    findings = [_judge_python(here), *(_judge_package(package, here) for package in PACKAGES), *_judge_machine(here)]
    return Diagnosis(tuple(findings), _what_works(findings, here))


def _judge_python(here: Surroundings) -> Finding:
    text = ".".join(map(str, here.python))
    if here.python < (3, 11):
        return Finding("python", "wrong", text, "install Python 3.11 or newer", needed=True)
    return Finding("python", "ok", text, needed=True)


def _judge_package(package: Package, here: Surroundings) -> Finding:
    version = here.versions.get(package.name)
    if version is None:
        status: Status = "missing" if package.needed else "note"
        return Finding(package.name, status, f"not installed ({package.purpose})", package.advice, package.needed)
    if package.name == "apex" and not here.apex_has_fused_adam:
        detail = f"{version} is another product of that name: it has no apex.optimizers.FusedAdam"
        advice = "pip uninstall apex, then build NVIDIA's from its source: docs/install_gpu.md"
        return Finding("apex", "wrong", detail, advice)
    if package.name == "apex" and not here.apex_has_extensions:
        detail = f"{version} was built without its CUDA extensions (no module amp_C), so FusedAdam cannot run"
        return Finding("apex", "wrong", detail, "build it again with the extensions: docs/install_gpu.md")
    torch = here.versions.get("torch", "?").partition("+")[0]
    if package.name == "sglang" and here.sglang_torch_pin not in (None, torch):
        detail = f"{version}, made for torch {here.sglang_torch_pin}, beside torch {torch}"
        return Finding("sglang", "note", detail, "on GPUs give it its own interpreter: cluster.engine_python")
    if package.name == "torch" and here.gpus and "+cpu" in version:
        advice = "install a CUDA build: docs/install_gpu.md"
        return Finding("torch", "wrong", f"{version} is a CPU build on a machine with GPUs", advice)
    return Finding(package.name, "ok", version, needed=package.needed)


def _judge_machine(here: Surroundings) -> list[Finding]:
    memory, shm = here.memory_bytes / GIB, here.shm_bytes
    findings = [
        Finding("gpus", "ok", ", ".join(here.gpus)) if here.gpus else Finding("gpus", "note", "none: runs on the CPU"),
        Finding("cores", "ok", str(here.num_cores))
        if here.num_cores >= 2
        else Finding("cores", "note", "1", "the quick start is timed on two cores"),
        Finding("memory", "ok", f"{memory:.1f} GiB")
        if memory >= 6
        else Finding("memory", "note", f"{memory:.1f} GiB", "the quick start needs up to 6 GiB"),
    ]
    if shm is not None and shm < GIB:
        advice = "Ray then keeps its objects in /tmp, slowly: enlarge it (docker: --shm-size=2g)"
        findings.append(Finding("/dev/shm", "note", f"{shm / GIB:.2f} GiB", advice))
    elif shm is not None:
        findings.append(Finding("/dev/shm", "ok", f"{shm / GIB:.1f} GiB"))
    return findings


def _what_works(findings: list[Finding], here: Surroundings) -> dict[str, str]:
    by_name = {finding.name: finding for finding in findings}
    lacking = [f.name for f in findings if f.needed and f.status in ("missing", "wrong")]
    base = f"no: {', '.join(lacking)}" if lacking else "yes"

    def needs(*names: str) -> str:
        absent = [name for name in names if name not in here.versions or by_name[name].status == "wrong"]
        return base if base != "yes" else f"no: {', '.join(absent)}" if absent else "yes"

    no_gpu = "no: no GPU"
    return {
        "training and embedded engine on the CPU": base,
        "SGLang engine": needs("sglang"),
        "training on GPUs": needs("torch") if here.gpus else no_gpu,
        "Transformer Engine layers": needs("transformer-engine") if here.gpus else no_gpu,
        "fused optimizer of apex": needs("apex") if here.gpus else no_gpu,
        "mathematics rewards": needs("math-verify"),
        "Parquet prompts": needs("pyarrow"),
        "GGUF weights": needs("gguf"),
    }


def render(diagnosis: Diagnosis) -> str:
    """A table for a person."""
    lines = []
    for finding in diagnosis.findings:
        lines.append(f"{finding.status:8} {finding.name:19} {finding.detail}")
        if finding.advice:
            lines.append(f"{'':28} -> {finding.advice}")
    lines.append("")
    lines += [f"{what}: {answer}" for what, answer in diagnosis.works.items()]
    return "\n".join(lines)
