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

TIMEOUT_S = 60.0
FIRST_SEED = 100
"""The weights of version v are drawn from seed FIRST_SEED + v."""


async def publish(sync) -> Exception | None:
    """The error of a sync, which comes in time and in one line; None when it succeeded."""
    begun = time.monotonic()
    try:
        await sync.publish()
    except (SyncError, ProcessDiedError) as error:
        assert time.monotonic() - begun < TIMEOUT_S + 5.0
        assert len(str(error).splitlines()) == 1
        return error
    return None


async def served_versions(world: KillWorld, engines: list[int]) -> list[int | None]:
    """What each engine would serve now, which is a whole version; None: it refuses to."""
    served: list[int | None] = []
    for number in engines:
        engine = world.engines[number]
        try:
            await engine.call("run", "resume")
        except EngineDirtyError:
            served.append(None)
            continue
        version = await engine.call("run", "policy_version")
        assert await engine.call("holds", FIRST_SEED + version), f"engine {number} serves a mixture as version {version}"
        served.append(version)
    return served


async def strike(world: KillWorld, sync, victim: str, version: int, at: float) -> Exception | None:
    """A sync to `version + 1` in which the victim is struck after the fraction `at` of its calls; checks what it leaves."""
    child = world.victims["trainer" if victim == "trainer" else "engine"]
    await child.call("light", int(at * world.calls[victim]), "cut" if victim == "connection" else "die")
    await world.load(FIRST_SEED + version + 1)
    error = await publish(sync)
    served = await served_versions(world, [0] if victim == "engine" else [0, 1])
    if error is None:
        assert set(served) == {version + 1}
    else:
        assert set(served) <= {None, version, version + 1}
        assert world.section.staging == "host" or victim == "engine" or None in served, "written in place, and yet clean"
    return error


async def count_calls(world: KillWorld, sync) -> int:
    """Publish version 0, then 1 to know how many calls of each child a sync makes; the version that is served."""
    for version in (0, 1):
        before = {name: await child.call("count") for name, child in world.victims.items()}
        await world.load(FIRST_SEED + version)
        assert await sync.publish() == version
    world.calls = {name: await child.call("count") - before[name] for name, child in world.victims.items()}
    world.calls["connection"] = world.calls["engine"]
    assert min(world.calls.values()) > 10
    return 1


async def strike_often(world: KillWorld, victim: str, moments: list[float]) -> list[Exception | None]:
    """One world for all moments: a trainer that died is replaced, and a whole sync cleans the engines."""
    sync = await world.start()
    version = await count_calls(world, sync)
    errors = []
    for at in moments:
        error = await strike(world, sync, victim, version, at)
        errors.append(error)
        if victim == "trainer":
            world.replace_trainer(1)
        if error is not None:
            await world.load(FIRST_SEED + version + 1)
            assert await sync.publish() == version + 1, "a whole sync makes every engine clean"
            assert await served_versions(world, [0, 1]) == [version + 1, version + 1]
        version += 1
    return errors


async def strike_engine(world: KillWorld, at: float) -> Exception | None:
    """An engine that died does not come back: the next sync says so too."""
    sync = await world.start()
    version = await count_calls(world, sync)
    error = await strike(world, sync, "engine", version, at)
    again = await publish(sync)
    assert again is not None
    assert "engine 1 died" in str(again) or "cannot connect" in str(again) or "connection" in str(again), again
    return error


def run_moments(transport: str, staging: str, victim: str, moments: list[float]) -> list[Exception | None]:
    if victim == "engine":
        return [run_in_world(transport, staging, lambda world, at=at: strike_engine(world, at)) for at in moments]
    return run_in_world(transport, staging, lambda world: strike_often(world, victim, moments))


def run_in_world(transport, staging, scenario):
    world = KillWorld(transport, staging, TIMEOUT_S)
    try:
        return asyncio.run(scenario(world))
    finally:
        world.close()


CASES = [
    ("p2p", "none", "trainer"),
    ("tcp", "none", "trainer"),
    ("ipc", "none", "trainer"),
    ("p2p", "host", "trainer"),
    ("p2p", "none", "engine"),
    ("tcp", "none", "engine"),
    ("ipc", "host", "engine"),
    ("p2p", "none", "connection"),
    ("ipc", "none", "connection"),
    ("p2p", "host", "connection"),
    ("tcp", "host", "connection"),
]


@pytest.mark.parametrize(
    ("transport", "staging", "victim", "moments"),
    [
        ("p2p", "none", "trainer", [0.55]),
        ("tcp", "none", "trainer", [0.55]),
        ("p2p", "host", "connection", [0.3, 0.6]),
        ("ipc", "none", "engine", [0.5]),
    ],
)
def test_what_dies_in_a_sync_leaves_whole_versions(transport, staging, victim, moments):
    errors = run_moments(transport, staging, victim, moments)
    assert any(errors), "no moment was inside of a sync"


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "staging", "victim"), CASES)
def test_what_dies_at_any_moment_leaves_whole_versions(transport, staging, victim):
    rng = random.Random(f"{transport} {staging} {victim}")
    errors = run_moments(transport, staging, victim, [rng.random() for _ in range(8 if victim == "engine" else 30)])
    num_failed = sum(error is not None for error in errors)
    print(f"{transport} {staging} {victim}: {num_failed} of {len(errors)} syncs failed, every one cleanly")
    assert num_failed >= len(errors) // 4, errors
