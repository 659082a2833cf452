"""Pass rates, draws and budgets."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from megatron_rl.scheduling.curriculum import Curriculum


def seasoned(seed: int = 3) -> Curriculum:
    curriculum = Curriculum(seed)
    for _ in range(30):
        curriculum.observe("easy", 8, 8)
        curriculum.observe("half", 4, 8)
        curriculum.observe("hard", 0, 8)
    return curriculum


def test_the_weight_is_largest_where_half_are_solved():
    curriculum = seasoned()
    assert curriculum.pass_rate("easy") > 0.95 > curriculum.pass_rate("half") > 0.45 > 0.05 > curriculum.pass_rate("hard")
    assert curriculum.weight("half") > curriculum.weight("new") > curriculum.weight("easy") > 0
    assert curriculum.weight("new") == pytest.approx(1 / 6)  # the mean of p(1-p) over [0, 1]


def test_evidence_fades():
    curriculum = seasoned()
    for _ in range(6):
        curriculum.observe("hard", 8, 8)
    assert curriculum.pass_rate("hard") > 0.8


def test_draws_follow_the_weights_and_keep_the_order():
    curriculum = seasoned()
    prompts = ["easy", "half", "new", "hard"]
    drawn: Counter[int] = Counter()
    for _ in range(2000):
        chosen = curriculum.choose(prompts, 1)
        drawn.update(chosen)
    total = sum(map(curriculum.weight, prompts))
    for position, prompt in enumerate(prompts):
        assert drawn[position] / 2000 == pytest.approx(curriculum.weight(prompt) / total, abs=0.04)
    assert curriculum.choose(prompts, 4) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="5 prompts wanted of 4"):
        curriculum.choose(prompts, 5)


def test_a_budget_is_spent_whole():
    curriculum = seasoned()
    counts = curriculum.budget(["easy", "half", "new", "hard"], 32)
    assert sum(counts) == 32 and min(counts) >= 2
    assert counts[1] > counts[2] > counts[0] == counts[3]
    assert curriculum.budget([], 0) == []
    with pytest.raises(ValueError, match="7 samples are fewer than 2 for each of 4"):
        curriculum.budget(["a", "b", "c", "d"], 7)


def test_bins_go_from_easy_to_hard():
    assert seasoned().bins(["hard", "half", "easy", "new"], 3) == [[2], [1, 3], [0]]


def test_it_resumes_where_it_was():
    first = seasoned()
    second = Curriculum(99)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    prompts = [f"p{i}" for i in range(9)] + ["half"]
    assert [first.choose(prompts, 4) for _ in range(5)] == [second.choose(prompts, 4) for _ in range(5)]
    assert second.pass_rate("easy") == first.pass_rate("easy")
