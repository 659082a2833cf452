"""Per-token log-probs and entropy from hidden states and a vocabulary-parallel output weight, in chunks of tokens.

Never more than one chunk of fp32 logits exists, forward or backward. The backward pass, which begins right after the
forward pass on the stage that makes logits, finds the last chunk as the forward pass left it and makes the others anew.
(32k tokens x 152k entries would be 20 GB.)

bf16 operands are widened to fp32 on CPU, once for all chunks and both passes: products there are fastest in fp32, and nothing
is rounded in between.

Shape suffixes: _K scored rows, _C rows of one chunk, V entries of this rank's vocabulary shard, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def compute_chunked_logprobs(
    hidden_KH: Tensor,
    weight_VH: Tensor,
    target_ids_K: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    chunk_tokens: int,
    tp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """fp32 (log-probs [K] of the targets, entropies [K]) of softmax(hidden @ weight.T / temperature).

    `weight_VH` is this rank's shard of the padded vocabulary; entries from `vocab_size` on do not exist. Gradients flow to
    `weight_VH` and, as this rank's part of a sum over the tensor-parallel ranks, to `hidden_KH`.
    """
    tp_rank = dist.get_rank(tp_group) if tp_group is not None else 0
    first = tp_rank * weight_VH.shape[0]
    num_entries = min(max(vocab_size - first, 0), weight_VH.shape[0])
    group = tp_group if tp_group is not None and dist.get_world_size(tp_group) > 1 else None
    keep = torch.is_grad_enabled()
    return _ChunkedLogprobs.apply(
        hidden_KH, weight_VH, target_ids_K - first, temperature, num_entries, chunk_tokens, group, keep
    )


class _ChunkedLogprobs(torch.autograd.Function):
    """With z = logits / temperature and p = softmax(z): d logp_t / dz_j = 1[j = t] - p_j, and
    dH / dz_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KH: Tensor,
        weight_VH: Tensor,
        local_targets_K: Tensor,
        temperature: float,
        num_entries: int,
        chunk_tokens: int,
        group: dist.ProcessGroup | None,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        num_rows = hidden_KH.shape[0]
        logprobs_K, entropies_K, normalisers_K = hidden_KH.new_empty((3, num_rows), dtype=torch.float32).unbind()
        hidden, weight = _widened(hidden_KH), _widened(weight_VH[:num_entries])
        for start in range(0, num_rows, chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits_CV = _logits(hidden[rows], weight, temperature)
            highest_C = _highest(logits_CV, group)
            logits_CV -= highest_C[:, None]
            target_C = _pick(logits_CV, local_targets_K[rows])
            exp_CV = logits_CV.exp()
            weighted_C = torch.bmm(logits_CV[:, None], exp_CV[:, :, None]).flatten()  # no [C, V] product
            sums = torch.stack((target_C, exp_CV.sum(-1), weighted_C))
            if group is not None:
                dist.all_reduce(sums, group=group)
            target_C, total_C, weighted_C = sums.unbind()
            log_total_C = total_C.log()
            logprobs_K[rows] = target_C - log_total_C
            entropies_K[rows] = log_total_C - weighted_C / total_C
            normalisers_K[rows] = log_total_C + highest_C
        ctx.save_for_backward(hidden_KH, weight_VH, local_targets_K, normalisers_K, entropies_K)
        ctx.temperature, ctx.num_entries, ctx.chunk_tokens = temperature, num_entries, chunk_tokens
        ctx.last_log_p_CV = logits_CV.sub_(log_total_C[:, None]) if keep and num_rows else None
        ctx.weight = weight if keep else None
        return logprobs_K, entropies_K

    @staticmethod
    def backward(ctx: Any, grad_logprobs_K: Tensor, grad_entropies_K: Tensor) -> tuple[Tensor | None, ...]:
        hidden_KH, weight_VH, local_targets_K, normalisers_K, entropies_K = ctx.saved_tensors
        hidden, weight = _widened(hidden_KH), ctx.weight
        ctx.weight = None
        if weight is None:
            weight = _widened(weight_VH[: ctx.num_entries])
        grad_hidden_KH = torch.zeros_like(hidden_KH)
        grad_weight = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
        has_entropy_gradient = bool(grad_entropies_K.any())
        for start in reversed(range(0, hidden_KH.shape[0], ctx.chunk_tokens)):
            rows = slice(start, start + ctx.chunk_tokens)
            hidden_CH, grad_C = hidden[rows], grad_logprobs_K[rows]
            log_p_CV, ctx.last_log_p_CV = ctx.last_log_p_CV, None
            if log_p_CV is None:
                log_p_CV = _logits(hidden_CH, weight, ctx.temperature).sub_(normalisers_K[rows, None])
            p_CV = log_p_CV.exp() if has_entropy_gradient else log_p_CV.exp_()
            if has_entropy_gradient:
                entropy_part_CV = (log_p_CV + entropies_K[rows, None]).mul_(p_CV).mul_(grad_entropies_K[rows, None])
            grad_logits_CV = p_CV.mul_(-grad_C[:, None])
            if has_entropy_gradient:
                grad_logits_CV -= entropy_part_CV
            is_here_C, column_C = _columns(local_targets_K[rows], ctx.num_entries)
            if ctx.num_entries:
                grad_logits_CV.scatter_add_(1, column_C[:, None], (grad_C * is_here_C)[:, None])
            if ctx.temperature != 1.0:
                grad_logits_CV /= ctx.temperature
            grad_logits_CV = grad_logits_CV.to(weight.dtype)
            grad_hidden_KH[rows] = grad_logits_CV @ weight
            if weight.dtype is torch.float32:
                grad_weight[: ctx.num_entries].addmm_(grad_logits_CV.T, hidden_CH)
            else:
                grad_weight[: ctx.num_entries] += grad_logits_CV.T @ hidden_CH
        return grad_hidden_KH, grad_weight.to(weight_VH.dtype), None, None, None, None, None, None


def _widened(operand: Tensor) -> Tensor:
    return operand.float() if operand.device.type == "cpu" else operand


def _logits(hidden_CH: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits_CV = (hidden_CH @ weight.T).float()
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def _highest(logits_CV: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if logits_CV.shape[1]:
        highest_C = logits_CV.amax(-1)
    else:  # a rank that holds nothing but padding
        highest_C = logits_CV.new_full((logits_CV.shape[0],), -torch.inf)
    if group is not None:
        dist.all_reduce(highest_C, op=dist.ReduceOp.MAX, group=group)
    return highest_C


def _columns(local_targets_C: Tensor, num_entries: int) -> tuple[Tensor, Tensor]:
    """Whether a target lies in this rank's shard, and its column (0 where it does not)."""
    is_here_C = (local_targets_C >= 0) & (local_targets_C < num_entries)
    return is_here_C, torch.where(is_here_C, local_targets_C, 0)


def _pick(logits_CV: Tensor, local_targets_C: Tensor) -> Tensor:
    is_here_C, column_C = _columns(local_targets_C, logits_CV.shape[1])
    if not logits_CV.shape[1]:
        return logits_CV.new_zeros(logits_CV.shape[0])
    return logits_CV.gather(1, column_C[:, None])[:, 0] * is_here_C
