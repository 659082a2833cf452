"""Faults that others met, each injected and caught; every test says by what: coverage, ownership, digest or probe."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
import torch

from megatron_rl.checkpoint.hf_folder import RandomSource
from megatron_rl.checkpoint.hf_shards import import_params, local_params
from megatron_rl.layout.intervals import matrix_shape
from megatron_rl.layout.pipeline import place_of_layer
from megatron_rl.model_families import shards
from megatron_rl.model_families.declaration import Fused
from megatron_rl.model_families.registry import FAMILIES, declared_family
from megatron_rl.resharding import box_table, ownership
from megatron_rl.resharding import plan as planning
from megatron_rl.resharding.box_sender import SendOptions
from megatron_rl.resharding.box_table import PlanError
from megatron_rl.resharding.channel import ChannelError
from megatron_rl.resharding.execute import WeightSender
from megatron_rl.resharding.ownership import check_held, held_shapes
from megatron_rl.resharding.plan import build_reshard_plan
from megatron_rl.resharding.verify import SyncError, check_digests
from megatron_rl.rollout.embedded.engine import EmbeddedEngine
from megatron_rl.types.layout import EngineLayout, ParallelLayout
from megatron_rl.types.resharding import ShardDigest, SourceParam
from tests.unit.resharding.random_layouts import random_case
from tests.unit.resharding.rig import KEY, world

FAMILY = FAMILIES["qwen3_moe"]
DIMS = dataclasses.replace(FAMILY.debug_dims, num_heads=8, num_kv_heads=4)
LAYOUT, ENGINE = ParallelLayout(tp=2, pp=2, ep=4, dp=2), EngineLayout(2, 2)


@pytest.fixture(autouse=True)
def no_cached_plan():
    planning._build.cache_clear()
    yield
    planning._build.cache_clear()


def build(family="qwen3_moe", dims=DIMS, layout=LAYOUT, engine=ENGINE):
    return build_reshard_plan(family, dims, layout, engine)


def corrupt(monkeypatch, change):
    """Plans are made of boxes that `change(columns, table)` has altered."""
    original = box_table.build_boxes

    def build_boxes(family, key):
        table = original(family, key)
        change(table.columns, table)
        return table

    monkeypatch.setattr(planning, "build_boxes", build_boxes)


def boxes_of(table, text):
    ids = [number for number, name in enumerate(table.target_params) if text in name]
    return np.flatnonzero(np.isin(table.columns["target_param"], ids))


def test_caught_by_coverage_a_target_layer_index_local_to_its_stage(monkeypatch):
    """Names of the second stage collide with those of the first: half of the model receives nothing."""
    original = box_table._Builder._target_id
    monkeypatch.setattr(box_table._Builder, "_target_id", lambda self, rule, layer: original(self, rule, layer % 2))
    with pytest.raises(PlanError, match=r"written more than once|receives nothing"):
        build()


def test_caught_by_ownership_a_source_layer_index_that_is_global(monkeypatch):
    monkeypatch.setattr(box_table, "place_of_layer", lambda *args: place_of_layer(*args)._replace(local_layer=args[2]))
    with pytest.raises(PlanError, match=r"would take 'decoder\.layers\.[23]\..*which is not on that stage"):
        build()


def test_caught_by_ownership_the_stages_in_another_order(monkeypatch):
    def reversed_stages(layout, num_layers, layer):
        place = place_of_layer(layout, num_layers, layer)
        return place._replace(pp=layout.pp - 1 - place.pp)

    monkeypatch.setattr(box_table, "place_of_layer", reversed_stages)
    with pytest.raises(PlanError, match="holds other weights"):
        build()


def swapped_gate_up(family, rule, component, *rest):
    return shards.engine_boxes(family, rule, 1 - component if rule.fused is Fused.GATE_UP else component, *rest)


@pytest.mark.parametrize("engine_tp", [1, 2])
def test_caught_by_ownership_gate_and_up_exchanged_by_the_planner(monkeypatch, engine_tp):
    monkeypatch.setattr(box_table, "engine_boxes", swapped_gate_up)
    with pytest.raises(PlanError, match=r"w13_weight.*linear_fc1.*holds other weights"):
        build(engine=EngineLayout(engine_tp, 1))


@pytest.mark.parametrize("offset", [1, 2])
def test_caught_by_ownership_experts_that_are_one_off(monkeypatch, offset):
    """Every expert lands in a neighbour's place: all is covered once, and wrong."""
    rows = 2 * DIMS.moe_ffn_size // ENGINE.tp

    def change(columns, table):
        chosen = boxes_of(table, "w13_weight")
        moved = columns["target_row"][chosen] + offset * rows
        columns["target_row"][chosen] = moved % (rows * DIMS.num_experts)

    corrupt(monkeypatch, change)
    with pytest.raises(PlanError, match=r"w13_weight.*holds other weights"):
        build()


def test_caught_by_coverage_experts_that_run_over_the_end(monkeypatch):
    def change(columns, table):
        columns["target_row"][boxes_of(table, "w2_weight")] += DIMS.hidden_size

    corrupt(monkeypatch, change)
    with pytest.raises(PlanError, match="w2_weight' on engine rank 0 is written outside it"):
        build()


def test_caught_by_ownership_experts_spread_round_robin(monkeypatch):
    """The trainer holds consecutive experts; a planner that thinks otherwise names ranks that have others."""

    def change(columns, table):
        chosen = boxes_of(table, "mlp.experts")
        classes = box_table.SourceClasses(LAYOUT)
        kind = columns["source_class"][chosen] % classes.per_stage - LAYOUT.tp - 1
        columns["source_class"][chosen] += (kind + 1) % LAYOUT.ep - kind

    corrupt(monkeypatch, change)
    with pytest.raises(PlanError, match=r"mlp\.experts.*holds other weights"):
        build()


def test_caught_by_coverage_a_missing_tied_embedding(monkeypatch):
    def change(columns, table):
        keep = np.setdiff1d(np.arange(len(columns["num_rows"])), boxes_of(table, "embed_tokens"))
        for name in columns:
            columns[name] = columns[name][keep]

    corrupt(monkeypatch, change)
    with pytest.raises(PlanError, match=r"embed_tokens\.weight' on engine rank 0 receives nothing"):
        build("llama", FAMILIES["llama"].debug_dims, ParallelLayout(tp=2, pp=2), EngineLayout(2))


def test_caught_by_ownership_a_last_stage_without_its_tied_copy():
    dims, layout = FAMILIES["llama"].debug_dims, ParallelLayout(pp=2)
    plan = build("llama", dims, layout, EngineLayout(1))
    held = dict(held_shapes(FAMILIES["llama"], plan.key, 1))
    check_held(FAMILIES["llama"], plan.key, 1, held)
    del held[SourceParam(0, "output_layer.weight")]
    with pytest.raises(PlanError, match=r"trainer rank 1 has no 'output_layer\.weight' in chunk 0"):
        check_held(FAMILIES["llama"], plan.key, 1, held)


STALE = [
    (ParallelLayout(tp=2, dp=2), ParallelLayout(tp=4)),
    (ParallelLayout(pp=2), ParallelLayout(pp=2, layers_per_chunk=(3, 1))),
    (ParallelLayout(pp=2, virtual_pp=2), ParallelLayout(pp=4)),
    (ParallelLayout(ep=2, dp=2), ParallelLayout(tp=2, etp=2)),
    (ParallelLayout(ep=4, dp=4), ParallelLayout(ep=2, dp=4)),
    (ParallelLayout(tp=2, etp=2), ParallelLayout(tp=2, ep=2)),
]


@pytest.mark.parametrize(("old", "new"), STALE, ids=str)
def test_caught_by_ownership_a_stale_plan_of_another_trainer_layout(old, new):
    """A rank compares its model with the plan before it sends anything."""
    stale, fresh = build(layout=old), build(layout=new)
    assert stale.fingerprint != fresh.fingerprint
    held = held_shapes(FAMILY, fresh.key, 0)
    check_held(FAMILY, fresh.key, 0, held)
    with pytest.raises(PlanError, match=r"another layout|the plan's layout"):
        check_held(FAMILY, stale.key, 0, held)


def test_caught_by_ownership_a_stale_plan_of_another_engine_layout():
    """The sender's boxes are what both sides hash, so digests cannot tell: the order names its layouts. Where shapes differ
    the receiver would refuse the boxes too."""
    with world("qwen3_moe", ParallelLayout(), EngineLayout(2, 1, ep=2), torch.float32) as one:
        stale = build("qwen3_moe", one.dims, one.layout, EngineLayout(2, 1))
        assert one.plan.num_elements_between().tolist() == stale.num_elements_between().tolist()
        addresses = [receiver.address for receiver in one.receivers]
        sender = WeightSender(stale, 0, addresses, KEY, SendOptions(bucket_bytes=4096, timeout_s=20.0))
        order = one.begin()
        with pytest.raises(PlanError, match=r"is not the controller's .*: a layout has changed since it was made"):
            sender.send(one.chunks[0], order)
        with pytest.raises(ChannelError, match="is outside of a parameter"):
            sender.send(one.chunks[0], dataclasses.replace(order, plan=stale.layout_digest))
        one.assert_untouched()


def test_a_layer_spec_changes_names_and_no_layout():
    local, te = (build_reshard_plan("qwen3_moe", DIMS, LAYOUT, ENGINE, spec=spec) for spec in ("local", "te"))
    assert local.fingerprint != te.fingerprint and local.layout_digest == te.layout_digest


def test_caught_by_digest_elements_that_are_missing_or_of_another_rank():
    plan = build(engine=EngineLayout(2, 1))
    elements = plan.num_elements_between()
    whole = [
        ShardDigest(t, int(elements[:, t].sum()), {int(s): f"{s} to {t}" for s in elements[:, t].nonzero()[0]}) for t in (0, 1)
    ]
    check_digests(plan, whole, whole)
    with pytest.raises(SyncError, match="digests differ"):
        check_digests(plan, [dataclasses.replace(whole[0], target_rank=1), dataclasses.replace(whole[1], target_rank=0)], whole)
    with pytest.raises(SyncError, match="engine rank 1 received"):
        check_digests(plan, whole, [whole[0], dataclasses.replace(whole[1], num_elements=7)])
    with pytest.raises(SyncError, match="1 engine ranks answered, the plan has 2"):
        check_digests(plan, whole, whole[:1])


def filled_engine(plan, source) -> EmbeddedEngine:
    """An embedded engine whose weights the plan has brought from one trainer rank."""
    engine = EmbeddedEngine(DIMS, plan.engine_layout.tp, torch.float32, num_slots=2, max_context=32, stop_token_ids=())
    (chunk,) = import_params(source, FAMILY, DIMS, ParallelLayout(), 0, spec="local", vocab_multiple=1, dtype=torch.float32)
    for rank, shard in enumerate(engine.weights.shards):
        for op in plan.ops_between(0, rank):
            held, wanted = (t.view(matrix_shape(tuple(t.shape))) for t in (chunk[op.source.name], shard[op.target]))
            rows = slice(op.source_row, op.source_row + op.num_rows), slice(op.source_col, op.source_col + op.num_cols)
            place = slice(op.target_row, op.target_row + op.num_rows), slice(op.target_col, op.target_col + op.num_cols)
            wanted[place] = held[rows]
    return engine


def scores_of(plan) -> np.ndarray:
    engine = filled_engine(plan, RandomSource(3, DIMS.num_layers))
    try:
        return asyncio.run(engine.score([list(range(4, 28))]))[0]
    finally:
        engine.close()


def test_caught_by_the_probe_alone_gate_and_up_exchanged_in_the_declaration(monkeypatch):
    """Planner, proof and both digests read one declaration; log-probs do not."""
    right = [scores_of(build(layout=ParallelLayout(), engine=EngineLayout(tp))) for tp in (1, 2)]
    np.testing.assert_allclose(right[0], right[1], atol=1e-5)
    planning._build.cache_clear()
    monkeypatch.setattr(box_table, "engine_boxes", swapped_gate_up)
    monkeypatch.setattr(ownership, "engine_boxes", swapped_gate_up)
    wrong = scores_of(build(layout=ParallelLayout(), engine=EngineLayout(2)))
    assert np.abs(wrong - right[1])[1:].max() > 100 * np.abs(right[0] - right[1]).max()


@pytest.mark.parametrize("seed", range(0, 2000, 20))
def test_what_a_rank_should_hold_is_what_import_gives_it(seed):
    """Two independent enumerations of a rank's parameters agree, for random layouts of every family."""
    case = random_case(seed)
    family = declared_family(case.family)
    plan = build_reshard_plan(case.family, case.dims, case.layout, case.engine, trainer_vocab_multiple=case.vocab_multiple)
    for rank in {0, case.layout.world_size // 2, case.layout.world_size - 1}:
        params = local_params(family, case.dims, case.layout, rank, spec="local", vocab_multiple=case.vocab_multiple)
        held = {SourceParam(param.chunk, param.name): param.shape for param in params}
        check_held(family, plan.key, rank, held)
