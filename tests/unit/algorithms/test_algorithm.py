from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.algorithm import Algorithm, build_algorithm
from megatron_rl.algorithms.inputs import LossInputs
from megatron_rl.config.algorithm_sections import AlgorithmSection, CorrectionSection, KlSection
from megatron_rl.types.training import Denominators


def corrected(correction: CorrectionSection) -> AlgorithmSection:
    return AlgorithmSection(clip_low=0.4, clip_high=0.4, correction=correction)


SECTIONS: dict[str, AlgorithmSection] = {
    "grpo": AlgorithmSection(name="grpo", loss="ppo", clip_low=0.2, clip_high=0.2, kl=KlSection(0.04)),
    "dapo": AlgorithmSection(name="dapo", loss="ppo", clip_low=0.2, clip_high=0.28, aggregation="token-mean"),
    "dual_clip": AlgorithmSection(loss="ppo", clip_low=0.2, clip_high=0.2, dual_clip=1.3, aggregation="token-sum"),
    "dr_grpo": AlgorithmSection(
        name="dr_grpo", loss="ppo", clip_low=0.2, clip_high=0.2, aggregation="seq-mean-token-sum-norm",
        aggregation_constant=37.0,
    ),
    "rloo": AlgorithmSection(loss="reinforce", aggregation="seq-mean-token-sum", kl=KlSection(0.1, "unbiased")),
    "gspo": AlgorithmSection(clip_low=0.05, clip_high=0.06),
    "gspo_token": AlgorithmSection(loss="gspo_token", clip_low=0.05, clip_high=0.06, aggregation="token-mean"),
    "cispo": AlgorithmSection(loss="cispo", clip_low=1.0, clip_high=0.3, aggregation="token-mean"),
    "sapo": AlgorithmSection(loss="sapo", kl=KlSection(0.1, "k2")),
    "gmpo": AlgorithmSection(loss="gmpo", clip_low=0.4, clip_high=0.4),
    "dppo_tv": AlgorithmSection(loss="dppo_tv", clip_low=0.1, clip_high=0.1, aggregation="token-mean"),
    "dppo_kl": AlgorithmSection(loss="dppo_kl", clip_low=0.02, clip_high=0.02, aggregation="token-mean"),
    "aipo": AlgorithmSection(loss="aipo", clip_high=0.4, aggregation="token-mean"),
    "vespo": AlgorithmSection(loss="vespo", aggregation="token-mean"),
    "clip_cov": AlgorithmSection(loss="clip_cov", clip_low=0.2, clip_high=0.2, aggregation="token-mean"),
    "kl_cov": AlgorithmSection(loss="kl_cov", aggregation="token-mean"),
    "distillation": AlgorithmSection(loss="none", kl=KlSection(1.0, "unbiased"), aggregation="token-mean"),
    "vapo": AlgorithmSection(
        name="vapo", loss="ppo", clip_low=0.2, clip_high=0.28, aggregation="token-mean", advantage="gae",
        positive_nll_coefficient=0.1, entropy_coefficient=0.01,
    ),
    "tis": AlgorithmSection(clip_low=0.05, clip_high=0.06, correction=CorrectionSection("tis", high=1.1)),
    "icepop": AlgorithmSection(clip_low=0.05, clip_high=0.06, correction=CorrectionSection("icepop", 0.7, 1.4)),
    "sequence_tis": corrected(CorrectionSection("sequence_tis", high=1.2)),
    "sequence_mask": corrected(CorrectionSection("sequence_mask", high=1.2)),
    "geometric_mask": corrected(CorrectionSection("geometric_mask", 0.8, 1.2)),
    "geometric_tis": corrected(CorrectionSection("geometric_tis", high=1.1)),
    "binary_kl_mask": corrected(CorrectionSection("binary_kl_mask", high=0.02)),
    "tv_mask": corrected(CorrectionSection("tv_mask", high=0.1)),
    "opsm": corrected(CorrectionSection("opsm", high=0.01)),
}  # fmt: skip


def whole(algorithm: Algorithm, batch: Any) -> tuple[float, list[np.ndarray], dict[str, float]]:
    """Loss, gradient per row and metrics of the minibatch in one microbatch."""
    order = list(range(len(batch.rows)))
    inputs = batch.inputs(order)
    output = algorithm.loss(inputs)
    output.loss.backward()
    grads = np.split(inputs.policy_logprobs_T.grad.numpy(), np.cumsum([len(r["mask"]) for r in batch.rows])[:-1])
    return float(output.loss.detach()), grads, add_metrics([output.metrics])


def add_metrics(parts: list[Any]) -> dict[str, float]:
    """What the trainer does: sums and weights over all microbatches, then one division."""
    result = {}
    for name in parts[0]:
        total = sum(float(part[name][0]) for part in parts)
        weight = sum(float(part[name][1]) for part in parts)
        result[name] = total / weight if weight else 0.0
    return result


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SECTIONS)
def test_loss_and_gradient_do_not_depend_on_the_layout(name: str, seed: int, ragged: Any, on_ranks: Any) -> None:
    """Random data-parallel shares (some empty), microbatches (some empty), orders and context-parallel shards."""
    algorithm = build_algorithm(SECTIONS[name])
    batch = ragged(seed)
    loss, grads, metrics = whole(algorithm, batch)
    rng = np.random.default_rng(100 + seed)
    num_micros, num_cp = 6, 3
    order = rng.permutation(len(batch.rows))
    micros: list[list[int]] = [[] for _ in range(num_micros)]
    for row in order:
        micros[rng.integers(0, num_micros - 1)].append(int(row))  # the last one stays empty
    total, parts = 0.0, []
    ours = [np.full(len(row["mask"]), np.nan) for row in batch.rows]
    for rows in micros:
        where = np.array([(row, t) for row in rows for t in range(len(batch.rows[row]["mask"]))]).reshape(-1, 2)
        owner = rng.integers(0, num_cp, len(where))

        def work(rank: int, add_up: Any, rows: list[int] = rows, owner: np.ndarray = owner) -> Any:
            inputs = batch.inputs(rows, np.flatnonzero(owner == rank), reduce_segments=add_up)
            output = algorithm.loss(inputs)
            (grad,) = torch.autograd.grad(output.loss, inputs.policy_logprobs_T)
            return output, grad.numpy()

        for rank, (output, grad) in enumerate(on_ranks(num_cp, work)):
            total += float(output.loss.detach())
            parts.append(output.metrics)
            for (row, t), value in zip(where[owner == rank], grad, strict=True):
                ours[row][t] = value
    assert total == pytest.approx(loss, rel=1e-9, abs=1e-14)
    np.testing.assert_allclose(np.concatenate(ours), np.concatenate(grads), rtol=1e-9, atol=1e-14)
    assert add_metrics(parts) == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    assert np.abs(np.concatenate(grads)).max() > 0


@pytest.mark.parametrize("name", SECTIONS)
def test_masked_tokens_get_no_gradient_whatever_they_hold(name: str, ragged: Any) -> None:
    algorithm = build_algorithm(SECTIONS[name])
    batch = ragged(7)
    loss, grads, _ = whole(algorithm, batch)
    for row in batch.rows:
        for key in ("policy", "old", "rollout", "ref", "entropy", "advantage"):
            row[key][row["mask"] == 0] = np.nan if key != "policy" else -np.inf
    other, other_grads, _ = whole(algorithm, batch)
    assert other == loss
    for row, grad, other_grad in zip(batch.rows, grads, other_grads, strict=True):
        np.testing.assert_array_equal(grad, other_grad)
        assert not other_grad[row["mask"] == 0].any()


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("shift", [-50.0, 50.0, -np.inf])
def test_extreme_ratios_stay_finite(name: str, shift: float, ragged: Any) -> None:
    algorithm = build_algorithm(SECTIONS[name])
    batch = ragged(3)
    for row in batch.rows[2:6]:
        row["policy"] = row["policy"] + shift
    loss, grads, metrics = whole(algorithm, batch)
    assert np.isfinite(loss) and np.isfinite(np.concatenate(grads)).all()
    assert np.isfinite(list(metrics.values())).all()


@pytest.mark.parametrize("name", SECTIONS)
def test_a_batch_without_a_trained_token_has_loss_zero_and_warns(name: str, ragged: Any) -> None:
    batch = ragged(1)
    for row in batch.rows:
        row["mask"][:] = 0
    loss, grads, metrics = whole(build_algorithm(SECTIONS[name]), batch)
    assert loss == 0 and not np.concatenate(grads).any()
    assert metrics["loss/masked_sequence_fraction"] == 1.0
    assert all(np.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", SECTIONS)
def test_an_empty_microbatch_is_attached_to_the_graph(name: str, ragged: Any) -> None:
    inputs = ragged(1).inputs([])
    loss = build_algorithm(SECTIONS[name]).loss(inputs).loss
    loss.backward()
    assert float(loss.detach()) == 0 and inputs.policy_logprobs_T.grad.shape == (0,)


def test_float32_inputs_agree_with_float64(ragged: Any) -> None:
    batch = ragged(2)
    exact, _, _ = whole(build_algorithm(SECTIONS["gspo"]), batch)
    inputs = batch.inputs(list(range(9)))
    names = [f"{n}_logprobs_T" for n in ("policy", "old", "rollout", "ref")] + ["advantages_T"]
    single = replace(inputs, **{name: getattr(inputs, name).detach().float() for name in names})
    output = build_algorithm(SECTIONS["gspo"]).loss(single)
    assert output.loss.dtype == torch.float32
    assert float(output.loss) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("which", ["policy_logprobs_T", "old_logprobs_T", "rollout_logprobs_T"])
def test_sixteen_bit_logprobs_are_refused(which: str, ragged: Any) -> None:
    inputs = ragged(2).inputs([2, 3])
    broken = replace(inputs, **{which: getattr(inputs, which).detach().bfloat16()})
    with pytest.raises(TypeError, match=f"{which} is torch.bfloat16: log-probs must be made in float32"):
        build_algorithm(SECTIONS["gspo"]).loss(broken)


def test_broken_inputs_are_named(ragged: Any) -> None:
    inputs = ragged(2).inputs([0, 2, 3])
    old_T = inputs.old_logprobs_T.clone()
    old_T[0] = float("nan")
    with pytest.raises(ValueError, match="NaN on trained tokens in old_logprobs_T"):
        build_algorithm(SECTIONS["gspo"]).loss(replace(inputs, old_logprobs_T=old_T))
    with pytest.raises(ValueError, match=r"advantages_T has shape \(1,\)"):
        build_algorithm(SECTIONS["gspo"]).loss(replace(inputs, advantages_T=torch.zeros(1)))
    with pytest.raises(ValueError, match="no reference log-probs"):
        build_algorithm(SECTIONS["grpo"]).loss(replace(inputs, ref_logprobs_T=None))
    with pytest.raises(ValueError, match="none were chosen: annotate first"):
        build_algorithm(SECTIONS["kl_cov"]).loss(replace(inputs, is_chosen_T=None))
    with pytest.raises(ValueError, match="no entropy was computed"):
        build_algorithm(SECTIONS["vapo"]).loss(replace(inputs, entropy_T=None))


def test_on_policy_gspo_is_the_plain_policy_gradient() -> None:
    """At ratio 1 the gradient of a token is -A / (|o_i| N_seq), and nothing is clipped."""
    policy_T = torch.tensor([-1.0, -2.0, -0.5, -0.1, -3.0], dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        policy_logprobs_T=policy_T, old_logprobs_T=policy_T.detach(), rollout_logprobs_T=policy_T.detach(),
        advantages_T=torch.tensor([2.0, 2.0, -1.0, -1.0, -1.0], dtype=torch.float64),
        loss_mask_T=torch.tensor([True, True, False, True, True]), segment_ids_T=torch.tensor([0, 0, 1, 1, 1]),
        num_segments=2, is_correct_S=torch.tensor([True, False]), versions_T=torch.zeros(5),
        denominators=Denominators(4, 2, 2),
    )  # fmt: skip
    output = build_algorithm(AlgorithmSection()).loss(inputs)
    output.loss.backward()
    np.testing.assert_allclose(policy_T.grad, [-0.5, -0.5, 0, 0.25, 0.25])
    assert output.metrics["loss/clip_fraction"][0] == 0
    assert output.metrics["loss/kl_to_rollout"][0] == pytest.approx(0)
    assert output.metrics["loss/ratio_mean"] == (4.0, 4)


def test_needs_follow_from_the_section() -> None:
    needs = {name: build_algorithm(section).needs for name, section in SECTIONS.items()}
    assert needs["gspo"] == {"old_logprobs"}
    assert needs["aipo"] == frozenset()
    assert needs["grpo"] == {"old_logprobs", "ref_logprobs"}
    assert needs["rloo"] == {"old_logprobs", "ref_logprobs"}  # the unbiased KL reads the ratio
    assert needs["vapo"] == {"old_logprobs", "values"}
    kl = KlSection(0.1, "k1", "reward")
    in_reward = build_algorithm(AlgorithmSection(advantage="reinforce_pp", loss="reinforce", aggregation="token-mean", kl=kl))
    assert in_reward.needs == {"old_logprobs", "ref_logprobs"} and in_reward.has_token_advantages
    assert needs["clip_cov"] == {"old_logprobs", "chosen"}
    assert needs["distillation"] == {"old_logprobs", "ref_logprobs"}


def test_old_tokens_are_left_out_and_keep_their_place_in_the_denominator(ragged: Any) -> None:
    section = replace(SECTIONS["dapo"], correction=CorrectionSection(max_version_age=1))
    inputs = ragged(5).inputs(list(range(9)), policy_version=5)
    output = build_algorithm(section).loss(inputs)
    (grad_T,) = torch.autograd.grad(output.loss, inputs.policy_logprobs_T)
    everything = ragged(5).inputs(list(range(9)))
    (all_T,) = torch.autograd.grad(build_algorithm(SECTIONS["dapo"]).loss(everything).loss, everything.policy_logprobs_T)
    is_old_T = inputs.versions_T == 3
    assert is_old_T.any() and all_T[is_old_T].any()
    np.testing.assert_array_equal(grad_T, torch.where(is_old_T, 0.0, all_T))
    with pytest.raises(ValueError, match="max_version_age is set"):
        build_algorithm(section).loss(everything)


def test_group_advantages_of_a_step() -> None:
    rewards = [[1.0, 0.0, 0.0, 0.0], [0.3, 0.3], [2.0]]
    first, second, third = build_algorithm(SECTIONS["gspo"]).group_advantages(rewards)
    np.testing.assert_allclose(first, [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
    assert second.tolist() == [0.0, 0.0] and third.tolist() == [0.0]
    whitened = build_algorithm(AlgorithmSection(advantage="reinforce_pp"))
    with pytest.raises(ValueError, match="num_tokens_by_group"):
        whitened.group_advantages(rewards)
    flat = np.concatenate(whitened.group_advantages(rewards, [[3, 4, 5, 6], [7, 1], [2]]))
    weights = np.array([3, 4, 5, 6, 7, 1, 2])
    assert np.average(flat, weights=weights) == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match=r"group 1 has the rewards \[1.0, nan\]"):
        whitened.group_advantages([[0.0, 1.0], [1.0, float("nan")]], [[1, 1], [1, 1]])


def test_token_advantages_leave_the_groups_to_the_ranks() -> None:
    vapo = build_algorithm(SECTIONS["vapo"])
    assert vapo.has_token_advantages
    assert [a.tolist() for a in vapo.group_advantages([[1.0, 0.0]])] == [[0.0, 0.0]]
    assert build_algorithm(AlgorithmSection(advantage="reinforce_pp", gamma=0.99)).has_token_advantages
    assert not build_algorithm(AlgorithmSection(advantage="reinforce_pp")).has_token_advantages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aggregation": "token-mean"}, "algorithm.aggregation: contradicts loss gspo: expected seq-mean-token-mean"),
        ({"loss": "ppo", "clip_low": 1.5}, "algorithm.clip_low: expected at most 1"),
        ({"loss": "aipo", "correction": CorrectionSection("tis")}, "algorithm.correction.kind: loss aipo weighs"),
        ({"kl": KlSection(0.1, "k1", "reward")}, "algorithm.kl.placement: reward needs an advantage per token"),
    ],
)
def test_contradictions_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build_algorithm(replace(AlgorithmSection(), **changes))
    assert "\n" not in str(caught.value)


def test_distillation_follows_the_reverse_kl_and_no_reward() -> None:
    """On policy the gradient of a token is x / N with x = log pi - log pi_teacher, whatever the advantages are."""
    policy_T = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    teacher_T = torch.tensor([-0.5, -2.0, -1.5], dtype=torch.float64)
    inputs = LossInputs(
        policy_logprobs_T=policy_T, old_logprobs_T=policy_T.detach(), rollout_logprobs_T=policy_T.detach(),
        advantages_T=torch.tensor([9.0, -9.0, 9.0], dtype=torch.float64), loss_mask_T=torch.ones(3, dtype=torch.bool),
        segment_ids_T=torch.tensor([0, 0, 1]), num_segments=2, is_correct_S=torch.tensor([True, False]),
        versions_T=torch.zeros(3), denominators=Denominators(3, 2, 2), ref_logprobs_T=teacher_T,
    )  # fmt: skip
    build_algorithm(SECTIONS["distillation"]).loss(inputs).loss.backward()
    np.testing.assert_allclose(policy_T.grad, (policy_T.detach() - teacher_T) / 3)
