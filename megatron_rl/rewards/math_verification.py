"""Rewards by symbolic equality with `math-verify`, under a deadline that holds in every thread.

A response such as "9^{9^{9}}" keeps sympy busy for ever, and the library's own timeouts are signals, which exist only
in a process's main thread. So the comparison runs in a child process (`math_verify_child`): the kernel ends the child
at the deadline, the response counts as wrong, and the next comparison starts a new child.
"""

from __future__ import annotations

import atexit
import json
import signal
import subprocess
import sys
import threading

from megatron_rl.rewards.registry import RewardError, reference_answer
from megatron_rl.types.rollout import Prompt, RewardResult

DEADLINE_S = 5.0
START_DEADLINE_S = 60.0


def score_math_verify(prompt: Prompt, response_text: str, is_finished: bool) -> RewardResult:
    """1 when the response's last expression equals the reference answer, else 0. `details`: gave_up.

    Whether the response ended by itself is not asked: the answer is looked for anywhere in it. Raises `RewardError`
    when math-verify finds no expression in the reference answer.
    """
    del is_finished
    answer = reference_answer(prompt)
    verdict = _CHILD.compare(answer, response_text)
    if verdict == "bad_reference":
        raise RewardError(
            f"prompt {prompt.prompt_id!r} of source {prompt.source!r}: math-verify finds no expression in the "
            f"reference answer {answer!r}; use reward 'exact_match' for such answers"
        )
    is_correct = verdict == "equal"
    return RewardResult(float(is_correct), is_correct, details={"gave_up": float(verdict == "gave_up")})


class ComparisonProcess:
    """One child that compares, started when first needed and again after it was ended. Thread-safe."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def compare(self, reference: str, response: str) -> str:
        """`equal`, `different`, `bad_reference` or `gave_up` (past the deadline or the memory limit).

        Raises `RewardError` when the child cannot start or fails.
        """
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps([reference, response]) + "\n")
            process.stdin.flush()
            # The child ends itself at the deadline, so this line or the end of the file arrives.
            line = process.stdout.readline()
            if line:
                return line.strip()
            code = self._close()
            if code == -signal.SIGALRM:
                return "gave_up"
            raise RewardError(
                f"the math-verify child process ended with code {code} while it compared {response[-200:]!r} with the "
                f"reference answer {reference!r}; its traceback is in the log above"
            )

    def close(self) -> None:
        """End the child, if one runs."""
        with self._lock:
            self._close()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._close()
        command = [sys.executable, "-m", "megatron_rl.rewards.math_verify_child", str(self._deadline_s)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
        assert process.stdout is not None
        watchdog = threading.Timer(START_DEADLINE_S, process.kill)
        watchdog.start()
        greeting = process.stdout.readline().strip()
        watchdog.cancel()
        if greeting != "ready":
            process.kill()
            raise RewardError(
                f"the math-verify child process ended with code {process.wait()} before it was ready; its message is "
                "in the log above (is math-verify installed?)"
            )
        self._process = process
        return process

    def _close(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        code = process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        return code


_CHILD = ComparisonProcess()
atexit.register(_CHILD.close)
