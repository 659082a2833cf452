"""Publishing a new policy version: pause, reshard, verify, commit everywhere or nowhere."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from megatron_rl.config.sections import SyncSection
from megatron_rl.controller.probe import ScoringTrainers, WeightProbe
from megatron_rl.controller.started_engine import ScoringEngine
from megatron_rl.resharding.channel import Address
from megatron_rl.resharding.control import ReceiverControl
from megatron_rl.resharding.hops import Hop, relay_rounds, sources_of
from megatron_rl.resharding.plan import ReshardPlan
from megatron_rl.resharding.verify import SyncError, check_digests, check_receiver
from megatron_rl.types.resharding import ShardDigest, SyncOrder
from megatron_rl.types.rollout import PolicyVersion

T = TypeVar("T")


class WeightSenders(ScoringTrainers, Protocol):
    """The trainer ranks, as far as a sync needs them."""

    async def send_weights(self, order: SyncOrder) -> list[ShardDigest]:
        """Every rank sends what the plan says it owes; returns what was sent, as hashed there."""
        ...


class Handover(Protocol):
    """What surrounds a sync where both sides share memory (`controller.turns.Turns`)."""

    async def before_sync(self) -> None:
        """Both sides hold weights when this returns."""
        ...

    def syncing(self) -> AbstractContextManager[None]:
        """The time in which both sides need their weights."""
        ...

    async def after_sync(self) -> None:
        """The engines can sample when this returns; the trainers hold no weights any more."""
        ...


class NoHandover:
    """Each side has memory of its own."""

    async def before_sync(self) -> None:
        return

    def syncing(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def after_sync(self) -> None:
        return


class WeightSync:
    """Brings all engines to the trainers' weights, one version after another.

    `addresses[r]` is the receiver of engine rank r (engine number * TP + TP rank). A sync that fails raises SyncError. No
    engine serves a mixture of versions: with `sync.staging: none` a failure leaves every engine paused and dirty until a
    later sync succeeds; with `host` a failure before the swap leaves them serving the version before.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        senders: WeightSenders,
        engines: Sequence[ScoringEngine],
        addresses: Sequence[Address],
        key: bytes,
        section: SyncSection,
        probe: WeightProbe | None = None,
        handover: Handover | None = None,
    ) -> None:
        self._plan, self._senders, self._engines = plan, senders, engines
        self._section, self._probe, self._handover = section, probe, handover or NoHandover()
        self._addresses = tuple(addresses)
        self._receivers = [ReceiverControl(r, a, key, section.timeout_s) for r, a in enumerate(addresses)]
        # All at once: asyncio's own pool follows the controller's cores, not the engines.
        self._threads = ThreadPoolExecutor(max_workers=len(addresses), thread_name_prefix="weight-sync")
        self._dtypes: Mapping[str, str] | None = None
        self._next_version = 0
        self._pause_mode: str = section.pause_mode or "retract"

    async def publish(self, pause_mode: str | None = None) -> PolicyVersion:
        """Sync once; `pause_mode` None: `sync.pause_mode`. Raises SyncError within `sync.timeout_s`."""
        version = PolicyVersion(self._next_version)
        self._pause_mode = pause_mode or self._section.pause_mode or "retract"
        what = f"weight sync to version {version}"
        try:
            async with asyncio.timeout(self._section.timeout_s):
                await self._publish(version)
        except TimeoutError:
            self.close()
            raise SyncError(f"{what}: not done within sync.timeout_s={self._section.timeout_s:g}") from None
        except (OSError, ValueError) as error:
            self.close()
            raise SyncError(f"{what}: {error}") from error
        self._next_version = version + 1
        return version

    def close(self) -> None:
        """Close the connections to the receivers; the next sync opens them anew."""
        for receiver in self._receivers:
            receiver.close()

    async def _publish(self, version: PolicyVersion) -> None:
        probe = self._probe if self._probe is not None and self._probe.is_due(version) else None
        await self._handover.before_sync()
        with self._handover.syncing():
            await self._bring(version)
            expected = None if probe is None else await probe.expect(self._senders)
        await self._handover.after_sync()
        await asyncio.gather(*(engine.resume() for engine in self._engines))
        if probe is not None and expected is not None:
            await self._check_by_probe(probe, expected)

    async def _bring(self, version: PolicyVersion) -> None:
        """Transfer, verify, commit."""
        sync, is_staged = f"{version}-{secrets.token_hex(8)}", self._section.staging == "host"
        if is_staged:
            await self._transfer(sync, version, is_staged=True)
            await self._begin()
            await self._ask_all(lambda receiver: receiver.apply(sync))
        else:
            await self._begin()
            await self._transfer(sync, version, is_staged=False)
        commit = {"phase": "commit", "version": version}
        held = await asyncio.gather(*(engine.load_weights(commit) for engine in self._engines))
        if set(held) != {version}:
            raise SyncError(f"weight sync to version {version}: the engines report {sorted(set(held))}")

    async def _begin(self) -> None:
        """From here on the engines are paused and refuse to sample until a commit."""
        await asyncio.gather(*(engine.pause(self._pause_mode) for engine in self._engines))
        await asyncio.gather(*(engine.load_weights({"phase": "begin"}) for engine in self._engines))

    async def _transfer(self, sync: str, version: PolicyVersion, *, is_staged: bool) -> None:
        """Every slice to its place; raises SyncError unless all engine ranks hold exactly what was sent to them."""
        if self._dtypes is None:
            self._dtypes = await self._check_receivers()
        sources = [sources_of(self._plan, rank) for rank in range(len(self._receivers))]
        await self._ask_all(lambda r: r.begin(sync, version, sources[r.target_rank], is_staged=is_staged))
        order = SyncOrder(sync, version, self._addresses, self._dtypes, self._plan.layout_digest)
        sent = await self._senders.send_weights(order)
        for hops in relay_rounds(self._plan, self._dtypes):
            sent += await self._at_once([partial(self._relay, order, hop) for hop in hops])
        received = await self._ask_all(lambda receiver: receiver.finish(sync))
        check_digests(self._plan, sent, received)

    def _relay(self, order: SyncOrder, hop: Hop) -> ShardDigest:
        address, receiver = self._addresses[hop.target_rank], self._receivers[hop.source_rank]
        return receiver.relay(order.sync, order.version, hop, address, self._section.bucket_bytes)

    async def _check_receivers(self) -> Mapping[str, str]:
        described = await self._ask_all(lambda receiver: receiver.describe())
        dtypes = [check_receiver(self._plan, rank, params) for rank, params in enumerate(described)]
        for rank, found in enumerate(dtypes):
            for name, dtype in found.items():
                if dtypes[0][name] != dtype:
                    raise SyncError(f"'{name}' is {dtypes[0][name]} on engine rank 0 and {dtype} on engine rank {rank}")
        return dtypes[0]

    async def _check_by_probe(self, probe: WeightProbe, expected: Sequence[np.ndarray]) -> None:
        try:
            await probe.check(expected, self._engines)
        except ValueError:
            await self._begin()  # what they hold is wrong: they sample no more
            raise

    async def _ask_all(self, question: Callable[[ReceiverControl], T]) -> list[T]:
        return await self._at_once([partial(question, receiver) for receiver in self._receivers])

    async def _at_once(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(self._threads, call) for call in calls))
