"""Which prompts are held out for evaluation, so that no training prompt asks the same question."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from megatron_rl.data.errors import DataError
from megatron_rl.data.mixture import apportion
from megatron_rl.types.rollout import Prompt

_WORD = re.compile(r"\w+|[^\w\s]")


def normalised_text(text: str) -> str:
    """Text without differences of case and white space: two prompts with one normalised text are duplicates."""
    return " ".join(text.casefold().split())


def question_key(text: str) -> tuple[str, ...]:
    """The words, numbers and signs of a question, sorted: "3 + 5 =" and "5 + 3 =" are one key, and so one side.

    The key is coarser than it must be ("5 - 3" and "3 - 5" share one): that costs a few prompts and leaks nothing.
    """
    return tuple(sorted(_WORD.findall(text.casefold())))


def split_prompts(
    prompts: Sequence[Sequence[Prompt]], weights: Sequence[float], num_eval_prompts: int, seed: int
) -> tuple[list[list[Prompt]], list[Prompt]]:
    """(training prompts per source, evaluation prompts); no key is on both sides.

    Evaluation takes `num_eval_prompts`, shared by weight. Prompts that share a key with one of them and are not taken
    are on neither side. Raises `DataError` when a source cannot give its share and keep a training prompt.
    """
    keys = [[question_key(prompt.text) for prompt in source] for source in prompts]
    held_out: set[tuple[str, ...]] = set()
    evaluation: list[Prompt] = []
    quotas = apportion(num_eval_prompts, weights)
    for index, quota in enumerate(quotas):
        taken = _take(keys[index], quota, held_out, random.Random(f"{seed}/split/{index}"))
        evaluation.extend(prompts[index][position] for position in taken)
        held_out.update(keys[index][position] for position in taken)
        if len(taken) < quota:
            raise _too_few(prompts[index], set(keys[index]), quota)
    training = [
        [prompt for prompt, key in zip(source, source_keys, strict=True) if key not in held_out]
        for source, source_keys in zip(prompts, keys, strict=True)
    ]
    for index, kept in enumerate(training):
        if not kept:
            raise _too_few(prompts[index], set(keys[index]), quotas[index])
    return training, evaluation


def _take(keys: Sequence[tuple[str, ...]], quota: int, held_out: set[tuple[str, ...]], rng: random.Random) -> list[int]:
    """Positions of up to `quota` prompts: whole keys first come first served, keys held out by others before that."""
    order = list(range(len(keys)))
    rng.shuffle(order)
    members: dict[tuple[str, ...], list[int]] = {}
    for position in order:
        members.setdefault(keys[position], []).append(position)
    ranked = sorted(members, key=lambda key: key not in held_out)
    return [position for key in ranked for position in members[key]][:quota]


def _too_few(source: Sequence[Prompt], keys: set[tuple[str, ...]], quota: int) -> DataError:
    name = source[0].source
    return DataError(
        f"source {name!r} has {len(source)} distinct prompts ({len(keys)} when reordered questions count once): too "
        f"few to hold out {quota} for evaluation and still train on others; lower run.num_eval_prompts or raise "
        "its size"
    )
