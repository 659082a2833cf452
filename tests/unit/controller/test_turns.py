"""Turns on shared GPUs: their order, what each side holds meanwhile, and syncs between them."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, nullcontext

import pytest
import torch

from megatron_rl.config.sections import OptimizerSection
from megatron_rl.controller.probe import WeightProbe
from megatron_rl.controller.turns import ColocatedTrainers, Turns
from megatron_rl.resharding.verify import SyncError
from megatron_rl.scheduling.colocation import ENGINE_PARTS, TRAINER_STATES
from megatron_rl.types.layout import ParallelLayout
from megatron_rl.types.protocols import EngineDirtyError
from megatron_rl.types.rollout import EngineLoad
from tests.unit.controller.test_weight_sync import DIMS, Setup, sample


class Scripted:
    """Trainers and one engine in one: says what is asked of it, in order."""

    def __init__(self, num_running=(0,)):
        self.said, self.num_running = [], list(num_running)
        self.metrics = []

    async def offload(self, states):
        self.said.append(f"offload {' '.join(states)}")
        return dict.fromkeys(states, 3)

    async def onload(self, states):
        self.said.append(f"onload {' '.join(states)}")

    async def pause(self, mode):
        self.said.append(f"pause {mode}")

    async def load(self):
        return EngineLoad(self.num_running.pop(0) if len(self.num_running) > 1 else self.num_running[0], 1, 0.0, 0, 0, 0.0)

    async def memory_bytes(self):
        return {"weights": 5, "kv_cache": 7}

    async def release_memory(self, parts):
        self.said.append(f"release {' '.join(parts)}")

    async def resume_memory(self, parts):
        self.said.append(f"resume {' '.join(parts)}")

    async def begin_phase(self, section, num_optimizer_steps):
        self.said.append("begin phase")

    async def train_step(self, batch, version):
        self.said.append(f"train {version}")
        return {}

    def turns(self, **options):
        @contextmanager
        def span(name):
            self.said.append(name)
            yield

        given = {"pause_mode": "abort", "timeout_s": 5.0, "span": span, "record": self.metrics.append, **options}
        return Turns(self, [self], **given)


FIRST = [
    "pause abort",
    "colocation/release_engines", "release kv_cache weights cuda_graph",
    "colocation/onload_trainers", "onload parameters gradients optimizer",
    "colocation/train", "begin phase",
    "colocation/train", "train 4",
]  # fmt: skip
SECOND = [
    "colocation/offload_optimizer", "offload gradients optimizer",
    "colocation/resume_weights", "resume weights",
    "colocation/sync",
    "colocation/offload_parameters", "offload parameters",
    "colocation/resume_cache", "resume kv_cache cuda_graph",
]  # fmt: skip


def test_a_turn_in_its_order():
    async def scenario():
        both = Scripted(num_running=[2, 1, 0])
        turns = both.turns()
        trainers = ColocatedTrainers(both, turns)
        for _ in range(2):
            both.said.clear()
            await trainers.begin_phase(OptimizerSection(), 3)
            await trainers.train_step(None, 4)
            assert both.said == FIRST
            both.said.clear()
            await turns.before_sync()
            with turns.syncing():
                pass
            await turns.after_sync()
            assert both.said == SECOND
        assert both.metrics == [{
            "memory/engine_weights_bytes": 5, "memory/engine_kv_cache_bytes": 7,
            **{f"memory/trainer_{state}_bytes": 3 for state in TRAINER_STATES},
        }] * 2  # fmt: skip

    asyncio.run(scenario())


def test_a_sync_that_failed_is_tried_again_where_it_stands():
    async def scenario():
        both = Scripted()
        turns = both.turns()
        await turns.before_sync()
        with pytest.raises(SyncError), turns.syncing():
            raise SyncError("lost")
        both.said.clear()
        await turns.before_sync()
        assert both.said == []
        with turns.syncing():
            pass
        await turns.after_sync()
        assert both.said == SECOND[4:]

    asyncio.run(scenario())


def test_an_engine_that_does_not_come_to_rest_is_not_released():
    async def scenario():
        both = Scripted(num_running=[3])
        with pytest.raises(TimeoutError, match=r"engines still run 3 requests 0\.2 s after a pause"):
            await both.turns(timeout_s=0.2).to_trainers()
        assert both.said == ["pause abort"]

    asyncio.run(scenario())


class Memory:
    """Trainers without any memory to give."""

    async def offload(self, states):
        return dict.fromkeys(states, 0)

    async def onload(self, states):
        return


def test_real_engines_give_everything_up_and_come_back_with_the_new_weights():
    async def scenario():
        probe = WeightProbe(((1, 5, 9, 30),), interval=1, tolerance=1e-4)
        with (
            Setup(ParallelLayout(tp=2), 2, probe=probe) as setup,
            Setup(ParallelLayout(), 1, num_engines=1) as reference,
        ):
            metrics = []
            options = {"pause_mode": "retract", "timeout_s": 10.0, "span": lambda name: nullcontext()}
            turns = Turns(Memory(), setup.engines, record=metrics.append, **options)
            setup.sync._handover = turns
            waiting = None
            for version in range(3):
                for one in (setup, reference):
                    one.senders.seed = 10 + version
                await reference.sync.publish()
                expected = await reference.engines[0].score([[1, 5, 9, 30]])
                setup.senders.scores = lambda token_ids, expected=expected: expected
                await turns.to_trainers()
                for engine in setup.engines:
                    assert await engine.memory_bytes() == dict.fromkeys(ENGINE_PARTS, 0)
                    assert sum(t.untyped_storage().nbytes() for shard in engine.weights.shards for t in shard.values()) == 0
                    with pytest.raises(RuntimeError, match="is released"):
                        await engine.resume()
                    with pytest.raises(RuntimeError, match="tokens was not released"):
                        await engine.resume_memory(("weights", "tokens"))
                if version == 1:  # asked while the trainers have their turn
                    waiting = asyncio.ensure_future(sample(setup.engines[0]))
                assert await setup.sync.publish() == version
                for engine in setup.engines:
                    assert await engine.score([[1, 5, 9, 30]]) == [pytest.approx(expected[0], abs=1e-5)]
                    assert {segment.policy_version for segment in await sample(engine)} == {version}
                if waiting is not None:
                    assert {segment.policy_version for segment in await waiting} == {1}
                    waiting = None
            size = 2 * sum(t.nbytes for t in setup.engines[0].weights.stacked.values())
            assert [row["memory/engine_weights_bytes"] for row in metrics] == [size] * 3
            assert metrics[0]["memory/engine_kv_cache_bytes"] == 2 * 2 * DIMS.num_layers * 4 * 32 * _kv_row_bytes()

    asyncio.run(scenario())


def _kv_row_bytes() -> int:
    return max(DIMS.num_kv_heads, 2) * DIMS.head_dim * torch.float32.itemsize


def test_real_engines_refuse_to_give_up_what_they_sample_with():
    async def scenario():
        with Setup(ParallelLayout(), 1, num_engines=1) as setup:
            await setup.sync.publish()
            (engine,) = setup.engines
            with pytest.raises(RuntimeError, match="pause it first"):
                await engine.release_memory(("kv_cache",))
            await engine.pause("retract")
            await engine.release_memory(("weights",))
            await engine.resume_memory(("weights",))
            with pytest.raises(EngineDirtyError):
                await engine.resume()  # memory, and no weights in it

    asyncio.run(scenario())
