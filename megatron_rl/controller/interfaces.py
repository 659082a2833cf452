"""Addresses on the one interface that a process listens on."""

from __future__ import annotations

import socket

from megatron_rl.resharding.control import Address


def free_address(interface: str) -> Address:
    """The interface and a port that is free on it now."""
    with socket.create_server((interface, 0)) as probe:
        return interface, probe.getsockname()[1]
