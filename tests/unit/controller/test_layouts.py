"""From sections to layouts: every size arrives where it belongs."""

from __future__ import annotations

import pytest

from megatron_rl.config.layout_section import LayoutSection
from megatron_rl.config.rollout_sections import EmbeddedSection, SglangSection
from megatron_rl.config.sections import RolloutSection
from megatron_rl.controller.experiment import UnservedError, check_engine_is_served
from megatron_rl.controller.layouts import engine_layout, trainer_layout
from megatron_rl.types.layout import EngineLayout, ParallelLayout


def test_sizes_arrive_where_they_belong() -> None:
    section = LayoutSection(tp=2, pp=3, virtual_pp=4, cp=5, ep=6, etp=7, dp=8, num_ranks=240, layers_per_chunk=(1,) * 12)
    expected = ParallelLayout(tp=2, pp=3, virtual_pp=4, cp=5, ep=6, etp=7, dp=8, layers_per_chunk=(1,) * 12)
    assert trainer_layout(section) == expected
    sglang = SglangSection(tp_size=8, ep_size=4, attn_dp_size=2)
    embedded = EmbeddedSection(tp_size=3)
    for engine, layout in (
        ("sglang", EngineLayout(tp=8, num_engines=5, ep=4, attention_dp=2)),
        ("embedded", EngineLayout(tp=3, num_engines=5)),
    ):
        assert engine_layout(RolloutSection(engine=engine, num_engines=5, sglang=sglang, embedded=embedded)) == layout


def test_data_parallel_attention_is_refused_in_one_line() -> None:
    check_engine_is_served(RolloutSection(engine="sglang", sglang=SglangSection(ep_size=2, tp_size=2)))
    with pytest.raises(UnservedError, match=r"^rollout\.sglang\.attn_dp_size=2: .*set it to 1$"):
        check_engine_is_served(RolloutSection(engine="sglang", sglang=SglangSection(tp_size=2, attn_dp_size=2)))
