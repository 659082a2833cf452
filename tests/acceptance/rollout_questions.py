"""What practitioners ask about generation, answered by two real SGLang servers of one core each.

    python -m tests.acceptance.rollout_questions [--seed 1] [--rounds 3] [--only static pulling]

A random tiny Qwen3-MoE answers 24 prompts 8 times; the lengths are drawn in advance (log-normal over prompts and over the
samples of one, up to 384 tokens) and forced, so every contestant samples the same tokens. They take turns; figures are
medians over the rounds. Prints one JSON line.

* `static`: each engine gets half of the prompts. `pulling`: one queue, an engine with room takes the next sample;
  `longest_first`: the same, with the lengths known. `chunks`: 64 tokens at a time, back into the queue, for the engine that
  has the prefix; `chunks_anywhere`: for whichever has room.
* `early_stop`: the seconds until three quarters of the groups are whole, over those of `pulling`; what the mean length of
  the kept answers is of all.
* `stream_*`: `pulling` over server-sent events, each token or each 16th, cumulative or incremental.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_rl.config.rollout_sections import SglangSection
from megatron_rl.controller.run_directory import git_revision
from megatron_rl.rollout.sglang.engine import SglangEngine
from megatron_rl.rollout.sglang.launch_args import EnginePlace, ServedModel
from megatron_rl.rollout.sglang.receiver_dir import create_receiver_dir
from megatron_rl.rollout.sglang.replies import build_generate_body
from megatron_rl.rollout.sglang.start import start_engine
from megatron_rl.scheduling.dispatch import DispatchQueue
from megatron_rl.types.rollout import GenerationRequest, SamplingParams

NUM_PROMPTS, NUM_SAMPLES, NUM_CONCURRENT, CHUNK_TOKENS, MOST_TOKENS, CONTEXT = 24, 8, 32, 64, 384, 448
KEPT_GROUPS = NUM_PROMPTS * 3 // 4
UNSTREAMED = ("static", "pulling", "longest_first", "chunks", "chunks_anywhere")
Answer = Callable[[int, GenerationRequest], Awaitable[tuple[int, ...]]]
"""Engine and request -> the sampled tokens."""


def draw_requests(seed: int) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    means = rng.lognormal(3.4, 0.8, NUM_PROMPTS)
    lengths = np.clip(means[:, None] * rng.lognormal(0.0, 0.4, (NUM_PROMPTS, NUM_SAMPLES)), 4, MOST_TOKENS).astype(int)
    prompts = rng.integers(0, 211, (NUM_PROMPTS, 24))
    return [
        GenerationRequest(f"{p}/{s}", tuple(prompts[p].tolist()), SamplingParams(int(lengths[p, s])), p * NUM_SAMPLES + s)
        for p in range(NUM_PROMPTS)
        for s in range(NUM_SAMPLES)
    ]


def save_model(folder: Path) -> None:
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=211, hidden_size=128, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
        max_position_embeddings=512, norm_topk_prob=True, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)


@asynccontextmanager
async def two_engines(folder: Path, server_args: dict[str, object]):
    """One per core."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    section = SglangSection(
        num_concurrent=NUM_CONCURRENT, server_args={"log_level_http": "warning", **server_args}
    )  # fmt: skip
    engines: list[SglangEngine] = []
    try:
        for core in cores:
            place = folder / secrets.token_hex(4)
            create_receiver_dir(place, secrets.token_bytes(32))
            engines.append(start_engine(
                f"engine {len(engines)}", section, EnginePlace(cpu_cores=(core,)),
                ServedModel(sys.executable, str(folder / "model"), "fp32", CONTEXT, "auto", None),
                receiver_dir=place, log_path=folder / "server.log", on_progress=lambda line: print(line, file=sys.stderr),
            ))  # fmt: skip
        yield engines
    finally:
        for engine in engines:
            await engine.close()


class Round:
    """One contestant's batch: samples over engines, what ended when."""

    def __init__(self, requests: Sequence[GenerationRequest], answer: Answer, chunk_tokens: int | None = None) -> None:
        self._requests, self._answer, self._chunk_tokens = requests, answer, chunk_tokens
        self.tokens: dict[int, tuple[int, ...]] = {}
        self._left = [NUM_SAMPLES] * NUM_PROMPTS
        self.whole_groups: list[tuple[float, int]] = []
        """(seconds since the start, prompt), in the order in which groups were whole."""

    async def run(self, queues: Sequence[DispatchQueue[int]], sticks: bool = True) -> float:
        """Seconds. One queue over both engines, or one for each."""
        started = time.monotonic()
        running: dict[asyncio.Task[tuple[int, ...]], tuple[DispatchQueue[int], int, int, int]] = {}
        while any(queue.num_waiting for queue in queues) or running:
            for number, queue in enumerate(queues):
                for slot, item in queue.assign():
                    engine = slot if len(queues) == 1 else number
                    running[asyncio.ensure_future(self._next_chunk(engine, item))] = (queue, slot, engine, item)
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                queue, slot, engine, item = running.pop(task)
                queue.finish(slot)
                self.tokens[item] = self.tokens.get(item, ()) + task.result()
                if len(self.tokens[item]) < self._requests[item].sampling.max_new_tokens:
                    queue.put(item, (0,), slot if sticks else None)  # ahead of what has not begun
                    continue
                self._left[item // NUM_SAMPLES] -= 1
                if not self._left[item // NUM_SAMPLES]:
                    self.whole_groups.append((time.monotonic() - started, item // NUM_SAMPLES))
        return time.monotonic() - started

    async def _next_chunk(self, engine: int, item: int) -> tuple[int, ...]:
        request, so_far = self._requests[item], self.tokens.get(item, ())
        left = request.sampling.max_new_tokens - len(so_far)
        budget = min(left, self._chunk_tokens or left)
        name = f"{request.request_id}+{len(so_far)}.{secrets.token_hex(4)}"
        chunk = GenerationRequest(name, request.token_ids + so_far, SamplingParams(budget), request.seed)
        return await self._answer(engine, chunk)


def filled(items: Sequence[int], limits: Sequence[int], order_of: Callable[[int], tuple[int, ...]]) -> DispatchQueue[int]:
    queue: DispatchQueue[int] = DispatchQueue(list(limits))
    for item in items:
        queue.put(item, order_of(item))
    return queue


async def play(requests: Sequence[GenerationRequest], answer: Answer, name: str) -> tuple[float, Round]:
    everything, both = range(len(requests)), [NUM_CONCURRENT] * 2
    one = Round(requests, answer, CHUNK_TOKENS if name.startswith("chunks") else None)
    if name == "static":
        halves = np.array_split(np.arange(len(requests)), 2)
        queues = [filled(half.tolist(), [NUM_CONCURRENT], lambda item: (1,)) for half in halves]
    elif name == "longest_first":
        queues = [filled(everything, both, lambda item: (1, -requests[item].sampling.max_new_tokens))]
    else:
        queues = [filled(everything, both, lambda item: (1,))]
    return await one.run(queues, sticks=name != "chunks_anywhere"), one


def plain(engines: Sequence[SglangEngine]) -> Answer:
    async def answer(engine: int, request: GenerationRequest) -> tuple[int, ...]:
        (segment,) = await engines[engine].generate(request)
        return segment.token_ids

    return answer


def streamed(engines: Sequence[SglangEngine], session: aiohttp.ClientSession, interval: int, is_incremental: bool) -> Answer:
    async def answer(engine: int, request: GenerationRequest) -> tuple[int, ...]:
        client = engines[engine]._client
        body = build_generate_body(request, weights="streamed") | {"stream": True}
        body["sampling_params"]["stream_interval"] = interval
        tokens: list[int] = []
        headers = {"Authorization": f"Bearer {client._keys.api}"}
        async with session.post(f"{client._url}/generate", json=body, headers=headers) as reply:
            reply.raise_for_status()
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    ids = json.loads(line[6:])["output_ids"]
                    tokens = tokens + ids if is_incremental else ids
        return tuple(tokens)

    return answer


async def measure(seed: int, rounds: int, only: Sequence[str] = ()) -> dict[str, object]:
    """`only`: these contestants of the first servers, and nothing of the second; empty: all."""
    requests = draw_requests(seed)
    lengths = np.array([r.sampling.max_new_tokens for r in requests]).reshape(NUM_PROMPTS, NUM_SAMPLES)
    seconds: dict[str, list[float]] = {}
    stops, biases, sampled = [], [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model")
        for is_incremental in (False,) if only else (False, True):
            contestants = ["pulling"] if is_incremental else list(only or UNSTREAMED)
            streams = {"stream_incremental_1": 1, "stream_incremental_16": 16} if is_incremental else {"stream_cumulative_1": 1}
            streams = {} if only else streams
            async with (
                two_engines(folder, {"incremental_streaming_output": is_incremental}) as engines,
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            ):
                for round_number in range(rounds + 1):  # the first warms up
                    for contestant in [*contestants, *streams]:
                        answer = plain(engines)
                        if contestant in streams:
                            answer = streamed(engines, session, streams[contestant], is_incremental)
                        for engine in engines:
                            await engine._control("/flush_cache", {})
                        elapsed, one = await play(requests, answer, contestant)
                        sampled[contestant] = one.tokens
                        if round_number:
                            key = "pulling_beside_streams" if is_incremental and contestant == "pulling" else contestant
                            seconds.setdefault(key, []).append(elapsed)
                        if round_number and contestant == "pulling" and not is_incremental:
                            stops.append(one.whole_groups[KEPT_GROUPS - 1][0] / elapsed)
                            kept = [prompt for _, prompt in one.whole_groups[:KEPT_GROUPS]]
                            biases.append(float(lengths[kept].mean() / lengths.mean()))
    counts = {name: sum(map(len, tokens.values())) for name, tokens in sampled.items()}
    assert set(counts.values()) == {int(lengths.sum())}, counts
    return {
        "command": f"python -m tests.acceptance.rollout_questions --seed {seed} --rounds {rounds}"
        + (f" --only {' '.join(only)}" if only else ""),
        "seed": seed,
        "revision": git_revision(),
        "num_tokens": int(lengths.sum()),
        "longest": int(lengths.max()),
        "median_length": int(np.median(lengths)),
        "tokens_per_s": {name: round(int(lengths.sum()) / statistics.median(times), 1) for name, times in seconds.items()},
        "early_stop_time": round(statistics.median(stops), 3) if stops else None,
        "early_stop_length": round(statistics.median(biases), 3) if stops else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=UNSTREAMED, default=[], help="these alone, without streaming")
    args = parser.parse_args()
    print(json.dumps(asyncio.run(measure(args.seed, args.rounds, args.only))))


if __name__ == "__main__":
    main()
