"""Every loss under every aggregation: no split, packing order or rank changes value or gradient (fp64, relative 1e-9)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.aggregation import MODES
from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.algorithms.registry import LOSSES
from megatron_rl.config.algorithm_sections import AlgorithmSection, CorrectionSection, KlSection

EVERYTHING = AlgorithmSection(
    clip_low=0.2, clip_high=0.3, kl=KlSection(0.1), entropy_coefficient=0.01, positive_nll_coefficient=0.1,
    correction=CorrectionSection("sequence_tis", high=1.3),
)  # fmt: skip
"""A correction over whole rows and every term that can be added, so that no denominator is left out."""


def sections(loss: str) -> list[AlgorithmSection]:
    """The loss under each aggregation. Combinations that the configuration refuses are invariant all the same."""
    constants = {mode: 37.0 if mode.endswith("-norm") else None for mode in MODES}
    return [
        replace(EVERYTHING, loss=loss, aggregation=mode, aggregation_constant=constant) for mode, constant in constants.items()
    ]


def share(algorithm: Algorithm, inputs: Any) -> tuple[float, np.ndarray]:
    loss = algorithm.loss(inputs).loss
    (grad_T,) = torch.autograd.grad(loss, inputs.policy_logprobs_T)
    return float(loss.detach()), grad_T.numpy()


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), num_rows=st.integers(2, 9), num_parts=st.integers(1, 6), is_truncated=st.booleans())
def test_splits_and_packings(loss: str, seed: int, num_rows: int, num_parts: int, is_truncated: bool, ragged: Any) -> None:
    """Rows of 1 to 12 tokens (the first of one, the second fully masked) over microbatches of random size and order, the last
    of them empty; sometimes a batch in which every answer was cut off.
    """
    batch = ragged(seed, num_rows)
    if is_truncated and seed % 3 == 0:
        for row in batch.rows:
            row["mask"][:] = 0
    rng = np.random.default_rng(seed)
    order = rng.permutation(num_rows)
    owner = rng.integers(0, num_parts, num_rows)
    parts = [order[owner[order] == part].tolist() for part in range(num_parts)] + [[]]
    ends = np.cumsum([len(row["mask"]) for row in batch.rows])
    for section in sections(loss):
        algorithm = Algorithm(section, "any", frozenset())
        value, grad_T = share(algorithm, batch.inputs(list(range(num_rows))))
        total, ours_T = 0.0, np.zeros(ends[-1])
        for rows in parts:
            part_value, part_grad_T = share(algorithm, batch.inputs(rows))
            where = [t for row in rows for t in range(ends[row] - len(batch.rows[row]["mask"]), ends[row])]
            ours_T[where] = part_grad_T
            total += part_value
        assert total == pytest.approx(value, rel=1e-9, abs=1e-14), section.aggregation
        np.testing.assert_allclose(ours_T, grad_T, rtol=1e-9, atol=1e-14, err_msg=section.aggregation)
        if batch.denominators.num_tokens == 0:
            assert value == 0 and not grad_T.any()


@pytest.mark.parametrize("loss", LOSSES)
def test_context_parallel_ranks(loss: str, ragged: Any, on_ranks: Any) -> None:
    """The tokens of a row lie on three ranks in any way; one rank may have none."""
    batch = ragged(11)
    rows = list(range(len(batch.rows)))
    owner = np.random.default_rng(5).integers(0, 2, sum(len(row["mask"]) for row in batch.rows))
    for section in sections(loss):
        algorithm = Algorithm(section, "any", frozenset())
        value, grad_T = share(algorithm, batch.inputs(rows))

        def work(rank: int, add_up: Any, algorithm: Algorithm = algorithm) -> tuple[float, np.ndarray]:
            return share(algorithm, batch.inputs(rows, np.flatnonzero(owner == rank), reduce_segments=add_up))

        parts = on_ranks(3, work)
        assert sum(part_value for part_value, _ in parts) == pytest.approx(value, rel=1e-9, abs=1e-14)
        for rank, (_, part_grad_T) in enumerate(parts):
            np.testing.assert_allclose(part_grad_T, grad_T[owner == rank], rtol=1e-9, atol=1e-14)


def test_a_global_denominator_is_what_makes_it_so(ragged: Any) -> None:
    """Local counts, the mistake that this file is about, do change the loss."""
    batch = ragged(3)
    algorithm = Algorithm(replace(EVERYTHING, loss="ppo", aggregation="token-mean"), "any", frozenset())
    whole, _ = share(algorithm, batch.inputs(list(range(9))))
    halves = []
    for rows in ([0, 1, 2], [3, 4, 5, 6, 7, 8]):
        local = replace(batch, rows=[batch.rows[i] for i in rows], is_correct=[batch.is_correct[i] for i in rows])
        halves.append(share(algorithm, local.inputs(list(range(len(rows)))))[0])
    assert np.mean(halves) != pytest.approx(whole, rel=1e-3)
