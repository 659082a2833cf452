"""The generate function of a run, by its dotted path: from an allowed package, an `async def`, called per sample."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.generate_path import is_allowed, split_path
from megatron_rl.config.rollout_sections import GenerateSection
from megatron_rl.rollout.generate.answer import Answer
from megatron_rl.rollout.generate.client import EngineClient, GenerateError, RunTurn, TextCodec
from megatron_rl.types.rollout import Prompt, SamplingParams

Generate = Callable[[EngineClient, Prompt, SamplingParams], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class GenerateFunction:
    """A loaded function with what its samples share."""

    path: str
    generate: Generate
    text: TextCodec
    options: Any

    async def __call__(self, prompt: Prompt, sampling: SamplingParams, run_turn: RunTurn) -> Answer:
        """One sample. Raises what the function raises, and GenerateError when it returns no answer or took no turn."""
        client = EngineClient(prompt, sampling, self.text, self.options, run_turn)
        answer = await self.generate(client, prompt, sampling)
        if not isinstance(answer, Answer):
            raise GenerateError(f"{self.path} returned {type(answer).__name__}, expected an Answer")
        if not client.num_turns or not answer.token_ids:
            raise GenerateError(f"{self.path} returned for prompt {prompt.prompt_id} without a turn of the engine")
        return answer


def load_function(section: GenerateSection, text: TextCodec) -> GenerateFunction | None:
    """None without a path. Raises GenerateError: what is wrong with path or options, in one line."""
    path = section.function
    if path is None:
        return None
    key = "rollout.generate.function"
    names = split_path(path)
    if names is None:
        raise GenerateError(f"{key}: expected package.module:name, got {path!r}")
    if not is_allowed(path, section.allowed_packages):
        allowed = ", ".join(section.allowed_packages)
        raise GenerateError(f"{key}: {path} is in none of rollout.generate.allowed_packages ({allowed})")
    try:
        module = importlib.import_module(names[0])
    except ImportError as error:
        raise GenerateError(f"{key}: cannot import {names[0]}: {error}") from error
    function = getattr(module, names[1], None)
    if not inspect.iscoroutinefunction(function):
        reason = "has no such name" if function is None else "is no async def"
        raise GenerateError(f"{key}: {path}: {names[0] if function is None else names[1]} {reason}")
    return GenerateFunction(path, function, text, _options(path, function, section))


def _options(path: str, function: Generate, section: GenerateSection) -> Any:
    """As the function's `options_type`, a dataclass; the mapping itself where it has none."""
    options_type = getattr(function, "options_type", None)
    if options_type is None:
        return section.options
    try:
        return options_type(**section.options)
    except (TypeError, ValueError) as error:
        known = ", ".join(inspect.signature(options_type).parameters)
        raise GenerateError(f"rollout.generate.options of {path}: {error}; it takes {known}") from error
