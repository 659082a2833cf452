from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.rollout.embedded import scoring
from megatron_rl.rollout.embedded.decoder import Decoder
from megatron_rl.rollout.embedded.weights import ShardedWeights
from tests.unit.rollout.embedded.engine_models import MOE, fill, hf_model


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_the_logprobs_of_transformers(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "LOGIT_ELEMENTS", 7 * MOE.vocab_size)  # several chunks of rows
    model = hf_model(MOE, seed=9)
    weights = ShardedWeights(MOE, 2, torch.float32)
    fill(weights, model)
    rng = np.random.default_rng(2)
    sequences = [rng.integers(MOE.vocab_size, size=size).tolist() for size in (9, 1, 31, 0, 2, 14)]
    with torch.inference_mode():
        scores = scoring.score_sequences(Decoder(weights, 32), sequences, temperature)
        for ids, score in zip(sequences, scores, strict=True):
            assert score.dtype == np.float32 and score.shape == (len(ids),)
            if len(ids) > 1:
                logprobs = (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
                expected = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
                np.testing.assert_allclose(score[1:], expected, atol=1e-4)
            assert not score[:1].any()
