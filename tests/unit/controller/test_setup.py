"""Model setup, bundles, signals and the actors' plain parts."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from megatron_rl.config.sections import ClusterSection, ModelSection
from megatron_rl.controller.metrics import training_metrics
from megatron_rl.controller.model_setup import build_model_setup
from megatron_rl.controller.placement import plan_bundles
from megatron_rl.controller.stop_signals import Interrupted, cancelled_by_signals
from megatron_rl.model_families.hf_config import UnsupportedModelError
from megatron_rl.model_families.registry import FAMILIES

HF = FAMILIES["qwen3_moe"].hf_from_dims(FAMILIES["qwen3_moe"].debug_dims)


def test_a_random_start_takes_the_tokenizers_vocabulary():
    dims = {key: value for key, value in HF.items() if key != "vocab_size"}
    setup = build_model_setup(ModelSection(family="qwen3_moe", dims=dims), seed=3, tokenizer_vocab_size=57)
    assert setup.dims.vocab_size == 57
    assert setup.family is FAMILIES["qwen3_moe"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (ModelSection(dims=HF), "model.family: needed"),
        (ModelSection(family="qwen3_mo", dims=HF), "did you mean 'qwen3_moe'"),
        (ModelSection(path="/nowhere/at/all"), "config.json: not found"),
        (ModelSection(family="qwen3_moe", dims=HF), "smaller than the tokenizer's 500"),
        (ModelSection(family="qwen3_moe", dims={"hidden_size": 8}), "is missing"),
        (ModelSection(family="qwen3_moe", dims=HF | {"attention_bias": True}), "attention_bias = True is not supported"),
    ],
)
def test_models_that_cannot_be_served_are_refused_in_one_line(section, message):
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        build_model_setup(section, seed=1, tokenizer_vocab_size=500)
    assert "\n" not in str(caught.value)


def test_bundles_are_trainers_then_engines():
    cpu = plan_bundles(ClusterSection(), 3, 2, 4)
    assert cpu.bundles == ({"CPU": 1.0},) * 5
    gpu = plan_bundles(ClusterSection(gpus_per_trainer_rank=1, gpus_per_engine_rank=0.5), 2, 1, 4)
    assert gpu.bundles == ({"CPU": 1.0, "GPU": 1}, {"CPU": 1.0, "GPU": 1}, {"CPU": 1.0, "GPU": 2.0})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_and_the_cleanup_runs(number):
    cleaned = []

    async def work():
        with cancelled_by_signals():
            try:
                os.kill(os.getpid(), number)
                await asyncio.sleep(30)
            finally:
                await asyncio.sleep(0)
                cleaned.append(True)

    with pytest.raises(Interrupted, match=number.name):
        asyncio.run(work())
    assert cleaned == [True]


def test_a_cancellation_from_elsewhere_stays_one():
    async def work():
        with cancelled_by_signals():
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(work())


def test_a_step_that_trained_nothing_has_every_key():
    metrics = training_metrics(None, 0.5)
    assert metrics["learning_rate"] == 0.5
    assert metrics["loss/clip_fraction"] == metrics["grad_norm"] == 0.0
