"""The shared inputs of the golden cases (`batch.json`), packed. Shape suffixes: _T packed tokens, _S rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.aggregation import aggregate, token_weights
from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.algorithms.inputs import LossInputs
from megatron_rl.algorithms.segments import Segments
from megatron_rl.config.algorithm_sections import AlgorithmSection
from megatron_rl.types.training import Denominators


@dataclass(frozen=True)
class GoldenBatch:
    raw: dict[str, Any]

    @classmethod
    def load(cls, directory: Path) -> GoldenBatch:
        return cls(json.loads((directory / "batch.json").read_text()))

    @property
    def lens(self) -> list[int]:
        return self.raw["lens"]

    @property
    def cu_seqlens(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lens)])

    @property
    def rewards(self) -> np.ndarray:
        return np.array(self.raw["rewards"], dtype=np.float64)

    def groups(self) -> list[np.ndarray]:
        """Row positions of each group."""
        index = np.array(self.raw["group_index"])
        return [np.flatnonzero(index == group) for group in np.unique(index)]

    def tokens(self, name: str) -> Tensor:
        """An entry of the batch, fp64 [T]; an entry with one number per row is spread over its tokens."""
        rows = self.raw[name]
        if not isinstance(rows[0], list):
            rows = [[value] * length for value, length in zip(rows, self.lens, strict=True)]
        return self.pack(rows)

    def pack(self, rows: list[list[float]]) -> Tensor:
        if [len(row) for row in rows] != self.lens:
            raise ValueError(f"rows of lengths {[len(row) for row in rows]}, expected {self.lens}")
        return torch.tensor([value for row in rows for value in row], dtype=torch.float64)

    def mask(self, name: str | None = None) -> Tensor:
        return torch.ones(sum(self.lens), dtype=torch.bool) if name is None else self.tokens(name).bool()

    def segments(self, mask_T: Tensor | None = None) -> Segments:
        ids_T = torch.repeat_interleave(torch.arange(len(self.lens)), torch.tensor(self.lens))
        return Segments(ids_T, self.mask() if mask_T is None else mask_T, len(self.lens))

    def denominators(self, mask_T: Tensor | None = None) -> Denominators:
        segments = self.segments(mask_T)
        positive_T = segments.spread(torch.tensor(self.rewards > 0)) & segments.mask_T
        return Denominators(int(segments.mask_T.sum()), int((segments.counts_S > 0).sum()), int(positive_T.sum()))

    def inputs(self, case: dict[str, Any], **changes: Any) -> LossInputs:
        """Everything a loss can read, `new` and `adv` as the case names them."""
        segments = self.segments()
        fields: dict[str, Any] = {
            "policy_logprobs_T": self.tokens(case["new"]).requires_grad_(),
            "old_logprobs_T": self.tokens("old"),
            "rollout_logprobs_T": self.tokens("rollout"),
            "ref_logprobs_T": self.tokens("ref"),
            "advantages_T": self.tokens(case["adv"]),
            "loss_mask_T": segments.mask_T,
            "segment_ids_T": segments.ids_T,
            "num_segments": segments.num,
            "is_correct_S": torch.tensor(self.rewards > 0),
            "versions_T": self.tokens("behaviour_version").long(),
            "denominators": self.denominators(),
        }
        return LossInputs(**{**fields, **changes})

    def section_loss(self, case: dict[str, Any], section: AlgorithmSection, **changes: Any) -> dict[str, Any]:
        """Loss and gradient of a whole section. A peer may do what our configuration refuses (k1 as a loss): no check."""
        inputs = self.inputs(case, **changes)
        algorithm = Algorithm(section, section.name, frozenset())
        return loss_and_grad(algorithm.loss(inputs).loss, inputs.policy_logprobs_T)

    def token_loss(
        self, case: dict[str, Any], mode: str, compute: Callable[[LossInputs], Tensor], **changes: Any
    ) -> dict[str, Any]:
        """Loss and gradient of a per-token loss, aggregated."""
        inputs = self.inputs(case, **changes)
        weights_T = token_weights(mode, inputs.build_segments(), inputs.denominators)
        return loss_and_grad(aggregate(compute(inputs), weights_T), inputs.policy_logprobs_T)


def loss_and_grad(loss: Tensor, leaf_T: Tensor) -> dict[str, Any]:
    (grad_T,) = torch.autograd.grad(loss, leaf_T)
    return {"loss": loss.detach(), "grad": grad_T}
