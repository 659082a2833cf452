"""Which model a run trains, and what is refused."""

from __future__ import annotations

import pytest

from megatron_rl.config.sections import ModelSection
from megatron_rl.controller.model_setup import build_model_setup
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
