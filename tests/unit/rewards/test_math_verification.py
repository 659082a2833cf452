import subprocess
import sys
import threading
import time

import pytest

from megatron_rl.rewards.math_verification import ComparisonProcess, score_math_verify
from megatron_rl.rewards.registry import RewardError
from megatron_rl.types.rollout import Prompt


@pytest.fixture(scope="module")
def comparison():
    process = ComparisonProcess(deadline_s=5.0)
    yield process
    process.close()


def in_a_worker_thread(function, *arguments):
    results: list = []
    thread = threading.Thread(target=lambda: results.append(function(*arguments)))
    thread.start()
    thread.join(timeout=60)
    return results[0]


@pytest.mark.parametrize(
    ("reference", "response", "verdict"),
    [
        ("1/2", "so the answer is $0.5$", "equal"),
        (r"\frac{1}{2}", r"thus \boxed{\frac{2}{4}}", "equal"),
        (r"$\sqrt{8}$", r"$2\sqrt{2}$", "equal"),
        ("42", "first 41, then\nthe answer is 42", "equal"),
        ("4", "it is 5", "different"),
        ("4", "", "different"),
        ("4", "no number; e\u0301, \U0001f600", "different"),
    ],
)
def test_equality_is_symbolic_and_works_in_worker_threads(comparison, reference, response, verdict):
    assert in_a_worker_thread(comparison.compare, reference, response) == verdict


def test_a_response_that_never_ends_to_evaluate_is_given_up_at_the_deadline():
    comparison = ComparisonProcess(deadline_s=0.5)
    try:
        assert comparison.compare("9", "9") == "equal"  # the child is up: its start is not in the time below
        start = time.monotonic()
        assert comparison.compare("9", "$9^{9^{9}}$") == "gave_up"
        assert time.monotonic() - start < 10.0
        assert comparison.compare("9", "9") == "equal"
    finally:
        comparison.close()


def test_a_child_found_dead_between_two_comparisons_is_started_again():
    comparison = ComparisonProcess(deadline_s=5.0)
    try:
        assert comparison.compare("9", "9") == "equal"
        assert comparison._process is not None
        comparison._process.kill()
        comparison._process.wait()
        assert comparison.compare("9", "9") == "equal"
    finally:
        comparison.close()


def test_the_child_ends_when_its_parent_ends():
    code = (
        "from megatron_rl.rewards.math_verification import ComparisonProcess\n"
        "import os\n"
        "c = ComparisonProcess(5.0); c.compare('1', '1')\n"
        "print(c._process.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    # The child holds our pipes open as long as it lives, so `run` returned only because it is gone.
    assert done.stdout.strip().isdigit()


def test_a_reference_without_an_expression_is_refused():
    prompt = Prompt(prompt_id="m/1", text="?", token_ids=(), answer="price in $", source="m")
    with pytest.raises(RewardError, match=r"'m/1' of source 'm'.*no expression in the reference answer"):
        score_math_verify(prompt, "4", True)


def test_the_reward_is_one_or_zero():
    prompt = Prompt(prompt_id="m/1", text="?", token_ids=(), answer="1/4", source="m")
    assert score_math_verify(prompt, "it is 0.25", False).reward == 1.0
    wrong = score_math_verify(prompt, "it is 0.2", True)
    assert (wrong.reward, wrong.is_correct, wrong.details["gave_up"]) == (0.0, False, 0.0)
