"""The probe's arithmetic; what it catches in a real sync is in test_weight_sync."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from megatron_rl.controller.probe import WeightProbe, compute_gap


class Scorer:
    def __init__(self, shift: float = 0.0):
        self.shift = shift

    async def score(self, token_ids):
        return [np.array([9.0 + self.shift, *(-0.5 * i + self.shift for i in ids[1:])]) for ids in token_ids]

    score_tokens = score


def test_it_is_due_after_the_first_sync_and_every_nth():
    probe = WeightProbe([(1, 2)], interval=3, tolerance=0.1)
    assert [version for version in range(8) if probe.is_due(version)] == [0, 3, 6]
    assert not WeightProbe([(1, 2)], interval=0, tolerance=0.1).is_due(0)
    assert not WeightProbe([(1,)], interval=1, tolerance=0.1).is_due(0), "a single token has no log-prob"


def test_the_gap_is_the_mean_over_tokens_that_have_a_log_prob():
    expected = [np.array([0.0, -1.0, -2.0]), np.array([0.0, -3.0])]
    scored = [np.array([5.0, -1.5, -2.0]), np.array([-7.0, -2.0])]
    assert compute_gap(expected, scored) == pytest.approx((0.5 + 0.0 + 1.0) / 3)


@pytest.mark.parametrize("shift", [0.3, -0.3, float("nan")])
def test_an_engine_that_differs_is_named(shift):
    probe = WeightProbe([(1, 2, 3), (4, 5)], interval=1, tolerance=0.2)
    expected = asyncio.run(probe.expect(Scorer()))
    assert asyncio.run(probe.check(expected, [Scorer(0.1), Scorer(-0.1)])) == pytest.approx([0.1, 0.1])
    with pytest.raises(ValueError, match=r"probe: engine 1 and the trainer differ by .*sync\.probe_tolerance=0\.2"):
        asyncio.run(probe.check(expected, [Scorer(0.1), Scorer(shift)]))
