"""Programs as answers, on their tests."""

from __future__ import annotations

import json

import pytest

from megatron_rl.rewards import programs
from megatron_rl.rewards.programs import ProgramTest, score_python_program
from megatron_rl.rewards.programs import tests_of as read_tests
from megatron_rl.rewards.registry import RewardError, load_reward
from megatron_rl.rewards.sandbox import SandboxLimits
from megatron_rl.types.rollout import Prompt

SUMS = [{"stdin": "1 2", "stdout": "3"}, {"stdin": "-4 4", "stdout": "0\n"}]
RIGHT = "Read and add:\n```python\nprint(sum(map(int, input().split())))\n```\n"


def prompt(answer: str = "", **metadata) -> Prompt:
    return Prompt("p", "add two numbers", (1,), answer, "code", metadata)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(programs, "LIMITS", SandboxLimits(timeout_s=20.0))


@pytest.mark.parametrize("given", [prompt(tests=SUMS), prompt(json.dumps(SUMS))])
def test_all_tests_must_pass(given):
    right = load_reward("python_program")(given, RIGHT, True)
    assert right.is_correct and right.reward == 1.0 and right.details["tests_passed"] == 1.0
    half = score_python_program(given, "```\nprint(3)\n```", True)
    assert not half.is_correct and half.reward == 0.0 and half.details == {"tests_passed": 0.5, "ended_by_limits": 0.0}
    assert score_python_program(given, RIGHT, False).details["tests_passed"] == 0.0


def test_the_last_block_counts_and_a_plain_answer_is_the_expected_output():
    response = "```python\nprint(1)\n```\nno:\n```py\nprint('a '); print('b')\n```"
    assert score_python_program(prompt("a\nb"), response, True).is_correct
    assert score_python_program(prompt("7"), "print(7)", True).is_correct
    assert not score_python_program(prompt("7"), "print(7); raise SystemExit(1)", True).is_correct


def test_one_that_hangs_is_asked_once(monkeypatch):
    monkeypatch.setattr(programs, "LIMITS", SandboxLimits(timeout_s=1.0))
    result = score_python_program(prompt(tests=SUMS * 20), "while True: pass", True)
    assert result.details == {"tests_passed": 0.0, "ended_by_limits": 1.0}


def test_tests_are_checked():
    assert read_tests(prompt("[1, 2]")) == [ProgramTest("", "[1, 2]")]
    for broken in ([], [{"stdin": "1"}], ["1"], 7):
        with pytest.raises(RewardError, match="prompt 'p' of source 'code': tests of a program are a list of"):
            read_tests(prompt(tests=broken))
    with pytest.raises(RewardError, match="empty reference answer"):
        read_tests(prompt(" "))
