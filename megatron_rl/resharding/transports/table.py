"""Which transport serves a pair."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_rl.resharding.channel import Channel
from megatron_rl.resharding.cuda_ipc import gpu_uuid
from megatron_rl.resharding.transports.disk import DiskTransport
from megatron_rl.resharding.transports.ipc import CudaIpcTransport, SharedMemoryTransport
from megatron_rl.resharding.transports.nccl import NcclTransport
from megatron_rl.resharding.transports.protocol import Transport
from megatron_rl.resharding.transports.sockets import SocketTransport

TransportChoice = Literal["auto", "p2p", "socket", "ipc", "disk"]

TRANSPORTS: Mapping[str, type] = {
    "socket": SocketTransport,
    "nccl": NcclTransport,
    "shared_memory": SharedMemoryTransport,
    "cuda_ipc": CudaIpcTransport,
    "disk": DiskTransport,
}
"""By the name that the sender says when it opens."""


def build_transport(
    name: str, channel: Channel, bucket_bytes: int, device: torch.device, folder: Path | None = None
) -> Transport:
    """`device`: of this end's weights. Raises ValueError for an unknown name."""
    if name not in TRANSPORTS:
        raise ValueError(f"unknown transport {name!r}; expected one of {', '.join(TRANSPORTS)}")
    transport: Transport
    if name == "disk":
        transport = DiskTransport(channel, bucket_bytes, folder)
    elif name == "nccl":
        transport = NcclTransport(channel, bucket_bytes, device)
    else:
        transport = TRANSPORTS[name](channel, bucket_bytes)
    return transport


def choose_transport(choice: TransportChoice, here: Mapping[str, Any], there: Mapping[str, Any], device: torch.device) -> str:
    """The transport of a pair, from what both hosts say (`describe_host`) and where the trainer's weights are.

    `auto` hands memory over where both can reach it and sends otherwise (`p2p`): by NCCL from GPU to GPU, else over the
    channel's own connection. Raises ValueError when `ipc` is asked for and cannot be: the line says what is in the way.
    """
    if choice in ("socket", "disk"):
        return choice
    if choice == "p2p":
        return "nccl" if _can_nccl(here, there) else "socket"
    name, obstacle = _shared_memory(here, there) if device.type == "cpu" else _cuda_ipc(here, there, device)
    if obstacle is None:
        return name
    if choice == "auto":
        return choose_transport("p2p", here, there, device)
    raise ValueError(f"sync.transport=ipc: {obstacle}; use auto or p2p")


def _shared_memory(here: Mapping[str, Any], there: Mapping[str, Any]) -> tuple[str, str | None]:
    reasons = {
        "boot": "they run on different machines",
        "pid_namespace": "they run in different containers (process-id namespaces)",
        "user": "they run as different users",
        "device": "the engine's weights are not in host memory",
    }
    differing = [reason for key, reason in reasons.items() if here[key] != there[key]]
    return "shared_memory", differing[0] if differing else None


def _cuda_ipc(here: Mapping[str, Any], there: Mapping[str, Any], device: torch.device) -> tuple[str, str | None]:
    gpu = gpu_uuid(device)
    if here["boot"] != there["boot"]:
        return "cuda_ipc", "they run on different machines"
    if there["device"] != "cuda" or gpu not in there["gpus"]:
        return "cuda_ipc", f"the engine rank does not see the trainer's GPU {gpu}"
    return "cuda_ipc", None


def _can_nccl(here: Mapping[str, Any], there: Mapping[str, Any]) -> bool:
    """NCCL joins two GPUs, never one with itself, and one version of it with the same."""
    return here["nccl"] is not None and here["nccl"] == there["nccl"] and here["gpu"] != there["gpu"]
