"""Requests in batches: both sides joined without a process between them."""

from __future__ import annotations

import asyncio
import random

import pytest

from megatron_rl.controller.request_stream import RequestDesk, RequestStream
from megatron_rl.types.rollout import FinishReason, GenerationRequest, PolicyVersion, RolloutSegment, SamplingParams


def request(name: str, length: int = 1) -> GenerationRequest:
    return GenerationRequest(name, (1, 2, 3), SamplingParams(length), seed=0)


def answer(asked: GenerationRequest):
    count = asked.sampling.max_new_tokens
    return (RolloutSegment((7,) * count, (-1.0,) * count, PolicyVersion(2), FinishReason.STOP),)


class StepEngine:
    """Ends a request after as many of its steps as it asks tokens; `step` is one decode step for all."""

    def __init__(self) -> None:
        self.waiting: dict[str, tuple[GenerationRequest, asyncio.Future]] = {}
        self.cancelled: list[str] = []
        self.aborts: list[str] = []
        self.deaf: list[str] = []
        """Requests whose first abort is not heard: it came before them."""
        self.steps = 0

    async def generate(self, asked):
        future = asyncio.get_running_loop().create_future()
        self.waiting[asked.request_id] = (asked, future)
        try:
            if await future is FinishReason.ABORT:
                return (RolloutSegment((7,), (-1.0,), PolicyVersion(2), FinishReason.ABORT),)
        except asyncio.CancelledError:
            self.waiting.pop(asked.request_id, None)
            self.cancelled.append(asked.request_id)
            raise
        return answer(asked)

    async def abort(self, request_ids):
        for name in request_ids:
            self.aborts.append(name)
            if name in self.deaf:
                self.deaf.remove(name)
            elif name in self.waiting:
                self.waiting.pop(name)[1].set_result(FinishReason.ABORT)

    def step(self) -> None:
        self.steps += 1
        for name, (asked, future) in list(self.waiting.items()):
            if asked.sampling.max_new_tokens <= self.steps and not future.done():
                del self.waiting[name]
                future.set_result(None)


async def nothing_to_abort(request_ids):
    raise AssertionError(f"{request_ids} are aborted")


class Wire:
    """An exchange that counts what it carries."""

    def __init__(self, desk: RequestDesk) -> None:
        self.desk, self.sizes = desk, []

    async def exchange(self, requests, cancelled, wait):
        self.sizes.append(len(requests))
        await asyncio.sleep(0)
        return await self.desk.exchange(requests, cancelled, wait)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_calls_follow_the_steps_not_the_samples():
    async def run():
        engine = StepEngine()
        wire = Wire(RequestDesk(engine.generate, engine.abort))
        stream = RequestStream(wire.exchange)
        asked = [request(f"r{i}", i % 5 + 1) for i in range(200)]
        tasks = [asyncio.create_task(stream.generate(r)) for r in asked]
        while not all(task.done() for task in tasks):
            await settle()
            engine.step()
            await asyncio.sleep(0.005)
        assert [task.result() for task in tasks] == [answer(r) for r in asked]
        return wire.sizes

    sizes = asyncio.run(run())
    assert sum(sizes) == 200 and max(sizes) == 200
    assert len(sizes) <= 12  # 5 steps end requests; a loaded machine may split one of them


def test_who_is_answered_asks_again_in_the_next_exchange():
    async def run():
        async def at_once(asked):
            return answer(asked)

        wire = Wire(RequestDesk(at_once, nothing_to_abort))
        stream = RequestStream(wire.exchange)

        async def worker(number):
            for turn in range(10):
                await stream.generate(request(f"{number}/{turn}"))

        await asyncio.gather(*(worker(number) for number in range(8)))
        return wire.sizes

    assert [size for size in asyncio.run(run()) if size] == [8] * 10


def test_an_error_reaches_the_one_who_asked():
    async def run():
        async def generate(asked):
            if asked.request_id == "bad":
                raise ValueError("the prompt is empty")
            return answer(asked)

        stream = RequestStream(RequestDesk(generate, nothing_to_abort).exchange)
        good, bad = await asyncio.gather(
            stream.generate(request("good")), stream.generate(request("bad")), return_exceptions=True
        )
        assert good == answer(request("good"))
        assert isinstance(bad, ValueError) and "empty" in str(bad)

    asyncio.run(run())


def test_a_broken_exchange_reaches_everybody_and_the_next_request_tries_again():
    async def run():
        calls = 0

        async def generate(asked):
            return answer(asked)

        desk = RequestDesk(generate, nothing_to_abort)

        async def exchange(*batch):
            nonlocal calls
            calls += 1
            if calls == 1:
                raise ConnectionError("engine-0 died")
            return await desk.exchange(*batch)

        stream = RequestStream(exchange)
        results = await asyncio.gather(*(stream.generate(request(str(i))) for i in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [ConnectionError] * 3
        assert await stream.generate(request("later")) == answer(request("later"))

    asyncio.run(run())


def test_a_cancelled_request_leaves_the_engine_and_the_others_stay():
    async def run():
        engine = StepEngine()
        stream = RequestStream(Wire(RequestDesk(engine.generate, engine.abort)).exchange)
        tasks = {name: asyncio.create_task(stream.generate(request(name))) for name in ("a", "b", "c")}
        await settle()
        tasks["b"].cancel()
        await settle()
        assert engine.cancelled == ["b"]
        engine.step()
        assert await tasks["a"] and await tasks["c"]
        lone = asyncio.create_task(stream.generate(request("lone", 99)))
        await settle()
        lone.cancel()
        await asyncio.gather(lone, return_exceptions=True)
        async with asyncio.timeout(5):  # nothing waits for what will never end
            while not stream._pump.done():
                await asyncio.sleep(0)
        assert engine.cancelled == ["b", "lone"]

    asyncio.run(run())


def test_an_aborted_request_answers_with_what_it_has():
    async def run():
        engine = StepEngine()
        desk = RequestDesk(engine.generate, engine.abort)
        stream = RequestStream(Wire(desk).exchange)
        tasks = {name: asyncio.create_task(stream.generate(request(name))) for name in ("a", "late", "c")}
        await settle()
        engine.deaf.append("late")
        assert stream.withdraw(["a", "late", "gone"]) == ["a", "late", "gone"]
        async with asyncio.timeout(5):
            await desk.abort(["a", "late", "gone"])
            assert [(await tasks[name])[0].finish_reason for name in ("a", "late")] == [FinishReason.ABORT] * 2
        assert engine.aborts == ["a", "late", "late"] and not tasks["c"].done()
        engine.step()
        assert await tasks["c"] == answer(request("c"))
        unsent = asyncio.create_task(stream.generate(request("unsent")))
        await asyncio.sleep(0)
        assert stream.withdraw(["unsent"]) == [] and await unsent == ()
        await settle()
        assert not engine.waiting and not stream._waiting

    asyncio.run(run())


def test_random_requests_and_cancels_are_each_answered_once():
    async def run(seed):
        rng = random.Random(seed)
        engine = StepEngine()
        stream = RequestStream(Wire(RequestDesk(engine.generate, engine.abort)).exchange)
        tasks = {}
        for number in range(60):
            name = f"r{number}"
            tasks[name] = asyncio.create_task(stream.generate(request(name, rng.randint(1, 30))))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            if rng.random() < 0.3:
                engine.step()
            if rng.random() < 0.2:
                tasks[rng.choice(list(tasks))].cancel()
        async with asyncio.timeout(120):
            while not all(task.done() for task in tasks.values()):
                engine.step()
                await settle()
        for task in tasks.values():
            assert task.cancelled() or task.result()
        assert not stream._waiting and not engine.waiting

    for seed in range(20):
        asyncio.run(run(seed))


def test_an_id_that_runs_already_is_refused():
    async def run():
        desk = RequestDesk(StepEngine().generate, nothing_to_abort)
        await desk.exchange([request("twin")], [], False)
        with pytest.raises(ValueError, match="'twin' runs already"):
            await desk.exchange([request("twin")], [], False)

    asyncio.run(run())
