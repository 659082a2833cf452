"""The trainer's side of a weight sync: every rank sends its own boxes to the engine ranks that need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import numpy as np
import torch

from megatron_rl.resharding.box_sender import BoxSender, SendOptions
from megatron_rl.resharding.box_table import PlanError
from megatron_rl.resharding.boxes import PairTable, as_matrix
from megatron_rl.resharding.channel import Address, ChannelError
from megatron_rl.resharding.plan import ReshardPlan
from megatron_rl.resharding.precision import check_block_boxes, made_boxes, with_scales
from megatron_rl.types.resharding import ShardDigest, SourceParam, SyncOrder

Chunks = Sequence[Mapping[str, torch.Tensor]]
_PAIRS_AT_ONCE = 2
"""Per rank: the second hashes and shakes hands while the first sends. More only divide the same cores and the same wire."""


class WeightSender:
    """One trainer rank. It keeps one connection per engine rank that needs something of it, from sync to sync."""

    def __init__(self, plan: ReshardPlan, rank: int, addresses: Sequence[Address], key: bytes, options: SendOptions) -> None:
        self.plan, self.addresses = plan, tuple(addresses)
        self._options = options
        mine = plan.columns_from(rank)
        targets = np.unique(mine["target_rank"])
        self._pairs = [
            _Pair(plan, rank, int(target), mine, addresses[int(target)], key, options)
            for target in np.roll(targets, -rank)  # not all ranks begin at the same engine rank
        ]

    def send(self, chunks: Chunks, order: SyncOrder) -> list[ShardDigest]:
        """Send everything that the rank owes, to a few engine ranks at a time.

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
        params = {
            SourceParam(number, name): as_matrix(param) for number, chunk in enumerate(chunks) for name, param in chunk.items()
        }  # fmt: skip
        with ThreadPoolExecutor(max_workers=min(len(self._pairs), _PAIRS_AT_ONCE), thread_name_prefix="weight-send") as pool:
            futures = [pool.submit(pair.send, params, order) for pair in self._pairs]
            done, _ = wait(futures, timeout=self._options.timeout_s, return_when=FIRST_EXCEPTION)
            failed = next((future for future in futures if future in done and future.exception()), None)
            if failed is not None or len(done) < len(futures):
                pool.shutdown(wait=False, cancel_futures=True)
                self.close()
            return _results(futures, failed, self._options.timeout_s)

    def close(self) -> None:
        """Close every connection; the next `send` opens them anew."""
        for pair in self._pairs:
            pair.sender.close()


def _results(
    futures: Sequence[Future[ShardDigest]], failed: Future[ShardDigest] | None, timeout_s: float
) -> list[ShardDigest]:
    """All of them, or the first failure: the others only failed because they were cut off or never began."""
    if failed is not None:
        failed.result()
    results = [future.result() for future in futures if not future.cancelled()]
    num_missed = len(futures) - len(results)
    if num_missed:
        raise ChannelError(f"{num_missed} of {len(futures)} engine ranks were not reached within {timeout_s:.0f} s")
    return results


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
        self._rank, self._target = rank, target
        self._source, self._planned = pair_tables(plan, mine, target)
        self._table, self._origins = self._planned, np.arange(0)
        self._shapes = plan.target_shapes
        self._dtypes: Mapping[str, str] = {}
        self.sender = BoxSender(rank, f"trainer rank {rank}", target, address, key, options)

    def send(self, params: Mapping[SourceParam, torch.Tensor], order: SyncOrder) -> ShardDigest:
        self._adopt(order.dtypes)
        boxes = made_boxes(self._source.resolve(params), self._table, self._origins, order.dtypes)
        digest = self.sender.send(boxes, self._table, order.sync, order.version)
        return ShardDigest(self._target, self._planned.num_elements, {self._rank: digest})

    def _adopt(self, dtypes: Mapping[str, str]) -> None:
        """The boxes that travel follow from how the engines hold each parameter."""
        if self._dtypes != dtypes:
            check_block_boxes(self._planned, dtypes, self._shapes)
            self._table, self._origins = with_scales(self._planned, dtypes)
            self._dtypes = dtypes


def pair_tables(plan: ReshardPlan, mine: Mapping[str, np.ndarray], target: int) -> tuple[PairTable, PairTable]:
    """Where the boxes of a trainer rank (its columns of the plan) lie at that rank and at one engine rank."""
    columns = {name: column[mine["target_rank"] == target] for name, column in mine.items()}
    return PairTable.of_side("source", columns, plan.source_params), PairTable.of_side("target", columns, plan.target_params)
