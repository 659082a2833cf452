"""Executing a plan equals slicing the Hugging Face tensors directly, bit for bit, for 2,000 random models and layouts."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from megatron_rl.layout.coords import coords_of
from megatron_rl.resharding.hops import relay_rounds
from megatron_rl.resharding.plan import build_reshard_plan
from tests.unit.resharding.random_layouts import random_case
from tests.unit.resharding.reference_shards import HfModel, engine_shard, megatron_chunk

NUM_BATCHES, BATCH = 20, 100


def build(case):
    return build_reshard_plan(
        case.family, case.dims, case.layout, case.engine, trainer_vocab_multiple=case.vocab_multiple,
        relay=case.relay, cut_rows=case.cut_rows,
    )  # fmt: skip


def trainer_ranks(case, model):
    """Per rank and chunk what it holds, by counting layers off in pipeline order."""
    layout = case.layout
    counts = layout.layers_per_chunk or (1,) * (layout.pp * layout.virtual_pp)
    shards: dict[tuple, dict] = {}
    held = []
    for rank in range(layout.world_size):
        coords = coords_of(layout, rank)
        chunks = []
        for chunk in range(layout.virtual_pp):
            block = chunk * layout.pp + coords.pp
            where = (block, coords.tp, coords.ep, coords.etp)
            if where not in shards:
                start = sum(counts[:block])
                is_last = block == len(counts) - 1
                shards[where] = megatron_chunk(
                    model, range(start, start + counts[block]), first=block == 0, last=is_last,
                    tied_copy=layout.pp > 1, coords=coords, layout=layout, multiple=case.vocab_multiple,
                )  # fmt: skip
            chunks.append(shards[where])
        held.append(chunks)
    return held


def execute(plan, held, targets):
    columns = {name: column.tolist() for name, column in plan.columns.items()}
    names, params = plan.target_params, plan.source_params
    for rank, source, row, col, target, param, trow, tcol, rows, cols in zip(*columns.values(), strict=True):
        chunk, name = params[source]
        box = held[rank][chunk][name][row : row + rows, col : col + cols]
        view = targets[target][names[param]][trow : trow + rows, tcol : tcol + cols]
        assert (view == -1).all(), "written twice"
        view[...] = box
    for hop in (hop for hops in relay_rounds(plan, dict.fromkeys(names, "bfloat16")) for hop in hops):
        for number, row, col, rows, cols in hop.table.rows_N5.tolist():
            name, box = hop.table.names[number], (slice(row, row + rows), slice(col, col + cols))
            assert (targets[hop.target_rank][name][box] == -1).all(), "passed on twice"
            targets[hop.target_rank][name][box] = targets[hop.source_rank][name][box]


def check(case):
    plan = build(case)
    model = HfModel(case.dims, case.family == "deepseek_v3")
    expected = [engine_shard(model, case.engine, rank) for rank in range(case.engine.tp)]
    assert set(plan.target_shapes) == set(expected[0])
    targets = [
        {name: np.full(shard.shape, -1, np.int32) for name, shard in expected[rank % case.engine.tp].items()}
        for rank in range(case.engine.num_ranks)
    ]
    execute(plan, trainer_ranks(case, model), targets)
    for rank, got in enumerate(targets):
        for name, want in expected[rank % case.engine.tp].items():
            assert np.prod(plan.target_shapes[name]) == want.size
            assert np.array_equal(got[name], want), f"engine rank {rank}: {name}"


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_the_executed_plan_equals_direct_slices(batch):
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        case = random_case(seed)
        try:
            check(case)
        except Exception as error:
            error.add_note(f"seed {seed}: {case}")
            raise


def test_the_random_cases_visit_every_axis():
    cases = [random_case(seed) for seed in range(NUM_BATCHES * BATCH)]
    assert len(cases) == 2000
    for side, names in (("layout", ("tp", "pp", "virtual_pp", "cp", "ep", "etp", "dp")), ("engine", ("tp", "ep", "moe_tp"))):
        for name in names:
            assert sum(getattr(getattr(case, side), name) > 1 for case in cases) > 150, name
    assert sum(case.engine.attention_dp > 1 for case in cases) > 150
    assert sum(case.engine.attention_tp > case.dims.num_kv_heads for case in cases) > 50
    assert sum(case.layout.layers_per_chunk is not None and len(set(case.layout.layers_per_chunk)) > 1 for case in cases) > 150
    assert sum(case.dims.tied_embeddings and case.layout.pp > 1 for case in cases) > 150
    assert sum(case.relay for case in cases) > 150


def test_sizes_that_do_not_divide_are_refused_in_one_line():
    rng, refused = random.Random(3), 0
    for seed in range(400):
        case = random_case(seed)
        broken = rng.choice(
            [("num_experts", case.layout.ep, 1), ("num_experts", case.engine.ep, 1), ("num_heads", case.layout.tp, 1),
             ("moe_ffn_size", case.engine.moe_tp, 1), ("num_layers", 1, 7)]
        )  # fmt: skip
        name, divisor, more = broken
        size = getattr(case.dims, name)
        if (name != "num_layers" and divisor == 1) or not size:
            continue
        if name == "num_layers" and case.layout.layers_per_chunk is None:
            continue
        dims = dataclasses.replace(case.dims, **{name: size + more})
        with pytest.raises(ValueError, match=r"^(trainer\.layout|engine)\.\w+: ") as caught:
            build(dataclasses.replace(case, dims=dims))
        assert "\n" not in str(caught.value) and str(size + more) in str(caught.value)
        refused += 1
    assert refused > 100
