"""Nouns of parallel layouts: where a rank stands and which part of a tensor it holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """A Megatron layout. `virtual_pp` is the number of model chunks per pipeline rank (1: not interleaved).

    World size = tp * cp * dp * pp, and also etp * ep * expert_dp * pp: the experts re-divide the same ranks.
    `layers_per_chunk` gives the layers of every model chunk in pipeline order (chunk v of stage p is entry v * pp + p);
    None: all chunks hold equally many.
    """

    tp: int = 1
    pp: int = 1
    virtual_pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    layers_per_chunk: tuple[int, ...] | None = None

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_dp(self) -> int:
        return self.tp * self.cp * self.dp // (self.etp * self.ep)


@dataclass(frozen=True, slots=True)
class RankCoords:
    """The coordinates of one rank in a `ParallelLayout`, dense and expert side."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    expert_dp: int


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """The layout of the inference side: `num_engines` engines of `tp` ranks; `vocab_multiple` pads the vocabulary.

    Inside an engine the experts are spread over `ep` groups of ranks and each is split over the `moe_tp` ranks of its
    group; attention runs `attention_dp` times side by side, each copy split over `attention_tp` ranks.
    """

    tp: int = 1
    num_engines: int = 1
    vocab_multiple: int = 64
    ep: int = 1
    attention_dp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tp * self.num_engines

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep

    @property
    def attention_tp(self) -> int:
        return self.tp // self.attention_dp


@dataclass(frozen=True, slots=True)
class ShardInterval:
    """A box of a whole (Hugging Face) tensor and where it lies in a rank's local parameter.

    Every tensor is seen as a matrix [rows, cols] (a vector is [n, 1]; stacked experts are flattened over their leading
    dimensions), so that one kind of box describes column, row, vocabulary and expert shards alike.
    """

    global_row: int
    global_col: int
    local_row: int
    local_col: int
    num_rows: int
    num_cols: int
