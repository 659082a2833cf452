"""Pausing, weight versions and the receivers inside a real server. Runs after the tests that need the first weights."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import stat

import pytest
import torch

from megatron_rl.resharding.channel import connect
from megatron_rl.rollout.sglang import engine as engine_module
from megatron_rl.rollout.sglang.engine import CONTROL_TIMEOUT_S
from megatron_rl.rollout.sglang.errors import EngineReplyError
from megatron_rl.types.protocols import EngineDirtyError
from megatron_rl.types.rollout import FinishReason, GenerationRequest, SamplingParams

pytestmark = pytest.mark.sglang

NUM_TOKENS = 72  # a second or more of decoding: long enough to be caught in the middle
SHORT = SamplingParams(max_new_tokens=3)
LONG = SamplingParams(max_new_tokens=NUM_TOKENS)
DEADLINE_S = 60.0


def long_requests(name: str, count: int) -> list[GenerationRequest]:
    return [GenerationRequest(f"{name}-{i}", (9, 3 + i, 77), LONG, seed=i) for i in range(count)]


async def wait_sampling(engine, num_requests: int) -> None:
    """Until the scheduler says that all of them run."""

    async def poll():
        while True:
            loads = await engine._client.get("/v1/loads", CONTROL_TIMEOUT_S)
            if loads["loads"][0]["num_running_reqs"] >= num_requests:
                return
            await asyncio.sleep(0.02)

    await asyncio.wait_for(poll(), DEADLINE_S)


async def switch_version(engine, version: int, pause_mode: str) -> None:
    """A weight update that moves no weight: version numbers and sessions are what is tested here."""
    await engine.load_weights({"phase": "begin", "pause_mode": pause_mode})
    assert await engine.load_weights({"phase": "commit", "version": version}) == version
    await engine.resume()


@pytest.fixture(scope="module")
def receivers(running, loop):
    return loop(running.engine.open_receivers())


def test_each_rank_opens_one_receiver_over_its_own_shard(running, receivers, loop):
    pids = {json.loads((running.receiver_dir / f"receiver-{rank}.json").read_text())["pid"] for rank in (0, 1)}
    assert len(receivers) == 2 and len(set(receivers)) == 2 and len(pids) == 2
    assert loop(running.engine.open_receivers()) == receivers, "asking again opens no others"
    assert stat.S_IMODE(running.receiver_dir.stat().st_mode) == 0o700
    for host, port in receivers:
        channel = connect(host, port, running.receiver_key, timeout_s=10.0)
        params = channel.ask({"kind": "describe"})["params"]
        channel.close()
        layer = "model.layers.1"
        assert params[f"{layer}.self_attn.qkv_proj.weight"] == [[(6 + 2 + 2) * 24 // 2, 96], "float32"]
        assert params[f"{layer}.mlp.experts.w13_weight"] == [[8, 2 * 128 // 2, 96], "float32"]
        assert params[f"{layer}.mlp.experts.w2_weight"] == [[8, 96, 128 // 2], "float32"]
        assert params["model.embed_tokens.weight"] == [[256 // 2, 96], "float32"]


def test_retract_keeps_requests_and_tells_which_version_sampled_what(engine, receivers, loop):
    async def scenario():
        tasks = [asyncio.ensure_future(engine.generate(r)) for r in long_requests("retract", 3)]
        await wait_sampling(engine, 3)
        before = await engine.policy_version()
        await switch_version(engine, 41, "retract")
        return before, await asyncio.gather(*tasks)

    before, answers = loop(scenario())
    for segments in answers:
        assert [segment.policy_version for segment in segments] == [before, 41]
        assert [segment.finish_reason for segment in segments] == [FinishReason.SWITCH, FinishReason.LENGTH]
        assert sum(len(segment.token_ids) for segment in segments) == NUM_TOKENS


def test_in_place_keeps_requests_too(engine, receivers, loop):
    async def scenario():
        task = asyncio.ensure_future(engine.generate(long_requests("in-place", 1)[0]))
        await wait_sampling(engine, 1)
        await switch_version(engine, 42, "in_place")
        return await task

    segments = loop(scenario())
    assert [segment.policy_version for segment in segments] == [41, 42]
    assert sum(len(segment.token_ids) for segment in segments) == NUM_TOKENS


def test_abort_returns_what_was_sampled(engine, receivers, loop):
    async def scenario():
        tasks = [asyncio.ensure_future(engine.generate(r)) for r in long_requests("abort", 4)]
        await wait_sampling(engine, 4)
        await engine.pause("abort")
        answers = await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)
        await engine.resume()
        return answers

    answers = loop(scenario())
    for (segment,) in answers:
        assert segment.finish_reason is FinishReason.ABORT
        assert len(segment.token_ids) < NUM_TOKENS and len(segment.token_ids) == len(segment.logprobs)
    assert any(segment.token_ids for (segment,) in answers)


def test_a_request_is_ended_alone(engine, receivers, loop):
    """SGLang aborts whatever begins with the id it is given: sample 1 would take 10 and 11 along."""
    requests = [GenerationRequest(f"alone/{i}", (9, 3 + i, 77), LONG, seed=i) for i in (1, 10, 11)]

    async def scenario():
        tasks = [asyncio.ensure_future(engine.generate(r)) for r in requests]
        await wait_sampling(engine, 3)
        await engine.abort(["alone/1", "unknown"])
        return await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)

    (ended,), *others = loop(scenario())
    assert ended.finish_reason is FinishReason.ABORT
    assert 0 < len(ended.token_ids) == len(ended.logprobs) < NUM_TOKENS
    for (segment,) in others:
        assert segment.finish_reason is FinishReason.LENGTH and len(segment.token_ids) == NUM_TOKENS


@pytest.mark.parametrize(("mode", "version"), [("retract", 43), ("in_place", 44)])
def test_requests_can_be_ended_around_a_pause(engine, receivers, loop, mode, version):
    """In the pause and right after it. What `retract` had stopped is told of only once it has been prefilled again."""
    requests = long_requests(f"around-{mode}", 3)

    async def scenario():
        before = await engine.policy_version()
        tasks = [asyncio.ensure_future(engine.generate(r)) for r in requests]
        await wait_sampling(engine, 3)
        await engine.load_weights({"phase": "begin", "pause_mode": mode})
        await engine.load_weights({"phase": "commit", "version": version})
        await engine.abort([requests[0].request_id])
        await engine.resume()
        await engine.abort([requests[1].request_id])
        return before, await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)

    before, (paused, resumed, whole) = loop(scenario())
    assert paused[-1].finish_reason is resumed[-1].finish_reason is FinishReason.ABORT
    assert [segment.policy_version for segment in whole] == [before, version]
    assert sum(len(segment.token_ids) for segment in whole) == NUM_TOKENS
    assert all(len(segments[0].token_ids) > 0 for segments in (paused, resumed)) or mode == "retract"
    assert len(paused[0].token_ids) == 0 or mode == "in_place"


def test_an_abandoned_update_leaves_the_engine_paused_until_the_next_commit(engine, receivers, loop):
    async def scenario():
        version = await engine.policy_version()
        await engine.load_weights({"phase": "begin", "pause_mode": "retract"})
        assert await engine.load_weights({"phase": "abandon"}) == version
        with pytest.raises(EngineDirtyError, match="engine shared"):
            await engine.resume()
        waiting = asyncio.ensure_future(engine.generate(GenerationRequest("dirty", (9, 3), SHORT, 0)))
        with pytest.raises(EngineDirtyError, match="without a begin"):
            await engine.load_weights({"phase": "commit", "version": 98})
        assert not waiting.done()
        await switch_version(engine, 99, "retract")
        return await waiting

    (segment,) = loop(scenario())
    assert segment.policy_version == 99


def test_a_failing_rank_is_told_and_the_server_lives(engine, receivers, loop, monkeypatch):
    """An exception inside SGLang's scheduler would end the server, so the loader reports its own in a file."""
    unexpected = base64.b64encode(pickle.dumps([("model.norm.weight", torch.zeros(3))])).decode()

    async def scenario():
        await engine.load_weights({"phase": "begin", "pause_mode": "retract"})
        with monkeypatch.context() as patch:
            patch.setattr(engine_module, "NO_TENSORS", unexpected)
            with pytest.raises(EngineReplyError, match=r"engine shared: TP rank 0: ValueError: .*1 tensors"):
                await engine.load_weights({"phase": "commit", "version": 103})
        with pytest.raises(EngineDirtyError):
            await engine.resume()
        await switch_version(engine, 104, "retract")
        return await engine.generate(GenerationRequest("after", (9, 3), SHORT, 0))

    assert loop(scenario())[0].policy_version == 104


def test_memory_is_given_up_and_taken_again_around_a_request_that_waits(running, receivers, loop):
    """What colocation asks of the server, in its order; without a GPU nothing is saved and the same paths run."""
    engine = running.engine

    async def scenario():
        request = asyncio.ensure_future(engine.generate(long_requests("given-up", 1)[0]))
        await wait_sampling(engine, 1)
        with pytest.raises(RuntimeError, match="memory is released while 1 requests run; pause it first"):
            await engine.release_memory(("kv_cache", "weights", "cuda_graph"))
        await engine.pause("retract")
        assert (await engine.memory_bytes()).keys() == {"kv_cache", "weights", "cuda_graph"}
        await engine.release_memory(("kv_cache", "weights", "cuda_graph"))
        assert set((await engine.memory_bytes()).values()) == {0}
        with pytest.raises(RuntimeError, match="is released; resume its memory first"):
            await engine.resume()
        await engine.resume_memory(("weights",))
        with pytest.raises(RuntimeError, match="weights was not released"):
            await engine.resume_memory(("weights",))
        await engine.load_weights({"phase": "begin"})
        assert await engine.load_weights({"phase": "commit", "version": 50}) == 50
        await engine.resume_memory(("kv_cache", "cuda_graph"))
        await engine.resume()
        segments = await asyncio.wait_for(request, DEADLINE_S)
        assert sum(len(segment.token_ids) for segment in segments) == NUM_TOKENS
        assert segments[-1].policy_version == 50

    loop(scenario())
