"""Busy slot-time on a clock of our own."""

from __future__ import annotations

import pytest

from megatron_rl.rollout.slot_meter import SlotMeter


def test_it_integrates_what_runs_since_the_restart():
    now = [10.0]
    meter = SlotMeter(lambda: now[0])
    meter.change(3)
    now[0] += 2
    meter.change(-1)
    now[0] += 4
    assert meter.efficiency(8) == pytest.approx((3 * 2 + 2 * 4) / (3 * 6))  # only 3 slots were ever needed
    assert meter.efficiency(2) == 1.0
    meter.restart()
    now[0] += 1
    meter.change(-2)
    now[0] += 3
    assert meter.efficiency(8) == pytest.approx(2 / 8)
    assert meter.elapsed_s == 4


def test_only_the_wait_for_rewards_counts_as_theirs():
    now = [0.0]
    meter = SlotMeter(lambda: now[0])
    for running, scored, seconds in ((2, 0, 3), (-1, 1, 5), (-1, 0, 2), (0, -1, 9)):
        meter.change(running, scored)
        now[0] += seconds
    meter.change(0)
    assert meter.reward_s == 2


def test_nothing_ran():
    assert SlotMeter(lambda: 1.0).efficiency(4) == 0.0
