import json

import pytest

from megatron_rl.rewards import reasoning_gym_tasks
from megatron_rl.rewards.reasoning_gym_tasks import (
    generate_entries,
    score_reasoning_gym,
    score_reasoning_gym_strict,
)
from megatron_rl.rewards.registry import RewardError
from megatron_rl.types.rollout import Prompt

WORDS = {"min_word_len": 3, "max_word_len": 6}


def make_prompt(entry, **changes) -> Prompt:
    # What a run directory keeps: the metadata after a round trip through JSON.
    metadata = json.loads(json.dumps(entry.metadata))
    fields = {"prompt_id": "w/0", "text": entry.question, "token_ids": (), "answer": entry.answer, "source": "w"}
    return Prompt(**(fields | {"metadata": metadata} | changes))


def test_generation_is_deterministic_and_depends_on_the_seed():
    first = [entry.question for entry in generate_entries("spell_backward", WORDS, seed=5, size=40)]
    again = [entry.question for entry in generate_entries("spell_backward", WORDS, seed=5, size=40)]
    other = [entry.question for entry in generate_entries("spell_backward", WORDS, seed=900, size=40)]
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("task", "params"),
    [("spell_backward", WORDS), ("chain_sum", {"max_digits": 2}), ("number_sorting", {}), ("letter_counting", {})],
)
def test_the_reference_answer_earns_the_full_score_in_a_fresh_process_state(task, params):
    entries = list(generate_entries(task, params, seed=3, size=9))
    reasoning_gym_tasks._dataset.cache_clear()
    reasoning_gym_tasks._entry.cache_clear()
    for entry in reversed(entries):
        result = score_reasoning_gym(make_prompt(entry), f" {entry.answer}\n", True)
        assert (result.reward, result.is_correct) == (1.0, True)


def test_partial_credit_is_reward_but_not_correct():
    entry = next(iter(generate_entries("spell_backward", WORDS, seed=3, size=1)))
    wrong_last = entry.answer[:-1] + "?"
    result = score_reasoning_gym(make_prompt(entry), wrong_last, True)
    assert 0.5 < result.reward < 1.0
    assert not result.is_correct
    strict = score_reasoning_gym_strict(make_prompt(entry), wrong_last, True)
    assert (strict.reward, strict.is_correct) == (0.0, False)
    assert strict.details["task_score"] == result.reward


def test_strict_wants_an_answer_that_ended_by_itself():
    entry = next(iter(generate_entries("spell_backward", WORDS, seed=3, size=1)))
    assert score_reasoning_gym_strict(make_prompt(entry), entry.answer, True).reward == 1.0
    assert score_reasoning_gym_strict(make_prompt(entry), entry.answer, False).reward == 0.0


@pytest.mark.parametrize(
    ("task", "params", "message"),
    [
        ("spel_backward", {}, "no task 'spel_backward'; did you mean 'spell_backward'"),
        ("spell_backward", {"min_word_length": 3}, "no parameter 'min_word_length'; did you mean 'min_word_len'"),
        ("spell_backward", {"seed": 3}, "no parameter 'seed'"),
        ("spell_backward", {"min_word_len": 5, "max_word_len": 4}, "refuses .*max_word_len must be >= min_word_len"),
    ],
)
def test_a_wrong_task_or_parameter_is_named(task, params, message):
    with pytest.raises(RewardError, match=message):
        list(generate_entries(task, params, seed=1, size=2))


def test_a_prompt_of_another_source_is_refused():
    entry = next(iter(generate_entries("spell_backward", WORDS, seed=3, size=1)))
    with pytest.raises(RewardError, match=r"'w/0' of source 'w' was not made by reasoning-gym.*task, params"):
        score_reasoning_gym(make_prompt(entry, metadata={}), "x", True)


def test_an_entry_that_no_longer_generates_the_same_answer_is_refused():
    entry = next(iter(generate_entries("spell_backward", WORDS, seed=3, size=1)))
    with pytest.raises(RewardError, match=r"'w/0'.*same reasoning-gym version"):
        score_reasoning_gym(make_prompt(entry, answer="changed"), "x", True)
