"""From `data.*` to what a run draws from: training prompts, held-out prompts and the pairs of the warm start."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_rl.config.sections import DataSection, SourceSection
from megatron_rl.data.errors import DataError
from megatron_rl.data.sampler import PromptSampler
from megatron_rl.data.sources import Question, read_source, reward_name
from megatron_rl.data.split import normalised_text, split_prompts
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.types.rollout import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DataBundle:
    """Everything a run draws from. The two samplers share the training prompts and nothing else."""

    train_sampler: PromptSampler
    warm_start_sampler: PromptSampler
    eval_prompts: tuple[Prompt, ...]
    reward_names: Mapping[str, str]
    """Source name -> name in `rewards.registry`."""
    num_train_prompts: Mapping[str, int]
    """Source name -> number of distinct training prompts."""


@dataclass(frozen=True, slots=True)
class SftPair:
    """A prompt and its reference answer, which ends with the end-of-sequence token."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


def build_data(section: DataSection, num_eval_prompts: int, tokenizer: Tokenizer) -> DataBundle:
    """Read all sources, drop duplicates and prompts that are too long, hold out evaluation prompts.

    Deterministic in `section`. Raises `DataError` when a source cannot be read, has no prompt left, or has too few
    distinct ones to hold out its share.
    """
    if not section.sources:
        raise DataError("data.sources is empty; name at least one source of prompts")
    names = [source.name for source in section.sources]
    if len(set(names)) < len(names):
        raise DataError(f"data.sources: names must differ, got {', '.join(names)}")
    seen: set[str] = set()
    prompts = [_source_prompts(source, section, tokenizer, seen) for source in section.sources]
    weights = [source.weight for source in section.sources]
    training, evaluation = split_prompts(prompts, weights, num_eval_prompts, section.seed)
    return DataBundle(
        train_sampler=PromptSampler(training, weights, section.seed),
        warm_start_sampler=PromptSampler(training, weights, section.seed + 1),
        eval_prompts=tuple(evaluation),
        reward_names={source.name: reward_name(source) for source in section.sources},
        num_train_prompts={name: len(kept) for name, kept in zip(names, training, strict=True)},
    )


def sft_pairs(prompts: Iterable[Prompt], tokenizer: Tokenizer) -> list[SftPair]:
    """The pairs of a supervised step. Raises `DataError` for a prompt without a reference answer."""
    return [SftPair(prompt.token_ids, _answer_ids(prompt, tokenizer)) for prompt in prompts]


def _source_prompts(source: SourceSection, section: DataSection, tokenizer: Tokenizer, seen: set[str]) -> list[Prompt]:
    prompts = []
    num_read = num_duplicates = num_too_long = 0
    for question in read_source(source, section.seed):
        num_read += 1
        text = normalised_text(question.text)
        if text in seen:
            num_duplicates += 1
            continue
        seen.add(text)
        token_ids = _render(question, tokenizer)
        if len(token_ids) > section.max_prompt_tokens:
            num_too_long += 1
            continue
        prompts.append(Prompt(question.prompt_id, question.text, token_ids, question.answer, source.name, question.metadata))
    summary = (
        f"source {source.name!r}: {len(prompts)} prompts of {num_read} read "
        f"({num_duplicates} duplicates, {num_too_long} longer than {section.max_prompt_tokens} tokens)"
    )
    if not prompts:
        raise DataError(f"{summary}; nothing is left to train on")
    logger.info(summary)
    return prompts


def _render(question: Question, tokenizer: Tokenizer) -> tuple[int, ...]:
    try:
        return tuple(tokenizer.render_prompt(question.text))
    except DataError as error:
        raise DataError(f"{question.place}: {error}") from error


def _answer_ids(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    if not prompt.answer.strip():
        raise DataError(
            f"prompt {prompt.prompt_id!r} of source {prompt.source!r} has an empty reference answer: a warm start "
            "cannot learn from it; set trainer.warm_start.num_steps to 0 or choose another source"
        )
    try:
        return (*tokenizer.encode(prompt.answer), tokenizer.eos_id)
    except DataError as error:
        raise DataError(f"the answer of prompt {prompt.prompt_id!r} of source {prompt.source!r}: {error}") from error
