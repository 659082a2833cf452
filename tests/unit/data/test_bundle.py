import json
import logging

import pytest

from megatron_rl.config.sections import DataSection, SourceSection
from megatron_rl.data.bundle import build_data, sft_pairs
from megatron_rl.data.character_tokenizer import CharacterTokenizer
from megatron_rl.data.errors import DataError
from megatron_rl.data.split import question_key
from megatron_rl.rewards.registry import load_reward
from megatron_rl.types.rollout import Prompt

TOKENIZER = CharacterTokenizer()
WORDS = SourceSection(
    name="words",
    kind="reasoning_gym",
    weight=2.0,
    task="spell_backward",
    params={"min_word_len": 3, "max_word_len": 6},
    prompt_regex=r": (\w+)$",
    prompt_template="{prompt}=",
    size=1500,
    reward="reasoning_gym_strict",
)
SUMS = SourceSection(
    name="sums",
    kind="reasoning_gym",
    task="chain_sum",
    params={"min_terms": 2, "max_terms": 2, "max_digits": 2},
    prompt_regex=": (.*)$",
    size=900,
)


def test_a_mixture_of_two_tasks_end_to_end():
    bundle = build_data(DataSection(sources=(WORDS, SUMS), seed=5), 300, TOKENIZER)
    assert bundle.reward_names == {"words": "reasoning_gym_strict", "sums": "reasoning_gym"}
    assert len({prompt.prompt_id for prompt in bundle.eval_prompts}) == 300
    assert sum(prompt.source == "words" for prompt in bundle.eval_prompts) == 200
    held_out = {question_key(prompt.text) for prompt in bundle.eval_prompts}
    num_train = sum(bundle.num_train_prompts.values())
    assert num_train > 1000
    for _ in range(40):
        draw = bundle.train_sampler.next(30)
        assert sum(prompt.source == "words" for prompt in draw) == 20
        for prompt in draw:
            assert question_key(prompt.text) not in held_out
            assert list(prompt.token_ids) == TOKENIZER.render_prompt(prompt.text)
            score = load_reward(bundle.reward_names[prompt.source])
            assert score(prompt, prompt.answer, is_finished=True).is_correct


def test_it_is_deterministic_and_the_warm_start_draws_in_its_own_order():
    section = DataSection(sources=(WORDS,), seed=5)
    first, second = build_data(section, 64, TOKENIZER), build_data(section, 64, TOKENIZER)
    assert first.eval_prompts == second.eval_prompts
    draw = first.train_sampler.next(50)
    assert draw == second.train_sampler.next(50)
    assert draw != first.warm_start_sampler.next(50)
    other = build_data(DataSection(sources=(WORDS,), seed=6), 64, TOKENIZER)
    assert other.eval_prompts != first.eval_prompts


def test_512_distinct_words_can_be_held_out_of_the_quick_start_task():
    bundle = build_data(DataSection(sources=(WORDS,)), 512, TOKENIZER)
    assert len({prompt.text for prompt in bundle.eval_prompts}) == 512


def write_source(tmp_path, rows, name="file", **fields) -> SourceSection:
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows))
    return SourceSection(name=name, kind="jsonl", path=str(path), **fields)


def test_duplicates_and_long_prompts_are_dropped_and_counted(tmp_path, caplog):
    first = write_source(tmp_path, [("a b", "1"), ("A  B", "1"), ("x" * 30, "2"), ("c", "3")], "first")
    second = write_source(tmp_path, [("c", "3"), ("d", "4"), ("e", "4")], "second")
    with caplog.at_level(logging.INFO, logger="megatron_rl.data"):
        bundle = build_data(DataSection(sources=(first, second), max_prompt_tokens=20), 0, TOKENIZER)
    assert bundle.num_train_prompts == {"first": 2, "second": 2}
    assert "source 'first': 2 prompts of 4 read (1 duplicates, 1 longer than 20 tokens)" in caplog.text
    assert "source 'second': 2 prompts of 3 read (1 duplicates, 0 longer" in caplog.text


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "source 'file': 0 prompts of 0 read .*nothing is left to train on"),
        ([("x" * 30, "1")], "1 longer than 20 tokens.*nothing is left"),
        (
            [("a", "1"), ("b\xe9", "1")],
            r"file.jsonl:2: character '\xe9' \(U\+00E9\) is not in the tokenizer's alphabet",
        ),
        ([("a", "1"), ("b", "")], "file.jsonl:2: 'answer' is empty"),
    ],
)
def test_bad_files_are_one_line(tmp_path, rows, message):
    section = DataSection(sources=(write_source(tmp_path, rows),), max_prompt_tokens=20)
    with pytest.raises(DataError, match=message):
        build_data(section, 0, TOKENIZER)


def test_no_source_and_equal_names_are_refused():
    with pytest.raises(DataError, match=r"data\.sources is empty"):
        build_data(DataSection(), 0, TOKENIZER)
    with pytest.raises(DataError, match="names must differ, got sums, sums"):
        build_data(DataSection(sources=(SUMS, SUMS)), 0, TOKENIZER)


def test_one_digit_sums_cannot_hold_out_512():
    section = DataSection(
        sources=(
            SourceSection(
                name="digits",
                kind="reasoning_gym",
                task="chain_sum",
                params={"min_terms": 2, "max_terms": 2, "max_digits": 1},
                size=3000,
            ),
        )
    )
    with pytest.raises(DataError, match=r"source 'digits' has 200 distinct prompts \(110 when reordered"):
        build_data(section, 512, TOKENIZER)
    assert len(build_data(section, 64, TOKENIZER).eval_prompts) == 64


def make_prompt(answer: str) -> Prompt:
    return Prompt("p/1", "sun=", tuple(TOKENIZER.render_prompt("sun=")), answer, "p")


def test_a_pair_ends_with_the_end_of_sequence():
    (pair,) = sft_pairs([make_prompt("nus")], TOKENIZER)
    assert pair.prompt_ids == tuple(TOKENIZER.render_prompt("sun="))
    assert pair.answer_ids == (*TOKENIZER.encode("nus"), TOKENIZER.eos_id)


@pytest.mark.parametrize(("answer", "message"), [("", "'p/1' of source 'p' has an empty"), ("\xe9", "answer of prompt 'p/1'")])
def test_an_answer_that_cannot_be_learned_names_its_prompt(answer, message):
    with pytest.raises(DataError, match=message):
        sft_pairs([make_prompt(answer)], TOKENIZER)
