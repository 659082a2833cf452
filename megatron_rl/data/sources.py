"""Where prompts come from: reasoning-gym tasks, JSONL files and Parquet files, each as raw questions."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from megatron_rl.config.sections import SourceSection
from megatron_rl.data.errors import DataError
from megatron_rl.rewards.reasoning_gym_tasks import generate_entries
from megatron_rl.rewards.registry import RewardError

DEFAULT_REWARDS = {"reasoning_gym": "reasoning_gym", "jsonl": "math_verify", "parquet": "math_verify"}
PLACEHOLDER = "{prompt}"


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt before tokenisation. `place` says where a person finds it: a file and line, or a task and index."""

    prompt_id: str
    text: str
    answer: str
    place: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


def read_source(section: SourceSection, seed: int) -> Iterator[Question]:
    """All questions of a source, in order, with `prompt_regex` and `prompt_template` applied. Deterministic in `seed`.

    Raises `DataError` that names the source, or the file and line.
    """
    if PLACEHOLDER not in section.prompt_template:
        raise DataError(f"source {section.name!r}: prompt_template must contain {PLACEHOLDER}")
    pattern = _compile_regex(section)
    for question in _READERS[section.kind](section, seed):
        text = section.prompt_template.replace(PLACEHOLDER, _varying_part(pattern, question))
        yield Question(question.prompt_id, text, question.answer, question.place, question.metadata)


def reward_name(section: SourceSection) -> str:
    """The reward that scores this source's answers (a name in `rewards.registry`)."""
    return section.reward or DEFAULT_REWARDS[section.kind]


def _read_reasoning_gym(section: SourceSection, seed: int) -> Iterator[Question]:
    if section.task is None:
        raise DataError(f"source {section.name!r}: kind reasoning_gym needs a task")
    # Each source has its own stream: neighbouring seeds share entries in reasoning-gym (it draws from seed + index).
    own_seed = int.from_bytes(hashlib.sha256(f"{seed}/{section.name}".encode()).digest()[:4], "big")
    try:
        for entry in generate_entries(section.task, section.params, own_seed, section.size):
            yield Question(
                prompt_id=f"{section.name}/{entry.index}",
                text=entry.question,
                answer=entry.answer,
                place=f"source {section.name!r}, {section.task} entry {entry.index}",
                metadata=entry.metadata,
            )
    except RewardError as error:
        raise DataError(f"source {section.name!r}: {error}") from error


def _read_jsonl(section: SourceSection, seed: int) -> Iterator[Question]:
    del seed
    path = _source_file(section)
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from error
                if not isinstance(row, dict):
                    raise DataError(f"{path}:{number}: expected one JSON object a line, got {type(row).__name__}")
                yield _row_question(section, row, number, f"{path}:{number}")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error


def _read_parquet(section: SourceSection, seed: int) -> Iterator[Question]:
    del seed
    path = _source_file(section)
    columns = [section.prompt_key, section.answer_key]
    try:
        file = pyarrow.parquet.ParquetFile(path)
        for key in columns:
            if key not in file.schema_arrow.names:
                raise DataError(f"{path}: no column {key!r}; it has {', '.join(file.schema_arrow.names)}")
        number = 0
        for batch in file.iter_batches(columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield _row_question(section, row, number, f"{path} row {number}")
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from error


_READERS = {"reasoning_gym": _read_reasoning_gym, "jsonl": _read_jsonl, "parquet": _read_parquet}


def _source_file(section: SourceSection) -> Path:
    if section.path is None:
        raise DataError(f"source {section.name!r}: kind {section.kind} needs a path")
    path = Path(section.path)
    if not path.is_file():
        raise DataError(f"source {section.name!r}: {path}: no such file")
    return path


def _row_question(section: SourceSection, row: Mapping[str, Any], number: int, place: str) -> Question:
    text = _row_text(row, section.prompt_key, "prompt_key", place)
    answer = _row_text(row, section.answer_key, "answer_key", place)
    return Question(f"{section.name}/{number}", text, answer, place)


def _row_text(row: Mapping[str, Any], key: str, option: str, place: str) -> str:
    if key not in row:
        raise DataError(f"{place}: no key {key!r} (it has {', '.join(row)}); set the source's {option}")
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{place}: {key!r} must be text or a number, not {type(value).__name__}")
    text = str(value)
    if not text.strip():
        raise DataError(f"{place}: {key!r} is empty; give it a value or leave the row out")
    return text


def _compile_regex(section: SourceSection) -> re.Pattern[str] | None:
    if section.prompt_regex is None:
        return None
    try:
        pattern = re.compile(section.prompt_regex, re.DOTALL)
    except re.error as error:
        raise DataError(f"source {section.name!r}: prompt_regex is not a regular expression: {error}") from error
    if pattern.groups != 1:
        raise DataError(f"source {section.name!r}: prompt_regex must have one group, the part to keep")
    return pattern


def _varying_part(pattern: re.Pattern[str] | None, question: Question) -> str:
    if pattern is None:
        return question.text
    match = pattern.search(question.text)
    if match is None or match[1] is None:
        raise DataError(
            f"{question.place}: prompt_regex {pattern.pattern!r} does not match the question {question.text[:200]!r}"
        )
    return match[1]
