"""bf16 matrix products on x86 processors without bf16 units (AVX512-BF16 or AMX).

There oneDNN emulates them at a quarter of the fp32 speed (measured on an AVX-512 Xeon at 2.5 GHz, one thread: 25 against 95
GFLOPS). Products in fp32 of widened operands, rounded once at the end, are what the units compute too: bf16 operands, fp32
accumulation.
"""

from __future__ import annotations

import functools
import warnings

import torch

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


def _matrix_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.dtype is torch.bfloat16 and left.shape[0] >= _MIN_ROWS:
        return torch.mm(left.float(), right.float()).to(torch.bfloat16)
    return torch.ops.aten.mm.out(left, right, out=left.new_empty((left.shape[0], right.shape[1])))
