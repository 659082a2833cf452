"""Publishing weights: real receivers and embedded engines, trainer ranks simulated in this process."""

from __future__ import annotations

import asyncio
import ctypes
import threading

import pytest
import torch

from megatron_rl.checkpoint.hf_folder import RandomSource
from megatron_rl.checkpoint.hf_shards import import_params
from megatron_rl.config.sections import SyncSection
from megatron_rl.controller.probe import WeightProbe
from megatron_rl.controller.weight_sync import WeightSync
from megatron_rl.model_families.registry import FAMILIES
from megatron_rl.resharding.box_sender import SendOptions
from megatron_rl.resharding.execute import WeightSender
from megatron_rl.resharding.plan import build_reshard_plan
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.resharding.transports import ipc
from megatron_rl.resharding.verify import SyncError
from megatron_rl.rollout.embedded.engine import EmbeddedEngine
from megatron_rl.types.layout import EngineLayout, ParallelLayout
from megatron_rl.types.protocols import EngineDirtyError
from megatron_rl.types.rollout import GenerationRequest, SamplingParams

KEY = b"0" * 32
FAMILY = FAMILIES["qwen3_moe"]
DIMS = FAMILY.debug_dims


TEXT = ((1, 5, 9, 30), (2, 2, 7))


class Senders:
    """All trainer ranks of a layout, one after another; `sabotage` changes what one of them sends."""

    def __init__(self, plan, layout, sabotage=None):
        self.plan, self.layout, self.sabotage = plan, layout, sabotage
        self.seed = 1
        self.scores = None

    async def send_weights(self, order):
        return await asyncio.to_thread(self._send, order)

    async def score_tokens(self, token_ids):
        return self.scores(token_ids)

    def _send(self, order):
        sent = []
        for rank in range(self.layout.world_size):
            source = RandomSource(self.seed, DIMS.num_layers, std=0.3)
            options = {"spec": "local", "vocab_multiple": 1, "dtype": torch.float32}
            chunks = import_params(source, FAMILY, DIMS, self.layout, rank, **options)
            if self.sabotage is not None:
                self.sabotage(rank, chunks)
            sender = WeightSender(self.plan, rank, order.addresses, KEY, SendOptions(bucket_bytes=20_000, timeout_s=10.0))
            sent += sender.send(chunks, order)
            sender.close()
        return sent


class Setup:
    def __init__(self, layout, engine_tp, num_engines=2, sabotage=None, key=KEY, probe=None, relay=False, **section):
        engine_layout = EngineLayout(tp=engine_tp, num_engines=num_engines)
        plan = build_reshard_plan("qwen3_moe", DIMS, layout, engine_layout, relay=relay)
        self.engines = [
            EmbeddedEngine(
                DIMS, engine_tp, torch.float32, num_slots=4, max_context=32, stop_token_ids=()
            )
            for _ in range(num_engines)
        ]  # fmt: skip
        self.receivers = [Receiver(shard, KEY) for engine in self.engines for shard in engine.weights.shards]
        for receiver in self.receivers:
            receiver.start()
        self.senders = Senders(plan, layout, sabotage)
        addresses = [receiver.address for receiver in self.receivers]
        section = SyncSection(timeout_s=15.0, **section)
        self.sync = WeightSync(plan, self.senders, self.engines, addresses, key, section, probe)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.sync.close()
        for receiver in self.receivers:
            receiver.close()
        for engine in self.engines:
            engine.close()


def sample(engine):
    request = GenerationRequest("r", (1, 2, 3), SamplingParams(max_new_tokens=6), seed=5)
    return engine.generate(request)


@pytest.mark.parametrize(
    ("engine_tp", "staging", "relay"), [(1, "none", False), (2, "none", True), (2, "host", False), (1, "host", True)]
)
def test_engines_hold_the_new_weights_and_version(engine_tp, staging, relay):
    async def scenario():
        with (
            Setup(ParallelLayout(tp=2, pp=2, ep=2, dp=1), engine_tp, 3 if relay else 2, staging=staging, relay=relay) as setup,
            Setup(ParallelLayout(), 1, num_engines=1) as reference,
        ):
            for version in range(2):
                for one in (setup, reference):
                    one.senders.seed = 10 + version
                    assert await one.sync.publish() == version
                expected = await reference.engines[0].score([[1, 5, 9, 30]])
                for engine in setup.engines:
                    assert await engine.policy_version() == version
                    scores = await engine.score([[1, 5, 9, 30]])
                    assert scores[0] == pytest.approx(expected[0], abs=1e-5)
                    segments = await sample(engine)
                    assert {segment.policy_version for segment in segments} == {version}

    asyncio.run(scenario())


def test_a_failed_sync_leaves_the_engines_paused_and_dirty_until_a_whole_one():
    class Lost(Exception):
        pass

    def sabotage(rank, chunks):
        if rank == 1:
            raise Lost

    async def scenario():
        with Setup(ParallelLayout(tp=2), 2) as setup:
            await setup.sync.publish()
            setup.senders.sabotage = sabotage
            with pytest.raises(Lost):
                await setup.sync.publish()
            for engine in setup.engines:
                with pytest.raises(EngineDirtyError):
                    await engine.resume()
                assert await engine.policy_version() == 0
                request = asyncio.ensure_future(sample(engine))
                await asyncio.sleep(0.05)
                assert not request.done(), "a paused engine must not sample"
                request.cancel()
            setup.senders.sabotage = None
            setup.senders.seed = 2
            assert await setup.sync.publish() == 1
            for engine in setup.engines:
                assert {segment.policy_version for segment in await sample(engine)} == {1}

    asyncio.run(scenario())


def test_a_receiver_that_is_not_there_is_named():
    async def scenario():
        with Setup(ParallelLayout(), 2) as setup:
            host, port = setup.receivers[3].address
            setup.receivers[3].close()
            with pytest.raises(SyncError, match=rf"version 0: receiver {host}:{port}: cannot connect"):
                await setup.sync.publish()

    asyncio.run(scenario())


def test_a_wrong_key_is_refused_and_nothing_is_applied():
    async def scenario():
        with Setup(ParallelLayout(), 1, key=b"1" * 32) as setup:
            with pytest.raises(SyncError, match="another key"):
                await setup.sync.publish()
            assert all(not tensor.any() for tensor in setup.engines[0].weights.shards[0].values())

    asyncio.run(scenario())


def test_bytes_that_change_on_the_way_are_noticed(monkeypatch):
    async def scenario():
        with Setup(ParallelLayout(), 2) as setup:
            original = ipc.memory_at

            def corrupted(address, num_bytes, owner):
                ctypes.c_ubyte.from_address(address).value ^= 1
                return original(address, num_bytes, owner)

            monkeypatch.setattr(ipc, "memory_at", corrupted)
            with pytest.raises(SyncError, match="digest"):
                await setup.sync.publish()
            with pytest.raises(EngineDirtyError):
                await setup.engines[0].resume()

    asyncio.run(scenario())


def test_with_staging_a_failed_sync_leaves_the_old_version_serving():
    def sabotage(rank, chunks):
        if rank == 1:
            raise ConnectionResetError("the cable was pulled")

    async def scenario():
        with Setup(ParallelLayout(tp=2), 2, staging="host") as setup:
            await setup.sync.publish()
            before = await setup.engines[0].score(TEXT)
            setup.senders.seed, setup.senders.sabotage = 2, sabotage
            with pytest.raises(SyncError, match="version 1: the cable was pulled"):
                await setup.sync.publish()
            for engine in setup.engines:
                assert {segment.policy_version for segment in await sample(engine)} == {0}
                for old, new in zip(before, await engine.score(TEXT), strict=True):
                    assert old == pytest.approx(new, abs=0)
            setup.senders.sabotage = None
            assert await setup.sync.publish() == 1
            assert {segment.policy_version for segment in await sample(setup.engines[1])} == {1}

    asyncio.run(scenario())


def swap_gate_and_up(rank, chunks):
    """A fault that trainer and engine would share if the declaration had it: every digest agrees."""
    for chunk in chunks:
        for name, tensor in chunk.items():
            if name.endswith("linear_fc1.weight"):
                gate, up = tensor.chunk(2)
                tensor.copy_(torch.cat([up, gate]))


@pytest.mark.parametrize("engine_tp", [1, 2])
def test_the_probe_catches_what_digests_cannot(engine_tp):
    async def scenario():
        probe = WeightProbe(TEXT, interval=2, tolerance=0.01)
        with (
            Setup(ParallelLayout(), 1, num_engines=1) as reference,
            Setup(ParallelLayout(), engine_tp, probe=probe) as setup,
        ):
            await reference.sync.publish()
            right = await reference.engines[0].score(TEXT)
            setup.senders.scores = lambda token_ids: right
            assert await setup.sync.publish() == 0
            setup.senders.sabotage = swap_gate_and_up
            assert await setup.sync.publish() == 1, "not due: every second version is probed"
            with pytest.raises(SyncError, match=r"version 2: probe: engine 0 and the trainer differ by .*tolerance=0\.01"):
                await setup.sync.publish()
            for engine in setup.engines:
                with pytest.raises(EngineDirtyError):
                    await engine.resume()

    asyncio.run(scenario())


def test_a_sync_that_takes_too_long_is_one_line_and_ends():
    async def scenario():
        with Setup(ParallelLayout(), 1, num_engines=1) as setup:
            setup.sync._section = SyncSection(timeout_s=0.3)
            setup.senders.sabotage = lambda rank, chunks: released.wait(5.0)
            with pytest.raises(SyncError, match=r"version 0: not done within sync\.timeout_s=0\.3"):
                await setup.sync.publish()
            with pytest.raises(EngineDirtyError):
                await setup.engines[0].resume()
            released.set()

    released = threading.Event()
    asyncio.run(scenario())
