from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megatron_rl.algorithms.segments import Segments

IDS_T = torch.tensor([2, 0, 2, 0, 0, 2])  # no order is required, and segment 1 has no token here
MASK_T = torch.tensor([True, True, True, False, True, False])
VALUES_T = torch.tensor([1.0, 10, 2, 999, 30, float("nan")], requires_grad=True)


def test_sums_means_and_spread() -> None:
    segments = Segments(IDS_T, MASK_T, 3)
    (sums_S,) = segments.sums(VALUES_T)
    assert sums_S.tolist() == [40, 0, 3] and sums_S.dtype == torch.float64 and not sums_S.requires_grad
    (means_S,) = segments.means(VALUES_T)
    assert means_S.tolist() == [20, 0, 1.5]
    assert segments.counts_S.tolist() == [2, 0, 2]
    assert segments.spread(means_S).tolist() == [1.5, 20, 1.5, 20, 20, 1.5]


def test_statistics_are_complete_over_context_parallel_ranks(on_ranks: Any) -> None:
    parts = [torch.tensor([0, 1]), torch.tensor([], dtype=torch.long), torch.tensor([2, 3, 4, 5])]

    def work(rank: int, add_up: Any) -> list[Any]:
        part = parts[rank]
        segments = Segments(IDS_T[part], MASK_T[part], 3, add_up)
        first_S, second_S = segments.sums(VALUES_T[part], VALUES_T[part] * 2)
        return [segments.counts_S.tolist(), first_S.tolist(), second_S.tolist()]

    assert on_ranks(3, work) == [[[2, 0, 2], [40, 0, 3], [80, 0, 6]]] * 3


def test_a_microbatch_without_a_sequence() -> None:
    empty = Segments(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.bool), 0)
    (sums_S,) = empty.sums(torch.zeros(0))
    assert sums_S.shape == (0,) and empty.spread(sums_S).shape == (0,)


def test_sums_are_exact_where_float32_is_not() -> None:
    values_T = torch.full((100_000,), 3e-4)
    segments = Segments(torch.zeros(100_000, dtype=torch.long), torch.ones(100_000, dtype=torch.bool), 1)
    np.testing.assert_allclose(segments.sums(values_T)[0], [np.float64(np.float32(3e-4)) * 100_000], rtol=1e-12)
