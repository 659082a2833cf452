"""A recording stand-in for NVIDIA apex: what Megatron-Core 0.16 takes from it, in plain torch."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import Tensor

RECORD: list[tuple[str, dict[str, Any]]] = []


class FusedAdam(torch.optim.AdamW):
    def __init__(self, params: Any, *, adam_w_mode: bool, **options: Any) -> None:
        RECORD.append(("FusedAdam", {"adam_w_mode": adam_w_mode}))
        super().__init__(params, **options)


def multi_tensor_applier(operation: Any, _overflow: Tensor, lists: list[list[Tensor]], *args: Any) -> Any:
    return operation(lists, *args)


for _name, _names in {
    "optimizers": {"FusedAdam": FusedAdam, "FusedSGD": torch.optim.SGD},
    "multi_tensor_apply": {"multi_tensor_applier": multi_tensor_applier},
}.items():
    _module = types.ModuleType(f"apex.{_name}")
    _module.__dict__.update(_names)
    sys.modules[_module.__name__] = _module
FusedAdam.__module__ = "apex.optimizers"
