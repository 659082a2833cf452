"""Rewards that compare text: 1 for the right answer in a response that ended by itself, else 0.

A response cut at the length limit earns nothing: its last words are an accident of where it was cut.
"""

from __future__ import annotations

import re

from megatron_rl.rewards.registry import RewardError, reference_answer
from megatron_rl.types.rollout import Prompt, RewardResult

# A minus is a sign unless it follows an operand: "5 - 9 = -4" ends in -4, "12-7" and "12 - 7" in 7.
_NUMBER = re.compile(r"(?P<sign>(?<![\w).])(?<![\w)]\s)[-\u2212])?(?P<digits>\d[\d,]*(?:\.\d+)?)")


def score_exact_match(prompt: Prompt, response_text: str, is_finished: bool) -> RewardResult:
    """1 when the response, without outer white space, is the reference answer, letter by letter."""
    answer = reference_answer(prompt)
    return _binary(is_finished and response_text.strip() == answer)


def score_last_integer(prompt: Prompt, response_text: str, is_finished: bool) -> RewardResult:
    """1 when the last number of the response is the integer of the reference answer ("5 - 9 = -4" answers -4).

    Raises `RewardError` when the reference answer is not an integer.
    """
    answer = reference_answer(prompt)
    try:
        expected = int(answer.replace(",", ""))
    except ValueError as error:
        raise RewardError(
            f"prompt {prompt.prompt_id!r} of source {prompt.source!r}: reward 'last_integer' needs an integer "
            f"reference answer, not {answer!r}"
        ) from error
    return _binary(is_finished and find_last_integer(response_text) == expected)


def find_last_integer(text: str) -> int | None:
    """The last number in `text` when it is an integer (thousands commas allowed), else None."""
    numbers = list(_NUMBER.finditer(text))
    if not numbers or "." in numbers[-1]["digits"]:
        return None
    number = numbers[-1]
    value = int(number["digits"].replace(",", ""))
    return -value if number["sign"] else value


def _binary(is_correct: bool) -> RewardResult:
    return RewardResult(reward=float(is_correct), is_correct=is_correct)
