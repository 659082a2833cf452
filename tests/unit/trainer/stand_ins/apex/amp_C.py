"""apex's kernels, recording, in plain torch."""

from __future__ import annotations

import apex
from torch import Tensor, stack


def multi_tensor_l2norm(lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    apex.RECORD.append(("multi_tensor_l2norm", {"tensors": len(lists[0])}))
    return stack([tensor.norm() for tensor in lists[0]]).norm().reshape(1), None


def multi_tensor_scale(lists: list[list[Tensor]], scale: float) -> None:
    apex.RECORD.append(("multi_tensor_scale", {"tensors": len(lists[0])}))
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)
