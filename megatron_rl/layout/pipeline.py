"""Which pipeline stage and virtual chunk holds which layer.

Chunks follow each other in pipeline order: chunk v of stage p is the (v * pp + p)-th. Each holds `num_layers / chunks`
consecutive layers, or as many as `layers_per_chunk` says (uneven splits; a chunk may hold none).
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

from megatron_rl.types.layout import ParallelLayout


class LayerPlace(NamedTuple):
    """Where a global layer lives: pipeline stage, virtual chunk, index within the chunk."""

    pp: int
    chunk: int
    local_layer: int


def chunk_bounds(layout: ParallelLayout, num_layers: int) -> list[int]:
    """First layer of every chunk in pipeline order, and `num_layers` at the end. Raises ValueError for a split that fails."""
    num_chunks = layout.pp * layout.virtual_pp
    if layout.layers_per_chunk is None:
        if num_layers % num_chunks:
            raise ValueError(f"{num_layers} layers do not divide over {layout.pp} stages x {layout.virtual_pp} chunks")
        return list(range(0, num_layers + 1, num_layers // num_chunks))
    if len(layout.layers_per_chunk) != num_chunks or sum(layout.layers_per_chunk) != num_layers:
        raise ValueError(
            f"layers_per_chunk {list(layout.layers_per_chunk)} is not a split of {num_layers} layers over {num_chunks} chunks"
        )
    return [0, *accumulate(layout.layers_per_chunk)]


def place_of_layer(layout: ParallelLayout, num_layers: int, layer: int) -> LayerPlace:
    """Raises ValueError when the layers do not divide over the chunks."""
    bounds = chunk_bounds(layout, num_layers)
    block = bisect_right(bounds, layer) - 1
    chunk, pp = divmod(block, layout.pp)
    return LayerPlace(pp, chunk, layer - bounds[block])


def layers_of_chunk(layout: ParallelLayout, num_layers: int, pp: int, chunk: int) -> range:
    """The global layers of one chunk, in order."""
    bounds = chunk_bounds(layout, num_layers)
    block = chunk * layout.pp + pp
    return range(bounds[block], bounds[block + 1])
