"""Run every check and print one JSON line: `launch/gpu_check.sh [--json] [--cpu] [--only NAME]`.

Exit status 0 when all is well (or there is no GPU, which the line says), 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from megatron_rl.platforms.platform import CpuPlatform, Platform, select_platform
from megatron_rl.resharding.nccl import load_nccl

BUDGET_S = 450
WHAT = {
    "equality": "Megatron and the embedded engine against transformers: Qwen3-MoE and Llama, fp32 and bf16",
    "training": "a falling loss over a few optimizer steps in bf16 with fp32 masters, and a GSPO step",
    "weight_sync": "weights over CUDA IPC into an engine process on the same GPU, bit by bit, before and after a step",
    "nccl": "bytes over NCCL, between two GPUs where there are two, else from one to itself",
    "offload": "a trainer's device memory given up and taken back between two steps, as in colocation",
    "generation_speed": "tokens per second of the embedded engine on a 2.5-billion-weight Qwen3-MoE",
    "training_speed": "tokens per second and model FLOPs utilisation on the same model",
    "transformer_engine": "the equality again with Transformer Engine's layers, where installed",
    "apex": "the training again with NVIDIA apex's optimizer, where installed",
}


def build_checks() -> dict[str, Callable[[Platform], dict[str, Any]]]:
    """Name -> check. Megatron is imported here, after the platform was prepared for it."""
    from gpu_check.equality import check_equality
    from gpu_check.generation import measure_generation
    from gpu_check.models import process_group
    from gpu_check.nccl import check_nccl
    from gpu_check.sizes import sizes_for
    from gpu_check.training import check_offload, check_training, measure_training
    from gpu_check.weight_sync import check_weight_sync

    def alone(check: Callable[..., dict[str, Any]], **choices: str) -> Callable[[Platform], dict[str, Any]]:
        def run(platform: Platform) -> dict[str, Any]:
            with process_group(platform):
                return check(platform, sizes_for(platform), **choices)

        return run

    return {
        "equality": alone(check_equality),
        "training": alone(check_training),
        "weight_sync": alone(check_weight_sync),
        "nccl": check_nccl,
        "offload": alone(check_offload),
        "generation_speed": lambda platform: measure_generation(platform, sizes_for(platform)),
        "training_speed": alone(measure_training),
        "transformer_engine": alone(check_equality, layer_spec="transformer_engine"),
        "apex": alone(check_training, fused_optimizer="apex"),
    }


def is_absent(name: str) -> bool:
    """Whether a check is about an optional part that is not here."""
    if name == "nccl":
        return not torch.cuda.is_available() or load_nccl() is None
    packages = {"transformer_engine": "transformer_engine", "apex": "amp_C"}  # amp_C: NVIDIA apex built with extensions
    return name in packages and importlib.util.find_spec(packages[name]) is None


def run_checks(platform: Platform, names: list[str]) -> dict[str, Any]:
    """Every check's figures. A check that fails is reported with its error and does not keep the others from running."""
    checks = build_checks()
    results: dict[str, Any] = {}
    for name in names:
        if is_absent(name):
            results[name] = "absent"
            continue
        print(f"gpu_check: {name}: {WHAT[name]}", file=sys.stderr, flush=True)
        started = time.perf_counter()
        try:
            results[name] = checks[name](platform)
        except Exception as error:  # noqa: BLE001 - a GPU is scarce: report it, and let the other checks run
            traceback.print_exc()
            results[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        results[name]["check_s"] = time.perf_counter() - started
        gc.collect()
        if platform.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return results


@contextlib.contextmanager
def deadline(budget_s: int) -> Iterator[None]:
    """After `budget_s` the check in progress ends with TimeoutError, and so does every later one at once."""

    def stop(*_signal: object) -> None:
        signal.alarm(5)
        raise TimeoutError(f"the whole check had {budget_s} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(budget_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def describe(platform: Platform) -> dict[str, Any]:
    import megatron.core

    is_gpu = platform.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(platform.device) if is_gpu else "cpu",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "megatron_core": megatron.core.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the JSON line alone, no progress on stderr")
    parser.add_argument("--cpu", action="store_true", help="run the checks on the CPU with tiny sizes")
    parser.add_argument("--only", choices=WHAT, action="append", help="this check (repeatable)")
    parser.add_argument("--budget-s", type=int, default=BUDGET_S)
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        print(json.dumps({"gpu_check": "no GPU here; nothing was checked", "ok": None, "would_check": WHAT}))
        return 0
    if arguments.json:
        sys.stderr = open(os.devnull, "w")
    started = time.perf_counter()
    platform = CpuPlatform() if arguments.cpu else select_platform()
    torch.set_float32_matmul_precision("highest")  # no TF32: fp32 is the truth here
    platform.prepare_megatron()
    with deadline(arguments.budget_s):
        results = run_checks(platform, arguments.only or list(WHAT))
    is_ok = all(result == "absent" or result["ok"] for result in results.values())
    line = {**describe(platform), "ok": is_ok, "seconds": time.perf_counter() - started, **results}
    print(json.dumps(line))
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
