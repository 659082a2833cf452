"""Which stage and chunk holds which layer."""

from __future__ import annotations

import pytest

from megatron_rl.layout.pipeline import layers_of_chunk, place_of_layer
from megatron_rl.types.layout import ParallelLayout


@pytest.mark.parametrize(("pp", "virtual_pp", "layers"), [(1, 1, 5), (2, 1, 6), (2, 2, 8), (3, 2, 12), (4, 1, 4)])
def test_layers_have_one_place_each(pp, virtual_pp, layers):
    layout = ParallelLayout(pp=pp, virtual_pp=virtual_pp)
    for layer in range(layers):
        place = place_of_layer(layout, layers, layer)
        assert layers_of_chunk(layout, layers, place.pp, place.chunk)[place.local_layer] == layer
    every = [l for p in range(pp) for c in range(virtual_pp) for l in layers_of_chunk(layout, layers, p, c)]
    assert sorted(every) == list(range(layers))
    with pytest.raises(ValueError, match="do not divide"):
        place_of_layer(ParallelLayout(pp=2), 5, 0)


@pytest.mark.parametrize(
    ("pp", "virtual_pp", "split"), [(2, 1, (3, 1)), (2, 2, (1, 2, 0, 1)), (3, 2, (0, 1, 1, 2, 0, 3)), (4, 1, (4, 4, 4, 1))]
)
def test_uneven_splits_are_counted_off_in_pipeline_order(pp, virtual_pp, split):
    layout = ParallelLayout(pp=pp, virtual_pp=virtual_pp, layers_per_chunk=split)
    layer = 0
    for chunk in range(virtual_pp):
        for stage in range(pp):
            held = layers_of_chunk(layout, sum(split), stage, chunk)
            assert held == range(layer, layer + split[chunk * pp + stage])
            for local, number in enumerate(held):
                assert place_of_layer(layout, sum(split), number) == (stage, chunk, local)
            layer = held.stop
    for wrong in (sum(split) + 1, sum(split) - 1):
        with pytest.raises(ValueError, match=r"layers_per_chunk \[.*\] is not a split"):
            place_of_layer(layout, wrong, 0)
