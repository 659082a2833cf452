from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.advantages import gae as module
from megatron_rl.algorithms.advantages.gae import (
    discounted_returns,
    gae,
    length_adaptive_lambda,
    scan_sequential,
    scan_vectorised,
)


def gae_of_one(rewards: list[float], values: list[float], gamma: float, lambda_: float) -> list[float]:
    """The definition, A_t = sum_k (gamma lambda)^k delta_{t+k}, as a double sum."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values)]
    return [sum((gamma * lambda_) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


def make_batch(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    lengths = np.concatenate([[0, 1], rng.integers(1, 40, 13)])
    total = int(lengths.sum())
    mask_T = rng.random(total) < 0.7
    mask_T[: lengths[:3].sum()] = False  # rows without a trained token
    return {
        "rewards_T": rng.normal(size=total),
        "values_T": rng.normal(size=total),
        "mask_T": mask_T,
        "cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]),
        "gamma": 0.97,
        "lambda_S": rng.random(len(lengths)),
        "lambda_critic": 0.9,
    }


@pytest.mark.parametrize("scan", [scan_sequential, scan_vectorised])
@pytest.mark.parametrize("seed", range(3))
def test_both_scans_equal_the_definition_on_the_trained_tokens(scan: Any, seed: int) -> None:
    batch = make_batch(seed)
    advantages_T, returns_T = scan(*batch.values())
    for s, (start, stop) in enumerate(zip(batch["cu_seqlens"], batch["cu_seqlens"][1:])):
        trained = start + np.flatnonzero(batch["mask_T"][start:stop])
        rewards, values = batch["rewards_T"][trained].tolist(), batch["values_T"][trained].tolist()
        actor = gae_of_one(rewards, values, 0.97, batch["lambda_S"][s])
        critic = np.array(gae_of_one(rewards, values, 0.97, 0.9)) + values
        np.testing.assert_allclose(advantages_T[trained], actor, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(returns_T[trained], critic, rtol=1e-10, atol=1e-12)
    assert not advantages_T[~batch["mask_T"]].any() and not returns_T[~batch["mask_T"]].any()


def test_the_compiled_scan_and_the_one_without_numba_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(5)
    keywords = {"gamma": 0.97, "lambda_actor_S": batch["lambda_S"], "lambda_critic": 0.9}
    arguments = [batch[name] for name in ("rewards_T", "values_T", "mask_T", "cu_seqlens")]
    compiled = gae(*arguments, **keywords)
    real_import = builtins.__import__

    def import_without_numba(name: str, *rest: Any) -> Any:
        if name == "numba":
            raise ImportError(name)
        return real_import(name, *rest)

    module._scan.cache_clear()
    monkeypatch.setattr(builtins, "__import__", import_without_numba)
    try:
        assert module._scan() is scan_vectorised
        plain = gae(*arguments, **keywords)
    finally:
        module._scan.cache_clear()
    for left, right in zip(compiled, plain, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-14)


def test_results_have_the_dtype_of_the_values_and_float32_is_close() -> None:
    batch = make_batch(6)
    arguments = [batch[name] for name in ("rewards_T", "values_T", "mask_T", "cu_seqlens")]
    exact = gae(*arguments, lambda_actor_S=batch["lambda_S"])
    single = gae(arguments[0], arguments[1].astype(np.float32), *arguments[2:], lambda_actor_S=batch["lambda_S"])
    for left, right in zip(single, exact, strict=True):
        assert left.dtype == np.float32 and right.dtype == np.float64
        np.testing.assert_allclose(left, right, atol=1e-5)


def test_terminal_reward_without_discount_gives_that_return_everywhere() -> None:
    rewards_T = np.array([0, 0, 0.7, 0, -1.0])
    _, returns_T = gae(rewards_T, np.array([0.3, -2, 5, 1, 0.1]), np.ones(5, bool), np.array([0, 3, 5]))
    np.testing.assert_allclose(returns_T, [0.7, 0.7, 0.7, -1, -1])


def test_discount_does_not_run_through_a_gap() -> None:
    mask_T = np.array([True, True, False, False, True, True])
    rewards_T = np.array([0, 0, 0, 0, 0, 1.0])
    returns_T = discounted_returns(rewards_T, mask_T, np.array([0, 6]), gamma=0.9)
    np.testing.assert_allclose(returns_T, [0.729, 0.81, 0, 0, 0.9, 1.0])


def test_length_adaptive_lambda_table() -> None:
    lengths = [0, 1, 20, 21, 40, 100, 400, 1000, 8000]
    expected = [0, 0, 0, 0.0476190, 0.5, 0.8, 0.95, 0.98, 0.9975]
    np.testing.assert_allclose(length_adaptive_lambda(np.array(lengths), 0.05), expected, atol=1e-6)
