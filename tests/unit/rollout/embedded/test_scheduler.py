from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.rollout.embedded.decoder import Decoder
from megatron_rl.rollout.embedded.generation import Generation
from megatron_rl.rollout.embedded.kv_cache import KVCache
from megatron_rl.rollout.embedded.scheduler import MAX_PADDING_RATIO, PREFILL_TOKENS, Scheduler, plan_prefill
from megatron_rl.rollout.embedded.weights import ShardedWeights
from megatron_rl.types.rollout import FinishReason
from tests.unit.rollout.embedded.engine_models import MOE, fill, hf_model, request


@pytest.fixture(scope="module")
def weights() -> ShardedWeights:
    sharded = ShardedWeights(MOE, 2, torch.float32)
    fill(sharded, hf_model(MOE, seed=8, scale=0.1))
    return sharded


def build(weights: ShardedWeights, num_slots: int, stop_token_ids: tuple[int, ...] = ()) -> Scheduler:
    decoder = Decoder(weights, max_context=48)
    cache = KVCache(MOE, 2, num_slots, 48, torch.float32, torch.device("cpu"))
    return Scheduler(decoder, cache, num_slots, stop_token_ids)


def run(scheduler: Scheduler, generations: list[Generation]) -> list[tuple[tuple[int, ...], FinishReason]]:
    for generation in generations:
        scheduler.add(generation)
    for _ in range(1000):
        if not scheduler.has_work:
            break
        scheduler.step()
    answers = [generation.future.result(timeout=0) for generation in generations]
    assert all(len(segments) == 1 for segments in answers)
    return [(segments[0].token_ids, segments[0].finish_reason) for segments in answers]


def mixed_requests(count: int) -> list[Generation]:
    """Prompts, lengths, seeds, temperatures, filters and stop tokens all vary; some prompts are shared."""
    rng = np.random.default_rng(6)
    prompts = [tuple(rng.integers(MOE.vocab_size, size=rng.integers(1, 12)).tolist()) for _ in range(count // 2)]
    return [
        Generation(
            request(
                f"r{index}",
                prompts[index % len(prompts)],
                seed=2**63 + index,
                max_new_tokens=1 + index % 9,
                temperature=(1.0, 0.7, 0.0)[index % 3],
                top_p=(1.0, 0.9)[index % 2],
                top_k=(0, 0, 20)[index % 3],
                stop_token_ids=tuple(range(index % 5 * 4)),
            )
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("num_slots", [2, 3, 16, 64])
def test_a_request_gets_the_same_tokens_whatever_runs_beside_it(weights: ShardedWeights, num_slots: int) -> None:
    together = run(build(weights, num_slots), mixed_requests(40))
    alone = [run(build(weights, 1), [generation])[0] for generation in mixed_requests(40)]
    assert together == alone
    reasons = {reason for _, reason in together}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_siblings_share_one_prefill_and_differ_by_seed(
    weights: ShardedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = build(weights, num_slots=6)
    shapes = []
    prefill = scheduler._decoder.prefill
    monkeypatch.setattr(
        scheduler._decoder, "prefill", lambda ids, *rest: shapes.append(ids.shape) or prefill(ids, *rest)
    )
    prompts = [(5, 6, 7)] * 3 + [(9, 8)] * 3
    answers = run(scheduler, [Generation(request(str(i), p, seed=i)) for i, p in enumerate(prompts)])
    assert shapes == [(2, 3)]
    assert len({tokens for tokens, _ in answers}) == 6


def test_logprobs_after_retraction_are_those_of_an_undisturbed_run(weights: ShardedWeights) -> None:
    generations, undisturbed = mixed_requests(12), mixed_requests(12)
    run(build(weights, 4), undisturbed)
    scheduler = build(weights, 4)
    for generation in generations:
        scheduler.add(generation)
    steps = 0
    while scheduler.has_work:
        scheduler.step()
        steps += 1
        if steps % 3 == 0:
            scheduler.retract()
            assert scheduler.num_running == 0
    for generation, expected in zip(generations, undisturbed, strict=True):
        (left,), (right,) = generation.future.result(timeout=0), expected.future.result(timeout=0)
        assert left.token_ids == right.token_ids
        np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-5)


def test_dropping_a_request_leaves_the_others_alone(weights: ShardedWeights) -> None:
    generations, undisturbed = mixed_requests(9), mixed_requests(9)
    expected = run(build(weights, 4), undisturbed)
    scheduler = build(weights, 4)
    for generation in generations:
        scheduler.add(generation)
    scheduler.step()
    scheduler.drop(generations[8])  # waits
    running = list(scheduler._pool.generations)
    scheduler.drop(running[0])
    while scheduler.has_work:
        scheduler.step()
    dropped = {id(generations[8]), id(running[0])}
    for generation, (tokens, _) in zip(generations, expected, strict=True):
        if id(generation) in dropped:
            assert not generation.future.done()
        else:
            assert generation.future.result(timeout=0)[0].token_ids == tokens


def test_counts_add_up(weights: ShardedWeights) -> None:
    scheduler = build(weights, 3)
    answers = run(scheduler, mixed_requests(10))
    assert scheduler.num_tokens_generated == sum(len(tokens) for tokens, _ in answers)
    assert 0 < scheduler.busy_slot_s <= scheduler.capacity_slot_s


def test_max_context_ends_a_request(weights: ShardedWeights) -> None:
    ((tokens, reason),) = run(build(weights, 1), [Generation(request("long", range(40), max_new_tokens=100))])
    assert (len(tokens), reason) == (8, FinishReason.LENGTH)


def test_plan_prefill_keeps_to_its_bounds() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        prompts = [tuple(rng.integers(9, size=rng.integers(1, 900)).tolist()) for _ in range(rng.integers(1, 30))]
        count = plan_prefill(prompts)
        distinct = set(prompts[:count])
        padded = max(map(len, distinct)) * len(distinct)
        assert 1 <= count <= len(prompts)
        assert padded <= PREFILL_TOKENS
        assert padded <= MAX_PADDING_RATIO * sum(map(len, distinct))
    assert plan_prefill([(1,) * 3000] * 50 + [(2,) * 3000]) == 50  # equal prompts count once
    assert plan_prefill([(1,) * (PREFILL_TOKENS + 1), (2,)]) == 1
