"""The value model (or reward model) of a family: its decoder with a scalar head in place of the vocabulary."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.model_families.declaration import ModelDims, ModelFamily, ParamRule, Shard

HEAD = "score.weight"
"""The Hugging Face name of the head in `...ForSequenceClassification` and `...ForTokenClassification`."""


def value_model_of(family: ModelFamily) -> ModelFamily:
    """`family` with `value_head` [1, H], the same on every tensor-parallel rank, instead of an output layer."""
    head = ParamRule("value_head.weight", (HEAD,), HEAD, Shard.REPLICATED)

    def shape_of(name: str, dims: ModelDims) -> tuple[int, ...]:
        return (1, dims.hidden_size) if name == HEAD else family.shape_of(name, dims)

    rules = tuple(rule for rule in family.params if not rule.megatron_name.startswith("output_layer."))
    return replace(family, name=f"{family.name}_value", params=(*rules, head), shape_of=shape_of)
