"""A judge behind a real HTTP server that is slow, busy, rude or wrong."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatron_rl.config.rollout_sections import JudgeSection
from megatron_rl.rewards.registry import RewardError
from megatron_rl.rollout.remote_judge import RemoteJudge
from megatron_rl.rollout.reward_pool import FAILED
from megatron_rl.types.rollout import Prompt, RewardResult

PROMPT = Prompt("p", "2 x 3", (1, 2), "6", "sums", {"level": 4})


class Judge(ThreadingHTTPServer):
    """Answers from a script: bytes, a status, or `wait` until the test ends. The last entry repeats."""

    def __init__(self, script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.asked, self.may_end = list(script), [], threading.Event()
        self.num_running = self.peak = 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.asked.append((self.path, self.headers.get("Authorization"), body))
            answer = server.script.pop(0) if len(server.script) > 1 else server.script[0]
            server.num_running += 1
            server.peak = max(server.peak, server.num_running)
        try:
            if answer == "wait":
                server.may_end.wait(30)
                return
            if answer == "pause":
                time.sleep(0.02)
                answer = {"reward": 1}
            status, raw = (answer, b"busy\nnow") if isinstance(answer, int) else (200, answer)
            raw = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)
        except OSError:
            pass  # whoever asked has gone
        finally:
            with server.lock:
                server.num_running -= 1

    def log_message(self, *args):
        pass


def judge(script, scenario=None, cache_size=0, **options):
    """(what the scenario returns, server, judge) with the judge answering from `script`."""
    server = Judge(script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    async def go():
        section = JudgeSection(
            "grader", f"http://127.0.0.1:{server.server_address[1]}/grade", **{"backoff_s": 0.001, "num_retries": 2, **options}
        )
        remote = RemoteJudge(section, cache_size)
        try:
            async with asyncio.timeout(60):
                return await (scenario or (lambda r: r.score(PROMPT, "it is 6", True)))(remote), server, remote
        finally:
            await remote.close()

    try:
        return asyncio.run(go())
    finally:
        server.may_end.set()
        server.shutdown()
        server.server_close()
        thread.join()


def test_it_is_told_everything_and_believed(tmp_path):
    key = tmp_path / "key"
    key.write_text("secret\n")
    answer = {"reward": 0.25, "is_correct": True, "details": {"style": 3}}
    result, server, _ = judge([answer], key_file=str(key))
    assert result == RewardResult(0.25, True, {"style": 3.0})
    assert server.asked == [
        (
            "/grade",
            "Bearer secret",
            {
                "prompt": "2 x 3",
                "response": "it is 6",
                "answer": "6",
                "source": "sums",
                "is_finished": True,
                "metadata": {"level": 4},
            },
        )
    ]
    assert judge([{"reward": 0.7}])[0] == RewardResult(0.7, True) and judge([{"reward": 0.5}])[0] == RewardResult(0.5, False)


@pytest.mark.parametrize("bad", [503, 429, b"<html>", {"reward": "good"}, {"reward": None}, b'{"reward": NaN}', [1], b""])
def test_it_is_asked_again_after_a_fault(bad):
    result, server, remote = judge([bad, bad, {"reward": 1}])
    assert result == RewardResult(1.0, True) and len(server.asked) == 3
    assert (remote.num_retries, remote.num_failed) == (2, 0)


def test_one_that_stays_broken_costs_one_reward(caplog):
    result, server, remote = judge([500])
    assert result is FAILED and len(server.asked) == 3 and remote.num_failed == 1
    assert "judge grader, prompt p: status 500; it counts as 0" in caplog.text


def test_one_that_hangs_is_left_after_each_try_and_at_the_deadline(caplog):
    result, server, _ = judge(["wait", {"reward": 1}], timeout_s=0.2)
    assert result.is_correct and len(server.asked) == 2
    started = time.monotonic()
    result, _, _ = judge(["wait"], timeout_s=20.0, deadline_s=0.2)
    assert result is FAILED and time.monotonic() - started < 15
    assert "prompt p: not within deadline_s=0.2" in caplog.text


def test_a_refusal_stops_the_run_in_one_line():
    with pytest.raises(RewardError, match=r"^judge 'grader': http://127.0.0.1:\d+/grade answers with status 401: busy now$"):
        judge([401])
    with pytest.raises(RewardError, match="judge 'grader': key_file /nowhere/key: No such file"):
        judge([{"reward": 1}], key_file="/nowhere/key")


def test_nobody_there_is_a_fault_like_others():
    server = Judge([{"reward": 1}])
    server.server_close()

    async def go():
        remote = RemoteJudge(
            JudgeSection("gone", f"http://127.0.0.1:{server.server_address[1]}", num_retries=1, backoff_s=0.001), 0
        )
        try:
            return await remote.score(PROMPT, "6", True)
        finally:
            await remote.close()

    assert asyncio.run(go()) is FAILED


def test_only_so_many_at_once_and_no_answer_is_graded_twice():
    async def many(remote):
        texts = [f"answer {number % 10}" for number in range(30)]
        first = await asyncio.gather(*(remote.score(PROMPT, text, True) for text in texts[:10]))
        return first + await asyncio.gather(*(remote.score(PROMPT, text, True) for text in texts[10:]))

    results, server, _ = judge(["pause"], many, cache_size=16, num_concurrent=3)
    assert len(results) == 30 and len(server.asked) == 10 and server.peak <= 3
