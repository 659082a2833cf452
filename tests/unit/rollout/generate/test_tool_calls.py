"""The turns around a tool, with a scripted engine that has a script of text."""

from __future__ import annotations

import asyncio

import pytest

from megatron_rl.data.character_tokenizer import CharacterTokenizer
from megatron_rl.rollout.generate.client import EngineClient
from megatron_rl.rollout.generate.tool_calls import ToolOptions, ToolOutput, answer_with_tool, find_calls
from megatron_rl.types.rollout import FinishReason, PolicyVersion, Prompt, RolloutSegment, SamplingParams

TEXT = CharacterTokenizer()
SHORT = ToolOptions(call_open="[", call_close="]", output_open="=", output_close=";")
PROMPT = Prompt("p", "2*3?", tuple(TEXT.render_prompt("2*3?")), "6", "s")


def talk(script, options=SHORT, tool=None, most=100):
    """(answer, its text, what the tool was asked). A turn without a closing mark ends with the end of sequence."""
    asked, turns = [], iter(script)

    async def run_turn(inserted, sampling):
        text = next(turns)
        whole = TEXT.encode(text)
        if whole[-1] not in sampling.stop_token_ids:
            whole.append(TEXT.eos_id)
        ids = whole[: sampling.max_new_tokens]
        reason = FinishReason.STOP if ids == whole else FinishReason.LENGTH
        return (RolloutSegment(tuple(ids), (-1.0,) * len(ids), PolicyVersion(1), reason),)

    async def six(call):
        asked.append(call)
        return ToolOutput("6", 1)

    async def go():
        client = EngineClient(PROMPT, SamplingParams(most, stop_token_ids=(TEXT.eos_id,)), TEXT, options, run_turn)
        return await answer_with_tool(client, PROMPT, options, tool or six)

    answer = asyncio.run(go())
    return answer, TEXT.decode(answer.token_ids), asked


def test_the_output_stands_between_two_turns_and_gets_no_loss():
    answer, text, asked = talk(["so [2*3]", "it is 6"])
    assert text == "so [2*3]=6;it is 6" and asked == ["2*3"]
    assert answer.is_finished and answer.token_ids[-1] == TEXT.eos_id
    masked = TEXT.decode([token for token, has_loss in zip(answer.token_ids, answer.loss_mask, strict=True) if not has_loss])
    assert masked == "=6;"
    assert answer.metrics == {"num_turns": 2, "tool_calls": 1, "tool_failures": 0, "tool_truncations": 0, "tool_bytes": 1}


def test_a_closing_mark_of_many_tokens_lets_the_model_end_its_turn():
    _, text, asked = talk(["<tool>1</tool><tool>2</tool>", "done"], ToolOptions())
    assert asked == ["1", "2"]
    assert text == "<tool>1</tool><tool>2</tool><output>6</output><output>6</output>done"


def test_an_answer_ends_without_a_call_at_the_cap_or_after_its_calls():
    answer, text, asked = talk(["six"])
    assert text == "six" and answer.is_finished and not asked
    answer, text, asked = talk(["[1", "x"], most=2)
    assert not answer.is_finished and text == "[1" and not asked
    loop = ToolOptions(call_open="[", call_close="]", max_calls=2)
    answer, _, asked = talk(["[1]", "[2]", "[3]", "x"], loop)
    assert asked == ["1", "2"] and not answer.is_finished
    answer, text, asked = talk(["[1]", "x"], most=5)  # no room for =6; and a token
    assert text == "[1]" and not answer.is_finished and answer.metrics["tool_calls"] == 1


def test_a_megabyte_is_cut_to_what_there_is_room_for_and_counted():
    async def flood(call):
        return ToolOutput("x" * 20_000, 1 << 20, is_truncated=True)

    answer, text, _ = talk(["[1]", "ok"], tool=flood, options=SHORT, most=60)
    assert text == "[1]=" + "x" * 54 + ";o" and not answer.is_finished  # one token of the next turn
    answer, text, _ = talk(["[1]", "ok"], ToolOptions(call_open="[", call_close="]", max_output_tokens=7), flood)
    assert text == "[1]<output>xxxxxxx</output>ok" and answer.is_finished
    assert answer.metrics["tool_truncations"] == 1 and answer.metrics["tool_bytes"] == 1 << 20


def test_what_the_vocabulary_lacks_is_left_out_of_the_output():
    async def foreign(call):
        return ToolOutput("a\u00e9b", 4, has_failed=True)

    answer, text, _ = talk(["[1]", "ok"], tool=foreign)
    assert text == "[1]=ab;ok" and answer.metrics["tool_failures"] == 1


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("none", []),
        ("[a] and [b]", ["a", "b"]),
        ("[open", []),
        ("closed]", []),
        ("[[a]]", ["a"]),
        ("[a[b]", ["b"]),
        ("[]", [""]),
    ],
)
def test_only_whole_calls_are_found(text, calls):
    assert find_calls(text, SHORT) == calls
