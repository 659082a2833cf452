"""Splits, paddings and boxes."""

from __future__ import annotations

import random

import pytest

from megatron_rl.layout.intervals import intersect, matrix_shape, padded_engine_vocab, round_up, shard_range
from megatron_rl.types.layout import ShardInterval


def test_intersections_agree_with_sets():
    rng = random.Random(3)

    def box() -> ShardInterval:
        return ShardInterval(*(rng.randrange(6) for _ in range(4)), rng.randrange(1, 5), rng.randrange(1, 5))

    def cells(b: ShardInterval) -> dict:
        return {
            (b.global_row + r, b.global_col + c): (b.local_row + r, b.local_col + c)
            for r in range(b.num_rows) for c in range(b.num_cols)
        }  # fmt: skip

    for _ in range(500):
        a, b = box(), box()
        common = cells(a).keys() & cells(b).keys()
        shared = intersect(a, b)
        if not common:
            assert shared is None
            continue
        for whole, part in zip((a, b), shared, strict=True):
            assert {cell: cells(whole)[cell] for cell in common} == cells(part)


def test_small_arithmetic():
    assert [shard_range(12, 3, r) for r in range(3)] == [(0, 4), (4, 8), (8, 12)]
    with pytest.raises(ValueError, match="does not divide"):
        shard_range(10, 3, 0)
    assert [round_up(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert [matrix_shape(s) for s in ((7,), (3, 5), (2, 3, 5))] == [(7, 1), (3, 5), (6, 5)]


@pytest.mark.parametrize(
    ("vocab", "tp", "multiple", "padded"), [(101, 1, 64, 128), (101, 4, 64, 128), (101, 3, 64, 192), (151936, 6, 64, 152064)]
)
def test_engine_vocabularies_are_padded_as_sglang_does(vocab, tp, multiple, padded):
    """Where the padded size does not divide by TP, SGLang pads to a multiple of both."""
    assert padded_engine_vocab(vocab, tp, multiple) == padded
