"""Rewards in processes of their own: a function that hangs, crashes or eats memory costs one sample's reward."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import asdict
from typing import Any

from megatron_rl.config.rollout_sections import RewardPoolSection
from megatron_rl.rewards.registry import RewardError
from megatron_rl.rollout.reward_cache import RewardCache
from megatron_rl.types.rollout import Prompt, RewardResult

logger = logging.getLogger(__name__)
FAILED = RewardResult(0.0, False, {"failed": 1.0})
"""The reward of a sample whose reward could not be computed; `details` tells it from an honest 0."""
START_TIMEOUT_S = 120.0
"""On top of the deadline of a worker's first reward, which imports its library."""
MAX_LINE_BYTES = 1 << 20


class _WorkerLostError(Exception):
    """A worker hangs or is gone."""


class RewardPool:
    """`section.num_workers` processes, started when first needed, replaced when they hang or die.

    `score` waits for a free one. It raises RewardError where the prompt or the reward's name is to blame.
    """

    def __init__(self, section: RewardPoolSection) -> None:
        if section.num_workers < 1:
            raise ValueError("a reward pool needs at least one worker")
        self._section = section
        self._free: asyncio.LifoQueue[Process | None] = asyncio.LifoQueue()
        for _ in range(section.num_workers):
            self._free.put_nowait(None)
        self._processes: set[Process] = set()
        self._cache = RewardCache(section.cache_size)
        self.num_failed = 0

    async def score(self, reward: str, prompt: Prompt, text: str, is_finished: bool) -> RewardResult:
        """The reward of one text by the function called `reward`; FAILED after `timeout_s` or a crash."""
        key = (reward, prompt.prompt_id, text, is_finished)
        known = self._cache.get(key)
        if known is not None:
            return known
        request = {"reward": reward, "prompt": asdict(prompt), "text": text, "is_finished": is_finished}
        process = await self._free.get()
        timeout_s = self._section.timeout_s
        try:
            if process is None:
                process, timeout_s = await self._start(), timeout_s + START_TIMEOUT_S
            answer = await self._ask(process, request, timeout_s)
        except _WorkerLostError as error:
            self._end(process)
            process, answer = None, {"crashed": str(error)}
        except BaseException:  # cancelled: the answer on its way would be taken for the next one's
            self._end(process)
            self._free.put_nowait(None)
            raise
        self._free.put_nowait(process)
        if "refused" in answer:
            raise RewardError(answer["refused"])
        if "crashed" in answer:
            self.num_failed += 1
            logger.warning("reward %s of prompt %s: %s; it counts as 0", reward, prompt.prompt_id, answer["crashed"])
            return FAILED
        result = RewardResult(answer["reward"], answer["is_correct"], answer["details"])
        self._cache.put(key, result)
        return result

    async def close(self) -> None:
        """End all workers."""
        processes = list(self._processes)
        for process in processes:
            self._end(process)
        await asyncio.gather(*(process.wait() for process in processes))

    async def _ask(self, process: Process, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(json.dumps(request).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            raise _WorkerLostError(f"no answer within {timeout_s:g} s") from None
        except (ConnectionError, ValueError) as error:  # the pipe broke, or the answer has no end
            raise _WorkerLostError(str(error)) from error
        if not line:
            raise _WorkerLostError(f"its process ended with status {await process.wait()}")
        return json.loads(line)

    async def _start(self) -> Process:
        memory = str(self._section.memory_bytes)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "megatron_rl.rollout.reward_worker", memory,
            stdin=PIPE, stdout=PIPE, limit=MAX_LINE_BYTES,
        )  # fmt: skip
        self._processes.add(process)
        return process

    def _end(self, process: Process | None) -> None:
        if process is not None:
            self._processes.discard(process)
            if process.returncode is None:
                process.kill()
