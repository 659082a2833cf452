from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.covariance_choice import choose_tokens, token_covariance
from megatron_rl.config.algorithm_sections import CovarianceSection

RNG = np.random.default_rng(8)
LOGPROBS_T, ADVANTAGES_T = -RNG.exponential(1.0, 60), RNG.normal(size=60)
MASK_T, DRAWS_T = RNG.random(60) < 0.7, RNG.random(60)
ARRAYS = {"logprobs_T": LOGPROBS_T, "advantages_T": ADVANTAGES_T, "mask_T": MASK_T, "draws_T": DRAWS_T}


def test_covariance_of_the_trained_tokens() -> None:
    cov_T, count = token_covariance(LOGPROBS_T, ADVANTAGES_T, MASK_T)
    assert count == MASK_T.sum()
    expected = np.cov(ADVANTAGES_T[MASK_T], LOGPROBS_T[MASK_T], ddof=0)[0, 1]
    np.testing.assert_allclose(cov_T[MASK_T].mean(), expected)


def test_clip_cov_chooses_at_random_inside_the_band() -> None:
    cov_T, _ = token_covariance(LOGPROBS_T, ADVANTAGES_T, MASK_T)
    band_T = MASK_T & (cov_T > 0.1) & (cov_T < 2.0)
    chosen_T = choose_tokens("clip_cov", CovarianceSection(0.1, 0.1, 2.0), **ARRAYS)
    assert chosen_T.sum() == int(0.1 * MASK_T.sum()) < band_T.sum()
    assert band_T[chosen_T].all() and DRAWS_T[chosen_T].max() < DRAWS_T[band_T & ~chosen_T].min()
    rest_T = choose_tokens("clip_cov", CovarianceSection(1.0, 0.1, 2.0), **ARRAYS, is_excluded_T=chosen_T)
    np.testing.assert_array_equal(rest_T, band_T & ~chosen_T)


def test_kl_cov_chooses_the_largest_covariances() -> None:
    cov_T, _ = token_covariance(LOGPROBS_T, ADVANTAGES_T, MASK_T)
    chosen_T = choose_tokens("kl_cov", CovarianceSection(0.2), **ARRAYS)
    assert chosen_T.sum() == int(0.2 * MASK_T.sum())
    assert cov_T[chosen_T].min() > cov_T[MASK_T & ~chosen_T].max()
    equal = {**ARRAYS, "advantages_T": np.zeros(60)}
    assert choose_tokens("kl_cov", CovarianceSection(0.2), **equal).sum() == chosen_T.sum()


@pytest.mark.parametrize("kind", ["clip_cov", "kl_cov"])
def test_ranks_choose_what_one_rank_chooses(kind: str, on_ranks: Any) -> None:
    section = CovarianceSection(0.15, 0.05, 3.0)
    whole_T = choose_tokens(kind, section, **ARRAYS)
    owner = RNG.integers(0, 3, 60)  # the fourth rank has nothing

    def work(rank: int, add_up: Any) -> np.ndarray:
        mine = {name: array[owner == rank] for name, array in ARRAYS.items()}
        return choose_tokens(kind, section, **mine, gather=lambda rows: np.concatenate(add_up([rows])))

    parts = on_ranks(4, work)
    assert whole_T.any() and len(parts[3]) == 0
    for rank, part_T in enumerate(parts):
        np.testing.assert_array_equal(part_T, whole_T[owner == rank])


def test_nothing_trained_or_no_candidate_chooses_nothing() -> None:
    nothing = {**ARRAYS, "mask_T": np.zeros(60, dtype=bool)}
    assert not choose_tokens("kl_cov", CovarianceSection(), **nothing).any()
    assert not choose_tokens("clip_cov", CovarianceSection(low=1e9, high=2e9), **ARRAYS).any()
    with pytest.raises(ValueError, match=r"algorithm.loss='ppo'"):
        choose_tokens("ppo", CovarianceSection(), **ARRAYS)
