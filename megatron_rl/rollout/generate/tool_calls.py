"""Turns around a tool: the model calls it in its text, the output is inserted, the model goes on. By ids, never by text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from megatron_rl.rollout.generate.answer import Answer, Transcript
from megatron_rl.rollout.generate.client import EngineClient
from megatron_rl.types.rollout import FinishReason, Prompt


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """What a tool said: `num_bytes`, of which `text` may be the beginning only."""

    text: str
    num_bytes: int
    is_truncated: bool = False
    has_failed: bool = False


Tool = Callable[[str], Awaitable[ToolOutput]]


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """How a call looks, and what its output is wrapped in (with a chat model: the marks of turns).

    Where `call_close` is one token of the vocabulary, it ends the turn; else the model ends it after its call.
    """

    call_open: str = "<tool>"
    call_close: str = "</tool>"
    output_open: str = "<output>"
    output_close: str = "</output>"
    max_calls: int = 8
    max_output_tokens: int = 1024

    def __post_init__(self) -> None:
        if not self.call_open or not self.call_close:
            raise ValueError("call_open and call_close must not be empty")
        if self.max_calls < 1 or self.max_output_tokens < 1:
            raise ValueError("max_calls and max_output_tokens must be at least 1")


def find_calls(text: str, options: ToolOptions) -> list[str]:
    """What stands between the marks of each whole call."""
    calls = []
    for part in text.split(options.call_open)[1:]:
        call, mark, _ = part.partition(options.call_close)
        if mark:
            calls.append(call)
    return calls


async def answer_with_tool(client: EngineClient, prompt: Prompt, options: ToolOptions, tool: Tool) -> Answer:
    """Turns until the model makes no call, has made `max_calls`, or there is no room for another turn.

    Metrics: num_turns, tool_calls, tool_failures, tool_truncations (outputs that were cut) and tool_bytes (before that).
    """
    text, transcript = client.text, Transcript(prompt)
    close_ids = text.encode(options.call_close)
    stops = close_ids if len(close_ids) == 1 else ()
    counts: Counter[str] = Counter(dict.fromkeys(("tool_calls", "tool_failures", "tool_truncations", "tool_bytes"), 0))
    while True:
        turn = await client.generate(transcript.token_ids, stop_token_ids=stops)
        transcript.add(turn)
        has_ended = turn.finish_reason is FinishReason.STOP
        calls = find_calls(text.decode(turn.token_ids), options) if has_ended else []
        if not calls or counts["tool_calls"] + len(calls) > options.max_calls:
            return transcript.answer(has_ended and not calls, _metrics(client, counts))
        for call in calls:
            output = await tool(call)
            before, after = text.encode(options.output_open), text.encode(options.output_close)
            said = text.encode_foreign(output.text)
            room = client.num_left(transcript.token_ids) - len(before) - len(after) - 1  # one token for the next turn
            most = min(room, options.max_output_tokens)
            is_cut = output.is_truncated or len(said) > most
            counts.update(tool_calls=1, tool_failures=output.has_failed, tool_truncations=is_cut, tool_bytes=output.num_bytes)
            if room < 0:
                return transcript.answer(False, _metrics(client, counts))
            transcript.insert([*before, *said[:most], *after])


def _metrics(client: EngineClient, counts: Counter[str]) -> dict[str, float]:
    return {"num_turns": float(client.num_turns), **{name: float(count) for name, count in counts.items()}}
