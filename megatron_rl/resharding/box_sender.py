"""The sending end of one pair: boxes to one receiver, over a connection that is kept from sync to sync."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.resharding.box_memory import hash_boxes
from megatron_rl.resharding.boxes import Boxes, PairTable
from megatron_rl.resharding.channel import Address, Channel, ChannelError, PeerRefusedError, connect
from megatron_rl.resharding.delta import DeltaBase, can_encode, is_worth_it
from megatron_rl.resharding.digest import DIGEST_NAMES, new_digest
from megatron_rl.resharding.host import describe_host
from megatron_rl.resharding.transports.protocol import Transport
from megatron_rl.resharding.transports.table import TransportChoice, build_transport, choose_transport


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How a rank sends: the `sync` section, as far as it concerns it."""

    bucket_bytes: int
    timeout_s: float
    transport: TransportChoice = "auto"
    directory: Path | None = None
    full_interval: int = 1
    """Every n-th version is sent whole, those between as deltas (p2p and socket); 1: all whole."""


class BoxSender:
    """Sends to the receiver of engine rank `target` at `address`; there the boxes are those of source number `source`.

    `who` names the sending rank in messages.
    """

    def __init__(self, source: int, who: str, target: int, address: Address, key: bytes, options: SendOptions) -> None:
        self._source, self._who, self._target = source, who, target
        self._address, self._key, self._options = address, key, options
        self._table: PairTable | None = None
        self._channel: Channel | None = None
        self._transport: Transport | None = None
        self._transport_name = ""
        self._base = DeltaBase()

    def send(self, boxes: Boxes, table: PairTable, sync: str, version: int) -> str:
        """Send `boxes`, which lie at the receiver as `table` says; the digest on which both ends agree.

        Raises ChannelError, ValueError or OSError in one line, and closes the connection; the next call opens another.
        """
        try:
            return self._send(boxes, table, sync, version)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        if self._channel is not None:
            self._channel.close()
        self._channel = self._transport = None

    def _send(self, boxes: Boxes, table: PairTable, sync: str, version: int) -> str:
        if table is not self._table:
            self.close()
            self._table = table
        is_kept = self._channel is not None
        channel, transport = self._connect(boxes, table)
        delta, opening = self._encode(boxes, sync, version)
        try:
            opened = channel.ask(opening)
        except PeerRefusedError:
            raise
        except ChannelError:
            if not is_kept:
                raise
            self.close()  # it has gone since the last sync
            channel, transport = self._connect(boxes, table)
            opened = channel.ask(opening)
        digest = new_digest(opened["digest"])
        if delta is not None and opened["delta"]:
            channel.send({"kind": "delta"}, delta)
            hash_boxes(boxes, digest)
        else:
            transport.submit_send(boxes)
            transport.run(digest)
        own = digest.hexdigest()
        if channel.expect()["digest"] != own:
            raise ChannelError(f"{channel.peer}: the digest of what {self._who} sent differs; it arrived wrong")
        self._base.digest = own
        return own

    def _connect(self, boxes: Boxes, table: PairTable) -> tuple[Channel, Transport]:
        """The kept connection, or a new one with the table of boxes told and the transport chosen."""
        if self._channel is None or self._transport is None:
            channel = self._channel = connect(*self._address, self._key, self._options.timeout_s)
            header = {"kind": "table", "source": self._source, "names": table.names}
            there = channel.ask(header, table.rows_N5.tobytes())["host"]
            self._transport_name = choose_transport(self._options.transport, describe_host(boxes.device), there, boxes.device)
            folder = self._options.directory
            self._transport = build_transport(
                self._transport_name,
                channel,
                self._options.bucket_bytes,
                boxes.device,
                None if folder is None else folder / f"from-{self._source}-to-{self._target}",
            )
        return self._channel, self._transport

    def _encode(self, boxes: Boxes, sync: str, version: int) -> tuple[bytes | None, dict[str, Any]]:
        """The delta if there is one worth sending, and the message that offers it. Until it has arrived, there is no base."""
        opening = {
            "kind": "open", "sync": sync, "source": self._source, "transport": self._transport_name,
            "bucket_bytes": self._options.bucket_bytes, "timeout_s": self._options.timeout_s, "digests": DIGEST_NAMES,
            "delta_base": None,
        }  # fmt: skip
        interval = self._options.full_interval
        if interval == 1 or self._transport_name not in ("socket", "nccl") or not can_encode(boxes):
            return None, opening
        base, delta = self._base.digest, None
        if version % interval:
            delta = self._base.encode(boxes)
        else:
            self._base.remember(boxes)
        self._base.digest = None
        if delta is None or not is_worth_it(delta, boxes):
            return None, opening
        return delta, opening | {"delta_base": base}
