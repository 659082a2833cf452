"""Engines that pass slices on: the trainers send every box once, and it travels around a ring of engines, rank by rank.

A box enters at one engine e and goes e, e+1, ... Round k passes on what entered k engines before: each engine rank holds
that whole, its digest agreed, before it sends it. At the receiving end a relay is one more source, numbered behind the
trainer ranks by the engine at which its boxes entered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from megatron_rl.resharding.box_sender import BoxSender, SendOptions
from megatron_rl.resharding.boxes import PairTable


class Passer:
    """An engine rank's end: sends what stands in its own parameters to its neighbour."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._known: dict[int, tuple[tuple[Any, ...], BoxSender, PairTable]] = {}

    def pass_on(self, params: Mapping[str, torch.Tensor], header: Mapping[str, Any], payload: bytearray) -> str:
        """Do what a `relay` message says; the digest on which both ends agree. Raises as `BoxSender.send`."""
        number, (host, port) = header["number"], header["to"]
        is_same = (header["names"], bytes(payload), host, port, header["bucket_bytes"], header["timeout_s"])
        if number not in self._known or self._known[number][0] != is_same:
            if number in self._known:
                self._known[number][1].close()
            options = SendOptions(header["bucket_bytes"], header["timeout_s"], "p2p")
            sender = BoxSender(number, header["who"], header["target"], (host, port), self._key, options)
            table = PairTable(tuple(header["names"]), np.frombuffer(payload, dtype=np.int64).reshape(-1, 5))
            self._known[number] = (is_same, sender, table)
        _, sender, table = self._known[number]
        return sender.send(table.resolve(params), table, header["sync"], header["version"])

    def close(self) -> None:
        for _, sender, _ in self._known.values():
            sender.close()
        self._known.clear()
