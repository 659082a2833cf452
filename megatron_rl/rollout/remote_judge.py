"""Rewards from a judge behind HTTP: a model that grades, a checker service. One POST per answer.

Asked: `{"prompt", "response", "answer", "source", "is_finished", "metadata"}`. Expected: `{"reward": 0.7}`, with `is_correct`
and `details` (numbers by name) where the judge has them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from megatron_rl.config.rollout_sections import JudgeSection
from megatron_rl.rewards.registry import RewardError
from megatron_rl.rollout.reward_cache import RewardCache
from megatron_rl.rollout.reward_pool import FAILED
from megatron_rl.types.rollout import Prompt, RewardResult

logger = logging.getLogger(__name__)
MAX_ANSWER_BYTES = 1 << 20
BUSY = (408, 425, 429)
"""Statuses below 500 that say: later."""


class _LaterError(Exception):
    """This try failed; another one may not."""


class RemoteJudge:
    """One judge. Several answers at once, at most `num_concurrent`; tries that fail are repeated after growing pauses.

    An answer that the judge does not grade within `deadline_s` counts as FAILED and is told in the log. A judge that
    refuses (another status below 500) is a mistake of the experiment: RewardError.
    """

    def __init__(self, section: JudgeSection, cache_size: int) -> None:
        self._section = section
        self._places = asyncio.Semaphore(section.num_concurrent)
        self._cache = RewardCache(cache_size)
        self._session: aiohttp.ClientSession | None = None
        self._headers: dict[str, str] = {}
        if section.key_file is not None:
            try:
                self._headers["Authorization"] = f"Bearer {Path(section.key_file).read_text().strip()}"
            except OSError as error:
                raise RewardError(f"judge {section.name!r}: key_file {section.key_file}: {error.strerror}") from error
        self.num_failed = self.num_retries = 0

    async def score(self, prompt: Prompt, text: str, is_finished: bool) -> RewardResult:
        key = (self._section.name, prompt.prompt_id, text, is_finished)
        known = self._cache.get(key)
        if known is not None:
            return known
        body = {
            "prompt": prompt.text,
            "response": text,
            "answer": prompt.answer,
            "source": prompt.source,
            "is_finished": is_finished,
            "metadata": dict(prompt.metadata),
        }
        try:
            async with asyncio.timeout(self._section.deadline_s), self._places:
                result = await self._try_until_graded(body)
        except (TimeoutError, _LaterError) as error:
            self.num_failed += 1
            reason = str(error) or f"not within deadline_s={self._section.deadline_s:g}"
            logger.warning("judge %s, prompt %s: %s; it counts as 0", self._section.name, prompt.prompt_id, reason)
            return FAILED
        self._cache.put(key, result)
        return result

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _try_until_graded(self, body: Mapping[str, Any]) -> RewardResult:
        for number in range(self._section.num_retries + 1):
            try:
                return await self._ask(body)
            except _LaterError:
                if number == self._section.num_retries:
                    raise
                self.num_retries += 1
                await asyncio.sleep(self._section.backoff_s * 2**number)
        raise AssertionError("unreachable")

    async def _ask(self, body: Mapping[str, Any]) -> RewardResult:
        section = self._section
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        timeout = aiohttp.ClientTimeout(total=section.timeout_s)
        try:
            async with self._session.post(section.url, json=body, timeout=timeout, allow_redirects=False) as reply:
                raw = await reply.content.read(MAX_ANSWER_BYTES + 1)
                status = reply.status
        except TimeoutError:
            raise _LaterError(f"no answer within {section.timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise _LaterError(f"{type(error).__name__}: {error}") from error
        if status >= 500 or status in BUSY:
            raise _LaterError(f"status {status}")
        if status != 200:
            shown = raw[:200].decode(errors="replace").replace("\n", " ")
            raise RewardError(f"judge {section.name!r}: {section.url} answers with status {status}: {shown}")
        return to_result(raw, section.correct_above)


def to_result(raw: bytes, correct_above: float) -> RewardResult:
    """The judge's answer. Raises _LaterError when it is none."""
    if len(raw) > MAX_ANSWER_BYTES:
        raise _LaterError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    try:
        answer = json.loads(raw)
    except ValueError:
        raise _LaterError(f"no JSON: {raw[:100]!r}") from None
    reward = answer.get("reward") if isinstance(answer, dict) else None
    if not _is_number(reward):
        raise _LaterError(f"no finite reward in {raw[:100]!r}")
    assert isinstance(answer, dict) and isinstance(reward, int | float)
    is_correct, details = answer.get("is_correct"), answer.get("details") or {}
    if not isinstance(details, dict) or not all(_is_number(value) for value in details.values()):
        raise _LaterError(f"details that are no numbers in {raw[:100]!r}")
    verdict = is_correct if isinstance(is_correct, bool) else reward > correct_above
    return RewardResult(float(reward), verdict, {name: float(value) for name, value in details.items()})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
