"""The trainer's side of a weight sync: every rank sends its own boxes to the engine ranks that need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.resharding.box_table import PlanError
from megatron_rl.resharding.boxes import Box, PairTable, hash_boxes
from megatron_rl.resharding.channel import Channel, ChannelError, PeerRefusedError, connect
from megatron_rl.resharding.control import Address
from megatron_rl.resharding.delta import DeltaBase, can_encode, is_worth_it
from megatron_rl.resharding.digest import DIGEST_NAMES, new_digest
from megatron_rl.resharding.host import describe_host
from megatron_rl.resharding.plan import ReshardPlan
from megatron_rl.resharding.precision import check_block_boxes, made_boxes, with_scales
from megatron_rl.resharding.transports.protocol import Transport
from megatron_rl.resharding.transports.table import TransportChoice, build_transport, choose_transport
from megatron_rl.types.resharding import ShardDigest, SourceParam, SyncOrder

Chunks = Sequence[Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How a trainer rank sends: the `sync` section, as far as it concerns it."""

    bucket_bytes: int
    timeout_s: float
    transport: TransportChoice = "auto"
    directory: Path | None = None
    full_interval: int = 1
    """Every n-th version is sent whole, those between as deltas (p2p alone); 1: all whole."""


class WeightSender:
    """One trainer rank. It keeps one connection per engine rank that needs something of it, from sync to sync."""

    def __init__(self, plan: ReshardPlan, rank: int, addresses: Sequence[Address], key: bytes, options: SendOptions) -> None:
        self.plan, self.addresses = plan, tuple(addresses)
        self._options = options
        mine = plan.columns_from(rank)
        self._pairs = [
            _Pair(plan, rank, int(target), mine, addresses[int(target)], key, options)
            for target in np.unique(mine["target_rank"])
        ]

    def send(self, chunks: Chunks, order: SyncOrder) -> list[ShardDigest]:
        """Send everything that the rank owes, to all engine ranks at once.

        `chunks` are the rank's parameters per virtual chunk; they travel in the engines' dtypes. Returns what was sent,
        as hashed here. Raises ChannelError or ValueError with the line of the first that failed; the others are cut off.
        Raises PlanError for an order of another plan: both sides hash this one's boxes and would agree.
        """
        if order.plan != self.plan.layout_digest:
            raise PlanError(
                f"this trainer rank's plan {self.plan.layout_digest} is not the controller's {order.plan}: a layout has "
                "changed since it was made"
            )
        if not self._pairs:
            return []
        params = {SourceParam(number, name): p for number, chunk in enumerate(chunks) for name, p in chunk.items()}
        with ThreadPoolExecutor(max_workers=len(self._pairs), thread_name_prefix="weight-send") as pool:
            futures = [pool.submit(pair.send, params, order) for pair in self._pairs]
            done, _ = wait(futures, timeout=self._options.timeout_s, return_when=FIRST_EXCEPTION)
            failed = next((future for future in futures if future in done and future.exception()), None)
            if failed is not None or len(done) < len(futures):
                self.close()
            return _results(futures, failed)

    def close(self) -> None:
        """Close every connection; the next `send` opens them anew."""
        for pair in self._pairs:
            pair.close()


def _results(futures: Sequence[Future[ShardDigest]], failed: Future[ShardDigest] | None) -> list[ShardDigest]:
    """All of them, or the first failure: the others only failed because they were cut off."""
    if failed is not None:
        failed.result()
    return [future.result() for future in futures]


class _Pair:
    """What a trainer rank sends to one engine rank."""

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        target: int,
        mine: Mapping[str, np.ndarray],
        address: Address,
        key: bytes,
        options: SendOptions,
    ) -> None:
        self._rank, self._target, self._address, self._key, self._options = rank, target, address, key, options
        self._source, self._planned = pair_tables(plan, mine, target)
        self._table, self._origins = self._planned, np.arange(0)
        self._shapes = plan.target_shapes
        self._dtypes: Mapping[str, str] = {}
        self._channel: Channel | None = None
        self._transport: Transport | None = None
        self._transport_name = ""
        self._base = DeltaBase()

    def send(self, params: Mapping[SourceParam, torch.Tensor], order: SyncOrder) -> ShardDigest:
        self._adopt(order.dtypes)
        boxes = self._boxes(params, order)
        try:
            return self._send(boxes, order)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        if self._channel is not None:
            self._channel.close()
        self._channel = self._transport = None

    def _send(self, boxes: Sequence[Box], order: SyncOrder) -> ShardDigest:
        is_kept = self._channel is not None
        channel, transport = self._connect(boxes)
        delta, opening = self._encode(boxes, order)
        try:
            opened = channel.ask(opening)
        except PeerRefusedError:
            raise
        except ChannelError:
            if not is_kept:
                raise
            self.close()  # it has gone since the last sync
            channel, transport = self._connect(boxes)
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
            raise ChannelError(f"{channel.peer}: the digest of what trainer rank {self._rank} sent differs; it arrived wrong")
        self._base.digest = own
        return ShardDigest(self._target, self._planned.num_elements, {self._rank: own})

    def _connect(self, boxes: Sequence[Box]) -> tuple[Channel, Transport]:
        """The kept connection, or a new one with the table of boxes told and the transport chosen."""
        if self._channel is None or self._transport is None:
            channel = self._channel = connect(*self._address, self._key, self._options.timeout_s)
            header = {"kind": "table", "source": self._rank, "names": self._table.names}
            there = channel.ask(header, memoryview(self._table.rows_N5.tobytes()))["host"]
            device = boxes[0].view.device
            self._transport_name = choose_transport(self._options.transport, describe_host(device), there, device)
            folder = self._options.directory
            self._transport = build_transport(
                self._transport_name,
                channel,
                self._options.bucket_bytes,
                None if folder is None else folder / f"from-{self._rank}-to-{self._target}",
            )
        return self._channel, self._transport

    def _encode(self, boxes: Sequence[Box], order: SyncOrder) -> tuple[bytes | None, dict[str, Any]]:
        """The delta if there is one worth sending, and the message that offers it. Until it has arrived, there is no base."""
        opening = {
            "kind": "open", "sync": order.sync, "source": self._rank, "transport": self._transport_name,
            "bucket_bytes": self._options.bucket_bytes, "timeout_s": self._options.timeout_s, "digests": DIGEST_NAMES,
            "delta_base": None,
        }  # fmt: skip
        interval = self._options.full_interval
        if interval == 1 or self._transport_name != "p2p" or not can_encode(boxes):
            return None, opening
        base, delta = self._base.digest, None
        if order.version % interval:
            delta = self._base.encode(boxes)
        else:
            self._base.remember(boxes)
        self._base.digest = None
        if delta is None or not is_worth_it(delta, boxes):
            return None, opening
        return delta, opening | {"delta_base": base}

    def _boxes(self, params: Mapping[SourceParam, torch.Tensor], order: SyncOrder) -> list[Box]:
        return made_boxes(self._source.resolve(params), self._table, self._origins, order.dtypes)

    def _adopt(self, dtypes: Mapping[str, str]) -> None:
        """The boxes that travel follow from how the engines hold each parameter."""
        if self._dtypes != dtypes:
            check_block_boxes(self._planned, dtypes, self._shapes)
            self._table, self._origins = with_scales(self._planned, dtypes)
            self._dtypes = dtypes
            self.close()


def pair_tables(plan: ReshardPlan, mine: Mapping[str, np.ndarray], target: int) -> tuple[PairTable, PairTable]:
    """Where the boxes of a trainer rank (its columns of the plan) lie at that rank and at one engine rank."""
    columns = {name: column[mine["target_rank"] == target] for name, column in mine.items()}
    tables = []
    sides: tuple[tuple[str, Sequence[Any]], ...] = (("source", plan.source_params), ("target", plan.target_params))
    for side, names in sides:
        used, numbers = np.unique(columns[f"{side}_param"], return_inverse=True)
        fields = (numbers, columns[f"{side}_row"], columns[f"{side}_col"], columns["num_rows"], columns["num_cols"])
        tables.append(PairTable(tuple(names[int(i)] for i in used), np.stack(fields, axis=1).astype(np.int64)))
    return tables[0], tables[1]
