"""A producer on scripted engines, and what must hold of whatever comes out of it."""

from __future__ import annotations

import asyncio
from collections import Counter

from megatron_rl.rollout.collector import request_seed
from megatron_rl.rollout.producer import Producer
from megatron_rl.scheduling.rollout_state import RolloutState
from megatron_rl.scheduling.settings import ScheduleSettings
from megatron_rl.scheduling.work import Fate
from megatron_rl.types.rollout import (
    EngineLoad,
    FinishReason,
    PolicyVersion,
    Prompt,
    RewardResult,
    RolloutSegment,
    SamplingParams,
)

MAX_NEW = 12
PROMPT = (1, 2, 3)


def answer_length(seed: int) -> int:
    return seed % (MAX_NEW + 3) + 1


class ScriptedEngine:
    """Token t of a request is a function of its seed and t; its log-prob also of the version. `slow` turns of the event
    loop per token."""

    def __init__(self, slow: int = 1) -> None:
        self.slow, self.version = slow, PolicyVersion(0)
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.pauses: list[str] = []
        self.running: set[str] = set()
        self.aborted: set[str] = set()
        self.peak = 0
        self.aborts = 0
        self.num_sampled = self.num_cancelled = 0
        """Tokens that were returned or will be, and those of requests that nobody waited for any more."""
        self.kv_fraction = 0.1

    def stops_at(self, seed, position):
        return position == answer_length(seed)

    async def generate(self, request):
        self.running.add(request.request_id)
        self.peak = max(self.peak, len(self.running))
        tokens, aborts = [], self.aborts
        reason = FinishReason.ABORT
        position = len(request.token_ids) - len(PROMPT)
        try:
            while self.aborts == aborts and request.request_id not in self.aborted:
                for _ in range(self.slow):
                    await asyncio.sleep(0)
                await self.may_run.wait()
                if self.aborts != aborts or request.request_id in self.aborted:
                    break
                self.num_sampled += 1
                tokens.append((request.seed + position, self.version))
                position += 1
                if self.stops_at(request.seed, position):
                    reason = FinishReason.STOP
                    break
                if len(tokens) == request.sampling.max_new_tokens:
                    reason = FinishReason.LENGTH
                    break
        except asyncio.CancelledError:
            self.num_sampled -= len(tokens)
            self.num_cancelled += len(tokens)
            raise
        finally:
            self.running.discard(request.request_id)
        return self.to_segments(tokens, reason)

    def to_segments(self, tokens, reason):
        segments = []
        for version in sorted({version for _, version in tokens}) or [self.version]:
            ids = tuple(token % 1000 for token, by in tokens if by == version)
            segments.append(RolloutSegment(ids, (-float(version) - 1.0,) * len(ids), version, FinishReason.SWITCH))
        last = segments[-1]
        segments[-1] = RolloutSegment(last.token_ids, last.logprobs, last.policy_version, reason)
        return tuple(segments)

    async def pause(self, mode):
        self.pauses.append(mode)
        self.may_run.clear()
        if mode == "abort":
            self.aborts += 1
            self.may_run.set()
            await asyncio.sleep(0)
            while self.running:
                await asyncio.sleep(0)
            self.may_run.clear()

    async def resume(self):
        self.may_run.set()

    async def abort(self, request_ids):
        self.aborted.update(self.running.intersection(request_ids))

    async def load(self):
        return EngineLoad(len(self.running), 0, self.kv_fraction, 0, 1000, 1.0)


def score_now(prompt, ids, ended):
    return RewardResult(float(len(ids)), sum(ids) % 2 == 0)


async def score(prompt, ids, ended):
    return score_now(prompt, ids, ended)


async def score_by_prompt(prompt, ids, ended):
    await asyncio.sleep(0)
    return RewardResult(0.0, prompt.prompt_id < "p3")


class Run:
    def __init__(
        self, engines, limits, *, pause_mode="retract", seed=4, prompts=7, score=score, windows=(), function=None,
        curriculum=None, phase_s=None, tail_rounds=False, **settings,
    ):  # fmt: skip
        defaults = {"groups_per_batch": 4, "samples_per_group": 3, "max_new_tokens": MAX_NEW}
        self.engines = engines
        self.state = RolloutState(ScheduleSettings(**{**defaults, **settings}), limits, curriculum=curriculum)
        self.drawn = 0

        def draw(count):
            self.drawn += count
            return [Prompt(f"p{(self.drawn + i) % prompts}", "q", PROMPT, "a", "s") for i in range(count)]

        self.producer = Producer(
            engines,
            self.state,
            score,
            SamplingParams(MAX_NEW),
            draw,
            seed,
            pause_mode=pause_mode,
            windows=windows,
            function=function,
            phase_s=phase_s,
            tail_rounds=tail_rounds,
        )
        self.version = 0

    async def publish(self):
        await self.producer.drain()
        for engine in self.engines:
            await engine.pause(self.producer.pause_mode)
        self.version += 1
        for engine in self.engines:
            engine.version = PolicyVersion(self.version)
            await engine.resume()
        self.producer.on_version(self.version)

    async def batches(self, count, train_turns=10):
        out = []
        async with asyncio.timeout(120):
            for _ in range(count):
                groups, stats = await self.producer.next_batch()
                out.append((self.version, groups, stats))
                for _ in range(train_turns):
                    await asyncio.sleep(0)
                await self.publish()
        assert not any(engine.num_cancelled for engine in self.engines)
        await self.producer.close()
        return out


def run(count=5, train_turns=10, slow=(1, 3), limits=(3, 5), **options):
    async def go():
        engines = [ScriptedEngine(turns) for turns in slow]
        made = Run(engines, limits, **options)
        return made, await made.batches(count, train_turns)

    return asyncio.run(go())


def check_content(made, batches):
    """Every trajectory says what its seed says, as if it had run in one go; its versions grow."""
    seen = Counter(t.trajectory_id for _, groups, _ in batches for g in groups for t in g.trajectories)
    assert max(seen.values()) == 1
    for _, groups, _ in batches:
        for group in groups:
            for trajectory in group.trajectories:
                seed = request_seed(4, trajectory.trajectory_id)
                length = min(answer_length(seed), MAX_NEW)
                assert trajectory.response_ids == tuple((seed + t) % 1000 for t in range(length))
                assert list(trajectory.response_logprobs) == [-float(v) - 1 for v in trajectory.response_versions]
                assert list(trajectory.response_versions) == sorted(trajectory.response_versions)
                stopped = answer_length(seed) <= MAX_NEW
                assert trajectory.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
                assert all(s.finish_reason in (FinishReason.SWITCH, FinishReason.ABORT) for s in trajectory.segments[:-1])
                assert trajectory.reward == score_now(trajectory.prompt, trajectory.response_ids, stopped)
    tokens = made.state.ledger.tokens
    trained = sum(len(t.response_ids) for _, groups, _ in batches for g in groups for t in g.trajectories)
    assert tokens[Fate.TRAINED] + tokens[Fate.MASKED_OVER_AGE] == trained
    assert made.state.ledger.num_sampled == sum(tokens.values())
    assert made.state.ledger.num_sampled == sum(engine.num_sampled for engine in made.engines)


def ages(batches):
    return [v - by for v, groups, _ in batches for g in groups for t in g.trajectories for by in t.response_versions]
