from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.rollout.embedded.sampling import BLOCK, SamplingRows, counter_uniforms, sample_tokens

DRAWS = 12_000


def rows(count: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> SamplingRows:
    return SamplingRows(
        np.full(count, temperature, np.float32), np.full(count, top_p, np.float32), np.full(count, top_k, np.int64)
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def kept_by(probs: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    """The filtered distribution by its definition: the most probable tokens until k are taken or p is reached."""
    kept, mass = np.zeros_like(probs), 0.0
    for rank, token in enumerate(np.argsort(-probs)):
        if (top_k and rank >= top_k) or (top_p < 1 and mass >= top_p):
            break
        kept[token] = probs[token]
        mass += probs[token]
    return kept / kept.sum()


def test_uniforms_depend_on_seed_and_position_alone() -> None:
    seeds = np.array([5, 2**64 - 1, 5, 0], np.uint64)
    positions = np.array([3, 3, 4, 3])
    batch = counter_uniforms(seeds, positions)
    assert len(set(batch)) == 4
    for index in range(4):
        assert counter_uniforms(seeds[index : index + 1], positions[index : index + 1])[0] == batch[index]


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_uniforms_are_uniform_and_uncorrelated(vary: str) -> None:
    counter, fixed = np.arange(DRAWS), np.full(DRAWS, 7)
    seeds, positions = (counter, fixed) if vary == "seed" else (fixed, counter)
    draws = counter_uniforms(seeds.astype(np.uint64), positions)
    assert draws.min() > 0 and draws.max() <= 1
    counts = np.histogram(draws, bins=100, range=(0, 1))[0]
    assert ((counts - DRAWS / 100) ** 2 / (DRAWS / 100)).sum() < 150  # chi-square, 99 degrees: p < 0.001 above 149
    assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.02


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.7, 0), (1.0, 5), (0.8, 4)])
def test_draws_follow_the_processed_distribution(temperature: float, top_p: float, top_k: int) -> None:
    vocab = 2 * BLOCK + 9  # several blocks, the last one padded
    logits = np.random.default_rng(3).normal(scale=2.0, size=vocab).astype(np.float32)
    logits[BLOCK - 3 : BLOCK + 4] = -np.inf  # impossible tokens on both sides of a block boundary
    expected = kept_by(softmax(logits / temperature), top_p, top_k)
    uniforms = counter_uniforms(np.arange(DRAWS, dtype=np.uint64), np.zeros(DRAWS, np.int64))
    batch = torch.from_numpy(logits).repeat(DRAWS, 1)
    tokens, logprobs = sample_tokens(batch, uniforms, rows(DRAWS, temperature, top_p, top_k))
    counts = np.bincount(tokens.numpy(), minlength=vocab)
    assert (counts[expected == 0] == 0).all()
    np.testing.assert_allclose(logprobs, np.log(expected[tokens.numpy()]), atol=2e-5)
    common = expected * DRAWS >= 5
    statistic = ((counts - expected * DRAWS)[common] ** 2 / (expected * DRAWS)[common]).sum()
    degrees = common.sum()
    assert statistic < degrees + 4 * np.sqrt(2 * degrees) + 4


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = np.random.default_rng(4).normal(size=(3, 50)).astype(np.float32)
    settings = SamplingRows(
        np.array([0.0, 0.5, 0.0], np.float32), np.array([0.3, 1.0, 1.0], np.float32), np.array([0, 1, 0])
    )
    tokens, logprobs = sample_tokens(torch.from_numpy(logits.copy()), np.array([0.9, 0.4, 0.2]), settings)
    assert tokens.tolist() == logits.argmax(axis=1).tolist()
    for row in (0, 2):  # of the unscaled, unfiltered distribution
        assert logprobs[row] == pytest.approx(np.log(softmax(logits[row]).max()), abs=1e-5)
    assert logprobs[1] == pytest.approx(0.0, abs=1e-6)


def test_the_extreme_uniforms_give_possible_tokens() -> None:
    logits = torch.full((2, 3 * BLOCK), float("-inf"))
    logits[:, [BLOCK + 5, 2 * BLOCK - 2]] = torch.tensor([1.0, -2.0])
    tokens, _ = sample_tokens(logits, np.array([2.0**-53, 1.0]), rows(2))
    assert tokens.tolist() == [BLOCK + 5, 2 * BLOCK - 2]


def test_nan_logits_give_a_nan_logprob_and_a_valid_token() -> None:
    tokens, logprobs = sample_tokens(torch.full((1, 40), float("nan")), np.array([0.5]), rows(1))
    assert 0 <= tokens[0] < BLOCK
    assert logprobs.isnan().all()
