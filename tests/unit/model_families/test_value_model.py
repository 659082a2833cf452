from __future__ import annotations

import pytest

from megatron_rl.model_families.registry import get_family
from megatron_rl.model_families.value_model import HEAD, value_model_of


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_the_vocabulary_gives_way_to_one_number(name: str) -> None:
    family = get_family(name)
    dims = family.debug_dims
    model = value_model_of(family)
    rules = {rule.megatron_name: rule for rule in model.rules_for(dims)}
    assert "output_layer.weight" not in rules and "embedding.word_embeddings.weight" in rules
    assert rules.keys() - {rule.megatron_name for rule in family.rules_for(dims)} == {"value_head.weight"}
    assert rules["value_head.weight"].hf_names == (HEAD,) and not rules["value_head.weight"].is_on_first_stage
    assert model.shape_of(HEAD, dims) == (1, dims.hidden_size)
    assert model.shape_of("model.norm.weight", dims) == (dims.hidden_size,)
