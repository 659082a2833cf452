"""The layouts of both sides, from their sections. Imports nothing heavy: plans are made on machines without torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.layout_section import LayoutSection
from megatron_rl.config.sections import RolloutSection
from megatron_rl.types.layout import EngineLayout, ParallelLayout


@dataclass(frozen=True, slots=True)
class RunLayouts:
    """Of every role. `critic` or `reference` None: it has no ranks of its own."""

    trainer: ParallelLayout
    critic: ParallelLayout | None
    reference: ParallelLayout | None
    engine: EngineLayout

    @property
    def num_trainer_ranks(self) -> int:
        """Of all roles that Megatron runs."""
        return sum(layout.world_size for layout in (self.trainer, self.critic, self.reference) if layout is not None)


def trainer_layout(section: LayoutSection) -> ParallelLayout:
    """The layout of a resolved section."""
    assert section.dp is not None and section.etp is not None, "resolve the configuration first"
    return ParallelLayout(
        tp=section.tp, pp=section.pp, virtual_pp=section.virtual_pp, cp=section.cp,
        ep=section.ep, etp=section.etp, dp=section.dp, layers_per_chunk=section.layers_per_chunk,
    )  # fmt: skip


def engine_layout(section: RolloutSection) -> EngineLayout:
    if section.engine == "embedded":
        return EngineLayout(tp=section.embedded.tp_size, num_engines=section.num_engines)
    sglang = section.sglang
    return EngineLayout(tp=sglang.tp_size, num_engines=section.num_engines, ep=sglang.ep_size, attention_dp=sglang.attn_dp_size)
