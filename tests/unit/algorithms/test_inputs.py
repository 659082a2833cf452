from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_rl.algorithms.inputs import LOGPROB_FLOOR, prepare


def test_everything_gets_one_dtype_and_zeros_under_the_mask(ragged: Any) -> None:
    inputs = ragged(4).inputs([1, 2, 3])  # row 1 is fully masked
    single = replace(
        inputs, policy_logprobs_T=inputs.policy_logprobs_T.detach().float(), advantages_T=inputs.advantages_T.bfloat16()
    )
    ready = prepare(single)
    for name in (
        "policy_logprobs_T",
        "old_logprobs_T",
        "rollout_logprobs_T",
        "ref_logprobs_T",
        "advantages_T",
        "entropy_T",
    ):
        tensor = getattr(ready, name)
        assert tensor.dtype == torch.float32, name
        assert not tensor[~ready.loss_mask_T].any(), name
    assert prepare(inputs).old_logprobs_T.dtype == torch.float64


def test_minus_infinity_is_raised_to_the_floor(ragged: Any) -> None:
    inputs = ragged(4).inputs([0])
    broken = replace(inputs, old_logprobs_T=torch.full_like(inputs.old_logprobs_T, -torch.inf))
    assert prepare(broken).old_logprobs_T.tolist() == [LOGPROB_FLOOR]


def test_nan_counts_only_on_trained_tokens(ragged: Any) -> None:
    inputs = ragged(4).inputs([1, 0])
    advantages_T = inputs.advantages_T.clone()
    advantages_T[0] = torch.nan
    assert not prepare(replace(inputs, advantages_T=advantages_T)).advantages_T.isnan().any()
    with pytest.raises(ValueError, match="NaN on trained tokens in advantages_T, entropy_T"):
        prepare(replace(inputs, advantages_T=advantages_T * torch.nan, entropy_T=advantages_T * torch.nan))
