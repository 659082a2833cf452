"""Published models in the layouts they are trained in: bytes, balance, time; and what the plan promises its users."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.cli.reshard_plan import model_dims
from megatron_rl.config.load import load_experiment
from megatron_rl.config.resolve import resolve
from megatron_rl.controller.layouts import engine_layout, trainer_layout
from megatron_rl.model_families.registry import FAMILIES, declared_family
from megatron_rl.model_families.shards import count_parameters
from megatron_rl.resharding.cost import Network, compute_cost
from megatron_rl.resharding.plan import COLUMNS, build_reshard_plan
from megatron_rl.types.layout import EngineLayout, ParallelLayout

EXPERIMENTS = Path(__file__).parents[3] / "configs" / "experiments"
QWEN = FAMILIES["qwen3_moe"].debug_dims


def plan_of(name):
    config = resolve(load_experiment(EXPERIMENTS / f"{name}.yaml").config)
    family, dims = model_dims(config.model, config.data)
    layout, engine = trainer_layout(config.trainer.layout), engine_layout(config.rollout)
    return build_reshard_plan(family, dims, layout, engine, spec="te")


@pytest.mark.parametrize(
    ("name", "model_gb", "shard_gb"),
    [("qwen3_30b_a3b_2x8", 61.06, 7.68), ("qwen3_235b_a22b_16x8", 470.19, 58.96), ("deepseek_v3_8x32", 1342.05, 43.94)],
)
def test_published_models_arrive_once_evenly_and_fast(name, model_gb, shard_gb):
    plan = plan_of(name)
    family = declared_family(plan.key.family_name)
    assert count_parameters(family, plan.key.dims) * 2e-9 == pytest.approx(model_gb, abs=0.01)
    elements = plan.num_elements_between()
    held = sum(np.prod(shape, dtype=np.int64) for shape in plan.target_shapes.values())  # these vocabularies need no padding
    assert (elements.sum(axis=0) == held).all()
    assert held * 2e-9 == pytest.approx(shard_gb, abs=0.01)
    sent, bound = elements.sum(axis=1), plan.sender_bound()
    assert bound <= sent.max() <= 1.001 * bound
    assert bound >= sent.mean()
    cost = compute_cost(plan, Network(), bucket_bytes=512 * 2**20)
    assert cost.receive_ratio == 1.0
    assert cost.nic_bound_s == pytest.approx(shard_gb / 50, rel=2e-3)
    assert cost.seconds <= 1.5 * cost.nic_bound_s
    assert cost.broadcast_s > 7.5 * cost.seconds


def test_a_trillion_weights_on_a_thousand_ranks_are_planned_in_seconds():
    """TP 8 engines split every expert eight ways and there are 128 of them: the largest table of the layouts that exist."""
    dims = dataclasses.replace(plan_of("deepseek_v3_8x32").key.dims, num_experts=384, num_dense_layers=1, vocab_size=163840)
    assert count_parameters(declared_family("deepseek_v3"), dims) > 1.0e12
    layout = ParallelLayout(tp=8, pp=16, ep=32, dp=8, layers_per_chunk=(4,) * 15 + (1,))
    start = time.process_time()
    plan = build_reshard_plan("deepseek_v3", dims, layout, EngineLayout(8, 128), spec="te")
    assert time.process_time() - start < 10
    assert layout.world_size == plan.engine_layout.num_ranks == 1024
    assert plan.num_ops > 70_000_000
    tables = [*plan.boxes.columns.values(), *plan.spans.columns.values()]
    assert sum(table.nbytes for table in tables) < 100 * 2**20
    sent = plan.num_elements_between().sum(axis=1)
    assert sent.max() <= 1.001 * plan.sender_bound()


LAYOUT, ENGINE = ParallelLayout(tp=2, pp=2, ep=2, dp=2), EngineLayout(2, 3, ep=2)


def test_equal_keys_give_one_plan_and_other_keys_another():
    layout = LAYOUT
    plan = build_reshard_plan("qwen3_moe", QWEN, layout, ENGINE)
    assert build_reshard_plan("qwen3_moe", QWEN, dataclasses.replace(layout), ENGINE) is plan
    others = [
        build_reshard_plan("qwen3_moe", QWEN, dataclasses.replace(layout, ep=1, etp=2), ENGINE),
        build_reshard_plan("qwen3_moe", QWEN, layout, dataclasses.replace(ENGINE, ep=1)),
        build_reshard_plan("qwen3_moe", QWEN, layout, ENGINE, spec="te"),
        build_reshard_plan("qwen3_moe", QWEN, layout, ENGINE, trainer_vocab_multiple=5),
        build_reshard_plan("qwen3_moe", QWEN, layout, ENGINE, relay=True),
        build_reshard_plan("qwen3_moe", dataclasses.replace(QWEN, vocab_size=103), layout, ENGINE),
    ]
    assert len({plan.fingerprint, *(other.fingerprint for other in others)}) == 7


def test_plans_are_the_same_in_every_process():
    code = (
        "from tests.unit.resharding.test_plan import *\n"
        "print(build_reshard_plan('qwen3_moe', QWEN, LAYOUT, ENGINE).fingerprint)\n"
        "import sys; assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[3]
    found = {
        subprocess.run([sys.executable, "-c", code], cwd=root, env={"PYTHONPATH": str(root), "PYTHONHASHSEED": seed},
                       capture_output=True, text=True, check=True, timeout=120).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    own = build_reshard_plan("qwen3_moe", QWEN, LAYOUT, ENGINE)
    assert found == {own.fingerprint + "\n"}


@pytest.mark.parametrize("relay", [False, True])
def test_views_agree(relay):
    plan = build_reshard_plan("qwen3_moe", QWEN, LAYOUT, ENGINE, relay=relay, cut_rows=1)
    elements = plan.num_elements_between()
    seen = 0
    for source in range(elements.shape[0]):
        ops = [op for target in range(elements.shape[1]) for op in plan.ops_between(source, target)]
        columns = plan.columns_from(source)
        assert set(columns) == set(COLUMNS) and len(columns["num_rows"]) == len(ops)
        assert [op.num_rows * op.num_cols for op in ops] == (columns["num_rows"] * columns["num_cols"]).tolist()
        for number, op in enumerate(ops):
            assert plan.op(seen + number) == op and op.source_rank == source
        assert sum(op.num_rows * op.num_cols for op in ops) == elements[source].sum()
        seen += len(ops)
    assert seen == plan.num_ops == len(plan.columns["num_rows"])


def test_with_relay_trainers_send_once_and_engines_pass_on_the_rest():
    layout, engine = ParallelLayout(dp=2), EngineLayout(2, 5)
    direct = build_reshard_plan("qwen3_moe", QWEN, layout, engine, cut_rows=1)
    relayed = build_reshard_plan("qwen3_moe", QWEN, layout, engine, relay=True, cut_rows=1)
    shards = direct.num_elements_between().sum(axis=0)
    entered = relayed.num_elements_between().sum(axis=0)
    assert entered.sum() == shards[:2].sum() and relayed.sender_bound() * 5 == direct.sender_bound()
    assert (abs(entered - shards / 5) < 0.06 * shards).all(), "every engine takes its part from the trainers"
    from_neighbour = np.roll(relayed.num_relayed(), engine.tp)
    assert (entered + from_neighbour == shards).all()
    cost = compute_cost(relayed, Network(), bucket_bytes=1 << 20)
    assert cost.receive_ratio == 1.0


def test_tied_embeddings_are_sent_by_both_stages_that_hold_them():
    dims = dataclasses.replace(FAMILIES["llama"].debug_dims, vocab_size=4001)
    plan = build_reshard_plan("llama", dims, ParallelLayout(tp=2, pp=2), EngineLayout(1, 1), cut_rows=1)
    ops = [op for source in range(4) for op in plan.ops_between(source, 0) if op.target == "model.embed_tokens.weight"]
    assert {op.source.name for op in ops} == {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert sum(op.num_rows for op in ops) == 4001
    sent = plan.num_elements_between().sum(axis=1)
    assert sent.max() <= 1.01 * sent.mean()


def test_boxes_are_cut_at_whole_blocks():
    """Senders share a box only at multiples of `cut_rows`, so that an fp8 block has one sender."""
    dims = dataclasses.replace(QWEN, num_layers=2, vocab_size=997)
    layout = ParallelLayout(dp=4, ep=2)
    whole = build_reshard_plan("qwen3_moe", dims, ParallelLayout(dp=1), EngineLayout(1, 1)).columns
    ends = set(zip(whole["target_param"].tolist(), whole["target_row"].tolist(), strict=True))
    plan = build_reshard_plan("qwen3_moe", dims, layout, EngineLayout(1, 1), cut_rows=128)
    columns = plan.columns
    assert plan.num_ops > len(plan.boxes.columns["num_rows"]), "something is shared"
    for param, row in zip(columns["target_param"].tolist(), columns["target_row"].tolist(), strict=True):
        assert row % 128 == 0 or (param, row) in ends
