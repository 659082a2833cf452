from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.trainer.logprobs import compute_chunked_logprobs

NUM_ROWS, HIDDEN, VOCAB, PADDED = 37, 19, 211, 224


def make_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(NUM_ROWS, HIDDEN, generator=generator, dtype=torch.float32).to(dtype).requires_grad_()
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float32).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (NUM_ROWS,), generator=generator)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(hidden @ weight[:VOCAB].T / temperature, dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 10, 37, 1000])
@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.3])
def test_values_and_gradients_equal_the_plain_path(chunk_tokens: int, entropy_coefficient: float) -> None:
    """The plain path in fp64, so that a difference is ours."""
    hidden, weight, targets = make_inputs(torch.float32)
    factors = torch.randn(NUM_ROWS, generator=torch.Generator().manual_seed(6))
    exact = [operand.detach().double().requires_grad_() for operand in (hidden, weight)]
    expected = plain(*exact, targets, 0.7)
    wanted = torch.autograd.grad((expected[0] * factors).sum() + entropy_coefficient * (expected[1] * factors).sum(), exact)
    actual = compute_chunked_logprobs(hidden, weight, targets, temperature=0.7, vocab_size=VOCAB, chunk_tokens=chunk_tokens)
    got = torch.autograd.grad((actual[0] * factors).sum() + entropy_coefficient * (actual[1] * factors).sum(), (hidden, weight))
    for a, b in zip((*actual, *got), (*expected, *wanted), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=2e-5)
    assert not got[1][VOCAB:].any()


def test_bf16_inputs_give_fp32_logprobs_and_bf16_gradients() -> None:
    hidden, weight, targets = make_inputs(torch.bfloat16)
    logprobs, entropies = compute_chunked_logprobs(hidden, weight, targets, temperature=1.0, vocab_size=VOCAB, chunk_tokens=8)
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs, plain(hidden.float(), weight.float(), targets, 1.0)[0], rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16


def test_no_rows_give_zero_gradients() -> None:
    hidden, weight, targets = make_inputs(torch.float32)
    logprobs, _ = compute_chunked_logprobs(hidden[:0], weight, targets[:0], temperature=1.0, vocab_size=VOCAB, chunk_tokens=8)
    logprobs.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, Tensor):
                self.largest = max(self.largest, item.numel())
        return result


def test_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    """Forward and backward; the weight and its gradient are what they are."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(4096, 8, generator=generator, requires_grad=True)
    weight = torch.randn(5000, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, 5000, (4096,), generator=generator)
    with LargestTensor() as seen:
        logprobs, entropies = compute_chunked_logprobs(
            hidden, weight, targets, temperature=0.9, vocab_size=5000, chunk_tokens=64
        )
        (logprobs.sum() + entropies.sum()).backward()
    assert seen.largest == 64 * 5000
