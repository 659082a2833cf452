import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rewards.matching import find_last_integer, score_exact_match, score_last_integer
from megatron_rl.rewards.registry import RewardError
from megatron_rl.types.rollout import Prompt


def make_prompt(answer: str) -> Prompt:
    return Prompt(prompt_id="p/1", text="?", token_ids=(), answer=answer, source="p")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12 + 7 = 19", 19),
        ("5 - 9 = -4", -4),
        ("5-9=-4", -4),
        ("12-7", 7),
        ("12 - 7", 7),
        ("(3 + 1) - 2", 2),
        ("= \u22124", -4),
        ("The answer is 19.", 19),
        ("1,234 of them", 1234),
        ("about 3.5", None),
        ("it is 4, not 3.5", None),
        ("none", None),
        ("", None),
        ("x2 = 11\n\nthen 8", 8),
    ],
)
def test_the_last_number_counts_when_it_is_an_integer(text, expected):
    assert find_last_integer(text) == expected


@given(left=st.integers(0, 10**6), right=st.integers(-(10**6), 10**6))
def test_an_equation_answers_its_right_side(left, right):
    assert find_last_integer(f"{left} - {left - right} = {right}") == right


@pytest.mark.parametrize(
    ("score", "answer", "response", "is_finished", "reward"),
    [
        (score_last_integer, "-4", "5 - 9 = -4", True, 1.0),
        (score_last_integer, "-4", "5 - 9 = -4", False, 0.0),
        (score_last_integer, "-4", "5 - 9 = 4", True, 0.0),
        (score_last_integer, "1,200", "1200", True, 1.0),
        (score_exact_match, "alluc", " alluc\n", True, 1.0),
        (score_exact_match, "alluc", "Alluc", True, 0.0),
        (score_exact_match, "alluc", "alluc", False, 0.0),
        (score_exact_match, "alluc", "alluc alluc", True, 0.0),
    ],
)
def test_only_a_right_answer_that_ended_by_itself_earns(score, answer, response, is_finished, reward):
    result = score(make_prompt(answer), response, is_finished)
    assert (result.reward, result.is_correct) == (reward, reward == 1.0)


def test_last_integer_refuses_a_reference_that_is_no_integer():
    with pytest.raises(RewardError, match=r"'p/1' of source 'p'.*needs an integer.*'1/2'"):
        score_last_integer(make_prompt("1/2"), "1", True)
