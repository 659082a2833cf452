from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.advantages.token import count_per_sequence, token_advantages, token_rewards
from megatron_rl.algorithms.advantages.whitening import identity
from megatron_rl.config.algorithm_sections import AlgorithmSection, KlSection

MASK_T = np.array([False, True, True, False, False, False, True, False, True])
CU_SEQLENS = np.array([0, 4, 5, 9])  # trained tokens 1, 2 | none | 6, 8
VAPO = AlgorithmSection(name="vapo", advantage="gae", lambda_alpha=0.8, loss="ppo")


def test_reward_falls_on_the_last_trained_token() -> None:
    rewards_T = token_rewards(np.array([1.0, 7.0, -2.0]), MASK_T, CU_SEQLENS)
    np.testing.assert_array_equal(rewards_T, [0, 0, 1, 0, 0, 0, 0, 0, -2])
    assert count_per_sequence(MASK_T, CU_SEQLENS).tolist() == [2, 0, 2]
    kl_T = np.arange(9.0)
    with_kl = token_rewards(np.array([1.0, 7.0, -2.0]), MASK_T, CU_SEQLENS, kl_T, 0.1)
    np.testing.assert_allclose(with_kl, [0, -0.1, 0.8, 0, 0, 0, -0.6, 0, -2.8])


def test_vapo_decays_by_length_and_keeps_returns_unwhitened() -> None:
    values_T = np.array([9, 0.5, 0.25, 9, 9, 9, -0.5, 9, 0.1])
    arguments = {"rewards_S": np.array([1.0, 7.0, -2.0]), "mask_T": MASK_T, "cu_seqlens": CU_SEQLENS}
    raw_T, returns_T = token_advantages(VAPO, **arguments, values_T=values_T, is_whitened=False)
    lambda_ = 1 - 1 / (0.8 * 2)
    np.testing.assert_allclose(raw_T[[1, 2, 6, 8]], [-0.25 + lambda_ * 0.75, 0.75, 0.6 - lambda_ * 2.1, -2.1])
    np.testing.assert_allclose(returns_T[MASK_T], [1, 1, -2, -2])
    white_T, same_T = token_advantages(VAPO, **arguments, values_T=values_T)
    assert white_T[MASK_T].mean() == pytest.approx(0, abs=1e-12) and white_T[MASK_T].std(ddof=1) == pytest.approx(1)
    np.testing.assert_array_equal(same_T, returns_T)


def test_reinforce_pp_discounts_kl_and_reward() -> None:
    section = AlgorithmSection(
        advantage="reinforce_pp", gamma=0.5, kl=KlSection(coefficient=0.1, estimator="k1", placement="reward")
    )
    advantages_T, _ = token_advantages(
        section, rewards_S=np.array([1.0, 7.0, -2.0]), mask_T=MASK_T, cu_seqlens=CU_SEQLENS, kl_T=np.ones(9),
        is_whitened=False,
    )  # fmt: skip
    np.testing.assert_allclose(advantages_T[MASK_T], [-0.1 + 0.5 * 0.9, 0.9, -0.1 - 0.5 * 2.1, -2.1])


def test_whitening_runs_over_ranks_and_an_empty_rank_takes_part(on_ranks: Any) -> None:
    values_T = np.linspace(-1, 1, 9)
    whole_T, _ = token_advantages(
        VAPO, rewards_S=np.array([1.0, 7.0, -2.0]), mask_T=MASK_T, cu_seqlens=CU_SEQLENS, values_T=values_T
    )
    pieces = [(slice(0, 5), [0, 4, 5], [1.0, 7.0]), (slice(0, 0), [0], []), (slice(5, 9), [0, 4], [-2.0])]

    def work(rank: int, add_up: Any) -> np.ndarray:
        part, cu_seqlens, rewards = pieces[rank]
        return token_advantages(
            VAPO, rewards_S=np.array(rewards), mask_T=MASK_T[part], cu_seqlens=np.array(cu_seqlens),
            values_T=values_T[part], reduce_sum=add_up,
        )[0]  # fmt: skip

    np.testing.assert_allclose(np.concatenate(on_ranks(3, work)), whole_T, rtol=1e-12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    num_ranks=st.integers(1, 4),
    seed=st.integers(0, 2**31),
    with_kl=st.booleans(),
)
def test_packing_and_ranks_change_nothing(
    lengths: list[int], num_ranks: int, seed: int, with_kl: bool, on_ranks: Any
) -> None:
    """GAE and whitening in fp64, for any order of the sequences and any spread over ranks: some empty, some sequences fully
    masked, some of one token."""
    rng = np.random.default_rng(seed)
    section = replace(VAPO, gamma=0.97, lambda_critic=0.9, kl=KlSection(0.1 * with_kl, "k1", "reward"))
    rows = [
        {
            "mask_T": (rng.random(n) < 0.8) & (rng.random() < 0.8),
            "values_T": 50 + rng.normal(size=n),
            "kl_T": rng.normal(size=n),
            "reward": rng.normal(),
        }
        for n in lengths
    ]

    def compute(members: list[int], reduce_sum: Any = identity) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        cu_seqlens = np.cumsum([0, *(lengths[i] for i in members)])
        packed = {
            name: np.concatenate([rows[i][name] for i in members] or [np.zeros(0)])
            for name in ("mask_T", "values_T", "kl_T")
        }
        rewards_S = np.array([rows[i]["reward"] for i in members])
        pair = token_advantages(section, rewards_S=rewards_S, cu_seqlens=cu_seqlens, reduce_sum=reduce_sum, **packed)
        parts = [np.split(array_T, cu_seqlens[1:-1]) for array_T in pair]
        return {i: (parts[0][k], parts[1][k]) for k, i in enumerate(members)}

    whole = compute(list(range(len(lengths))))
    shares = np.array_split(rng.permutation(len(lengths)), num_ranks)
    shares = [list(share) for share in shares]
    rng.shuffle(shares)
    for part in on_ranks(num_ranks, lambda rank, add_up: compute(shares[rank], add_up)):
        for i, pair in part.items():
            for mine_T, theirs_T in zip(pair, whole[i], strict=True):
                np.testing.assert_allclose(mine_T, theirs_T, rtol=1e-9, atol=1e-9)


def test_what_is_missing_is_named() -> None:
    arguments = {"rewards_S": np.zeros(3), "mask_T": MASK_T, "cu_seqlens": CU_SEQLENS}
    with pytest.raises(ValueError, match="no values were annotated"):
        token_advantages(VAPO, **arguments)
    with pytest.raises(ValueError, match="no KL to the reference"):
        section = replace(VAPO, kl=KlSection(0.1, "k1", "reward"))
        token_advantages(section, **arguments, values_T=np.zeros(9))
    with pytest.raises(ValueError, match=r"algorithm\.advantage=grpo is made per group"):
        token_advantages(AlgorithmSection(), **arguments)
