"""The picture is well-formed and has a line for every pair that exchanges something."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from megatron_rl.model_families.registry import FAMILIES
from megatron_rl.resharding.picture import draw_plan
from megatron_rl.resharding.plan import build_reshard_plan
from megatron_rl.types.layout import EngineLayout, ParallelLayout

DIMS = FAMILIES["qwen3_moe"].debug_dims
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("relay", [False, True])
def test_lines_are_the_pairs(relay):
    plan = build_reshard_plan("qwen3_moe", DIMS, ParallelLayout(tp=2, pp=2, ep=2, dp=2), EngineLayout(2, 3), relay=relay)
    root = ElementTree.fromstring(draw_plan(plan, "a < b & c"))
    elements = plan.num_elements_between()
    titles = [title.text for title in root.iter(SVG + "title")]
    pairs = {tuple(map(int, re.match(r"(\d+) to (\d+): ", title).groups())) for title in titles}
    assert len(titles) == len(pairs)
    assert pairs == {(int(s), int(t)) for s, t in zip(*elements.nonzero(), strict=True)}
    assert len(list(root.iter(SVG + "path"))) == len(pairs) + (6 if relay else 0)
    texts = [text.text for text in root.iter(SVG + "text")]
    assert texts[0] == "a < b & c"
    received = elements.sum(axis=0)[3] * 2 if not relay else None
    if received is not None:
        assert f"engine 1, rank 1: {received / 1e3:.3g} kB" in texts


def test_large_layouts_are_refused_in_one_line():
    plan = build_reshard_plan("llama", FAMILIES["llama"].debug_dims, ParallelLayout(), EngineLayout(1, 65))
    with pytest.raises(ValueError, match=r"^--svg draws at most 64 ranks a side, this layout has 1 and 65$"):
        draw_plan(plan, "x")
