"""The critic as one trainer rank sees it: values and value steps on top of what every role does. No Ray here.

The value of token t is that of the state in which token t was chosen: V_t reads the tokens up to t - 1. So a value stands
at the same index as the log-prob, the advantage and the return of the token that was chosen there.

Shape suffixes: _T packed tokens (token-aligned), _K scored rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.config.algorithm_sections import AlgorithmSection
from megatron_rl.trainer.model import ValueModel
from megatron_rl.trainer.objective import value_objective
from megatron_rl.trainer.role import MegatronRole
from megatron_rl.types.training import Denominators, Microbatch


class CriticTrainer(MegatronRole):
    """One rank of the critic: the policy's decoder with a scalar head, its own optimizer and layout."""

    model_class = ValueModel
    is_head_split = False

    def load_policy(self, chunks: Sequence[Mapping[str, Tensor]]) -> None:
        """Start from a policy of the same layout (its `chunk_parameters`): every weight but the head, which becomes 0,
        so that the first values are 0.
        """
        own = [
            {name: chunk[name] if name in chunk else torch.zeros_like(weight) for name, weight in mine.items()}
            for mine, chunk in zip(self.chunk_parameters(), chunks, strict=True)
        ]
        self.load_parameters(own)

    def compute_values(self, microbatches: Sequence[Microbatch]) -> list[np.ndarray]:
        """Token-aligned float32 values [T] of each microbatch of this data-parallel rank, returned on all its ranks.

        0 outside the loss mask.
        """
        return self.compute_scores(microbatches)

    def annotate(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """The microbatches with `values` in their token_arrays."""
        return [
            replace(microbatch, token_arrays={**microbatch.token_arrays, "values": values_T})
            for microbatch, values_T in zip(microbatches, self.compute_values(microbatches), strict=True)
        ]

    def train_minibatch(
        self,
        microbatches: Sequence[Microbatch],
        denominators: Denominators,
        algorithm: AlgorithmSection,
        value_clip: float | None,
    ) -> dict[str, float]:
        """One optimizer step on the value loss. Reads `values` (before the step) and `returns` from token_arrays.

        The loss is aggregated as the policy's is. Returns the same metrics on every rank; raises as a policy's step does.
        """
        metrics = self._optimize(microbatches, value_objective(algorithm, denominators, value_clip))
        return {name if "/" in name else f"critic/{name}": value for name, value in metrics.items()}

    def _score_rows(self, model: Any, hidden_KH: Tensor, target_ids_K: Tensor) -> Tensor:
        """Values, [K, 1]."""
        return model.values(hidden_KH)[:, None]
