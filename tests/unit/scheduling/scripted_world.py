"""Engines, rewards and a trainer as a random script around `RolloutState`: what happens next is drawn from a seed.

The world keeps its own account of every token (which version sampled it, where it went) and compares.
"""

from __future__ import annotations

import random

from megatron_rl.scheduling.rollout_state import RolloutState
from megatron_rl.scheduling.settings import OverAge, ScheduleKind, ScheduleSettings, max_oversample
from megatron_rl.scheduling.work import Fate
from megatron_rl.types.rollout import TrajectoryState


def random_settings(rng: random.Random) -> ScheduleSettings:
    kind = rng.choice(list(ScheduleKind))
    early_stop = kind is ScheduleKind.LOCKSTEP and rng.random() < 0.3
    max_staleness = rng.randint(1 if kind is ScheduleKind.ONE_STEP_OFF else 0, 3)
    return ScheduleSettings(
        groups_per_batch=rng.randint(1, 4),
        samples_per_group=rng.randint(1, 3),
        max_new_tokens=rng.randint(1, 12),
        kind=kind,
        max_staleness=max_staleness,
        over_age=rng.choice(list(OverAge)),
        oversample=rng.uniform(1.0, 4.0 if early_stop else max_oversample(kind, max_staleness)),
        early_stop=early_stop,
        phase_tokens=rng.choice([None, rng.randint(1, 6)]),
        max_versions=rng.choice([None, None, rng.randint(1, 4)]),
        filter_groups=rng.random() < 0.4,
        max_oversample_factor=rng.uniform(1.0, 4.0),
    )


class World:
    """`run` trains some batches and raises AssertionError where the account does not add up or nothing moves."""

    def __init__(self, seed: int, settings: ScheduleSettings | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.settings = random_settings(rng) if settings is None else settings
        self.limits = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
        self.state = RolloutState(self.settings, self.limits)
        self.speeds = [rng.choice([1.0, 1.0, 0.2]) for _ in self.limits]
        self.solve_rate = rng.random()
        self.alive = set(range(len(self.limits)))
        self.running: dict[str, tuple[int, list[int]]] = {}  # sample -> engine, versions of the tokens of this go
        self.tokens: dict[str, list[int]] = {}  # sample -> versions of the tokens returned
        self.lengths: dict[str, int] = {}
        self.has_turns = settings is None and rng.random() < 0.4
        self.late_rate = rng.choice([0.0, 0.0, 0.1]) if settings is None else 0.0
        self.draw_length = lambda: rng.randint(1, 14)
        self.turn_ends: dict[str, set[int]] = {}  # sample -> after how many of its tokens it goes to its tool
        self.inserted: dict[str, int] = {}
        self.away: list[str] = []
        self.unused: dict[str, list[int]] = {}
        self.unscored: list[str] = []
        self.ended: set[str] = set()
        self.num_lost = self.num_sampled = self.num_trained = self.num_masked = self.num_groups = 0
        self.num_unused = 0
        self.version = 0
        self.is_training = False
        self.num_batches = self.num_short = 0

    def run(self, num_batches: int = 5, patience: int = 20000) -> None:
        for _ in range(patience):
            if self.num_batches == num_batches:
                break
            self.turn()
        assert self.num_batches == num_batches, f"stuck after {self.num_batches} batches: {self.settings}"
        self.check_account()

    def turn(self) -> None:
        rng, state = self.rng, self.state
        if not (self.settings.kind is ScheduleKind.LOCKSTEP and self.is_training):
            for _ in range(state.num_wanted):
                self.num_groups += 1
                state.add_group(f"g{self.num_groups}", f"p{self.num_groups % 7}")
            self.start()
            self.step_engines()
        self.end_dropped()
        if rng.random() < 0.05:
            self.abort(rng.choice(sorted(self.alive)))
        if rng.random() < 0.005 and len(self.alive) > 1:
            self.lose(rng.choice(sorted(self.alive)))
        self.step_tools()
        while self.unscored and rng.random() < 0.7:
            name = self.unscored.pop(rng.randrange(len(self.unscored)))
            state.on_scored(name, rng.random() < self.solve_rate)
            self.end_dropped()
        if self.is_training:
            is_drained = self.settings.kind is not ScheduleKind.ONE_STEP_OFF or state.is_idle
            if is_drained or state.num_ready >= self.settings.groups_per_batch:
                if rng.random() < 0.3:
                    self.publish()
        elif (batch := state.take_batch(rng.random() < self.late_rate)) is not None:
            self.train(batch)
            self.end_dropped()
        elif state.is_stalled:
            state.begin_phase()
        if rng.random() < 0.1:
            self.check_account()

    def start(self) -> None:
        for engine, sample in self.state.assign():
            assert engine in self.alive and sample.state is TrajectoryState.RUNNING
            assert sample.sample_id not in self.running and sample.sample_id not in self.ended
            self.running[sample.sample_id] = (engine, [])
            length = self.lengths.setdefault(sample.sample_id, self.draw_length())
            if self.has_turns and sample.sample_id not in self.turn_ends:
                self.turn_ends[sample.sample_id] = {self.rng.randint(1, length) for _ in range(self.rng.randint(0, 3))}
            on_engine = sum(where == engine for where, _ in self.running.values())
            assert on_engine <= self.limits[engine]

    def step_engines(self) -> None:
        for name, (engine, versions) in list(self.running.items()):
            if self.rng.random() > self.speeds[engine]:
                continue
            sample = self.state._samples[name]
            limit = self.state.token_limit(sample)
            assert limit > 0
            versions.append(self.version)
            total = len(self.tokens.get(name, ())) + len(versions)
            has_stopped = total >= self.lengths[name] or total in self.turn_ends.get(name, ())
            if has_stopped or len(versions) >= limit:
                self.give_back(name, has_stopped)

    def give_back(self, name: str, has_stopped: bool) -> None:
        _, versions = self.running.pop(name)
        self.num_sampled += len(versions)
        self.tokens.setdefault(name, []).extend(versions)
        spans = [(version, versions.count(version)) for version in sorted(set(versions))]
        sample = self.state.on_returned(name, spans, has_stopped, not self.has_turns)
        if sample is None:
            self.ended.add(name)
        elif sample.state is TrajectoryState.DONE:
            self.unscored.append(name)
        elif sample.state is TrajectoryState.AWAY:
            self.away.append(name)

    def step_tools(self) -> None:
        """Tools answer in an order of their own; some functions leave tokens of theirs out of the loss."""
        for name in [name for name in self.away if self.rng.random() < 0.3]:
            self.away.remove(name)
            if name in self.ended:
                continue  # dropped meanwhile
            versions, inserted = self.tokens[name], self.rng.randint(0, 3)
            behind = len(versions) + self.inserted.get(name, 0)
            if len(versions) < self.lengths[name] and behind + inserted < self.settings.max_new_tokens:
                self.inserted[name] = self.inserted.get(name, 0) + inserted
                self.state.on_turn(name, inserted)
            else:
                self.unused[name] = [version for version in versions if self.rng.random() < 0.1]
                self.state.on_last_turn(name, [(version, 1) for version in self.unused[name]])
                self.unscored.append(name)

    def abort(self, engine: int) -> None:
        for name in [name for name, (where, _) in self.running.items() if where == engine]:
            self.give_back(name, has_stopped=False)

    def lose(self, engine: int) -> None:
        self.alive.discard(engine)
        for name in [name for name, (where, _) in self.running.items() if where == engine]:
            self.num_lost += len(self.running.pop(name)[1])
        self.state.on_engine_lost(engine)

    def end_dropped(self) -> None:
        for sample in self.state.take_dropped():
            if sample.sample_id in self.running:
                self.give_back(sample.sample_id, has_stopped=False)
            self.ended.add(sample.sample_id)

    def train(self, batch) -> None:
        settings = self.settings
        self.num_batches += 1
        self.num_short += len(batch) < settings.groups_per_batch
        assert len(batch) <= settings.groups_per_batch
        assert [g.serial for g in batch] == sorted(g.serial for g in batch)
        for group in batch:
            assert len(group.samples) >= min(2, settings.samples_per_group)
            if settings.over_age is not OverAge.DROP_SAMPLE and settings.max_versions is None:
                assert len(group.samples) == settings.samples_per_group
            if settings.filter_groups:
                assert {sample.is_correct for sample in group.samples} == {True, False}
            for sample in group.samples:
                assert sample.sample_id not in self.ended, "trained twice, or after it was dropped"
                self.ended.add(sample.sample_id)
                versions = self.tokens[sample.sample_id]
                assert [v for v, count in sample.spans for _ in range(count)] == versions
                behind = len(versions) + self.inserted.get(sample.sample_id, 0)
                assert behind <= settings.max_new_tokens and len(versions) <= self.lengths[sample.sample_id]
                if not self.has_turns:
                    assert len(versions) == min(self.lengths[sample.sample_id], settings.max_new_tokens)
                masked = sum(self.version - version > settings.max_staleness for version in versions)
                assert masked == 0 or settings.over_age is OverAge.MASK
                unused = self.unused.get(sample.sample_id, ())
                num_unused = sum(self.version - version <= settings.max_staleness for version in unused)
                self.num_masked += masked
                self.num_unused += num_unused
                self.num_trained += len(versions) - masked - num_unused
        self.is_training = True

    def publish(self) -> None:
        if self.rng.random() < 0.3:
            for engine in sorted(self.alive):
                self.abort(engine)
        self.version += 1
        self.is_training = False
        self.state.on_version(self.version)
        self.end_dropped()

    def check_account(self) -> None:
        tokens = self.state.ledger.tokens
        assert self.state.ledger.num_sampled == self.num_sampled == sum(tokens.values())
        assert tokens[Fate.TRAINED] == self.num_trained
        assert tokens[Fate.MASKED_OVER_AGE] == self.num_masked
        assert tokens[Fate.MASKED_BY_FUNCTION] == self.num_unused
        under_way = sum(len(versions) for name, versions in self.tokens.items() if name not in self.ended)
        assert tokens[Fate.UNDER_WAY] == under_way
