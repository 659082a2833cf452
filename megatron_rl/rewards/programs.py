"""Rewards for answers that are programs: run in the sandbox on the task's tests."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from megatron_rl.rewards.registry import RewardError, reference_answer
from megatron_rl.rewards.sandbox import ProgramStatus, SandboxLimits, run_program
from megatron_rl.types.rollout import Prompt, RewardResult

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
LIMITS = SandboxLimits(timeout_s=5.0, output_bytes=1 << 20)
"""Of one test."""


@dataclass(frozen=True, slots=True)
class ProgramTest:
    """Standard input, and the standard output that is expected; white space at the ends of lines does not count."""

    stdin: str
    stdout: str


def score_python_program(prompt: Prompt, response_text: str, is_finished: bool) -> RewardResult:
    """1 when the program of a response that ended by itself passes all tests of its prompt, else 0.

    The program is the last fenced block, or the whole response. `details`: the share of tests passed (those after the first
    one that timed out count as failed), and whether it was ended by its limits. Raises `RewardError` for a prompt without
    tests.
    """
    tests = tests_of(prompt)
    blocks = _FENCE.findall(response_text)
    source = blocks[-1] if blocks else response_text
    num_passed, was_ended = 0, False
    for test in tests if is_finished else ():
        result = run_program(source, test.stdin, LIMITS)
        was_ended = result.status not in (ProgramStatus.OK, ProgramStatus.FAILED)
        num_passed += result.status is ProgramStatus.OK and _lines(result.output) == _lines(test.stdout)
        if was_ended:
            break
    is_correct = num_passed == len(tests)
    details = {"tests_passed": num_passed / len(tests), "ended_by_limits": float(was_ended)}
    return RewardResult(float(is_correct), is_correct, details)


def tests_of(prompt: Prompt) -> list[ProgramTest]:
    """`metadata["tests"]`, or the reference answer: a JSON list of {"stdin", "stdout"}, or the expected output as it is."""
    found: Any = prompt.metadata.get("tests")
    if found is None:
        answer = reference_answer(prompt)
        try:
            found = json.loads(answer)
        except ValueError:
            found = None
        if not isinstance(found, list) or not all(isinstance(test, dict) for test in found):
            return [ProgramTest("", answer)]
    try:
        tests = [ProgramTest(str(test.get("stdin", "")), str(test["stdout"])) for test in found]
    except (AttributeError, KeyError, TypeError):
        tests = []
    if not tests:
        raise RewardError(
            f"prompt {prompt.prompt_id!r} of source {prompt.source!r}: tests of a program are a list of "
            f'{{"stdin": ..., "stdout": ...}}, got {str(found)[:100]}'
        )
    return tests


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
