"""The scheduler under thousands of random schedules, and its policies one by one."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_rl.scheduling.rollout_state import RolloutState
from megatron_rl.scheduling.settings import OverAge, ScheduleKind, ScheduleSettings
from megatron_rl.scheduling.work import Fate
from megatron_rl.types.rollout import TrajectoryState
from tests.unit.scheduling.scripted_world import World


@pytest.mark.parametrize("block", range(4))
def test_every_token_has_one_fate_and_nothing_is_too_old_or_stuck(block):
    fates: Counter[Fate] = Counter()
    short = 0
    for seed in range(block * 500, (block + 1) * 500):
        world = World(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {world.settings}") from error
        fates.update({fate: bool(count) for fate, count in world.state.ledger.tokens.items()})
        short += world.num_short
    unseen = [fate for fate in Fate if not fates[fate]]
    assert not unseen, f"the script never reached {unseen}"
    assert short


def state_of(limits=(8,), **options) -> RolloutState:
    defaults = {"groups_per_batch": 2, "samples_per_group": 2, "max_new_tokens": 10}
    return RolloutState(ScheduleSettings(**{**defaults, **options}), limits)


def release(state: RolloutState) -> int:
    count = state.num_wanted
    for _ in range(count):
        state.add_group(f"g{state._serial}", f"p{state._serial}")
    return count


def finish(state: RolloutState, name: str, version: int, tokens: int = 3, correct: bool = True) -> None:
    state.on_returned(name, [(version, tokens)], True)
    state.on_scored(name, correct)


def names(state: RolloutState) -> list[str]:
    return [sample.sample_id for _, sample in state.assign()]


def test_lockstep_releases_a_batch_per_version():
    state = state_of()
    assert release(state) == 2
    running = names(state)
    assert running == ["g0/0", "g0/1", "g1/0", "g1/1"]
    for name in reversed(running):
        assert state.take_batch() is None
        finish(state, name, 0)
    batch = state.take_batch()
    assert [group.group_id for group in batch] == ["g0", "g1"]
    assert state.num_wanted == 0  # the next batch starts under the next weights
    state.on_version(1)
    assert state.num_wanted == 2


def test_one_step_off_generates_the_next_batch_while_this_one_trains():
    state = state_of(kind=ScheduleKind.ONE_STEP_OFF, max_staleness=1)
    for version in range(3):
        if version:
            state.on_version(version)
        if version == 0:
            assert release(state) == 2
            for name in names(state):
                finish(state, name, 0)
        assert state.take_batch() is not None
        assert release(state) == 2  # under the version that trains now
        for name in names(state):
            finish(state, name, version)
        assert state.take_batch() is None  # its weights do not exist yet


def test_asynchronous_admission_rises_with_the_weights_and_not_with_a_batch():
    state = state_of(kind=ScheduleKind.ASYNCHRONOUS, max_staleness=2, limits=(20,))
    assert release(state) == 6
    for name in names(state):
        finish(state, name, 0)
    assert len(state.take_batch()) == 2
    assert state.num_wanted == 0
    state.on_version(1)
    assert state.num_wanted == 2


def test_waiting_takes_no_batch_that_would_make_an_old_group_late():
    state = state_of(kind=ScheduleKind.ASYNCHRONOUS, max_staleness=1, groups_per_batch=1, samples_per_group=1)
    assert release(state) == 2
    old, new = names(state)
    state.on_returned(old, [(0, 2)], False)  # still on its way
    assert names(state) == [old]
    finish(state, new, 0)
    assert len(state.take_batch()) == 1  # the old one can still go into the batch of version 1
    state.on_version(1)
    release(state)
    (newer,) = names(state)
    finish(state, newer, 1)
    assert state.take_batch() is None  # it must be the old one
    finish(state, old, 1)
    assert [group.group_id for group in state.take_batch()] == ["g0"]
    assert state.ledger.tokens[Fate.TRAINED] == 3 + 5


@pytest.mark.parametrize(
    ("policy", "trained", "fate", "count"),
    [
        (OverAge.MASK, ["g0/0", "g0/1"], Fate.MASKED_OVER_AGE, 4),
        (OverAge.DROP_SAMPLE, ["g1/0", "g1/1"], Fate.DROPPED_OVER_AGE, 4 + 4),
        (OverAge.DROP_GROUP, ["g1/0", "g1/1"], Fate.DROPPED_OVER_AGE, 4 + 4),
    ],
)
def test_what_grows_too_old_meets_its_policy(policy, trained, fate, count):
    state = state_of(kind=ScheduleKind.ASYNCHRONOUS, max_staleness=0, groups_per_batch=1, over_age=policy)
    release(state)
    old = names(state)
    state.next_trained = 1  # as if an empty batch had been taken
    state.on_version(1)
    for sample in state.take_dropped():
        assert sample.state is TrajectoryState.RUNNING  # to be ended by whoever runs it
        assert state.on_returned(sample.sample_id, [(0, 4)], False) is None
    release(state)
    for name in names(state):
        finish(state, name, 1)
    if policy is OverAge.MASK:
        for name in old:
            state.on_returned(name, [(0, 2), (1, 1)], True)
            state.on_scored(name, True)
    (group,) = state.take_batch()
    assert [sample.sample_id for sample in group.samples] == trained
    assert state.ledger.tokens[fate] == count


def test_the_siblings_of_a_dropped_sample_train_if_they_are_two():
    for size, left in ((3, 2), (2, 0)):
        state = state_of(
            kind=ScheduleKind.ASYNCHRONOUS, groups_per_batch=1, samples_per_group=size, max_versions=1, max_staleness=2
        )
        state.add_group("g", "p")
        running = names(state)
        for name in running[1:]:
            finish(state, name, 0)
        state.on_version(1)
        assert [s.sample_id for s in state.take_dropped()][:1] == ["g/0"]
        state.on_returned("g/0", [(0, 5)], False)
        batch = state.take_batch()
        assert len(batch[0].samples if batch else []) == left
        assert state.ledger.tokens[Fate.DROPPED_VERSIONS] == 5
        assert state.ledger.tokens[Fate.DROPPED_SMALL_GROUP] == (0 if left else 3)


def test_groups_of_one_correctness_are_replaced_until_the_valve():
    state = state_of(filter_groups=True, max_oversample_factor=2.0)
    assert release(state) == 2
    running = names(state)
    for name in running[:2]:
        finish(state, name, 0, correct=True)
    assert state.num_wanted == 1 and state.take_batch() is None
    for name in running[2:]:
        finish(state, name, 0, correct=False)
    assert state.ledger.tokens[Fate.FILTERED_SOLVED] == 6 and state.ledger.tokens[Fate.FILTERED_FAILED] == 6
    assert state.num_wanted == 0  # two filtered groups are one batch: the valve
    assert state.take_batch() == []
    state.on_version(1)
    assert state.num_wanted == 2


def test_a_paused_sample_goes_first_and_to_its_engine():
    state = state_of(limits=(1, 1), groups_per_batch=3, samples_per_group=1)
    release(state)
    assert dict(state.assign()).keys() == {0, 1}
    state.on_returned("g1/0", [(0, 4)], False)
    assert [(engine, sample.sample_id) for engine, sample in state.assign()] == [(1, "g1/0")]


def test_a_budget_pauses_until_the_next_phase():
    state = state_of(phase_tokens=4, samples_per_group=1)
    release(state)
    for _, sample in list(state.assign()):
        assert state.token_limit(sample) == 4
        state.on_returned(sample.sample_id, [(0, 4)], False)
    assert not names(state) and state.is_stalled
    state.begin_phase()
    resumed = [sample for _, sample in state.assign()]
    assert [state.token_limit(sample) for sample in resumed] == [4, 4]
    for sample in resumed:
        state.on_returned(sample.sample_id, [(0, 4)], False)
    state.begin_phase()
    assert [state.token_limit(sample) for _, sample in state.assign()] == [2, 2]  # the global cap


def test_a_late_batch_takes_what_is_ready_as_far_as_others_do_not_grow_too_old():
    strict, loose = state_of(samples_per_group=1), state_of(samples_per_group=1, max_staleness=1)
    for state in (strict, loose):
        release(state)
        first, _ = names(state)
        assert state.take_batch(is_late=True) is None  # nothing is ready
        finish(state, first, 0)
        assert state.take_batch() is None
    assert strict.take_batch(is_late=True) is None  # the other one could not be trained any more
    assert [group.group_id for group in loose.take_batch(is_late=True)] == ["g0"]


def test_a_sample_with_turns_goes_away_and_comes_back_to_its_engine():
    state = state_of(limits=(1, 1), groups_per_batch=1, samples_per_group=1)
    release(state)
    ((engine, sample),) = state.assign()
    state.on_turn("g0/0", 2)  # before the first turn
    assert state.token_limit(sample) == 8
    state.on_returned("g0/0", [(0, 3)], True, is_one_turn=False)
    assert sample.state is TrajectoryState.AWAY and not state.is_idle and state.take_batch() is None
    with pytest.raises(ValueError, match="g0/0: 10 tokens behind the prompt leave no room for a turn below 10"):
        state.on_turn("g0/0", 5)
    state.on_turn("g0/0", 4)
    assert [(e, s.sample_id, state.token_limit(s)) for e, s in state.assign()] == [(engine, "g0/0", 1)]
    state.on_returned("g0/0", [(0, 1)], False, is_one_turn=False)  # the global cap
    state.on_last_turn("g0/0", [(0, 1)])
    state.on_scored("g0/0", True)
    assert len(state.take_batch()) == 1
    assert state.ledger.tokens[Fate.TRAINED] == 3 and state.ledger.tokens[Fate.MASKED_BY_FUNCTION] == 1


def test_a_sample_dropped_between_two_turns_is_settled_at_once():
    state = state_of(kind=ScheduleKind.ASYNCHRONOUS, groups_per_batch=1, samples_per_group=1, max_versions=1, max_staleness=2)
    state.add_group("g", "p")
    names(state)
    state.on_returned("g/0", [(0, 5)], True, is_one_turn=False)
    state.on_version(1)
    assert [sample.sample_id for sample in state.take_dropped()] == ["g/0"]
    assert state.ledger.tokens[Fate.DROPPED_VERSIONS] == 5 and state.num_outstanding == 0


def test_the_longest_expected_prompt_starts_first():
    state = state_of(groups_per_batch=3, samples_per_group=1)
    for prompt, length in (("p0", 2.0), ("p1", 9.0), ("p2", 5.0)):
        state.lengths.observe(prompt, length)
    release(state)
    assert names(state) == ["g1/0", "g2/0", "g0/0"]


def test_versions_only_grow_and_ids_are_unique():
    state = state_of()
    state.add_group("g", "p")
    with pytest.raises(ValueError, match="'g' is under way already"):
        state.add_group("g", "p")
    state.on_version(3)
    with pytest.raises(ValueError, match="version 3 after version 3"):
        state.on_version(3)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"groups_per_batch": 0}, "at least 1"),
        ({"kind": ScheduleKind.ONE_STEP_OFF}, "max_staleness must be at least 1"),
        ({"oversample": 1.5}, "at most 1 with max_staleness 0"),
        ({"kind": ScheduleKind.ONE_STEP_OFF, "max_staleness": 1, "oversample": 1.5}, "at most 1 with max_staleness 1"),
        ({"phase_tokens": 0}, "phase_tokens 0"),
        ({"kind": ScheduleKind.ASYNCHRONOUS, "early_stop": True}, "early_stop cuts the batches of lockstep, not of async"),
        ({"max_oversample_factor": 0.5}, "max_oversample_factor 0.5"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        state_of(**options)
