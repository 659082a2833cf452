"""Engines that pass slices on: the trainers send every box once, and it travels around a ring of engines, rank by rank.

A box enters at one engine e and goes e, e+1, ... Round k passes on what entered k engines before: each engine rank holds
that whole, its digest agreed, before it sends it. At the receiving end a relay is one more source, numbered behind the
trainer ranks by the engine at which its boxes entered.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_rl.resharding.box_sender import BoxSender, SendOptions
from megatron_rl.resharding.boxes import PairTable


@dataclass(slots=True)
class _Route:
    """What one relayed source needs, and whether it is under way."""

    key: tuple[Any, ...]
    sender: BoxSender
    table: PairTable
    is_busy: bool = False


class Passer:
    """An engine rank's end: sends what stands in its own parameters to its neighbour."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._routes: dict[int, _Route] = {}
        self._lock = threading.Lock()

    def pass_on(self, params: Mapping[str, torch.Tensor], header: Mapping[str, Any], payload: bytearray) -> str:
        """Do what a `relay` message says; the digest on which both ends agree. Raises as `BoxSender.send`.

        A hop of an earlier sync that still hangs is cut off: no two send over one connection.
        """
        route = self._take(header, payload)
        try:
            return route.sender.send(route.table.resolve(params), route.table, header["sync"], header["version"])
        finally:
            route.is_busy = False

    def close(self) -> None:
        with self._lock:
            for route in self._routes.values():
                route.sender.close()
            self._routes.clear()

    def _take(self, header: Mapping[str, Any], payload: bytearray) -> _Route:
        """The route that was kept if it is the same and free, else a new one."""
        number, (host, port) = header["number"], header["to"]
        key = (header["names"], bytes(payload), host, port, header["bucket_bytes"], header["timeout_s"])
        with self._lock:
            route = self._routes.get(number)
            if route is None or route.key != key or route.is_busy:
                if route is not None:
                    route.sender.close()
                options = SendOptions(header["bucket_bytes"], header["timeout_s"], "p2p")
                sender = BoxSender(number, header["who"], header["target"], (host, port), self._key, options)
                table = PairTable(tuple(header["names"]), np.frombuffer(payload, dtype=np.int64).reshape(-1, 5))
                route = self._routes[number] = _Route(key, sender, table)
            route.is_busy = True
            return route
