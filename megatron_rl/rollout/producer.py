"""Runs the rollout scheduler on real engines: what it assigns is generated, scored and handed out as batches of groups."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from megatron_rl.rollout.collector import RolloutStats, Scorer, request_seed
from megatron_rl.rollout.generate.conversation import Conversation
from megatron_rl.rollout.generate.function import GenerateFunction
from megatron_rl.rollout.prompt_supply import Draw, PlannedGroup, PromptSupply
from megatron_rl.rollout.sample_content import SampleContent
from megatron_rl.rollout.slot_meter import SlotMeter
from megatron_rl.scheduling.admission import AdmissionWindow
from megatron_rl.scheduling.kv import PauseMode, choose_pause_mode
from megatron_rl.scheduling.rollout_state import RolloutState
from megatron_rl.scheduling.settings import OverAge, ScheduleKind
from megatron_rl.scheduling.work import Fate, GroupWork, SampleWork
from megatron_rl.types.protocols import GenerationEngine
from megatron_rl.types.rollout import (
    EngineLoad,
    FinishReason,
    GenerationRequest,
    RolloutSegment,
    SamplingParams,
    TrajectoryGroup,
    TrajectoryState,
)

LOAD_INTERVAL_S = 1.0
"""How often the engines are asked how full their KV caches are."""


class ReportingEngine(GenerationEngine, Protocol):
    """An engine that says how busy it is, and ends single requests."""

    async def load(self) -> EngineLoad: ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """These requests are answered with what they have; ids that do not run are ignored."""
        ...


class Producer:
    """Batches of whole, scored groups by the schedule of `state`.

    The samples of a group depend on the run's seed and the prompt's place in the draw, not on the engines: in lockstep
    without `oversample` a run repeats itself. `limits` of the state are the engines' own.
    """

    def __init__(
        self,
        engines: Sequence[ReportingEngine],
        state: RolloutState,
        score: Scorer,
        sampling: SamplingParams,
        draw: Draw,
        seed: int,
        *,
        pause_mode: PauseMode | None,
        windows: Sequence[AdmissionWindow] = (),
        function: GenerateFunction | None = None,
        phase_s: float | None = None,
        tail_rounds: bool = False,
    ) -> None:
        """`pause_mode` None: decided at each pause. `windows`: one per engine whose number of samples follows its KV
        cache; empty: the limits of `state` stay. `function` None: an answer is one turn.
        `phase_s`: how long a batch is waited for before it is cut short. `tail_rounds`: prompts that `early_stop` drops while
        they run are answered in rounds of their own."""
        self._engines, self._state, self._score = engines, state, score
        self._sampling, self._seed, self._function = sampling, seed, function
        self._supply = PromptSupply(draw, state.settings.groups_per_batch, state.plan_samples)
        self._tail_rounds = tail_rounds
        self._fixed_pause_mode, self._windows, self._phase_s = pause_mode, windows, phase_s
        self.pause_mode: PauseMode = pause_mode or "retract"
        """How the engines are to be paused for the next weights: what becomes of the KV cache of what runs."""
        self._content: dict[str, SampleContent] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._asked: set[str] = set()
        """Samples whose request is at an engine."""
        self._aborted: set[str] = set()
        """Those of them that were dropped, until they return."""
        self._scoring: set[asyncio.Task[None]] = set()
        self._aborts: set[asyncio.Task[None]] = set()
        self._meter = SlotMeter()
        self._is_open = False
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._fates = dict(state.ledger.tokens)
        self._sampled = 0
        self._updated = time.monotonic()
        self._watch: asyncio.Task[None] | None = None

    async def next_batch(self) -> tuple[list[TrajectoryGroup], RolloutStats]:
        """The groups of the next training step, in the order of their release. Generation goes on while it is trained,
        except in lockstep. Raises the first error of an engine or a reward."""
        started = time.monotonic()
        if self._state.settings.kind is ScheduleKind.LOCKSTEP or not self._is_open:
            self._meter.restart()
        self._is_open = True
        if self._tail_rounds:
            self._state.begin_round(is_whole=self._supply.begin_round())
        batch = await self._take()
        if self._state.settings.kind is ScheduleKind.LOCKSTEP:
            await self._close_phase()
        groups = [self._to_group(work) for work in batch]
        stats = self._stats(groups, time.monotonic() - started)
        self._meter.restart()
        self._start()
        return groups, stats

    async def drain(self) -> None:
        """Called when a batch is trained, before new weights. `one_step_off` waits for the batch that it generated
        beside it; the other schedules change weights under what runs."""
        settings = self._state.settings
        if settings.kind is ScheduleKind.ONE_STEP_OFF:
            while (self._scoring or not self._state.is_idle) and self._state.num_ready < settings.groups_per_batch:
                await self._wait()
        await self._choose_pause_mode()
        if self.pause_mode == "abort":
            self._is_open = False  # what comes back waits for the new weights here, and may go to any engine

    def on_version(self, version: int) -> None:
        """All engines hold and sample with a newer version. The first one starts nothing: nobody asked for a batch yet."""
        self._updated = time.monotonic()
        if version > self._state.version:
            self._state.on_version(version)
            self._drop()
        if self._state.settings.kind is not ScheduleKind.LOCKSTEP and self._supply.num_draws:
            self._is_open = True
            self._start()

    @property
    def oldest_trained(self) -> int:
        """Tokens of older versions than this get no loss in the batch that was taken last; 0 unless the policy is to mask."""
        settings = self._state.settings
        return self._state.version - settings.max_staleness if settings.over_age is OverAge.MASK else 0

    async def close(self) -> None:
        """End everything that runs."""
        self._is_open = False
        programs = [content.program for content in self._content.values() if content.program]
        tasks = [*self._tasks.values(), *programs, *self._scoring, *self._aborts, *([self._watch] if self._watch else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self) -> list[GroupWork]:
        deadline = None if self._phase_s is None else time.monotonic() + self._phase_s
        while True:
            self._start()
            is_late = deadline is not None and time.monotonic() >= deadline
            batch = self._state.take_batch(is_late)
            if batch is not None:
                self._drop()
                return batch
            if self._state.is_stalled and not self._scoring:
                self._state.begin_phase()
            else:
                await self._wait(None if is_late else deadline)

    async def _wait(self, deadline: float | None = None) -> None:
        """Until something changes, or the monotonic clock reaches `deadline`."""
        self._changed.clear()
        if self._error is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
        if self._error is not None:
            raise self._error

    async def _close_phase(self) -> None:
        """Lockstep trains alone: what is unfinished rests on its engine, or here when it is aborted."""
        self._is_open = False
        while self._aborted:
            await self._wait()
        if self._tasks:
            await self._choose_pause_mode()
            await asyncio.gather(*(engine.pause(self.pause_mode) for engine in self._engines))

    async def _choose_pause_mode(self) -> None:
        if self._fixed_pause_mode is None and self._tasks:
            loads = await asyncio.gather(*(engine.load() for engine in self._engines))
            held = sum(len(self._content[name].token_ids) for name in self._tasks)
            self.pause_mode = choose_pause_mode(loads, held, time.monotonic() - self._updated)

    async def _watch_loads(self) -> None:
        """Admit by measured KV use."""
        preempted = [0] * len(self._engines)
        while True:
            await asyncio.sleep(LOAD_INTERVAL_S)
            try:
                loads = await asyncio.gather(*(engine.load() for engine in self._engines))
            except Exception as error:  # noqa: BLE001 (raised where the next batch is waited for)
                self._fail(error)
                return
            for number, (window, load) in enumerate(zip(self._windows, loads, strict=True)):
                new = max(load.num_preempted - preempted[number], 0)
                preempted[number] = load.num_preempted
                running = self._state.queue.num_running_on(number)
                self._state.queue.set_limit(number, window.on_usage(load.kv_fraction, running, new))
            self._start()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._changed.set()

    def _start(self) -> None:
        """Release and dispatch whatever the scheduler allows."""
        if not self._is_open or self._error is not None:
            return
        if self._windows and self._watch is None:
            self._watch = asyncio.create_task(self._watch_loads())
        for _ in range(self._state.num_wanted):
            plan = self._supply.next()
            for sample in self._state.add_group(plan.group_id, plan.prompt.prompt_id, plan.num_samples).samples:
                self._content[sample.sample_id] = SampleContent(plan.prompt, [])
        for engine, sample in self._state.assign():
            self._meter.change(1)
            self._tasks[sample.sample_id] = asyncio.create_task(self._run(engine, sample))

    async def _run(self, engine: int, sample: SampleWork) -> None:
        """One go of a sample on an engine."""
        name, content = sample.sample_id, self._content[sample.sample_id]
        try:
            if self._function is not None and content.program is None:
                self._begin_program(self._function, sample, content)
            sampling = self._sampling
            if content.conversation is not None:
                await content.conversation.first_turn()
                sampling = content.conversation.sampling
            limit = min(self._state.token_limit(sample), sampling.max_new_tokens - content.num_turn_tokens)
            request = GenerationRequest(
                name, content.token_ids, replace(sampling, max_new_tokens=limit), request_seed(self._seed, name)
            )
            self._asked.add(name)
            segments = await self._engines[engine].generate(request)
            if self._end(sample, segments, limit):
                self._begin_score(sample, content, segments[-1].finish_reason is FinishReason.STOP)
            self._start()
        except Exception as error:  # noqa: BLE001 (raised where the next batch is waited for)
            self._fail(error)
        self._changed.set()

    def _begin_program(self, function: GenerateFunction, sample: SampleWork, content: SampleContent) -> None:
        """The generate function of a sample begins with its first place at an engine."""

        def on_asked(num_inserted: int) -> None:
            if self._content.get(sample.sample_id) is not content:
                raise asyncio.CancelledError  # it was dropped
            self._state.on_turn(sample.sample_id, num_inserted)
            self._start()
            self._changed.set()  # its budget may be used up, and the phase with it

        content.conversation = Conversation(function, content.prompt, self._sampling, on_asked)
        content.segments = content.conversation.segments
        content.program = asyncio.create_task(self._run_program(content.conversation, sample, content))

    async def _run_program(self, conversation: Conversation, sample: SampleWork, content: SampleContent) -> None:
        try:
            answer = await conversation.run()
            if self._content.get(sample.sample_id) is not content:
                return  # dropped meanwhile
            content.metrics = answer.metrics
            self._state.on_last_turn(sample.sample_id, content.unused)
            self._begin_score(sample, content, answer.is_finished)
        except Exception as error:  # noqa: BLE001 (raised where the next batch is waited for)
            self._fail(error)
        self._changed.set()

    def _end(self, sample: SampleWork, segments: Sequence[RolloutSegment], limit: int) -> bool:
        """Keep what a go gave and tell the scheduler; whether the sample is complete. A complete turn goes to its function."""
        self._meter.change(-1)
        del self._tasks[sample.sample_id]
        self._asked.discard(sample.sample_id)
        self._aborted.discard(sample.sample_id)
        content = self._content[sample.sample_id]
        content.segments += [segment for segment in segments if segment.token_ids]
        num_new = sum(len(segment.token_ids) for segment in segments)
        reason = segments[-1].finish_reason if segments else FinishReason.ABORT
        # An engine whose context is full stops before the limit it was given: nothing more can come.
        conversation = content.conversation
        has_stopped = reason is FinishReason.STOP or (reason is FinishReason.LENGTH and num_new < limit)
        if conversation is not None:
            has_stopped |= conversation.num_turn_tokens >= conversation.sampling.max_new_tokens
        spans = [(segment.policy_version, len(segment.token_ids)) for segment in segments]
        if self._state.on_returned(sample.sample_id, spans, has_stopped, conversation is None) is None:
            self._forget(sample)
            return False
        has_ended = sample.state in (TrajectoryState.DONE, TrajectoryState.AWAY)
        if content.segments and content.segments[-1].is_sampled:
            last = FinishReason.STOP if reason is FinishReason.STOP else FinishReason.LENGTH
            content.segments[-1] = replace(content.segments[-1], finish_reason=last if has_ended else FinishReason.ABORT)
        if conversation is not None and has_ended:
            conversation.end_turn()
        return sample.state is TrajectoryState.DONE

    def _begin_score(self, sample: SampleWork, content: SampleContent, has_stopped: bool) -> None:
        self._scoring.add(asyncio.create_task(self._run_score(sample, content, has_stopped)))

    async def _run_score(self, sample: SampleWork, content: SampleContent, has_stopped: bool) -> None:
        """The reward of a complete sample, while others generate."""
        task = asyncio.current_task()
        assert task is not None
        self._meter.change(0, 1)
        try:
            content.reward = await self._score(content.prompt, content.response_ids, has_stopped)
            self._state.on_scored(sample.sample_id, content.reward.is_correct)
            self._drop()
            self._start()
        except Exception as error:  # noqa: BLE001 (raised where the next batch is waited for)
            self._fail(error)
        finally:
            self._meter.change(0, -1)
            self._scoring.remove(task)
            self._changed.set()  # after all of the above: whoever waits looks at it

    def _drop(self) -> None:
        """Forget what the scheduler dropped. What still runs is ended at its engine, and forgotten when it has returned with
        the tokens that are to be counted."""
        dropped = self._state.take_dropped()
        if self._tail_rounds:
            self._keep_prompts([sample for sample in dropped if sample.fate is Fate.DROPPED_EARLY_STOP])
        running: dict[int, list[str]] = {}
        for sample in dropped:
            name = sample.sample_id
            if name in self._asked:
                assert sample.engine is not None
                running.setdefault(sample.engine, []).append(name)
            elif task := self._tasks.get(name):
                task.cancel()
                self._end(sample, (), 0)
            else:
                self._forget(sample)
        for engine, names in running.items():
            self._aborted.update(names)
            self._aborts.add(asyncio.create_task(self._abort(engine, names)))

    async def _abort(self, engine: int, names: Sequence[str]) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await self._engines[engine].abort(names)
        except Exception as error:  # noqa: BLE001 (raised where the next batch is waited for)
            self._fail(error)
        finally:
            self._aborts.remove(task)

    def _keep_prompts(self, samples: Sequence[SampleWork]) -> None:
        """The prompts of a cut round's rest: late, or as if they had not been drawn."""
        groups: dict[str, list[SampleWork]] = {}
        for sample in samples:
            groups.setdefault(sample.group.group_id, []).append(sample)
        rest = []
        for group_id, members in groups.items():
            prompt = self._content[members[0].sample_id].prompt
            if any(s.oldest_version is not None and s.state is not TrajectoryState.DONE for s in members):
                self._supply.put_late(prompt)
            else:
                rest.append(PlannedGroup(group_id, prompt, len(members)))
        self._supply.put_back(rest)

    def _forget(self, sample: SampleWork) -> None:
        content = self._content.pop(sample.sample_id)
        if content.program is not None:
            content.program.cancel()

    def _to_group(self, work: GroupWork) -> TrajectoryGroup:
        trajectories = [self._content.pop(s.sample_id).to_trajectory(s.sample_id) for s in work.samples]
        return TrajectoryGroup(work.group_id, trajectories[0].prompt, tuple(trajectories))

    def _stats(self, groups: Sequence[TrajectoryGroup], elapsed_s: float) -> RolloutStats:
        tokens = dict(self._state.ledger.tokens)
        fates: Mapping[str, int] = {fate.value: count - self._fates[fate] for fate, count in tokens.items()}
        self._fates = tokens
        num_sampled = self._state.ledger.num_sampled - self._sampled
        self._sampled += num_sampled
        return RolloutStats(
            generate_s=max(elapsed_s - self._meter.reward_s, 0.0),
            reward_s=self._meter.reward_s,
            num_tokens=num_sampled,
            tokens_per_s=num_sampled / max(self._meter.elapsed_s - self._meter.reward_s, 1e-6),
            efficiency=self._meter.efficiency(sum(self._state.queue.limits)),
            token_fates=fates,
            length_bias=self._state.length_monitor.bias(),
        )
