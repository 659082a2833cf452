"""Log-probs of given tokens, for probes and checks. Legend: T predicted tokens, H hidden, V padded vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_rl.rollout.embedded.decoder import Decoder
from megatron_rl.rollout.embedded.scheduler import plan_prefill

LOGIT_ELEMENTS = 2**24
"""fp32 logits held at once (64 MiB)."""


def score_sequences(decoder: Decoder, sequences: Sequence[Sequence[int]], temperature: float) -> list[np.ndarray]:
    """One float32 array per sequence: log-prob of each token given those before it, 0 for the first."""
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
    scores: list[np.ndarray] = [np.zeros(len(ids), np.float32) for ids in sequences]
    device = decoder.device
    start = 0
    while start < len(order):
        prompts = [tuple(sequences[index]) for index in order[start:]]
        batch = order[start : start + plan_prefill(prompts)]
        start += len(batch)
        lengths = [len(sequences[index]) for index in batch]
        if not max(lengths):
            continue
        ids_BL = np.zeros((len(batch), max(lengths)), np.int64)
        for row, index in enumerate(batch):
            ids_BL[row, : lengths[row]] = sequences[index]
        ids = torch.from_numpy(ids_BL).to(device)
        predicted = torch.arange(1, ids.shape[1], device=device) < torch.tensor(lengths, device=device)[:, None]
        hidden_TH = decoder.prefill(ids)[:, :-1][predicted]
        logprobs = _token_logprobs(decoder, hidden_TH, ids[:, 1:][predicted], temperature).cpu().numpy()
        for index, part in zip(batch, np.split(logprobs, np.cumsum(np.maximum(np.array(lengths) - 1, 0))[:-1]), strict=True):
            scores[index][1:] = part
    return scores


def _token_logprobs(decoder: Decoder, hidden_TH: torch.Tensor, targets_T: torch.Tensor, temperature: float) -> torch.Tensor:
    rows = max(LOGIT_ELEMENTS // decoder.dims.vocab_size, 1)
    parts = [hidden_TH.new_zeros(0, dtype=torch.float32)]
    for hidden, targets in zip(hidden_TH.split(rows), targets_T.split(rows), strict=True):
        logits_TV = decoder.logits(hidden).div_(temperature)
        parts.append(logits_TV.gather(1, targets[:, None]).squeeze(1) - logits_TV.logsumexp(dim=-1))
    return torch.cat(parts)
