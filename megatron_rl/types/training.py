"""Nouns of training: samples, packed microbatches and the global denominators.

Shape suffixes: _S sequences in a microbatch, _T packed tokens, _L tokens of one sample.

Every per-token array is *token-aligned*: index t describes token t (its loss mask, its log-prob, its version). The
log-prob of the first token of a sequence does not exist and is 0 there. The trainer, and only the trainer, turns this
into the prediction-aligned view that logits have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One scored trajectory, ready to be packed.

    `loss_mask_L` is 1 on tokens that the policy sampled and that are to be trained on. `advantage` is the scalar
    group-relative advantage (0 where the algorithm makes per-token advantages on the trainer ranks).
    `is_correct` is the unshaped metric.
    """

    sample_id: str
    group_id: str
    token_ids_L: np.ndarray  # int64
    loss_mask_L: np.ndarray  # bool
    rollout_logprobs_L: np.ndarray  # float32, 0 outside the response
    versions_L: np.ndarray  # int32, -1 outside the response
    reward: float
    advantage: float
    is_correct: bool
    is_truncated: bool
    num_prompt_tokens: int = 0
    """Leading tokens that all samples of the group have in common; 0: nothing to share."""
    experts_LYK: np.ndarray | None = None  # uint8 or uint16, see `types.routing`
    """The experts that the engine chose; None: nothing to replay."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Sequences packed one after another into T tokens; `cu_seqlens` has S+1 entries and starts with 0.

    An empty microbatch (S = 0, T = 0) is legal: ranks need equal counts. `token_arrays` holds float32 [T] arrays by
    name: rollout_logprobs, advantages, and what `annotate` added (old_logprobs, ref_logprobs, values, returns).

    Every array holds every sequence whole. `shared_prefix_S` only says what need not be computed again: so many leading
    tokens of a sequence are those of the sequence before it (0: it starts a run of its own; the same number throughout
    a run). Empty: nothing is shared.
    """

    token_ids_T: np.ndarray  # int64
    cu_seqlens: np.ndarray  # int32 [S+1]
    loss_mask_T: np.ndarray  # bool
    versions_T: np.ndarray  # int32
    rewards_S: np.ndarray  # float32
    is_correct_S: np.ndarray  # bool
    sample_index_S: np.ndarray  # int32, the position of each sequence in the step's list of samples
    token_arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    shared_prefix_S: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))  # int32 [S] or [0]
    experts_TYK: np.ndarray | None = None
    """The experts to replay (see `types.routing`); None: routers choose for themselves."""

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)


@dataclass(frozen=True, slots=True)
class Denominators:
    """Global counts of one optimizer minibatch, over all data-parallel ranks and microbatches, made before any split.

    `num_sequences` counts sequences with at least one unmasked token. `num_positive_tokens` counts the unmasked tokens
    of correct sequences (the positive-example NLL).
    """

    num_tokens: int
    num_sequences: int
    num_positive_tokens: int


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What one optimizer step consumes. `microbatches[d]` is the list of data-parallel rank d; all lists are equally long."""

    microbatches: tuple[tuple[Microbatch, ...], ...]
    denominators: Denominators


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """What one training step consumes: one or more minibatches of equal data-parallel width."""

    minibatches: tuple[Minibatch, ...]
    num_samples: int
