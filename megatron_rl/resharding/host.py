"""Where a process stands: what decides whether two processes can hand memory to each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from megatron_rl.resharding.cuda_ipc import gpu_uuid
from megatron_rl.resharding.nccl import nccl_version


def describe_host(device: torch.device) -> dict[str, Any]:
    """Machine (boot), process-id namespace and user, the kind of device that holds the weights and which GPU it is, the GPUs in
    sight, NCCL's version."""
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
        "user": os.geteuid(),
        "device": device.type,
        "gpu": gpu_uuid(device) if device.type == "cuda" else None,
        "gpus": visible_gpus(),
        "nccl": nccl_version() if device.type == "cuda" else None,
    }


def visible_gpus() -> list[str]:
    """The names of the GPUs that this process sees; processes that see different ones number them differently."""
    if not torch.cuda.is_available():
        return []
    return [gpu_uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
