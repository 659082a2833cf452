"""What a trainer rank does beyond the trainer: the reference swapped in, metrics averaged."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.controller.policy_worker import mean_metrics, swapped_weights


def test_swapped_weights_come_back_bit_by_bit():
    live = [{"a": torch.randn(3, 2), "b": torch.randn(5)}, {"a": torch.randn(4)}]
    other = [{name: torch.full_like(tensor, 7.0) for name, tensor in chunk.items()} for chunk in live]
    before = [{name: tensor.clone() for name, tensor in chunk.items()} for chunk in live]
    with pytest.raises(KeyError), swapped_weights(live, other):
        assert all((tensor == 7.0).all() for chunk in live for tensor in chunk.values())
        raise KeyError
    for old, new in zip(before, live, strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)


def test_metrics_are_means_and_the_last_learning_rate():
    steps = [{"loss/policy": 1.0, "learning_rate": 0.1}, {"loss/policy": 3.0, "learning_rate": 0.2}]
    assert mean_metrics(steps) == {"loss/policy": 2.0, "learning_rate": 0.2}


def test_every_learning_rate_is_the_last_one():
    steps = [{"critic/learning_rate": 0.1, "loss/value": 2.0}, {"critic/learning_rate": 0.3, "loss/value": 4.0}]
    assert mean_metrics(steps) == {"critic/learning_rate": 0.3, "loss/value": 3.0}
