from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.routing_replay import expert_probabilities, select_experts

LOGITS_TE = torch.tensor([[0.1, 2.0, -1.0, 0.7], [1.5, 0.2, 0.3, 0.1]], dtype=torch.float64)


@pytest.mark.parametrize("score", ["softmax_post", "softmax_pre", "sigmoid"])
def test_replaying_its_own_choice_is_bit_equal(score: str) -> None:
    chosen_Tk = select_experts(LOGITS_TE, 2, score)
    native = expert_probabilities(LOGITS_TE, chosen_Tk, score)
    assert torch.equal(native, expert_probabilities(LOGITS_TE, select_experts(LOGITS_TE, 2, score), score))
    assert chosen_Tk.tolist() == [[1, 3], [0, 2]]


def test_replayed_experts_get_probability_and_gradient() -> None:
    logits_TE = LOGITS_TE.clone().requires_grad_()
    forced_Tk = torch.tensor([[0, 2], [3, 1]])
    probabilities_TE = expert_probabilities(logits_TE, forced_Tk, "softmax_post", scaling=2.0)
    np.testing.assert_allclose(probabilities_TE.detach().sum(-1), [2.0, 2.0])
    assert (probabilities_TE.detach() > 0).int().tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]
    (probabilities_TE * torch.arange(4.0)).sum().backward()
    assert (logits_TE.grad != 0).int().tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]


def test_bias_moves_the_choice_and_not_the_probabilities() -> None:
    bias_E = torch.tensor([0.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    chosen_Tk = select_experts(LOGITS_TE, 2, "sigmoid", bias_E)
    assert sorted(chosen_Tk[0].tolist()) == [0, 3]
    scores = torch.sigmoid(LOGITS_TE[0, [0, 3]])
    ours = expert_probabilities(LOGITS_TE, chosen_Tk, "sigmoid")[0, [0, 3]]
    np.testing.assert_allclose(ours, scores / scores.sum())


def test_groups_limit_the_choice() -> None:
    logits = torch.tensor([[3.0, -5.0, 2.0, 1.9]])  # the best pair of single experts lies in two groups
    assert sorted(select_experts(logits, 2)[0].tolist()) == [0, 2]
    assert sorted(select_experts(logits, 2, num_groups=2, group_topk=1)[0].tolist()) == [2, 3]
    with pytest.raises(ValueError, match="num_groups without group_topk"):
        select_experts(logits, 2, num_groups=2)


def test_an_unknown_score_function_is_refused() -> None:
    with pytest.raises(ValueError, match="'tanh' is not known"):
        expert_probabilities(LOGITS_TE, torch.tensor([[0], [1]]), "tanh")  # type: ignore[arg-type]
