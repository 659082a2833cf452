"""The gaps of the released SGLang on a CPU, closed through SGLang's own plugin registry; no file of SGLang is touched.

`register` is an entry point of the group `sglang.srt.plugins` (declared in `stand_ins`), so SGLang calls it in each of
its processes before anything is built.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_rl.platforms.cpu_bf16 import enable_fp32_products_of_bf16, lacks_bf16_units
from megatron_rl.rollout.sglang.cpu_layer.attention import batched_decode, batched_extend

CHECKED_VERSION = "0.5.23"
_MASK_32 = 0xFFFFFFFF
PAUSED_POLL_S = 0.002
"""How long a paused scheduler rests before it looks for requests again."""


def skip_host_registration(buffer: torch.Tensor, *unused: object) -> None:
    """Pinning host memory for a GPU: there is none."""


def skip_batch_invariant_mode(*unused: object, **unused_options: object) -> None:
    """Its matmuls are Triton kernels; on CPU the seeded sampler alone makes draws independent of the batch."""


def _rotate_left(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK_32


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _rotate_left((block * 0xCC9E2D51) & _MASK_32, 15) * 0x1B873593 & _MASK_32
    return (_rotate_left(state ^ block, 13) * 5 + 0xE6546B64) & _MASK_32


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (Appleby, x86_32) of the 16 bytes seed [n] (8), position [n] (4), column [m] (4) -> uint32 [n, m].

    Arithmetic is in int64 with a 32-bit mask, since torch has no uint32 multiplication on CPU; a product of two 32-bit
    numbers may wrap the int64, which leaves its low 32 bits right.
    """
    seed = seed.view(torch.int64)
    blocks = (seed & _MASK_32, (seed >> 32) & _MASK_32, positions.long() & _MASK_32)
    state = torch.zeros_like(seed)
    for block in blocks:
        state = _mix(state, block)
    state = _mix(state[:, None], (col_indices.long() & _MASK_32)[None, :]) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK_32
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK_32
    return (state ^ (state >> 16)).to(torch.uint32)


def own_experts_only(original: Callable[..., Any], layer: Any, x: torch.Tensor, topk_output: Any, *args: Any) -> Any:
    """Run the (token, choice) pairs whose expert is this rank's; expert -1 marks those of other ranks.

    x [T, H] -> [T, H], the rank's part of the sum over experts. Each pair becomes a token with one expert, because the
    original counts an expert that is chosen twice by a token only once.
    """
    token, choice = (topk_output.topk_ids >= 0).nonzero(as_tuple=True)
    out = torch.zeros_like(x)
    if len(token) == 0:
        return out
    pairs = topk_output._replace(
        topk_weights=topk_output.topk_weights[token, choice, None], topk_ids=topk_output.topk_ids[token, choice, None]
    )
    return out.index_add_(0, token, original(layer, x[token], pairs, *args))


def rest_while_paused(original: Callable[..., None], scheduler: Any) -> None:
    """`--sleep-on-idle` knows no pause. A scheduler that spins takes a core from the trainer that sends to it, and the
    interpreter's lock from the receiver beside it."""
    original(scheduler)
    time.sleep(PAUSED_POLL_S)


@dataclass(frozen=True, slots=True)
class Patch:
    target: str
    kind: Literal["REPLACE", "AROUND"]
    hook: Callable[..., Any]
    reason: str


PATCHES = (
    Patch(
        "sglang.srt.mem_cache.pool_host.common._cuda_host_register",
        "REPLACE",
        skip_host_registration,
        "--enable-return-routed-experts pins its host buffer through cudart",
    ),
    Patch(
        "sglang.srt.mem_cache.pool_host.common._cuda_host_unregister",
        "REPLACE",
        skip_host_registration,
        "the counterpart of the above",
    ),
    Patch(
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        "AROUND",
        own_experts_only,
        "--ep-size 2 indexes expert -1",
    ),
    Patch(
        "sglang.srt.batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode",
        "REPLACE",
        skip_batch_invariant_mode,
        "--enable-deterministic-inference installs Triton matmuls",
    ),
    Patch(
        "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
        "REPLACE",
        murmur_hash32,
        "sampling_seed hashes with a kernel of sgl_kernel",
    ),
    Patch(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_decode",
        "AROUND",
        batched_decode,
        "a loop over sequences, most of a decode step",
    ),
    Patch(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend",
        "AROUND",
        batched_extend,
        "the same loop in prefill",
    ),
    Patch(
        "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine",
        "AROUND",
        rest_while_paused,
        "a paused scheduler spins",
    ),
)


def register() -> None:
    """Register every patch, and allow the CPU's attention backend where determinism lists its backends.

    Raises SystemExit on another SGLang version: SGLang only logs the exceptions of plugins, and a server that runs
    without its patches is worse than none.
    """
    import sglang  # only server processes have it
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if sglang.__version__ != CHECKED_VERSION:
        raise SystemExit(f"the CPU layer is checked on sglang {CHECKED_VERSION}, found {sglang.__version__}")
    for patch in PATCHES:
        HookRegistry.register(patch.target, patch.hook, HookType[patch.kind])
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    if lacks_bf16_units():
        enable_fp32_products_of_bf16()  # as the trainer does; three times faster than the emulated ones
