import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.errors import DataError
from megatron_rl.data.split import normalised_text, question_key, split_prompts
from megatron_rl.types.rollout import Prompt


def make_prompts(source: str, texts) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"{source}/{index}", text=text, token_ids=(), answer="1", source=source)
        for index, text in enumerate(texts)
    ]


def sums(limit: int) -> list[str]:
    return [f"{left} + {right} =" for left in range(limit) for right in range(limit)]


def test_texts_that_differ_in_case_or_white_space_are_one():
    assert normalised_text(" What is\n 2+3 ?") == normalised_text("what  IS 2+3 ?")
    assert normalised_text("2+3") != normalised_text("3+2")


@pytest.mark.parametrize("left, right", [("3 + 5 =", "5 + 3 ="), ("12+7", "7 + 12"), ("Sum of a and b", "sum of b and A")])
def test_reordered_questions_share_a_key(left, right):
    assert question_key(left) == question_key(right)


@pytest.mark.parametrize("left, right", [("3 + 5 =", "3 - 5 ="), ("35 + 1", "3 + 51"), ("abc=", "cba=")])
def test_other_questions_have_other_keys(left, right):
    assert question_key(left) != question_key(right)


@settings(deadline=None)
@given(num_eval=st.integers(1, 30), seed=st.integers(0, 999), overlap=st.booleans())
def test_no_question_is_on_both_sides_and_evaluation_is_complete(num_eval, seed, overlap):
    second = sums(5) if overlap else [f"spell word{index}" for index in range(41)]
    prompts = [make_prompts("a", sums(9)), make_prompts("b", [text + " ?" for text in second] if overlap else second)]
    training, evaluation = split_prompts(prompts, [2.0, 1.0], num_eval, seed)
    assert len({prompt.prompt_id for prompt in evaluation}) == num_eval
    assert abs(sum(prompt.source == "a" for prompt in evaluation) - 2 * num_eval / 3) < 1.0
    held_out = {question_key(prompt.text) for prompt in evaluation}
    assert not held_out & {question_key(prompt.text) for source in training for prompt in source}
    assert all(training)


def test_a_question_of_two_sources_is_held_out_of_both():
    shared = [f"what is {index}" for index in range(23)]
    prompts = [make_prompts("a", shared), make_prompts("b", random.Random(1).sample(shared, 23))]
    training, evaluation = split_prompts(prompts, [1.0, 1.0], 12, seed=2)
    held_out = {prompt.text for prompt in evaluation}
    assert not held_out & {prompt.text for source in training for prompt in source}


def test_it_is_deterministic_by_seed():
    prompts = [make_prompts("a", sums(7))]
    assert split_prompts(prompts, [1.0], 9, 4) == split_prompts(prompts, [1.0], 9, 4)
    assert split_prompts(prompts, [1.0], 9, 4)[1] != split_prompts(prompts, [1.0], 9, 5)[1]


def test_no_evaluation_leaves_everything_to_train_on():
    prompts = [make_prompts("a", sums(3))]
    assert split_prompts(prompts, [1.0], 0, 1) == ([prompts[0]], [])


@pytest.mark.parametrize("num_eval", [9, 10, 512])
def test_too_few_distinct_prompts_are_refused_with_both_counts(num_eval):
    with pytest.raises(DataError, match=r"source 'a' has 9 distinct prompts \(6 when reordered .* hold out"):
        split_prompts([make_prompts("a", sums(3))], [1.0], num_eval, 1)
