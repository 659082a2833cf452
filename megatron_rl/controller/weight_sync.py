"""Publishing a new policy version: pause, reshard, verify, commit everywhere or nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from megatron_rl.config.sections import SyncSection
from megatron_rl.resharding.channel import ChannelError
from megatron_rl.resharding.execute import Address, begin_receive, describe_receiver, finish_receive
from megatron_rl.resharding.plan import ReshardPlan
from megatron_rl.resharding.verify import SyncError, check_digests, check_receiver, sources_of
from megatron_rl.types.protocols import GenerationEngine
from megatron_rl.types.resharding import ShardDigest
from megatron_rl.types.rollout import PolicyVersion


class WeightSenders(Protocol):
    """The trainer ranks, as far as a sync needs them."""

    async def send_weights(self, addresses: Sequence[Address], dtype: str, version: int) -> list[ShardDigest]:
        """Every rank sends what the plan says it owes; returns what was sent, as hashed there."""
        ...


class WeightSync:
    """Brings all engines to the trainers' weights, one version after another.

    `addresses[r]` is the receiver of engine rank r (engine number * TP + TP rank). A sync that fails raises SyncError and
    leaves every engine paused and dirty: none serves a mixture of versions.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        senders: WeightSenders,
        engines: Sequence[GenerationEngine],
        addresses: Sequence[Address],
        key: bytes,
        section: SyncSection,
    ) -> None:
        self._plan, self._senders, self._engines = plan, senders, engines
        self._addresses, self._key, self._section = addresses, key, section
        self._dtype: str | None = None
        self._next_version = 0

    async def publish(self, pause_mode: str | None = None) -> PolicyVersion:
        """Sync once; `pause_mode` None: `sync.pause_mode`. Raises SyncError within `sync.timeout_s`."""
        version = PolicyVersion(self._next_version)
        mode = pause_mode or self._section.pause_mode or "retract"
        try:
            async with asyncio.timeout(self._section.timeout_s):
                await asyncio.gather(*(engine.pause(mode) for engine in self._engines))
                await asyncio.gather(*(engine.load_weights({"phase": "begin"}) for engine in self._engines))
                await self._transfer(version)
                commit = {"phase": "commit", "version": version}
                held = await asyncio.gather(*(engine.load_weights(commit) for engine in self._engines))
        except TimeoutError:
            limit = f"sync.timeout_s={self._section.timeout_s:g}"
            raise SyncError(f"weight sync to version {version}: not done within {limit}") from None
        except ChannelError as error:
            raise SyncError(f"weight sync to version {version}: {error}") from error
        if set(held) != {version}:
            raise SyncError(f"weight sync to version {version}: the engines report {sorted(set(held))}")
        await asyncio.gather(*(engine.resume() for engine in self._engines))
        self._next_version = version + 1
        return version

    async def _transfer(self, version: PolicyVersion) -> None:
        if self._dtype is None:
            self._dtype = await self._check_receivers()
        timeout_s, ranks = self._section.timeout_s, range(len(self._addresses))
        await asyncio.gather(*(
            asyncio.to_thread(
                begin_receive, self._addresses[r], self._key, timeout_s, version=version, sources=sources_of(self._plan, r)
            )
            for r in ranks
        ))  # fmt: skip
        sent = await self._senders.send_weights(self._addresses, self._dtype, version)
        received = await asyncio.gather(*(
            asyncio.to_thread(finish_receive, self._addresses[r], self._key, timeout_s, version=version, target_rank=r)
            for r in ranks
        ))  # fmt: skip
        check_digests(self._plan, sent, received)

    async def _check_receivers(self) -> str:
        described = await asyncio.gather(*(
            asyncio.to_thread(describe_receiver, address, self._key, self._section.timeout_s) for address in self._addresses
        ))  # fmt: skip
        dtypes = {check_receiver(self._plan, rank, params) for rank, params in enumerate(described)}
        if len(dtypes) != 1:
            raise SyncError(f"engines hold weights in several dtypes {sorted(dtypes)}; set one for all")
        return dtypes.pop()


