import math

import pytest

from megatron_rl.rewards.registry import REWARDS, CheckedReward, RewardError, load_reward, reference_answer
from megatron_rl.types.rollout import Prompt, RewardResult


def make_prompt(answer: str = "7") -> Prompt:
    return Prompt(prompt_id="sums/3", text="3 + 4 =", token_ids=(), answer=answer, source="sums")


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_every_name_in_the_table_loads(name):
    assert callable(load_reward(name).score)


def test_an_unknown_name_gets_the_nearest_known_one():
    with pytest.raises(RewardError, match="'exact_macth'; did you mean 'exact_match'"):
        load_reward("exact_macth")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_names_prompt_and_source(bad):
    reward = CheckedReward("broken", lambda prompt, text, is_finished: RewardResult(bad, False))
    with pytest.raises(RewardError, match=r"'broken'.*'sums/3'.*'sums'"):
        reward(make_prompt(), "7", True)


@pytest.mark.parametrize("answer", ["", "  \n"])
@pytest.mark.parametrize("name", ["exact_match", "last_integer", "math_verify"])
def test_an_empty_reference_answer_names_prompt_and_source(name, answer):
    with pytest.raises(RewardError, match="'sums/3' of source 'sums' has an empty reference answer"):
        load_reward(name)(make_prompt(answer), "7", is_finished=True)


def test_the_reference_answer_loses_its_outer_white_space():
    assert reference_answer(make_prompt(" 7\n")) == "7"
