"""The decoder against transformers, for every feature that the dims can switch on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.rollout.embedded import products
from megatron_rl.rollout.embedded.decoder import Decoder, PromptSlots
from megatron_rl.rollout.embedded.kv_cache import KVCache
from megatron_rl.rollout.embedded.weights import ShardedWeights
from tests.unit.rollout.embedded.engine_models import DENSE, MOE, fill, hf_model

CASES = {
    "moe": (MOE, (1, 2, 4)),  # at tp 4 the two key-value heads are replicated
    "moe_not_renormalised": (dataclasses.replace(MOE, norm_topk_prob=False, top_k=3), (1, 2)),
    "moe_tied": (dataclasses.replace(MOE, tied_embeddings=True), (2,)),
    "moe_aligned": (dataclasses.replace(MOE, moe_ffn_size=48), (1, 2)),  # the grouped kernel instead of the loop
    "dense_tied": (DENSE, (1, 3)),
    "dense_untied": (dataclasses.replace(DENSE, tied_embeddings=False, rope_theta=500.0), (1, 3)),
    "dense_one_kv_head": (dataclasses.replace(DENSE, num_kv_heads=1), (2, 6)),
    "dense_no_gqa": (dataclasses.replace(DENSE, num_kv_heads=6), (1, 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_prefill_and_decode_give_the_logits_of_transformers(case: str) -> None:
    dims, sizes = CASES[case]
    model = hf_model(dims, seed=3)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(dims.vocab_size, (5, 23), generator=generator)
    with torch.inference_mode():
        expected = model(ids).logits
        for tp in sizes:
            prefilled, decoded = run_both_ways(model, dims, tp, ids)
            assert (prefilled - expected).abs().max() < 1e-4
            assert (decoded - expected[:, 7:]).abs().max() < 1e-4
            assert (prefilled - expected).abs().mean() < 1e-6 * expected.abs().max()


def run_both_ways(
    model: torch.nn.Module, dims: ModelDims, tp: int, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of one prefill [B, L, V], and of 7 tokens prefilled and the others decoded one by one [B, L - 7, V]."""
    weights = ShardedWeights(dims, tp, torch.float32)
    fill(weights, model)
    decoder = Decoder(weights, max_context=40)
    cache = KVCache(dims, tp, num_slots=9, max_context=40, dtype=torch.float32, device=torch.device("cpu"))
    prefilled = decoder.logits(decoder.prefill(ids).flatten(0, 1)).view(*ids.shape, -1)
    slots = torch.arange(len(ids)).flip(0)  # the last sequence runs in slot 0
    decoder.prefill(ids[:, :7], PromptSlots(cache, torch.arange(len(ids)), slots))
    cache.move(0, 8, 7)  # there and back again
    cache.data[:, :, 0] = 0
    cache.move(8, 0, 7)
    decoded = []
    for position in range(7, ids.shape[1]):
        positions = torch.full((len(ids),), position)
        hidden = decoder.decode(ids[slots, position], positions, position + 1, cache)
        decoded.append(decoder.logits(hidden)[slots, : dims.vocab_size])
    return prefilled[..., : dims.vocab_size], torch.stack(decoded, dim=1)


@pytest.mark.parametrize("dims", [dataclasses.replace(MOE, moe_ffn_size=48), DENSE], ids=["moe", "dense"])
def test_bfloat16_stays_close_to_float32(dims: ModelDims) -> None:
    model = hf_model(dims, seed=4, scale=0.1)
    ids = torch.randint(dims.vocab_size, (3, 17), generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        exact = model(ids).logits.log_softmax(-1)
        reference = model.bfloat16()(ids).logits.float().log_softmax(-1)
        weights = ShardedWeights(dims, 2 if dims.num_experts else 3, torch.bfloat16)
        fill(weights, model)
        decoder = Decoder(weights, max_context=17)
        logits = decoder.logits(decoder.prefill(ids).flatten(0, 1)).view(3, 17, -1)
        assert logits.dtype is torch.float32
        error = (logits[..., : dims.vocab_size].log_softmax(-1) - exact).abs()
    assert error.mean() < 1.5 * (reference - exact).abs().mean()  # no worse than transformers in bf16
    assert error.mean() > 0


@pytest.mark.parametrize("dims", [dataclasses.replace(MOE, moe_ffn_size=48), DENSE], ids=["moe", "dense"])
def test_widened_copies_follow_the_weights(dims: ModelDims, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(dims.vocab_size, (2, 5), generator=torch.Generator().manual_seed(6))
    weights = ShardedWeights(dims, 2 if dims.num_experts else 3, torch.bfloat16)

    def logits(decoder: Decoder) -> torch.Tensor:
        return decoder.logits(decoder.prefill(ids).flatten(0, 1))[:, : dims.vocab_size]

    with torch.inference_mode():
        monkeypatch.setattr(products, "lacks_bf16_units", lambda: False)
        stored = Decoder(weights, max_context=9)
        monkeypatch.setattr(products, "lacks_bf16_units", lambda: True)
        widened = Decoder(weights, max_context=9)
        for seed in (1, 2):
            fill(weights, hf_model(dims, seed=seed, scale=0.1).bfloat16())
            widened.forget_weights()
            plain = logits(stored)
            # Two roundings apart at most: the copies hold the same values.
            assert (logits(widened) - plain).abs().max() < 0.02 * plain.abs().max()


def test_padded_vocabulary_has_no_probability() -> None:
    weights = ShardedWeights(MOE, 2, torch.float32)
    fill(weights, hf_model(MOE, seed=1))
    logits = Decoder(weights, 8).logits(torch.ones(3, MOE.hidden_size))
    assert logits.shape == (3, 128)
    assert torch.isneginf(logits[:, MOE.vocab_size :]).all()
    assert torch.isfinite(logits[:, : MOE.vocab_size]).all()


def test_ragged_decode_ignores_what_an_earlier_sequence_left_in_the_slot() -> None:
    model = hf_model(DENSE, seed=2)
    weights = ShardedWeights(DENSE, 1, torch.float32)
    fill(weights, model)
    decoder = Decoder(weights, max_context=32)
    cache = KVCache(DENSE, 1, num_slots=3, max_context=32, dtype=torch.float32, device=torch.device("cpu"))
    cache.data.normal_(generator=torch.Generator().manual_seed(0)).mul_(100)
    rng = np.random.default_rng(4)
    lengths = [3, 11, 6]
    ids = torch.from_numpy(rng.integers(DENSE.vocab_size, size=(3, 12)))
    with torch.inference_mode():
        decoder.prefill(ids[:, :11], PromptSlots(cache, torch.arange(3), torch.arange(3)))
        positions = torch.tensor(lengths)
        last = ids[torch.arange(3), positions]
        logits = decoder.logits(decoder.decode(last, positions, 12, cache))
        for row, length in enumerate(lengths):
            expected = model(ids[row : row + 1, : length + 1]).logits[0, -1]
            torch.testing.assert_close(logits[row, : DENSE.vocab_size], expected, atol=1e-4, rtol=1e-5)
