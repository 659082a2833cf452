"""What a real server samples and what it says about it, against transformers."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest
import torch

from megatron_rl.rollout.sglang.errors import EngineReplyError
from megatron_rl.types.rollout import FinishReason, GenerationRequest, SamplingParams

pytestmark = pytest.mark.sglang

NUM_TOKENS = 13
PROMPT = (7, 190, 33, 2, 118)
_counter = iter(range(10**6))


def make_request(prompt=PROMPT, *, seed=11, **sampling) -> GenerationRequest:
    params = SamplingParams(**{"max_new_tokens": NUM_TOKENS, **sampling})
    return GenerationRequest(f"request-{next(_counter)}", tuple(prompt), params, seed)


def reference_logprobs(model, token_ids, temperature=1.0) -> torch.Tensor:
    """[L-1] log-prob of each token but the first, by a plain forward of the whole sequence."""
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].double() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def test_the_load_says_what_it_has_prefilled(engine, loop):
    before = loop(engine.load())
    loop(engine.generate(make_request(range(1, 60), max_new_tokens=2)))
    deadline = time.monotonic() + 30.0  # the server takes its counts now and then, not when it is asked
    while (after := loop(engine.load())).num_prefill_tokens == before.num_prefill_tokens and time.monotonic() < deadline:
        loop(asyncio.sleep(0.1))
    assert after.num_prefill_tokens > before.num_prefill_tokens and after.prefill_s > before.prefill_s
    assert after.num_preempted == 0 and 0 <= after.kv_fraction < 1


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logprobs_are_those_of_the_sampled_distribution(engine, tiny_model, loop, temperature):
    (segment,) = loop(engine.generate(make_request(temperature=temperature)))
    expected = reference_logprobs(tiny_model.reference, (*PROMPT, *segment.token_ids), temperature)[len(PROMPT) - 1 :]
    assert segment.finish_reason is FinishReason.LENGTH and len(segment.token_ids) == NUM_TOKENS
    torch.testing.assert_close(torch.tensor(segment.logprobs).double(), expected, atol=1e-3, rtol=0)
    # The test can tell temperatures apart.
    other = reference_logprobs(tiny_model.reference, (*PROMPT, *segment.token_ids), temperature * 1.2)
    assert (other[len(PROMPT) - 1 :] - expected).abs().max() > 0.05


def test_greedy_takes_the_most_likely_token(engine, tiny_model, loop):
    (segment,) = loop(engine.generate(make_request(temperature=0.0)))
    ids = torch.tensor([(*PROMPT, *segment.token_ids)])
    with torch.no_grad():
        best = tiny_model.reference(ids).logits[0, len(PROMPT) - 1 : -1].argmax(-1)
    assert tuple(best.tolist()) == segment.token_ids


def test_experts_are_those_that_the_routers_choose(engine, tiny_model, loop):
    (segment,) = loop(engine.generate(make_request()))
    ids = torch.tensor([(*PROMPT, *segment.token_ids)])
    with torch.no_grad():
        logits = tiny_model.reference(ids, output_router_logits=True).router_logits
    top_k = tiny_model.reference.config.num_experts_per_tok
    expected = torch.stack([layer.topk(top_k, dim=-1).indices for layer in logits], dim=1)
    assert segment.experts.tolist() == expected[:-1].tolist()


def test_scores_equal_a_forward(engine, tiny_model, loop):
    token_ids = (
        *torch.randint(211, (60,), generator=torch.Generator().manual_seed(3)).tolist(),
        210,
    )  # the last id too
    (scores,) = loop(engine.score([token_ids]))
    assert len(scores) == 61 and scores[0] == 0.0
    expected = reference_logprobs(tiny_model.reference, token_ids)
    torch.testing.assert_close(torch.tensor(scores[1:]).double(), expected, atol=1e-3, rtol=0)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(engine, loop):
    request = make_request(seed=2**63 + 12345, max_new_tokens=29)

    def again():
        return dataclasses.replace(request, request_id=f"again-{next(_counter)}")

    async def in_a_batch():
        others = [make_request((*PROMPT, i), seed=i, max_new_tokens=20 + i) for i in range(20)]
        answers = await asyncio.gather(*(engine.generate(r) for r in (*others[:9], again(), *others[9:])))
        return answers[9], {answer[0].token_ids[:8] for answer in answers}

    (alone,) = loop(engine.generate(again()))
    (batched,), distinct = loop(in_a_batch())
    assert alone.token_ids == batched.token_ids
    assert len(distinct) == 21, "other seeds and prompts give other tokens"
    (other_seed,) = loop(engine.generate(dataclasses.replace(again(), seed=request.seed + 1)))
    assert other_seed.token_ids != alone.token_ids


def test_a_stop_token_ends_the_answer_and_is_part_of_it(engine, loop):
    (free,) = loop(engine.generate(make_request(seed=21)))
    stop = next(token for i, token in enumerate(free.token_ids) if i >= 3 and token not in free.token_ids[:i])
    (stopped,) = loop(engine.generate(make_request(seed=21, stop_token_ids=(stop,))))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_a_prompt_beyond_the_context_is_refused_in_one_line(engine, loop):
    with pytest.raises(EngineReplyError, match=r"^engine shared: /generate answered 400: .*(?!\n)"):
        loop(engine.generate(make_request([5] * 600)))
