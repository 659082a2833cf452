"""Attention over a whole batch at once, for SGLang's `torch_native` backend, which loops over sequences and layers in Python.

With 64 sequences of a 30-layer model that loop is most of a decode step on CPU. The hooks take the backend's arguments.

Shape suffixes: T tokens of all sequences, N sequences, L longest query, C longest context, K key-value heads, G query heads
per key-value head, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

MAX_MASK_ELEMENTS = 2**24
"""Above this, sequences are long enough that the loop over them costs little, and the mask of all much."""


def batched_decode(
    original: Callable[..., Any],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """One new token per sequence; its key and value are in the cache already."""
    arguments = (query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
    if not _is_plain(encoder_lens, options):
        return original(backend, *arguments, encoder_lens, **options)
    _attend(*arguments, seq_lens - 1, torch.ones_like(seq_lens), options["scaling"])
    return output


def batched_extend(
    original: Callable[..., Any],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """The new tokens of each sequence after its cached prefix."""
    arguments = (query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
    lengths = (extend_prefix_lens, extend_seq_lens)
    num_elements = len(seq_lens) * int(extend_seq_lens.max()) * int(seq_lens.max()) if len(seq_lens) else 0
    if not _is_plain(encoder_lens, options) or not options["causal"] or num_elements > MAX_MASK_ELEMENTS:
        return original(backend, *arguments, *lengths, encoder_lens, **options)
    _attend(*arguments, *lengths, options["scaling"])
    return output


def _is_plain(encoder_lens: torch.Tensor | None, options: dict[str, Any]) -> bool:
    return encoder_lens is None and not options["is_cross_attn"] and options["sliding_window_size"] is None


def _attend(
    query_TQD: torch.Tensor,
    output_TQD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens_N: torch.Tensor,
    prefix_lens_N: torch.Tensor,
    query_lens_N: torch.Tensor,
    scaling: float | None,
) -> None:
    """Write the attention of every query into `output_TQD`. Computed in fp32: bf16 may be emulated."""
    if not len(seq_lens_N):
        return
    num_kv = k_cache.shape[1]
    group = query_TQD.shape[1] // num_kv
    num_queries, context = int(query_lens_N.max()), int(seq_lens_N.max())
    steps_L, steps_C = torch.arange(num_queries), torch.arange(context)
    is_query_NL = steps_L < query_lens_N[:, None]
    rows_NL = (query_lens_N.cumsum(0) - query_lens_N)[:, None] + torch.where(is_query_NL, steps_L, 0)
    slots_NC = req_to_token[req_pool_indices.long(), :context].long()
    slots_NC = torch.where(steps_C < seq_lens_N[:, None], slots_NC, slots_NC[:, :1])  # what lies behind the end is no slot
    mask_NLC = steps_C <= (prefix_lens_N[:, None] + steps_L)[:, :, None]
    is_ragged = num_queries * len(seq_lens_N) != len(query_TQD)  # otherwise, as in decoding, all rows in their order
    query = query_TQD[rows_NL] if is_ragged else query_TQD.unflatten(0, (-1, num_queries))
    query = query.float().unflatten(2, (num_kv, group)).permute(0, 2, 3, 1, 4)  # [N, K, G, L, D]
    key, value = (_gather(cache, slots_NC).float().transpose(1, 2) for cache in (k_cache, v_cache))  # [N, K, C, D]
    # The G query heads of one key-value head stand where further queries would: no key is repeated.
    mask = mask_NLC[:, None, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
    attended = F.scaled_dot_product_attention(query.flatten(2, 3), key, value, attn_mask=mask, scale=scaling)
    attended = attended.unflatten(2, (group, num_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [N, L, Q, D]
    if is_ragged:
        output_TQD[rows_NL[is_query_NL]] = attended[is_query_NL].to(output_TQD.dtype)
    else:
        output_TQD.copy_(attended.flatten(0, 1))


def _gather(cache: torch.Tensor, slots_NC: torch.Tensor) -> torch.Tensor:
    """`cache[slots_NC]`, three times faster."""
    return cache.index_select(0, slots_NC.flatten()).unflatten(0, slots_NC.shape)
