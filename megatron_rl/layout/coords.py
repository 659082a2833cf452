"""Rank arithmetic of Megatron's default order: tp fastest, then cp, dp, pp; experts: etp, ep, expert-dp, pp.

Source: megatron.core.parallel_state.RankGenerator with order "tp-cp-ep-dp-pp". A distributed test compares every group.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.types.layout import EngineLayout, ParallelLayout, RankCoords


def coords_of(layout: ParallelLayout, rank: int) -> RankCoords:
    """The coordinates of a rank. Raises ValueError outside the layout."""
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"rank {rank} is outside a layout of {layout.world_size} ranks")
    stage_size = layout.tp * layout.cp * layout.dp
    pp, in_stage = divmod(rank, stage_size)
    rest, tp = divmod(in_stage, layout.tp)
    dp, cp = divmod(rest, layout.cp)
    rest, etp = divmod(in_stage, layout.etp)
    expert_dp, ep = divmod(rest, layout.ep)
    return RankCoords(rank=rank, tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, expert_dp=expert_dp)


def rank_of(layout: ParallelLayout, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
    """The rank at dense coordinates."""
    return tp + layout.tp * (cp + layout.cp * (dp + layout.dp * pp))


def expert_rank_of(layout: ParallelLayout, *, etp: int = 0, ep: int = 0, expert_dp: int = 0, pp: int = 0) -> int:
    """The rank at expert coordinates."""
    stage_size = layout.tp * layout.cp * layout.dp
    return etp + layout.etp * (ep + layout.ep * expert_dp) + stage_size * pp


def dense_replicas(layout: ParallelLayout, *, tp: int, pp: int) -> Iterator[int]:
    """The ranks that hold the same dense shard: data- and context-parallel copies."""
    for dp in range(layout.dp):
        for cp in range(layout.cp):
            yield rank_of(layout, tp=tp, cp=cp, dp=dp, pp=pp)


def expert_replicas(layout: ParallelLayout, *, etp: int, ep: int, pp: int) -> Iterator[int]:
    """The ranks that hold the same expert shard."""
    for expert_dp in range(layout.expert_dp):
        yield expert_rank_of(layout, etp=etp, ep=ep, expert_dp=expert_dp, pp=pp)


def engine_expert_coords(layout: EngineLayout, rank: int) -> tuple[int, int]:
    """(expert-parallel rank, expert-TP rank) of a rank inside an engine: SGLang counts expert TP fastest."""
    return divmod(rank, layout.moe_tp)


def engine_attention_rank(layout: EngineLayout, rank: int) -> int:
    """The attention-TP rank of a rank inside an engine: attention copies are blocks of `attention_tp` ranks."""
    return rank % layout.attention_tp
