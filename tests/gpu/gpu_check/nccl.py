"""Bytes over NCCL, by the calls of the `nccl` transport: between two GPUs where there are two, else from one GPU to itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.platforms.platform import Platform
from megatron_rl.resharding.nccl import Communicator, load_nccl, nccl_version, new_unique_id

NUM_BYTES = 64 * 1024 * 1024
NUM_ROUNDS = 8
TIMEOUT_S = 60.0


def check_nccl(platform: Platform) -> dict[str, Any]:
    """Send and receive a few buckets, compare each; GB per second of the median one."""
    devices = [torch.device("cuda", index) for index in range(min(torch.cuda.device_count(), 2))]
    unique_id, last = new_unique_id(), len(devices) - 1
    library = load_nccl()
    library.ncclGroupStart()  # one thread speaks for both ends
    comms = [Communicator(unique_id, rank, len(devices), device) for rank, device in enumerate(devices)]
    library.ncclGroupEnd()
    try:
        wait_for(lambda: all(comm.is_ready() for comm in comms))
        sent = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, device=devices[0])
        arrived = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=devices[last])
        wrong, seconds = 0, []
        for _ in range(NUM_ROUNDS):
            sent.add_(1)
            torch.cuda.synchronize(devices[0])
            begun = time.perf_counter()
            library.ncclGroupStart()
            comms[0].send(sent, last)
            comms[last].receive(arrived, 0)
            library.ncclGroupEnd()
            wait_for(lambda: all(comm.is_ready() for comm in comms))
            wait_for(lambda: all(comm.is_idle() for comm in comms))
            seconds.append(time.perf_counter() - begun)
            wrong += int((arrived.cpu() != sent.cpu()).sum())
    finally:
        for comm in comms:
            comm.abort()
    return {
        "version": nccl_version(),
        "gpus": len(devices),
        "wrong_bytes": wrong,
        "gb_per_s": NUM_BYTES / 1e9 / statistics.median(seconds),
        "ok": wrong == 0,
    }


def wait_for(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"NCCL moved nothing within {TIMEOUT_S:.0f} s")
