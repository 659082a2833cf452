"""Ten syncs in a row from real trainers into a server that is generating, in each pause mode."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_rl.model_families.registry import load_dims
from tests.distributed.launch import run_distributed
from tests.distributed.sync_in_flight import MAX_NEW_TOKENS, NUM_REQUESTS, sync_in_flight
from tests.sglang.conftest import TP_SIZE

pytestmark = [pytest.mark.sglang, pytest.mark.distributed]

PAUSE_MODES = ["retract", "in_place", "abort", "in_place", "retract", "abort", "retract", "abort", "in_place", "in_place"]


def test_requests_that_a_sync_catches_tell_their_versions_and_later_ones_see_the_new_weights(running, tiny_model):
    family, dims = load_dims(tiny_model.folder)
    engine = {
        "kind": "sglang",
        "tp": TP_SIZE,
        "url": running.server.url,
        "key_file": str(running.work_dir / "keys.yaml"),
        "receiver_dir": str(running.receiver_dir),
    }
    first, *reports = run_distributed(
        sync_in_flight,
        2,
        timeout_s=300,
        dims=dataclasses.asdict(dims),
        family=family.name,
        sizes={"tp": 2, "etp": 2},
        engine=engine,
        key_hex=running.receiver_key.hex(),
        pause_modes=PAUSE_MODES,
    )[0]
    assert [report["mode"] for report in reports] == PAUSE_MODES
    before = first
    for version, report in enumerate(reports, 1):
        assert report["version"] == version
        assert report["gap"] < 1e-3, report
        assert np.abs(np.subtract(report["logprobs"][:12], before["logprobs"][:12])).max() > 1e-2, "the weights changed"
        assert len(report["caught"]) == NUM_REQUESTS
        for segments in report["caught"]:
            check_spans(segments, report["mode"], version)
        before = report


def check_spans(segments, mode, version):
    """What was sampled before the sync has the version before; `abort` hands it back, the other modes go on from there."""
    tokens = sum(segment["tokens"] for segment in segments)
    if mode == "abort":
        assert [(s["version"], s["finish"]) for s in segments] == [(version - 1, "ABORT")], segments
        assert 0 < tokens < MAX_NEW_TOKENS
    else:
        assert [(s["version"], s["finish"]) for s in segments] == [(version - 1, "SWITCH"), (version, "LENGTH")], segments
        assert tokens == MAX_NEW_TOKENS and all(segment["tokens"] > 0 for segment in segments)
