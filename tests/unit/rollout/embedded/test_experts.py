from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_rl.rollout.embedded.experts import route, routed_mlp


@pytest.mark.parametrize("renormalise", [False, True])
def test_route_takes_the_softmax_over_all_experts(renormalise: bool) -> None:
    logits = np.random.default_rng(1).normal(size=(9, 7)).astype(np.float32)
    weights, experts = route(torch.from_numpy(logits), top_k=3, renormalise=renormalise)
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = np.argsort(-probs, axis=1)[:, :3]
    picked = np.take_along_axis(probs, expected, axis=1)
    assert (experts.numpy() == expected).all()
    np.testing.assert_allclose(
        weights, picked / picked.sum(axis=1, keepdims=True) if renormalise else picked, rtol=1e-5
    )


@pytest.mark.parametrize("intermediate", [8, 7])  # the grouped kernel, and the loop for rows that are not aligned
@pytest.mark.parametrize("num_tokens", [1, 29])
def test_routed_mlp_is_the_weighted_sum_of_the_chosen_experts(intermediate: int, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(2)
    tp, num_experts, hidden = 2, 5, 12
    w13 = torch.randn(tp, num_experts, 2 * intermediate, hidden, generator=generator)
    w2 = torch.randn(tp, num_experts, hidden, intermediate, generator=generator)
    inputs = torch.randn(num_tokens, hidden, generator=generator)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    logits[:, 3] = -50.0  # nobody goes to expert 3
    weights, experts = route(logits, 2, renormalise=True)
    expected = torch.zeros_like(inputs)
    for token in range(num_tokens):
        for weight, expert in zip(weights[token], experts[token], strict=True):
            for rank in range(tp):
                gate, up = (w13[rank, expert] @ inputs[token]).chunk(2)
                expected[token] += weight * (w2[rank, expert] @ (F.silu(gate) * up))
    torch.testing.assert_close(routed_mlp(inputs, weights, experts, w13, w2), expected, rtol=1e-4, atol=1e-4)
