"""The estimate of sampled lengths, and which schedules prefer short answers, on random worlds with a heavy tail."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_rl.scheduling.length_bias import LengthBias, LengthMonitor
from megatron_rl.scheduling.settings import OverAge, ScheduleKind, ScheduleSettings
from tests.unit.scheduling.scripted_world import World

MAX_NEW = 60


def heavy_tail(rng: random.Random) -> int:
    return min(int(rng.lognormvariate(1.5, 1.0)) + 1, MAX_NEW)


def test_dropped_answers_count_up_to_where_they_were_cut():
    rng = random.Random(3)
    lengths = [heavy_tail(rng) for _ in range(4000)]
    monitor = LengthMonitor()
    for length in lengths:
        cut = rng.randint(0, 40)  # whoever is not done by then is dropped
        monitor.observe(min(length, cut), length <= cut, length <= cut)
    trained = [length for length, _, is_trained in monitor._ended if is_trained]
    bias = monitor.bias()
    truth = (sum(trained) / len(trained)) / (sum(lengths) / len(lengths))
    assert truth < 0.8
    assert bias.trained_over_sampled == pytest.approx(truth, abs=0.06)
    assert 0.05 < bias.distance < 0.5


def test_nothing_dropped_is_no_bias_and_the_window_forgets():
    monitor = LengthMonitor(window=200)
    for length in range(200):
        monitor.observe(length, True, True)
    assert monitor.bias() == LengthBias(1.0, 0.0)
    for _ in range(60):
        monitor.observe(500, True, False)
    assert monitor.bias().trained_over_sampled < 0.7
    for length in range(200):
        monitor.observe(length, True, True)
    assert monitor.bias() == LengthBias(1.0, 0.0)


def test_of_a_few_samples_nothing_is_said():
    monitor = LengthMonitor()
    for _ in range(63):
        monitor.observe(1, True, True)
        monitor.observe(100, True, False)
    assert monitor.bias() == LengthBias(1.0, 0.0)


LOCKSTEP = ScheduleSettings(3, 2, MAX_NEW)
ONE_OFF = replace(LOCKSTEP, kind=ScheduleKind.ONE_STEP_OFF, max_staleness=1)
FREE = replace(LOCKSTEP, kind=ScheduleKind.ASYNCHRONOUS, max_staleness=1)


def biases(settings: ScheduleSettings, num_worlds: int = 6) -> list[LengthBias]:
    """One per world. Checks what the monitors say against the lengths that the script meant its samples to have."""
    found, truths = [], []
    for seed in range(num_worlds):
        world = World(seed, settings)
        rng = random.Random(f"{seed} lengths")
        world.draw_length = lambda rng=rng: heavy_tail(rng)
        world.run(num_batches=40, patience=200_000)
        meant = [length for name, length in world.lengths.items() if name in world.ended]
        trained = [length for length, _, is_trained in world.state.length_monitor._ended if is_trained]
        found.append(world.state.length_monitor.bias())
        truths.append((sum(trained) / len(trained)) / (sum(meant) / len(meant)))
    assert sum(bias.trained_over_sampled for bias in found) == pytest.approx(sum(truths), abs=0.1 * num_worlds)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        LOCKSTEP,
        replace(LOCKSTEP, oversample=2.0, max_staleness=1),
        ONE_OFF,
        replace(ONE_OFF, oversample=1.5, max_staleness=2),
        FREE,
        replace(FREE, max_staleness=3),
        replace(FREE, over_age=OverAge.MASK),
    ],
)
def test_schedules_that_wait_or_mask_do_not_prefer_short_answers(settings):
    assert biases(settings, 3) == [LengthBias(1.0, 0.0)] * 3


@pytest.mark.parametrize(
    "settings",
    [
        replace(FREE, over_age=OverAge.DROP_SAMPLE, samples_per_group=3),
        replace(FREE, over_age=OverAge.DROP_GROUP),
        replace(LOCKSTEP, early_stop=True, oversample=2.0),
    ],
)
def test_schedules_that_drop_what_is_late_do_and_the_monitor_says_so(settings):
    found = biases(settings)
    ratios = [bias.trained_over_sampled for bias in found]
    assert sum(ratios) / len(ratios) < 0.95 and min(ratios) < 0.9
    assert max(bias.distance for bias in found) > 0.03
