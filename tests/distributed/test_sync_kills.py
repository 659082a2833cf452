"""Something dies in the middle of a sync: one clear error in time, and no engine that serves a mixture of versions."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from megatron_rl.resharding.verify import SyncError
from megatron_rl.types.protocols import EngineDirtyError
from tests.distributed.kill_world import KillWorld, ProcessDiedError

pytestmark = pytest.mark.distributed

TIMEOUT_S = 30.0
SEEDS = (101, 102, 103, 104, 105, 106, 107, 108)
"""The weights of version 0, 1, ..."""


async def strike(world: KillWorld, victim: str, after_s: float) -> None:
    await asyncio.sleep(after_s)
    if victim == "trainer":
        world.trainers[1].kill()
    elif victim == "engine":
        world.engines[1].kill()


async def publish_and_strike(world: KillWorld, sync, victim: str, after_s: float) -> Exception | None:
    """The error of a sync during which the victim dies; None when the sync was faster."""
    blow = asyncio.ensure_future(strike(world, victim, after_s))
    begun = time.monotonic()
    try:
        await sync.publish()
    except (SyncError, ProcessDiedError) as error:
        assert time.monotonic() - begun < TIMEOUT_S
        assert len(str(error).splitlines()) == 1
        return error
    finally:
        await blow
    return None


async def assert_whole_or_silent(world: KillWorld, seeds: dict[int, int], engines: list[int]) -> list[int | None]:
    """Every engine that would serve holds exactly the version it reports; the versions, None: it refuses to."""
    served: list[int | None] = []
    for number in engines:
        engine = world.engines[number]
        try:
            await engine.call("run", "resume")
        except EngineDirtyError:
            served.append(None)
            continue
        version = await engine.call("run", "policy_version")
        assert await engine.call("holds", seeds[version]), f"engine {number} serves a mixture as version {version}"
        served.append(version)
    return served


@pytest.mark.parametrize(("transport", "staging"), [("p2p", "none"), ("ipc", "none"), ("p2p", "host")])
def test_a_trainer_dies_at_random_moments(transport, staging):
    rng = random.Random(f"{transport} {staging}")

    async def scenario():
        sync = await world.start()
        await world.load(SEEDS[0])
        begun = time.monotonic()
        assert await sync.publish() == 0
        usual_s = time.monotonic() - begun
        seeds, version, num_failed = {0: SEEDS[0]}, 0, 0
        for seed in SEEDS[1:5]:
            await world.load(seed)
            error = await publish_and_strike(world, sync, "trainer", rng.uniform(0.0, 0.7 * usual_s))
            seeds[version + 1] = seed
            if error is None:
                version += 1
            else:
                num_failed += 1
            served = await assert_whole_or_silent(world, seeds, [0, 1])
            assert set(served) <= {None, version, version + 1}
            if staging == "host" and error is not None and "trainer 1 died" in str(error):
                assert served == [version, version], "what was staged was never seen"
            world.replace_trainer(1)
            world.handles.children[1] = world.trainers[1]
            await world.load(seed)
            version = await sync.publish()  # a whole sync makes every engine clean
            seeds[version] = seed
            assert await assert_whole_or_silent(world, seeds, [0, 1]) == [version, version]
        assert num_failed >= 1, "no moment was inside of a sync"

    world = KillWorld(transport, staging, TIMEOUT_S)
    try:
        asyncio.run(scenario())
    finally:
        world.close()


def test_an_engine_dies():
    async def scenario():
        sync = await world.start()
        await world.load(SEEDS[0])
        begun = time.monotonic()
        await sync.publish()
        usual_s = time.monotonic() - begun
        await world.load(SEEDS[1])
        error = await publish_and_strike(world, sync, "engine", 0.4 * usual_s)
        served = await assert_whole_or_silent(world, {0: SEEDS[0], 1: SEEDS[1]}, [0])
        assert error is None or served == [None] or served == [1]
        with pytest.raises((SyncError, ProcessDiedError)) as caught:
            await sync.publish()
        assert "engine 1 died" in str(caught.value) or "cannot connect" in str(caught.value)

    world = KillWorld("p2p", "none", TIMEOUT_S)
    try:
        asyncio.run(scenario())
    finally:
        world.close()


def test_connections_break_at_random_moments():
    rng = random.Random(5)

    async def scenario():
        sync = await world.start()
        seeds = {}
        version = -1
        usual_s = 0.2
        num_failed = 0
        for round_number, seed in enumerate(SEEDS[:6]):
            await world.load(seed)
            begun = time.monotonic()
            publishing = asyncio.ensure_future(sync.publish())
            if round_number:
                await asyncio.sleep(rng.uniform(0.0, 0.8 * usual_s))
                await world.engines[round_number % 2].call("cut", round_number // 2 % 2)
            seeds[version + 1] = seed
            try:
                version = await publishing
                usual_s = time.monotonic() - begun
            except SyncError as error:
                num_failed += 1
                assert len(str(error).splitlines()) == 1
                assert await assert_whole_or_silent(world, seeds, [0, 1]) in ([None, None], [version, version])
                version = await sync.publish()
            assert await assert_whole_or_silent(world, seeds, [0, 1]) == [version, version]
        assert version == 5 and num_failed >= 1

    world = KillWorld("p2p", "none", TIMEOUT_S)
    try:
        asyncio.run(scenario())
    finally:
        world.close()
