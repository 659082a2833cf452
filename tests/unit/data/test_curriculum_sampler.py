"""Which prompts a curriculum draws, and that it resumes."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from megatron_rl.config.sections import CurriculumSection
from megatron_rl.data.curriculum_sampler import CurriculumSampler
from megatron_rl.data.errors import DataError
from megatron_rl.data.sampler import PromptSampler
from megatron_rl.scheduling.curriculum import Curriculum
from megatron_rl.types.rollout import Prompt

RATES = {f"s/{index}": (index % 5) / 4 for index in range(60)}
"""Prompt -> how often it is solved: never, a quarter, half, three quarters, always."""


def make(seed=2, **options) -> CurriculumSampler:
    prompts = [Prompt(name, name, (), "1", "s") for name in RATES]
    section = CurriculumSection(enabled=True, **options)
    return CurriculumSampler(PromptSampler([prompts], [1.0], seed), Curriculum(seed), section)


def train(sampler: CurriculumSampler, num_draws: int, count: int = 6) -> list[list[str]]:
    draws = []
    for _ in range(num_draws):
        prompts = sampler.next(count)
        for prompt in prompts:
            sampler.curriculum.observe(prompt.prompt_id, round(8 * RATES[prompt.prompt_id]), 8)
        draws.append([prompt.prompt_id for prompt in prompts])
    return draws


def test_it_prefers_what_is_solved_half_of_the_time():
    sampler = make(num_candidates=4)
    train(sampler, 40)
    drawn = Counter(RATES[name] for draw in train(sampler, 100) for name in draw)
    assert drawn[0.5] > drawn[0.25] > 3 * drawn[0.0] > 0 and drawn[0.75] > 3 * drawn[1.0] > 0
    metrics = sampler.metrics()
    assert metrics["curriculum/known_fraction"] == 1.0 and metrics["curriculum/num_known"] == 60
    assert 0.2 < metrics["curriculum/pass_rate"] < 0.8


def test_one_candidate_per_prompt_leaves_the_epochs_as_they_are():
    plain = PromptSampler([[Prompt(name, name, (), "1", "s") for name in RATES]], [1.0], 2)
    sampler = make(num_candidates=1)
    assert train(sampler, 10) == [[prompt.prompt_id for prompt in plain.next(6)] for _ in range(10)]
    assert all(len(set(draw)) == 6 for draw in train(make(num_candidates=7), 20))


def test_from_easy_to_hard_opens_bins_one_by_one():
    sampler = make(num_candidates=5, order="easy_to_hard", num_bins=5, draws_per_bin=20)
    for name, rate in RATES.items():
        for _ in range(20):
            sampler.curriculum.observe(name, round(8 * rate), 8)
    means = []
    for level in range(5):
        assert sampler.level == level
        draws = train(sampler, 20)
        means.append(sum(RATES[name] for draw in draws for name in draw) / 120)
    assert means[0] > 0.7 > means[-1] and sorted(means, reverse=True)[0] == means[0]
    assert sampler.level == 4


def test_it_resumes_where_it_was():
    first = make(num_candidates=3)
    train(first, 13)
    second = make(num_candidates=3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert train(second, 9) == train(first, 9)
    other = CurriculumSampler(
        PromptSampler([[Prompt("x", "x", (), "1", "s")]], [1.0], 2), Curriculum(2), CurriculumSection(enabled=True)
    )
    with pytest.raises(DataError, match="other prompts, weights or seed"):
        other.load_state_dict(first.state_dict())
