"""The section of a Megatron layout, which the trainer, the critic and the reference each have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayoutSection:
    """Megatron parallel sizes. `dp` None: num_ranks / (tp * cp * pp). `etp` None: `tp` when `ep` is 1, else 1."""

    tp: int = 1
    pp: int = 1
    virtual_pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int | None = None
    num_ranks: int = 1
    layers_per_chunk: tuple[int, ...] | None = None
    """Layers of every model chunk in pipeline order (chunk v of stage p is entry v * pp + p); None: evenly."""
