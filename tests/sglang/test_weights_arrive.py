"""After a sync a real SGLang server computes what a fresh load of the exported checkpoint computes."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_rl.model_families.registry import load_dims
from tests.distributed.launch import run_distributed
from tests.distributed.sync_walk import walk_sync
from tests.sglang.conftest import SECTION, TP_SIZE, started

LAYOUTS = [(2, [{"tp": 2, "etp": 2}, {"ep": 2, "dp": 2}, {"pp": 2}]), (4, [{"tp": 2, "ep": 2, "dp": 2}])]
pytestmark = [pytest.mark.sglang, pytest.mark.distributed]


@pytest.mark.parametrize(
    ("world_size", "layouts"),
    LAYOUTS,
    ids=["2 ranks", "4 ranks"],
)
def test_the_server_equals_a_fresh_load(running, tiny_model, world_size, layouts):
    check(running, tiny_model, world_size, layouts, TP_SIZE)


@pytest.mark.slow
def test_a_server_of_one_rank_equals_a_fresh_load(tiny_model, tmp_path, loop):
    with started(tiny_model.folder, tmp_path, dataclasses.replace(SECTION, tp_size=1), loop) as server:
        for world_size, layouts in LAYOUTS:
            check(server, tiny_model, world_size, layouts, 1)


@pytest.mark.slow
def test_a_server_with_expert_parallelism_equals_a_fresh_load(tiny_model, tmp_path, loop):
    with started(tiny_model.folder, tmp_path, dataclasses.replace(SECTION, ep_size=2), loop) as server:
        for world_size, layouts in LAYOUTS:
            check(server, tiny_model, world_size, layouts, TP_SIZE, ep_size=2)


def check(running, tiny_model, world_size, layouts, tp_size, ep_size=1):
    family, dims = load_dims(tiny_model.folder)
    gaps = run_distributed(
        walk_sync,
        world_size,
        timeout_s=300,
        dims=dataclasses.asdict(dims),
        family=family.name,
        layouts=layouts,
        engine={
            "kind": "sglang",
            "tp": tp_size,
            "ep": ep_size,
            "url": running.server.url,
            "key_file": str(running.work_dir / "keys.yaml"),
            "receiver_dir": str(running.receiver_dir),
        },
        key_hex=running.receiver_key.hex(),
    )[0]
    print(f"SGLang TP {tp_size}, {world_size} trainer ranks: {gaps}")
    assert len(gaps) == len(layouts)
    assert max(gaps.values()) < 1e-3, gaps
