"""Which pipeline stage and virtual chunk holds which layer.

Interleaving (virtual_pp > 1): chunk v of stage p holds the layers that start at v * (L / virtual_pp) + p * (L / chunks).
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_rl.types.layout import ParallelLayout


class LayerPlace(NamedTuple):
    """Where a global layer lives: pipeline stage, virtual chunk, index within the chunk."""

    pp: int
    chunk: int
    local_layer: int


def place_of_layer(layout: ParallelLayout, num_layers: int, layer: int) -> LayerPlace:
    """Raises ValueError when the layers do not divide evenly over the chunks."""
    num_chunks = layout.pp * layout.virtual_pp
    if num_layers % num_chunks:
        raise ValueError(f"{num_layers} layers do not divide over {layout.pp} stages x {layout.virtual_pp} chunks")
    per_chunk = num_layers // num_chunks
    block, local_layer = divmod(layer, per_chunk)
    chunk, pp = divmod(block, layout.pp)
    return LayerPlace(pp, chunk, local_layer)


def layers_of_chunk(layout: ParallelLayout, num_layers: int, pp: int, chunk: int) -> range:
    """The global layers of one chunk, in order."""
    per_chunk = num_layers // (layout.pp * layout.virtual_pp)
    first = (chunk * layout.pp + pp) * per_chunk
    return range(first, first + per_chunk)
