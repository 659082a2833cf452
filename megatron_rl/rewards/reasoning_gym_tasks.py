"""The one place that knows `reasoning-gym`: procedurally generated tasks that score their own answers.

A prompt carries where its entry comes from (task, params, seed, size, index), not the entry: generation is
deterministic, so the exact entry (with tuples, matrices and other things that JSON would change) is made again where it
is scored.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS, create_dataset

from megatron_rl.rewards.registry import RewardError
from megatron_rl.types.rollout import Prompt, RewardResult

_METADATA_KEYS = ("task", "params", "seed", "size", "index")


@dataclass(frozen=True, slots=True)
class GeneratedEntry:
    """One question. `metadata` is JSON-serialisable and enough for `score_reasoning_gym` to find the entry again."""

    index: int
    question: str
    answer: str
    metadata: dict[str, Any]


def generate_entries(task: str, params: Mapping[str, Any], seed: int, size: int) -> Iterator[GeneratedEntry]:
    """The `size` entries of a task's generated set. Deterministic in (task, params, seed, size).

    Raises `RewardError` for an unknown task or parameter, with the nearest known one, or for a value that the task
    refuses.
    """
    check_task(task, params)
    shared = {"task": task, "params": dict(params), "seed": seed, "size": size}
    dataset = _dataset(task, json.dumps(shared["params"], sort_keys=True), seed, size)
    for index in range(size):
        entry = dataset[index]
        yield GeneratedEntry(index, entry["question"], _answer_text(entry), {**shared, "index": index})


def check_task(task: str, params: Mapping[str, Any]) -> None:
    """Raises `RewardError` when the task or one of its parameters does not exist."""
    if task not in DATASETS:
        raise RewardError(f"reasoning-gym has no task {task!r}{_nearest(task, DATASETS)}")
    known = {field.name for field in fields(DATASETS[task][1])} - {"seed", "size"}
    for name in params:
        if name not in known:
            raise RewardError(f"reasoning-gym task {task!r} has no parameter {name!r}{_nearest(name, known)}")


def score_reasoning_gym(prompt: Prompt, response_text: str, is_finished: bool) -> RewardResult:
    """The task's own score in [0, 1]; many tasks give partial credit. Correct means the full score.

    Whether the response ended by itself is not asked: use `score_reasoning_gym_strict` where it matters.
    """
    del is_finished
    score = _task_score(prompt, response_text)
    return RewardResult(reward=score, is_correct=score >= 1.0)


def score_reasoning_gym_strict(prompt: Prompt, response_text: str, is_finished: bool) -> RewardResult:
    """1 when the response ended by itself and the task gives it the full score, else 0."""
    score = _task_score(prompt, response_text)
    is_correct = is_finished and score >= 1.0
    return RewardResult(reward=float(is_correct), is_correct=is_correct, details={"task_score": score})


def _task_score(prompt: Prompt, response_text: str) -> float:
    missing = [key for key in _METADATA_KEYS if key not in prompt.metadata]
    if missing:
        raise RewardError(
            f"prompt {prompt.prompt_id!r} of source {prompt.source!r} was not made by reasoning-gym "
            f"(metadata lacks {', '.join(missing)}); choose another reward for this source"
        )
    meta = prompt.metadata
    key = (meta["task"], json.dumps(dict(meta["params"]), sort_keys=True), meta["seed"], meta["size"])
    entry = _entry(*key, meta["index"])
    if _answer_text(entry) != prompt.answer:
        raise RewardError(
            f"prompt {prompt.prompt_id!r} of source {prompt.source!r}: reasoning-gym now generates the answer "
            f"{_answer_text(entry)!r}, the prompt has {prompt.answer!r}; both sides need the same reasoning-gym version"
        )
    return float(_dataset(*key).score_answer(response_text.strip(), entry))


@lru_cache(maxsize=64)
def _dataset(task: str, encoded_params: str, seed: int, size: int) -> ProceduralDataset:
    try:
        return create_dataset(task, seed=seed, size=size, **json.loads(encoded_params))
    except (AssertionError, ValueError, TypeError) as error:
        raise RewardError(
            f"reasoning-gym task {task!r} refuses size {size} with parameters {encoded_params}: {error}"
        ) from error


@lru_cache(maxsize=4096)
def _entry(task: str, encoded_params: str, seed: int, size: int, index: int) -> dict[str, Any]:
    return _dataset(task, encoded_params, seed, size)[index]


def _answer_text(entry: Mapping[str, Any]) -> str:
    # Some tasks accept many answers and name none.
    return "" if entry["answer"] is None else str(entry["answer"])


def _nearest(name: str, known: Any) -> str:
    match = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(sorted(known))}"
