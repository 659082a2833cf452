"""bf16 matrix products on x86 processors without bf16 units (AVX512-BF16 or AMX).

There oneDNN emulates them at a quarter of the fp32 speed (measured on an AVX-512 Xeon at 2.5 GHz, one thread: 25 against 95
GFLOPS). Products in fp32 of widened operands, rounded once at the end, are what the units compute too: bf16 operands, fp32
accumulation.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable

import torch

_TYPICAL_ROWS = 64
"""What kept weights are arranged for: a batch that decodes. Others are right as well."""
_MIN_ROWS = 8
"""Below this, widening the weights costs more than it saves."""


def lacks_bf16_units() -> bool:
    """Whether this is an x86 processor on which bf16 products are emulated."""
    cpu = torch.cpu
    return cpu._is_avx2_supported() and not (cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())


@functools.cache
def enable_fp32_products_of_bf16() -> torch.library.Library:
    """Replace the CPU kernel of `aten::mm`, through which linear layers and their gradients go, in this process.

    Only bf16 matrices of at least 8 rows take the new path. The replacement lasts as long as the returned handle, which is
    kept; calling again is harmless.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Oo]verrid")  # that is what is meant
        library.impl("mm", _matrix_product, "CPU")
    return library


_Place = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Address, shape and strides of an operand."""
_kept: dict[_Place, torch.Tensor | None] = {}
"""Weights that lie still until the next `keep_widened`, with what `_pack` made of them once a product used them."""


def keep_widened(weights: Iterable[torch.Tensor]) -> None:
    """Widen these weights at their first product and keep that, until the next call; to be called when they were written.

    A small batch spends longer on widening, and on arranging the weight for the processor, than on the product. Weights are
    matrices or stacks of matrices (experts), used as by `torch.nn.functional.linear`. Costs twice their memory. Has no
    effect without `enable_fp32_products_of_bf16`.
    """
    _kept.clear()
    for weight in weights:
        if weight.dtype is torch.bfloat16 and weight.dim() in (2, 3):
            matrices = weight.detach()[None] if weight.dim() == 2 else weight.detach()
            _kept.update(dict.fromkeys(_place(matrix.t()) for matrix in matrices))


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """In fp32, blocked as oneDNN's linear layer reads it. MKL, behind `mm`, would arrange it anew for every product, which
    takes it as long as the product with 64 rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.float(), _TYPICAL_ROWS)


def _place(matrix: torch.Tensor) -> _Place:
    return matrix.data_ptr(), tuple(matrix.shape), matrix.stride()


def _matrix_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if _kept and (place := _place(right)) in _kept:
        if (packed := _kept[place]) is None:
            packed = _kept[place] = _pack(right.t())
        return torch.ops.mkldnn._linear_pointwise(left.float(), packed, None, "none", [], "").to(torch.bfloat16)
    if left.dtype is torch.bfloat16 and left.shape[0] >= _MIN_ROWS:
        return torch.mm(left.float(), right.float()).to(torch.bfloat16)
    return torch.ops.aten.mm.out(left, right, out=left.new_empty((left.shape[0], right.shape[1])))
