"""Who passes what on to whom in a relayed sync, and the sources that each engine rank expects. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_rl.resharding.boxes import PairTable
from megatron_rl.resharding.plan import ReshardPlan
from megatron_rl.resharding.precision import with_scales


class Hop(NamedTuple):
    """Engine rank `source_rank` passes the boxes of `table`, which entered at engine `origin`, on to `target_rank`."""

    source_rank: int
    target_rank: int
    origin: int
    number: int
    """What the target calls this source."""
    needs: tuple[int, ...]
    """The sources from which the boxes came to `source_rank`."""
    table: PairTable


def sources_of(plan: ReshardPlan, target_rank: int) -> list[int]:
    """The sources of an engine rank: trainer ranks, then the engines at which boxes entered that it gets from a neighbour."""
    return _trainers_of(plan, target_rank) + [
        plan.layout.world_size + origin for origin in _origins(plan, target_rank % plan.engine_layout.tp)
        if origin != target_rank // plan.engine_layout.tp
    ]  # fmt: skip


def relay_rounds(plan: ReshardPlan, dtypes: Mapping[str, str]) -> list[list[Hop]]:
    """The hops of each round, which run at once; a round begins when the one before has ended everywhere.

    `dtypes`: how the engines hold each parameter; the scales of quantised ones travel too.
    """
    tp, engines, num_trainers = plan.engine_layout.tp, plan.engine_layout.num_engines, plan.layout.world_size
    if not plan.key.relay or engines == 1:
        return []
    tables = {
        (origin, rank): _table_into(plan, origin * tp + rank, dtypes) for rank in range(tp) for origin in _origins(plan, rank)
    }
    rounds = []
    for distance in range(engines - 1):
        hops = []
        for engine in range(engines):
            origin, neighbour = (engine - distance) % engines, (engine + 1) % engines
            for rank in range(tp):
                if (origin, rank) not in tables:
                    continue
                source = engine * tp + rank
                needs = [num_trainers + origin] if distance else _trainers_of(plan, source)
                hops.append(Hop(
                    source, neighbour * tp + rank, origin, num_trainers + origin, tuple(needs), tables[origin, rank]
                ))  # fmt: skip
        rounds.append(hops)
    return rounds


def _trainers_of(plan: ReshardPlan, target_rank: int) -> list[int]:
    return [int(rank) for rank in plan.num_elements_between()[:, target_rank].nonzero()[0]]


def _origins(plan: ReshardPlan, rank: int) -> Sequence[int]:
    """The engines at which boxes of this rank of every engine enter, when they are relayed."""
    tp, engines = plan.engine_layout.tp, plan.engine_layout.num_engines
    if not plan.key.relay or engines == 1:
        return ()
    entered = plan.num_elements_between().sum(axis=0).reshape(engines, tp)
    return [int(engine) for engine in entered[:, rank].nonzero()[0]]


def _table_into(plan: ReshardPlan, target_rank: int, dtypes: Mapping[str, str]) -> PairTable:
    """What an engine rank gets from trainer ranks, as it lies there; it lies so in every engine."""
    table = PairTable.of_side("target", plan.columns_into(target_rank), plan.target_params)
    return with_scales(table, dtypes)[0]
