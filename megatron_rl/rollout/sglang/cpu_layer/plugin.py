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
from megatron_rl.platforms.host_heap import keep_freed_memory
from megatron_rl.rollout.sglang.cpu_layer.attention import batched_decode, batched_extend

CHECKED_VERSION = "0.5.23"
_MASK_32 = 0xFFFFFFFF
_SIGN = 1 << 31
PAUSED_POLL_S = 0.002
"""How long a paused scheduler rests before it looks for requests again."""


def skip_host_registration(buffer: torch.Tensor, *unused: object) -> None:
    """Pinning host memory for a GPU: there is none."""


def skip_batch_invariant_mode(*unused: object, **unused_options: object) -> None:
    """Its matmuls are Triton kernels; on CPU the seeded sampler alone makes draws independent of the batch."""


def _wrapped(x: torch.Tensor | int) -> Any:
    """The low 32 bits, as the int32 that has them."""
    low = (x & _MASK_32) ^ _SIGN
    return low - _SIGN if isinstance(low, int) else (low - _SIGN).to(torch.int32)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)  # torch shifts the sign in


def _rotate_left(x: torch.Tensor, bits: int) -> torch.Tensor:
    return _shift_right(x, 32 - bits).bitwise_or_(x.bitwise_left_shift_(bits))


def _scramble(block: torch.Tensor) -> torch.Tensor:
    return _rotate_left(block * _wrapped(0xCC9E2D51), 15).mul_(_wrapped(0x1B873593))


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    return _rotate_left(state ^ _scramble(block), 13).mul_(5).add_(_wrapped(0xE6546B64))


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (Appleby, x86_32) of the 16 bytes seed [n] (8), position [n] (4), column [m] (4) -> uint32 [n, m].

    Computed in int32, whose products wrap as they should, and in place: a row is a whole vocabulary.
    """
    seed = seed.view(torch.int64)
    state = torch.zeros(len(seed), dtype=torch.int32)
    for block in (seed, seed >> 32, positions.long()):
        state = _mix(state, _wrapped(block))
    state = _mix(state[:, None], _wrapped(col_indices.long())[None, :]).bitwise_xor_(16)
    state = state.bitwise_xor_(_shift_right(state, 16)).mul_(_wrapped(0x85EBCA6B))
    state = state.bitwise_xor_(_shift_right(state, 13)).mul_(_wrapped(0xC2B2AE35))
    return state.bitwise_xor_(_shift_right(state, 16)).view(torch.uint32)


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
    keep_freed_memory()
    torch.set_flush_denormal(True)  # as in the trainer: softmax over a large vocabulary is full of them
    if lacks_bf16_units():
        enable_fp32_products_of_bf16()  # as the trainer does; three times faster than the emulated ones
