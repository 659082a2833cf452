"""The scheduler of a run's rollouts: a state machine from groups to batches. No clock, no engine, no tokens: events only.

    add_group -> assign -> on_returned (pauses put it back) -> on_scored -> take_batch
                   ^          |         on_version: the weights moved
                   +-- on_turn <- between two turns, at a tool; on_last_turn ends it

Whoever runs it holds the tokens and does what it says. It keeps, for every sample, the versions that sampled it; nothing
is trained that is older than `max_staleness` versions, and every sampled token ends in the ledger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_rl.scheduling.curriculum import Curriculum
from megatron_rl.scheduling.dispatch import DispatchQueue
from megatron_rl.scheduling.group_index import GroupIndex
from megatron_rl.scheduling.ledger import TokenLedger
from megatron_rl.scheduling.length_bias import LengthMonitor
from megatron_rl.scheduling.lengths import LengthStatistics
from megatron_rl.scheduling.settings import OverAge, ScheduleSettings
from megatron_rl.scheduling.staleness import num_admissible, num_required, plan_batch
from megatron_rl.scheduling.work import Fate, GroupWork, SampleWork
from megatron_rl.types.rollout import TrajectoryState

SCHEDULE_DROPS = (Fate.DROPPED_OVER_AGE, Fate.DROPPED_VERSIONS, Fate.DROPPED_EARLY_STOP, Fate.DROPPED_SMALL_GROUP)
"""What is left out for being late, not for what it says."""


class RolloutState:
    """See the module. `limits[e]`: samples that engine e runs at once."""

    def __init__(
        self,
        settings: ScheduleSettings,
        limits: Sequence[int],
        lengths: LengthStatistics | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        """`curriculum` is told the pass rate of every complete group, filtered ones included."""
        self.settings = settings
        self.queue: DispatchQueue[SampleWork] = DispatchQueue(limits)
        self.ledger = TokenLedger()
        self.lengths = lengths or LengthStatistics()
        self.length_monitor = LengthMonitor()
        self.curriculum = curriculum
        self.version = 0
        self.next_trained = 0
        """The version that the next batch trains."""
        self.num_filtered = 0
        """Groups left out since the last batch."""
        self._samples: dict[str, SampleWork] = {}
        self._groups: dict[str, GroupWork] = {}
        self._index = GroupIndex()
        self._paused: dict[str, SampleWork] = {}
        self._num_away = 0
        self._is_whole = False
        self._dropped: list[SampleWork] = []
        self._serial = 0

    # Supply.

    @property
    def num_wanted(self) -> int:
        """Groups to add now."""
        if self._is_valve_open:
            return 0
        settings = replace(self.settings, oversample=1.0) if self._is_whole else self.settings
        return num_admissible(settings, self.version, self.next_trained, len(self._groups))

    def begin_round(self, is_whole: bool) -> None:
        """With `early_stop`: the next batch is whole, it releases just what it takes and is not cut; or it is not."""
        self._is_whole = is_whole

    def plan_samples(self, prompt_ids: Sequence[str]) -> list[int]:
        """How many samples each prompt of a draw gets."""
        size = self.settings.samples_per_group
        if self.curriculum is None or not self.settings.adapt_samples:
            return [size] * len(prompt_ids)
        return self.curriculum.budget(prompt_ids, size * len(prompt_ids))

    def add_group(self, group_id: str, prompt_id: str, num_samples: int | None = None) -> GroupWork:
        """Release the samples of one prompt into the queue; their ids are `group_id/index`."""
        if group_id in self._groups:
            raise ValueError(f"group '{group_id}' is under way already; ids must be unique")
        group = GroupWork(group_id, prompt_id, self._serial, self.lengths.expect(prompt_id))
        self._serial += 1
        for index in range(num_samples or self.settings.samples_per_group):
            sample = SampleWork(f"{group_id}/{index}", group, index)
            group.samples.append(sample)
            self._samples[sample.sample_id] = sample
            self.queue.put(sample, self._order(sample))
        group.num_open = len(group.samples)
        self._groups[group_id] = group
        return group

    # Dispatch.

    def assign(self) -> Iterator[tuple[int, SampleWork]]:
        """(engine, sample) for everything that starts or resumes now."""
        for engine, sample in self.queue.assign():
            sample.state, sample.engine = TrajectoryState.RUNNING, engine
            if sample.oldest_version is None:
                sample.oldest_version = self.version
                if sample.group.oldest_version is None:
                    self._index.set_oldest(sample.group, self.version)
            yield engine, sample

    def token_limit(self, sample: SampleWork) -> int:
        """How many more tokens this sample may get from its engine now."""
        left = self.settings.max_new_tokens - sample.num_tokens - sample.num_inserted
        if self.settings.phase_tokens is not None:
            left = min(left, self.settings.phase_tokens - sample.phase_tokens)
        return left

    def on_returned(
        self, sample_id: str, spans: Sequence[tuple[int, int]], has_stopped: bool, is_one_turn: bool = True
    ) -> SampleWork | None:
        """An engine returned a sample with the tokens of this go. It is complete when it has stopped by itself or reached
        `max_new_tokens`, else it is paused. None: it was dropped meanwhile. Unless `is_one_turn`, its turn is complete
        instead: it is away until `on_turn` or `on_last_turn`."""
        sample = self._samples[sample_id]
        assert sample.engine is not None and sample.state is TrajectoryState.RUNNING, f"{sample_id} does not run"
        self.queue.finish(sample.engine)
        self.ledger.sample(sample.add_spans(spans))
        sample.state = TrajectoryState.PAUSED
        if sample.is_dropped:
            self._forget(sample)
            return None
        if has_stopped or sample.num_tokens + sample.num_inserted >= self.settings.max_new_tokens:
            sample.state = TrajectoryState.DONE if is_one_turn else TrajectoryState.AWAY
            self._num_away += not is_one_turn
        else:
            self._resume(sample)
        return sample

    def on_turn(self, sample_id: str, num_inserted: int) -> None:
        """`num_inserted` tokens that nobody sampled stand before the next turn. A sample that was away waits for an engine
        again, rather the one that has its prefix; one that runs is before its first turn.

        Raises ValueError when the global cap leaves no room for a turn.
        """
        sample = self._samples[sample_id]
        num_behind = sample.num_tokens + sample.num_inserted + num_inserted
        if num_behind >= self.settings.max_new_tokens:
            limit = self.settings.max_new_tokens
            raise ValueError(f"{sample_id}: {num_behind} tokens behind the prompt leave no room for a turn below {limit}")
        sample.num_inserted += num_inserted
        if sample.state is not TrajectoryState.RUNNING:
            self._come_back(sample)
            self._resume(sample)

    def on_last_turn(self, sample_id: str, unused: Sequence[tuple[int, int]] = ()) -> None:
        """A sample that was away is complete. `unused`: (version, how many tokens of it get no loss)."""
        sample = self._samples[sample_id]
        self._come_back(sample)
        sample.unused = list(unused)
        sample.state = TrajectoryState.DONE

    def on_engine_lost(self, engine: int) -> list[SampleWork]:
        """An engine is gone: what ran there since its last return is sampled again elsewhere, and prefixes are moved."""
        self.queue.set_limit(engine, 0)
        lost = [s for s in self._samples.values() if s.engine == engine and s.state is not TrajectoryState.DONE]
        for sample in lost:
            sample.engine = None
            if sample.state is TrajectoryState.RUNNING:
                self.queue.finish(engine)
                sample.state = TrajectoryState.PAUSED
                if sample.is_dropped:
                    self._forget(sample)
                else:
                    self._enqueue(sample)
            elif self.queue.remove(sample):
                self._enqueue(sample)
        return lost

    # Completion.

    def on_scored(self, sample_id: str, is_correct: bool) -> None:
        """A complete sample has its reward; `is_correct` is the unshaped metric. The last one completes its group."""
        sample = self._samples.get(sample_id)
        if sample is None or sample.is_dropped:
            return  # dropped while it was scored
        sample.is_correct = is_correct
        sample.group.num_open -= 1
        self._complete(sample.group)

    def take_batch(self, is_late: bool = False) -> list[GroupWork] | None:
        """The groups of the next training step, oldest first in the order of their release; None: not yet.

        Fewer than `groups_per_batch` when too many were filtered for one batch; then it may be empty. `is_late`: the phase's
        time is up, and one ready group will do (as long as no other grows too old by it).
        """
        wanted = self.settings.groups_per_batch
        if is_late:
            wanted = max(min(wanted, self.num_ready), 1)
        if self.next_trained != self.version:
            return None  # the weights that the next batch trains do not exist yet
        if self.num_ready < wanted and not (self._is_valve_open and self.num_unfinished == 0):
            return None
        index = self._index
        required: Sequence[tuple[int, int]] = ()
        if self.settings.over_age is OverAge.WAIT and not self.settings.early_stop:
            num_unstarted = len(self._groups) - sum(index.started.values())
            required = num_required(self.settings, self.version, index.started, num_unstarted)
        plan = plan_batch(index.num_ready_by_start, wanted, required)
        if plan is None:
            return None
        batch = []
        for version, count in plan.items():
            batch += index.oldest_ready(version, count)
        for group in batch:
            self._train(group)
        if self.settings.early_stop and not self._is_whole:
            for group in list(self._groups.values()):
                self._drop_group(group, Fate.DROPPED_EARLY_STOP)
        self.next_trained += 1
        self.num_filtered = 0
        return sorted(batch, key=lambda group: group.serial)

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits for an engine, is between two turns or is to be added."""
        return not (self.queue.num_running or self.queue.num_waiting or self._num_away or self.num_wanted)

    @property
    def is_stalled(self) -> bool:
        """Idle, with samples that are paused by their budget: the phase is over."""
        return bool(self._paused) and self.is_idle

    # The weights.

    def on_version(self, version: int) -> None:
        """All engines hold a newer version: what is too old by the policy is dropped, and a new phase begins."""
        if version <= self.version:
            raise ValueError(f"version {version} after version {self.version}: versions only grow")
        self.version = self.next_trained = version
        if self.settings.over_age in (OverAge.DROP_SAMPLE, OverAge.DROP_GROUP):
            self._drop_over_age()
        if self.settings.max_versions is not None:
            self._drop_many_versions(self.settings.max_versions)
        self.begin_phase()

    def begin_phase(self) -> None:
        """Samples get a new budget; those that were paused wait for an engine, ahead of new ones."""
        for sample in self._samples.values():
            sample.phase_tokens = 0
        paused, self._paused = self._paused, {}
        for sample in paused.values():
            self._enqueue(sample)
        self.queue.reorder(self._order)

    def take_dropped(self) -> list[SampleWork]:
        """Samples dropped or filtered since the last call. One that still RUNs is to be ended at its engine; it is
        forgotten when it returns."""
        dropped, self._dropped = self._dropped, []
        return dropped

    # Counts.

    @property
    def num_outstanding(self) -> int:
        """Groups released and neither in a batch nor dropped."""
        return len(self._groups)

    @property
    def num_ready(self) -> int:
        """Groups that a batch can take."""
        return self._index.num_ready

    @property
    def num_unfinished(self) -> int:
        """Groups that still need an engine or a reward."""
        return len(self._groups) - self.num_ready

    @property
    def _is_valve_open(self) -> bool:
        settings = self.settings
        return self.num_filtered >= (settings.max_oversample_factor - 1) * settings.groups_per_batch and (
            settings.filter_groups and self.num_filtered > 0
        )

    def _order(self, sample: SampleWork) -> tuple[int, int, float, int, int]:
        """Oldest started groups first, then the longest expected, then by release."""
        oldest = sample.group.oldest_version
        started = (0, oldest) if oldest is not None and (sample.num_tokens or oldest < self.version) else (1, 0)
        return (*started, -sample.group.expected_tokens, sample.group.serial, sample.index)

    def _come_back(self, sample: SampleWork) -> None:
        assert sample.state is TrajectoryState.AWAY, f"{sample.sample_id} is not away"
        sample.state = TrajectoryState.PAUSED
        self._num_away -= 1

    def _resume(self, sample: SampleWork) -> None:
        """Into the queue, or to rest where its budget of this phase is used up."""
        if self.token_limit(sample) > 0:
            self._enqueue(sample)
        else:
            self._paused[sample.sample_id] = sample

    def _enqueue(self, sample: SampleWork) -> None:
        self.queue.put(sample, self._order(sample), sample.engine)

    def _leave(self, group: GroupWork) -> None:
        self._index.leave(group)
        del self._groups[group.group_id]

    def _complete(self, group: GroupWork) -> None:
        """Ready, or left out, once every sample that was not dropped is scored."""
        if group.num_open or group.oldest_version is None or self._index.is_ready(group):
            return
        settings = self.settings
        self.lengths.observe(group.prompt_id, sum(s.num_tokens for s in group.samples) / len(group.samples))
        if self.curriculum is not None:
            self.curriculum.observe(group.prompt_id, sum(map(bool, (s.is_correct for s in group.samples))), len(group.samples))
        correct = {sample.is_correct for sample in group.samples}
        if settings.filter_groups and len(correct) == 1:
            self.num_filtered += 1
            self._drop_group(group, Fate.FILTERED_SOLVED if True in correct else Fate.FILTERED_FAILED)
            return
        self._index.set_ready(group)

    def _train(self, group: GroupWork) -> None:
        oldest_allowed = self.version - self.settings.max_staleness
        for sample in group.samples:
            masked = sum(count for version, count in sample.spans if version < oldest_allowed)
            if masked and self.settings.over_age is not OverAge.MASK:
                raise RuntimeError(f"{sample.sample_id}: {masked} tokens are older than version {oldest_allowed}")
            unused = sum(count for version, count in sample.unused if version >= oldest_allowed)
            self.ledger.settle(Fate.MASKED_OVER_AGE, masked)
            self.ledger.settle(Fate.MASKED_BY_FUNCTION, unused)
            self.ledger.settle(Fate.TRAINED, sample.num_tokens - masked - unused)
            self.ledger.count_sample(Fate.TRAINED)
            self.length_monitor.observe(sample.num_tokens, True, True)
            del self._samples[sample.sample_id]
        self._leave(group)

    def _drop_over_age(self) -> None:
        oldest_allowed = self.version - self.settings.max_staleness
        for group in list(self._groups.values()):
            over = [s for s in group.samples if s.oldest_version is not None and s.oldest_version < oldest_allowed]
            if over and self.settings.over_age is OverAge.DROP_GROUP:
                self._drop_group(group, Fate.DROPPED_OVER_AGE)
            elif over:
                self._drop_samples(group, over, Fate.DROPPED_OVER_AGE)

    def _drop_many_versions(self, limit: int) -> None:
        for group in list(self._groups.values()):
            over = [
                sample
                for sample in group.samples
                if sample.state is not TrajectoryState.DONE
                and sample.oldest_version is not None
                and self.version - sample.oldest_version + 1 > limit
            ]
            if over:
                self._drop_samples(group, over, Fate.DROPPED_VERSIONS)

    def _drop_samples(self, group: GroupWork, samples: Sequence[SampleWork], fate: Fate) -> None:
        """Drop some of a group; what is left trains as long as it is at least two samples (an advantage is relative)."""
        for sample in samples:
            group.samples.remove(sample)
            if sample.is_correct is None:
                group.num_open -= 1
            self._drop(sample, fate)
        if len(group.samples) < min(2, self.settings.samples_per_group):
            self._drop_group(group, Fate.DROPPED_SMALL_GROUP)
            return
        starts = [sample.oldest_version for sample in group.samples if sample.oldest_version is not None]
        self._index.set_oldest(group, min(starts, default=None))
        self._complete(group)

    def _drop_group(self, group: GroupWork, fate: Fate) -> None:
        self._leave(group)
        for sample in group.samples:
            self._drop(sample, fate)
        group.samples = []

    def _drop(self, sample: SampleWork, fate: Fate) -> None:
        sample.fate = fate
        self.ledger.count_sample(fate)
        self._dropped.append(sample)
        if sample.state is not TrajectoryState.RUNNING:
            self.queue.remove(sample)
            self._paused.pop(sample.sample_id, None)
            self._num_away -= sample.state is TrajectoryState.AWAY
            self._forget(sample)

    def _forget(self, sample: SampleWork) -> None:
        """The end of a dropped sample: its tokens are counted and its name may be used again."""
        self.ledger.settle(sample.fate, sample.num_tokens)
        if sample.fate in SCHEDULE_DROPS:
            self.length_monitor.observe(sample.num_tokens, sample.state is TrajectoryState.DONE, False)
        del self._samples[sample.sample_id]
