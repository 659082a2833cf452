"""What each process does in the checkpoint tests: save and load Megatron checkpoints under one layout after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.megatron_dist import CheckpointModel, load_megatron_checkpoint, save_megatron_checkpoint
from megatron_rl.model_families.registry import get_family
from megatron_rl.types.layout import ParallelLayout
from tests.distributed.launch import Rank
from tests.distributed.walk import joined, policy


def walk_checkpoints(me: Rank, *, family: str, folder: str, cases: list[dict[str, Any]]) -> list[dict[str, list[str]]]:
    """Per case and checkpoint in its `load`: the parameters that differ from those imported directly under its layout.

    A case has `layout`, `load` and optionally `dtype` and `save`, the checkpoint that it then writes.
    """
    results = []
    with joined(me) as platform:
        for case in cases:
            layout, dtype = ParallelLayout(**case["layout"]), case.get("dtype", "fp32")
            with policy(me, platform, family, layout, dtype=dtype) as trainer:
                expected = [{name: p.clone() for name, p in chunk.items()} for chunk in trainer.chunk_parameters()]
                result = {}
                for name in case["load"]:
                    trainer.load_parameters([{n: torch.full_like(p, 7.0) for n, p in chunk.items()} for chunk in expected])
                    trainer.load_parameters(load_megatron_checkpoint(Path(folder, name), trainer.chunks))
                    result[name] = [
                        parameter
                        for mine, theirs in zip(trainer.chunk_parameters(), expected, strict=True)
                        for parameter in theirs
                        if not torch.equal(mine[parameter], theirs[parameter])
                    ]
                if "save" in case:
                    model = CheckpointModel(get_family(family), trainer.dims, trainer.config.params_dtype)
                    save_megatron_checkpoint(Path(folder, case["save"]), trainer.chunks, model)
            results.append(result)
    return results
