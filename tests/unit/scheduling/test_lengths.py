"""Length statistics."""

from __future__ import annotations

import json

import pytest

from megatron_rl.scheduling.lengths import LengthStatistics


def test_a_known_prompt_has_its_own_mean_and_a_new_one_that_of_all():
    lengths = LengthStatistics()
    assert lengths.expect("a") == 0
    lengths.observe("a", 10.0)
    lengths.observe("b", 30.0)
    assert (lengths.expect("a"), lengths.expect("b"), lengths.expect("new")) == (10.0, 30.0, 20.0)
    for _ in range(20):
        lengths.observe("a", 50.0)  # the policy moved
    assert lengths.expect("a") == pytest.approx(50.0, abs=0.1)


def test_it_resumes_where_it_was():
    first, second = LengthStatistics(), LengthStatistics()
    first.observe("a", 7.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for lengths in (first, second):
        lengths.observe("a", 9.0)
        assert (lengths.expect("a"), lengths.expect("z")) == (8.0, 8.0)
