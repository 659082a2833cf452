"""Same numbers everywhere: every layout, microbatch size and packing order against transformers and against one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.launch import run_distributed
from tests.distributed.reference import transformers_logprobs
from tests.distributed.walk import LENGTHS, walk_layouts

MOE, DENSE = "qwen3_moe", "llama"
TIMEOUT_S = 900.0
VAPO = {"algorithms": ["vapo"]}
FULL, SELECTIVE = {"section": {"recompute": "full"}}, {"section": {"recompute": "selective"}}
OVERLAPPED = {"section": {"megatron": {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}}}}
PLAIN = {"distributed_optimizer": False}
WHOLE = {"num_steps": 3, "objectives": True}
VPP2 = {"pp": 2, "virtual_pp": 2}
OTHER_ORDER = {"order": [6, 1, 7, 0, 3, 5, 2, 4], "num_microbatches": 3}
CASES: dict[tuple[str, int], list[dict[str, Any]]] = {
    (MOE, 1): [
        {"name": "TP1", "layout": {}} | WHOLE,
        {"name": "TP1, replayed", "layout": {}, "replay": True} | VAPO,
        {"name": "TP1, other order", "layout": {}} | OTHER_ORDER | WHOLE,
        {"name": "TP1, one microbatch, plain optimizer", "layout": {}, "num_microbatches": 1} | PLAIN,
        {"name": "TP1, more microbatches than sequences", "layout": {}, "num_microbatches": 9},
        {"name": "TP1, shared prompts", "layout": {}, "share": True, "num_microbatches": 1} | VAPO,
        {"name": "TP1, shared prompts, groups split", "layout": {}, "share": True} | FULL | VAPO,
        {"name": "TP1, shared prompts, selective", "layout": {}, "share": True} | SELECTIVE | VAPO,
        {"name": "TP1, replayed, shared prompts", "layout": {}, "replay": True, "share": True} | FULL | VAPO,
    ],
    (MOE, 2): [
        {"name": "TP2", "layout": {"tp": 2, "etp": 2}} | WHOLE,
        {"name": "PP2", "layout": {"pp": 2}, "num_microbatches": 3} | WHOLE,
        {"name": "CP2", "layout": {"cp": 2}} | WHOLE,
        {"name": "DP2", "layout": {"dp": 2}, "num_microbatches": 3} | WHOLE,
        {"name": "EP2", "layout": {"dp": 2, "ep": 2}} | WHOLE,
        {"name": "EP2, plain optimizer", "layout": {"dp": 2, "ep": 2}} | PLAIN | VAPO,
        {"name": "DP2, overlapped", "layout": {"dp": 2}} | OVERLAPPED | VAPO,
        {"name": "DP2, shared prompts", "layout": {"dp": 2}, "num_microbatches": 1, "share": True} | VAPO,
        {"name": "TP2 EP2 ETP1, replayed, shared", "layout": {"tp": 2, "ep": 2}, "share": True, "replay": True} | VAPO,
        {"name": "CP2 EP2, replayed, not shared", "layout": {"cp": 2, "ep": 2}, "share": True, "replay": True} | VAPO,
        {"name": "PP2 VPP2, replayed", "layout": VPP2, "num_microbatches": 3, "replay": True} | FULL | VAPO,
        {"name": "PP2 VPP2, shared prompts", "layout": VPP2, "share": True, "untrained": True} | VAPO,
    ],
    (MOE, 4): [
        {"name": "EP2 DP4", "layout": {"dp": 4, "ep": 2}} | WHOLE,
        {"name": "TP2 EP4 DP2", "layout": {"tp": 2, "dp": 2, "ep": 4}} | VAPO,
        {"name": "TP2 PP2, shared prompts", "layout": {"tp": 2, "etp": 2, "pp": 2}, "share": True} | VAPO,
        {"name": "TP2 CP2 EP2, replayed", "layout": {"tp": 2, "cp": 2, "ep": 2}, "replay": True} | VAPO,
        {"name": "PP2 CP2", "layout": {"pp": 2, "cp": 2}} | VAPO,
        {"name": "PP2 EP2 DP2, shared", "layout": {"pp": 2, "dp": 2, "ep": 2}, "num_microbatches": 1, "share": True} | VAPO,
    ],
    (DENSE, 1): [
        {"name": "TP1", "layout": {}, "num_steps": 3},
        {"name": "TP1, other order", "layout": {}} | OTHER_ORDER,
        {"name": "TP1, full recompute, plain optimizer", "layout": {}} | FULL | PLAIN,
        {"name": "TP1, shared prompts, selective", "layout": {}, "share": True} | SELECTIVE | VAPO,
    ],
    (DENSE, 2): [
        {"name": "TP2", "layout": {"tp": 2}},
        {"name": "PP2 VPP2", "layout": VPP2, "num_microbatches": 3},
        {"name": "CP2", "layout": {"cp": 2}},
        {"name": "DP2, plain optimizer", "layout": {"dp": 2}} | PLAIN,
        {"name": "TP2, shared prompts", "layout": {"tp": 2}, "share": True, "untrained": True} | VAPO,
    ],
    (DENSE, 4): [
        {"name": "DP4", "layout": {"dp": 4}} | VAPO,
        {"name": "TP2 PP2", "layout": {"tp": 2, "pp": 2}} | VAPO,
        {"name": "TP2 CP2", "layout": {"tp": 2, "cp": 2}} | VAPO,
        {"name": "PP2 VPP2 DP2", "layout": {"dp": 2} | VPP2} | VAPO,
    ],
}
"""By family and number of ranks. Each axis runs alone under both algorithms, and under every objective (`WHOLE`); what combines
them runs two steps of the algorithm with the critic."""


@pytest.fixture(scope="module", params=[MOE, DENSE])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def oracle(family: str) -> list[dict[str, Any]]:
    """All cases of one rank; every other layout is held against the first, replayed ones against the second."""
    return run_distributed(walk_layouts, 1, timeout_s=TIMEOUT_S, family=family, cases=CASES[family, 1])[0]


def test_one_rank_equals_transformers(family: str, oracle: list[dict[str, Any]], tmp_path: Path) -> None:
    expected = transformers_logprobs(family, tmp_path)
    for member in range(len(LENGTHS)):
        np.testing.assert_allclose(oracle[0]["logprobs"][str(member)], expected[member], atol=1e-4)


def test_packing_and_recompute_change_nothing(family: str, oracle: list[dict[str, Any]]) -> None:
    wrong = [
        line
        for case, result in zip(CASES[family, 1], oracle, strict=True)
        for line in compare(case, result, oracle[case.get("replay", False)])
    ]
    assert not wrong, "\n".join(wrong)


def test_the_value_of_a_token_does_not_see_it(oracle: list[dict[str, Any]]) -> None:
    """Values are token-aligned: the first has no state before it, all others differ from their neighbours."""
    for values in oracle[0]["values"].values():
        assert values[0] == 0
        assert len(set(values)) == len(values)


def test_training_moves(oracle: list[dict[str, Any]]) -> None:
    for steps in oracle[0]["steps"].values():
        losses = [step["loss/total"] for step in steps]
        assert losses[1] < losses[0]
        assert all(step["grad_norm"] > 0.01 for step in steps)
    values = [step["loss/value"] for step in oracle[0]["steps"]["vapo"]]
    assert values[2] < values[1] < values[0]
    assert 0 < oracle[0]["steps"]["vapo"][2]["loss/value_clip_fraction"] < 1
    assert all(grad_norm > 1e-3 for _, grad_norm in oracle[0].get("objectives", {}).values())


@pytest.mark.parametrize("world_size", [2, 4])
def test_layouts_change_nothing(family: str, world_size: int, oracle: list[dict[str, Any]]) -> None:
    """All ranks report the same steps, and together the log-probs of every sequence. All cases are judged before failing."""
    cases = CASES[family, world_size]
    by_rank = run_distributed(walk_layouts, world_size, timeout_s=TIMEOUT_S, family=family, cases=cases)
    wrong: list[str] = []
    for index, case in enumerate(cases):
        together: dict[str, Any] = {**by_rank[0][index], "logprobs": {}, "values": {}}
        for results in by_rank:
            for name in ("logprobs", "values"):
                together[name] |= results[index][name]
            if any(results[index].get(key) != by_rank[0][index].get(key) for key in ("steps", "objectives")):
                wrong.append(f"{case['name']}: ranks report different metrics")
        wrong += compare(case, together, oracle[case.get("replay", False)])
    assert not wrong, "\n".join(wrong)


def compare(case: dict[str, Any], result: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What differs between a case and the oracle, in words."""
    gradient_tolerance = 1e-4 if case["layout"].get("cp", 1) > 1 else 1e-5
    wrong = []
    for what, tolerance in {"logprobs": 2e-5, "values": 1e-5}.items():
        mine, theirs = result[what], expected[what]
        if sorted(mine) != sorted(theirs):
            return [f"{case['name']}: {what} of {sorted(mine)}, expected {sorted(theirs)}"]
        gap = max(np.abs(np.subtract(mine[member], scores)).max() for member, scores in theirs.items())
        if gap > tolerance:
            wrong.append(f"{case['name']}: {what} differ by up to {gap:.2e}")
    if case.get("replay") and (result["own_choice"]["replayed"] != 0 or result["own_choice"]["forced"] < 1e-3):
        wrong.append(f"{case['name']}: log-probs with own and other experts differ by {result['own_choice']}")
    tolerances = {
        "loss/total": 1e-5,
        "loss/entropy": 1e-5,
        "grad_norm": gradient_tolerance,
        "loss/value": 1e-5,
        "loss/value_clip_fraction": 1e-5,
        "loss/explained_variance": 1e-5,
        "critic/grad_norm": gradient_tolerance,
    }
    for name, steps in result["steps"].items():
        for number, (mine, theirs) in enumerate(zip(steps, expected["steps"][name], strict=False)):
            for metric, tolerance in tolerances.items():
                if metric not in theirs:  # GSPO has no critic
                    continue
                if mine[metric] != pytest.approx(theirs[metric], rel=tolerance, abs=tolerance * 0.1):
                    wrong.append(f"{case['name']}, {name}, step {number}: {metric} {mine[metric]}, expected {theirs[metric]}")
    for name, (loss, grad_norm) in result.get("objectives", {}).items():
        for what, mine, theirs, tolerance in (
            ("loss", loss, expected["objectives"][name][0], 1e-5),
            ("gradient norm", grad_norm, expected["objectives"][name][1], gradient_tolerance),
        ):
            if mine != pytest.approx(theirs, rel=tolerance, abs=tolerance * 0.1):
                wrong.append(f"{case['name']}, objective {name}: {what} {mine}, expected {theirs}")
    return wrong
