import json
import random
from collections import Counter

import pytest

from megatron_rl.data.errors import DataError
from megatron_rl.data.sampler import PromptSampler
from megatron_rl.types.rollout import Prompt


def make_prompts(source: str, count: int) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"{source}/{index}", text=f"{source} {index}", token_ids=(), answer="1", source=source)
        for index in range(count)
    ]


def make_sampler(sizes=(7, 19), weights=(1.0, 2.0), seed=3) -> PromptSampler:
    return PromptSampler([make_prompts(f"s{index}", size) for index, size in enumerate(sizes)], weights, seed)


def ids(prompts) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]


def test_it_is_deterministic_by_seed():
    first, again, other = make_sampler(), make_sampler(), make_sampler(seed=4)
    draws = [ids(first.next(5)) for _ in range(20)]
    assert draws == [ids(again.next(5)) for _ in range(20)]
    assert draws != [ids(other.next(5)) for _ in range(20)]


def test_an_epoch_draws_every_prompt_once_and_the_next_one_in_another_order():
    sampler = make_sampler(sizes=(11,), weights=(1.0,))
    first, second = ids(sampler.next(11)), ids(sampler.next(11))
    assert sorted(first) == sorted(second) == sorted(f"s0/{index}" for index in range(11))
    assert first != second


@pytest.mark.parametrize("num_prompts", [1, 4, 5, 7])
def test_a_draw_repeats_no_prompt_also_across_epochs(num_prompts):
    sampler = make_sampler(sizes=(7,), weights=(1.0,))
    counts: Counter[str] = Counter()
    for _ in range(40):
        draw = ids(sampler.next(num_prompts))
        assert len(set(draw)) == num_prompts
        counts.update(draw)
        assert max(counts.values()) - min(counts[f"s0/{index}"] for index in range(7)) <= 1


def test_sources_mix_by_weight():
    drawn = Counter(prompt.source for prompt in make_sampler().next(9))
    assert drawn == {"s0": 3, "s1": 6}


def test_it_resumes_at_any_step_through_json():
    rng = random.Random(5)
    sampler = make_sampler()
    for _ in range(30):
        sampler.next(rng.randint(1, 9))
        resumed = make_sampler()
        resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
        ahead = make_sampler()
        ahead.load_state_dict(sampler.state_dict())
        assert [ids(resumed.next(6)) for _ in range(5)] == [ids(ahead.next(6)) for _ in range(5)]
    resumed = make_sampler()
    resumed.load_state_dict(sampler.state_dict())
    assert [ids(resumed.next(8)) for _ in range(20)] == [ids(sampler.next(8)) for _ in range(20)]


@pytest.mark.parametrize("change", [{"sizes": (7, 18)}, {"weights": (1.0, 3.0)}, {"seed": 4}])
def test_a_state_over_other_data_is_refused(change):
    with pytest.raises(DataError, match="other prompts, weights or seed"):
        make_sampler(**change).load_state_dict(make_sampler().state_dict())


def test_a_draw_larger_than_a_source_is_refused():
    with pytest.raises(DataError, match=r"source 's0' has 7 training prompts.*run.prompts_per_step"):
        make_sampler().next(26)


def test_an_empty_source_is_a_broken_call():
    with pytest.raises(ValueError, match="no empty source"):
        PromptSampler([make_prompts("a", 2), []], [1.0, 1.0], 0)
