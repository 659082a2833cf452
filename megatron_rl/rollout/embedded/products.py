"""Matrix products of the decoder with weights as they are stored, or widened once per weight version.

Where bf16 products are emulated (`platforms.cpu_bf16`), widening the weights at every product costs a small batch about as
much as the product itself. Products in fp32 of bf16 operands, rounded once, are what bf16 units compute.

Shape suffixes: T tokens, R ranks, I inputs of one rank, H outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_rl.platforms.cpu_bf16 import lacks_bf16_units


def is_widened(weight: torch.Tensor) -> bool:
    """Whether products with this weight are faster with a fp32 copy of it."""
    return weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and lacks_bf16_units()


def widened(weight: torch.Tensor) -> torch.Tensor:
    """What products should be made with: a fp32 copy, or the weight itself."""
    return weight.float() if is_widened(weight) else weight


def linear(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`inputs` times the transpose of a (widened) weight, in the inputs' dtype."""
    if inputs.dtype is weight.dtype:
        return F.linear(inputs, weight)
    return F.linear(inputs.to(weight.dtype), weight).to(inputs.dtype)


def row_parallel(inputs_TRI: torch.Tensor, weight_RHI: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks of each rank's inputs times its columns of the weight: [T, H], in the inputs' dtype."""
    operands_TRI = inputs_TRI.to(weight_RHI.dtype)
    output = torch.mm(operands_TRI[:, 0], weight_RHI[0].t())
    for rank in range(1, len(weight_RHI)):
        output.addmm_(operands_TRI[:, rank], weight_RHI[rank].t())
    return output.to(inputs_TRI.dtype)
