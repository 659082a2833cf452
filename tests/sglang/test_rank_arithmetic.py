"""Our expert and attention ranks inside an engine are those that the installed SGLang derives.

Its two functions are taken out of its source: importing the module needs CUDA packages.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_rl.layout.coords import engine_attention_rank, engine_expert_coords
from megatron_rl.types.layout import EngineLayout

NAMES = ("derive_attn_tp_size", "derive_attention_ranks", "derive_spawn_ranks", "derive_parallel_widths")


def sglang_functions():
    root = Path(find_spec("sglang").submodule_search_locations[0])
    tree = ast.parse((root / "srt" / "runtime_context.py").read_text())
    chosen = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in NAMES]
    assert len(chosen) == len(NAMES)
    namespace: dict = {}
    exec(compile(ast.Module(chosen, []), "runtime_context", "exec"), namespace)
    return namespace


@pytest.mark.parametrize(("tp", "ep", "attention_dp"), [(1, 1, 1), (8, 1, 1), (8, 2, 4), (8, 8, 2), (6, 3, 2), (32, 8, 8)])
def test_ranks_and_widths_are_those_of_sglang(tp, ep, attention_dp):
    theirs, layout = sglang_functions(), EngineLayout(tp=tp, ep=ep, attention_dp=attention_dp)
    widths = theirs["derive_parallel_widths"](
        tp_size=tp, attn_cp_size=1, attn_dp_size=attention_dp, moe_ep_size=ep, moe_dp_size=1, dcp_size=1, dcp_enabled=False
    )
    assert (widths["attn_tp_size"], widths["moe_tp_size"]) == (layout.attention_tp, layout.moe_tp)
    for rank in range(tp):
        ranks = theirs["derive_spawn_ranks"](
            world_rank=rank, tp_size=tp, ep_join_rank_offset=0, attn_cp_size=1, attn_tp_size=layout.attention_tp,
            moe_dp_size=1, moe_ep_size=ep,
        )  # fmt: skip
        assert engine_expert_coords(layout, rank) == (ranks["moe_ep_rank"], ranks["moe_tp_rank"])
        attention = theirs["derive_attention_ranks"](tp_rank=rank, attn_tp_size=layout.attention_tp, attn_cp_size=1)
        assert engine_attention_rank(layout, rank) == attention[0]
