"""Addresses on the one interface that a process listens on."""

from __future__ import annotations

import os
import socket

from megatron_rl.resharding.channel import Address


def free_address(interface: str) -> Address:
    """The interface and a port that is free on it now."""
    with socket.create_server((interface, 0)) as probe:
        return interface, probe.getsockname()[1]


def see_devices(devices: str | None) -> None:
    """Make these GPUs the ones that this process, and what it starts, can use. None: leave it as it is. To be called
    before CUDA is first used."""
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
