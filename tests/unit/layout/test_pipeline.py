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
