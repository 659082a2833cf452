from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.aggregation import MODES, aggregate, token_weights
from megatron_rl.algorithms.segments import Segments
from megatron_rl.types.training import Denominators

MASK_T = torch.tensor([True, True, True, False, False, True])
SEGMENTS = Segments(torch.tensor([0, 0, 0, 1, 2, 2]), MASK_T, 3)  # 3 trained tokens, none, 1
DENOMINATORS = Denominators(num_tokens=8, num_sequences=5, num_positive_tokens=0)  # of the whole minibatch


@pytest.mark.parametrize(
    ("mode", "first", "last"),
    [
        ("token-mean", 1 / 8, 1 / 8),
        ("token-sum", 1, 1),
        ("seq-mean-token-sum", 1 / 5, 1 / 5),
        ("seq-mean-token-mean", 1 / 15, 1 / 5),
        ("seq-mean-token-sum-norm", 1 / 500, 1 / 500),
    ],
)
def test_weights_are_the_table(mode: str, first: float, last: float) -> None:
    constant = 100.0 if mode.endswith("-norm") else None
    weights_T = token_weights(mode, SEGMENTS, DENOMINATORS, constant)
    np.testing.assert_allclose(weights_T, [first] * 3 + [0, 0, last])


def test_masked_losses_stay_out_even_when_not_finite() -> None:
    weights_T = token_weights("token-mean", SEGMENTS, DENOMINATORS)
    loss_T = torch.tensor([1.0, 2, 3, float("nan"), float("inf"), 4], dtype=torch.float64, requires_grad=True)
    loss = aggregate(loss_T, weights_T)
    loss.backward()
    assert float(loss.detach()) == 10 / 8
    np.testing.assert_array_equal(loss_T.grad, weights_T)


def test_a_minibatch_without_a_trained_token_weighs_nothing() -> None:
    nothing = Segments(SEGMENTS.ids_T, torch.zeros(6, dtype=torch.bool), 3)
    for mode in MODES:
        constant = 9.0 if mode.endswith("-norm") else None
        assert not token_weights(mode, nothing, Denominators(0, 0, 0), constant).any()


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="aggregation_constant=None: the constant belongs to"):
        token_weights("seq-mean-token-sum-norm", SEGMENTS, DENOMINATORS)
    with pytest.raises(ValueError, match="to no other mode"):
        token_weights("token-mean", SEGMENTS, DENOMINATORS, 7.0)
    with pytest.raises(ValueError, match="'batch-mean' is not known: choose one of token-mean"):
        token_weights("batch-mean", SEGMENTS, DENOMINATORS)
