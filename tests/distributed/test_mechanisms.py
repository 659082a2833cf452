"""Auxiliary loss, expert bias, bf16 with fp32 masters, a critic, empty shares, and what stops a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.distributed.launch import run_distributed
from tests.distributed.mechanisms import megatron_groups, show_mechanisms, uneven_shares


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("mechanisms"))
    return dict(run_distributed(show_mechanisms, 1, timeout_s=600, folder=folder)[0])


def test_the_auxiliary_loss_changes_the_gradient_and_not_the_reported_loss(shown: dict[str, Any]) -> None:
    plain, aux = shown["plain"][0], shown["aux"][0]
    assert aux["loss/supervised"] == pytest.approx(plain["loss/supervised"], rel=1e-6)
    assert abs(aux["grad_norm"] / plain["grad_norm"] - 1) > 1e-4


def test_expert_bias_moves_by_its_rate_after_a_step_and_not_before(shown: dict[str, Any]) -> None:
    bias = shown["bias"]
    assert not np.any(bias["before"]) and not np.any(bias["after_scoring"])
    assert sorted(set(np.round(np.abs(bias["after_step"]).ravel(), 6))) in ([0.01], [0.0, 0.01])
    assert np.abs(bias["after_step"]).max() == pytest.approx(0.01)


@pytest.mark.parametrize("distributed", [True, False])
def test_bf16_trains_on_fp32_masters(shown: dict[str, Any], distributed: bool) -> None:
    result = shown[f"bf16_{distributed}"]
    assert result["parameter"] == "torch.bfloat16" and result["masters"] == ["torch.float32"]
    assert result["rounded"] is True
    assert result["losses"][-1] < 0.8 * result["losses"][0]
    assert result["learning_rates"][:5] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


@pytest.mark.parametrize("distributed", [True, False])
def test_memory_that_is_given_up_between_steps_changes_no_step(shown: dict[str, Any], distributed: bool) -> None:
    result = shown["offload"][str(distributed)]
    assert result["steps_True"] == result["steps_False"]
    assert result["kept"] is True, "the weights stay while gradients and optimizer leave: a sync reads them"
    assert result["left"] == [0, 0, 0]
    size = result["num_parameters"]  # bf16 weights; fp32 gradients, padded; fp32 masters and two moments
    assert 2 * size <= result["held"]["parameters"] < 2.1 * size
    assert 4 * size <= result["held"]["gradients"] < 4.2 * size
    assert 12 * size <= result["held"]["optimizer"] < 12.6 * size


def test_a_gradient_that_is_not_finite_stops_the_run(shown: dict[str, Any]) -> None:
    assert "gradient norm is nan" in shown["not_finite"]


def test_a_step_that_was_refused_leaves_weights_and_moments_alone(shown: dict[str, Any]) -> None:
    refused = shown["refused_step"]
    assert "gradient norm is" in refused["message"] and "loss/supervised" in refused["message"]
    assert refused["losses"][1] == refused["expected"]


def test_a_weight_of_the_wrong_shape_is_named(shown: dict[str, Any]) -> None:
    assert "decoder.final_layernorm.weight: expected shape (48,), got (7,)" in shown["wrong_shape"]


def test_a_critic_begins_as_the_policy_with_a_head_of_zeros(shown: dict[str, Any]) -> None:
    start = shown["worker"]["start"]
    assert start["gap"] == 0 and start["head"] == 0
    assert not start["only_policy"] and start["only_critic"] == ["value_head.weight"]


def test_a_critic_begins_as_the_reward_model_of_a_folder(shown: dict[str, Any]) -> None:
    start = shown["worker"]["from_folder"]
    assert start["gap"] == 0 and start["head"] > 0.1
    assert "/none: not found; expected a Hugging Face model folder" in shown["worker"]["no_folder"]


def test_value_pretraining_raises_the_explained_variance_and_leaves_the_policy_alone(shown: dict[str, Any]) -> None:
    worker = shown["worker"]
    explained = [step["loss/explained_variance"] for step in worker["pretraining"]]
    assert explained[0] == 0  # values of 0 explain nothing
    assert np.mean(explained[-3:]) > 0.5
    assert worker["pretrained"]["policy_sum"] == worker["start"]["policy_sum"]
    assert worker["pretrained"]["gap"] > 0


def test_a_step_with_a_critic_trains_both_and_reports_both(shown: dict[str, Any]) -> None:
    step = shown["worker"]["step"]
    assert shown["worker"]["stepped"]["policy_sum"] != shown["worker"]["pretrained"]["policy_sum"]
    assert step["loss/explained_variance"] > 0.4
    assert {"loss/value", "loss/value_clip_fraction", "critic/grad_norm", "critic/learning_rate", "grad_norm"} <= step.keys()
    assert step["loss/kl_to_ref"] >= 0 and step["learning_rate"] == step["critic/learning_rate"] == 2e-3


def test_a_critic_on_ranks_of_its_own_gives_the_same_step(shown: dict[str, Any]) -> None:
    together, apart = shown["worker"]["together"], shown["worker"]["apart"]
    assert apart == pytest.approx(together, rel=1e-6)
    assert together["loss/value"] > 0 and together["loss/explained_variance"] != 0
    assert shown["worker"]["num_values"] == [24, 11]
    assert shown["worker"]["untrained_values"] == 0  # a policy's folder has no head


def test_a_reference_on_ranks_of_its_own_gives_the_same_steps(shown: dict[str, Any]) -> None:
    swapped, own = shown["worker"]["swapped"], shown["worker"]["own_ranks"]
    for mine, theirs in zip(own, swapped, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
    assert swapped[1]["loss/kl_to_ref"] > 1e-4  # the policy has left it


def test_a_rank_without_samples_takes_part() -> None:
    first, second = run_distributed(uneven_shares, 2, timeout_s=300)
    assert first == second
    assert first[1]["loss/supervised"] < first[0]["loss/supervised"]


def test_megatron_places_ranks_where_our_arithmetic_says() -> None:
    layouts = [
        {"tp": 2, "pp": 2},
        {"tp": 2, "cp": 2, "etp": 2},
        {"tp": 2, "dp": 2, "ep": 2},
        {"tp": 2, "dp": 2, "ep": 4},
        {"cp": 2, "pp": 2, "ep": 2},
        {"dp": 4, "ep": 2},
    ]
    for results in run_distributed(megatron_groups, 4, timeout_s=300, layouts=layouts):
        for sizes, places in zip(layouts, results, strict=True):
            for axis, (megatron, ours) in places.items():
                assert megatron == ours, (sizes, axis)
