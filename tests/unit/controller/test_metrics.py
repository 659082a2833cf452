"""Metrics of a step that trained nothing."""

from __future__ import annotations

from megatron_rl.controller.metrics import training_metrics


def test_a_step_that_trained_nothing_has_every_key():
    metrics = training_metrics(None, 0.5)
    assert metrics["learning_rate"] == 0.5
    assert metrics["loss/clip_fraction"] == metrics["grad_norm"] == 0.0
