"""What a trainer rank does beyond the trainer: metrics averaged."""

from __future__ import annotations

from megatron_rl.controller.policy_worker import mean_metrics


def test_metrics_are_means_and_the_last_learning_rate():
    steps = [{"loss/policy": 1.0, "learning_rate": 0.1}, {"loss/policy": 3.0, "learning_rate": 0.2}]
    assert mean_metrics(steps) == {"loss/policy": 2.0, "learning_rate": 0.2}


def test_every_learning_rate_is_the_last_one():
    steps = [{"critic/learning_rate": 0.1, "loss/value": 2.0}, {"critic/learning_rate": 0.3, "loss/value": 4.0}]
    assert mean_metrics(steps) == {"critic/learning_rate": 0.3, "loss/value": 3.0}
