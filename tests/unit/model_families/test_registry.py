"""Contract of every family: the declaration against transformers, the engine and arithmetic."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers

from megatron_rl.checkpoint.hf_export import hf_tensor_shapes
from megatron_rl.layout.intervals import matrix_shape
from megatron_rl.model_families.declaration import Shard
from megatron_rl.model_families.hf_config import UnsupportedModelError
from megatron_rl.model_families.registry import (
    DECLARED_ONLY,
    FAMILIES,
    declared_family,
    family_of,
    get_family,
    load_dims,
)
from megatron_rl.model_families.shards import (
    count_parameters,
    engine_boxes,
    engine_shapes,
    local_matrix_shape,
    megatron_boxes,
    padded_vocab,
)
from megatron_rl.rollout.embedded.weights import engine_param_shapes

ALL = sorted(FAMILIES)
DECLARED = sorted(FAMILIES | DECLARED_ONLY)


def variants(family):
    """The debug dims and dims that exercise the other branches."""
    dims = family.debug_dims
    yield dims
    yield dataclasses.replace(dims, tied_embeddings=not dims.tied_embeddings, num_kv_heads=1, vocab_size=67)
    yield dataclasses.replace(dims, num_heads=8, num_kv_heads=4, num_layers=2)


@pytest.mark.parametrize("name", DECLARED)
def test_names_and_shapes_are_those_of_transformers(name):
    family = declared_family(name)
    for dims in variants(family):
        hf = family.hf_from_dims(dims)
        config = transformers.AutoConfig.for_model(**hf)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        theirs = {key: tuple(value.shape) for key, value in model.named_parameters()}
        theirs |= {key: tuple(value.shape) for key, value in model.named_buffers() if key.endswith("correction_bias")}
        ours = dict(hf_tensor_shapes(family, dims))
        if dims.num_experts:  # transformers 5 stacks experts in memory; on disk, and for us, they are single tensors
            fused = {key for key in theirs if ".experts." in key}
            assert sum(np.prod(theirs[key]) for key in fused) == sum(
                np.prod(shape) for key, shape in ours.items() if ".experts." in key
            )
            theirs = {key: shape for key, shape in theirs.items() if key not in fused}
            ours = {key: shape for key, shape in ours.items() if ".experts." not in key}
        assert ours == theirs


@pytest.mark.parametrize("name", DECLARED)
def test_the_parameter_count_follows_from_the_dims(name):
    family = declared_family(name)
    for dims in variants(family):
        total = sum(int(np.prod(shape)) for _, shape in hf_tensor_shapes(family, dims))
        assert count_parameters(family, dims) == total


@pytest.mark.parametrize("name", DECLARED)
def test_dims_survive_the_hf_config(name, tmp_path):
    family = declared_family(name)
    for dims in variants(family):
        config = family.hf_from_dims(dims)
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert load_dims(tmp_path, declared_too=True) == (family, dims)
        modern = {key: value for key, value in config.items() if key != "rope_theta"}
        modern["rope_parameters"] = {"rope_type": "default", "rope_theta": dims.rope_theta}
        assert family.dims_from_hf(modern) == dims
        written = transformers.AutoConfig.for_model(**config).to_dict()  # as transformers saves it
        assert family.dims_from_hf(written) == dims


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_engine_shapes_are_those_of_the_engine(name, tp):
    family = FAMILIES[name]
    for dims in variants(family):
        assert engine_shapes(family, dims, tp, 64) == engine_param_shapes(dims, tp, 64)


@pytest.mark.parametrize("name", DECLARED)
@pytest.mark.parametrize("side", ["megatron", "engine"])
def test_boxes_partition_both_sides(name, side):
    """Every element of a whole tensor lies in a shard, exactly once (replicated parts: on every rank that has them)."""
    family = declared_family(name)
    for dims in variants(family):
        tps = [tp for tp in (1, 2, 4) if dims.num_kv_heads % tp == 0 or side == "engine"]
        for tp in tps:
            for rule in family.rules_for(dims):
                check_partition(family, rule, dims, tp, side)


def check_partition(family, rule, dims, tp, side):
    vocab_multiple = 3 if side == "megatron" else 16
    padded = padded_vocab(dims, tp, 3) if side == "megatron" else -(-dims.vocab_size // 16) * 16
    padded = -(-padded // tp) * tp
    height, width = local_matrix_shape(family, rule, dims, tp, padded, engine=side == "engine")
    offset = rule.engine_offset(dims) if rule.engine_offset and side == "engine" else 0
    boxes_of = megatron_boxes if side == "megatron" else engine_boxes
    seen = [np.zeros(matrix_shape(family.shape_of(n, dims)), dtype=int) for n in rule.hf_names]
    for rank in range(tp):
        local = np.zeros((offset + height, width), dtype=int)
        for component in range(len(rule.hf_names)):
            for box in boxes_of(family, rule, component, dims, tp, rank, vocab_multiple):
                rows = slice(box.local_row, box.local_row + box.num_rows)
                cols = slice(box.local_col, box.local_col + box.num_cols)
                assert local[rows, cols].size == box.num_rows * box.num_cols, "inside the local parameter"
                local[rows, cols] += 1
                seen[component][
                    box.global_row : box.global_row + box.num_rows, box.global_col : box.global_col + box.num_cols
                ] += 1
        assert local.max() <= 1
        if rule.shard is not Shard.VOCAB:
            assert local[offset:].min() == 1, f"{rule.megatron_name}: a hole in the local parameter"
    for counts in seen:
        copies = counts.max()
        assert (counts == copies).all() and copies >= 1


def test_a_family_that_is_only_declared_is_not_trained():
    assert declared_family("deepseek_v3").name == "deepseek_v3"
    assert declared_family("llama") is FAMILIES["llama"]
    with pytest.raises(UnsupportedModelError, match=r"^model\.family: 'deepseek_v3' is declared for plans"):
        get_family("deepseek_v3")


def test_errors_name_the_key():
    with pytest.raises(UnsupportedModelError, match="did you mean 'llama'"):
        get_family("lama")
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel.*supported: Qwen3MoeForCausalLM"):
        family_of({"architectures": ["GPT2LMHeadModel"]})
    config = FAMILIES["llama"].hf_from_dims(FAMILIES["llama"].debug_dims)
    with pytest.raises(UnsupportedModelError, match="rope_type 'yarn'"):
        FAMILIES["llama"].dims_from_hf(config | {"rope_parameters": {"rope_type": "yarn"}})
    with pytest.raises(UnsupportedModelError, match="'num_hidden_layers' is missing"):
        FAMILIES["llama"].dims_from_hf({k: v for k, v in config.items() if k != "num_hidden_layers"})


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(UnsupportedModelError, match="not found"):
        load_dims(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match="not valid JSON"):
        load_dims(tmp_path)
