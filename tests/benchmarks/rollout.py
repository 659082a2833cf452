"""What the rollout scheduler costs per event, and what a kept KV cache saves.

`controller_us_per_event`: 100,000 trajectories under way on 1,000 scripted engines, one process.

    python -m tests.benchmarks.rollout --json

An event is a start, a return, a score, a report of KV use or a group's release; batches and versions are counted as one
each and their whole cost is included. Time is the CPU time of this process. Memory is the interpreter's allocated blocks
after each version: `memory_growth` is the last count over the one half-way.

`partial_kept_vs_reprefill`: tokens per CPU-second of the embedded engine when 4 samples with prefixes of 2,048 tokens are
paused and resumed 8 times with their KV cache, over the same with abort and a prefill of the whole prefix; no new weights in
between, so that both sample the same tokens. `partial_stale_vs_reprefill`: the same with a new version at every pause, so
that what was kept is stale from the first one on. All take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from collections import deque

import torch

from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.rollout.embedded.engine import EmbeddedEngine
from megatron_rl.scheduling.admission import AdmissionWindow
from megatron_rl.scheduling.rollout_state import RolloutState
from megatron_rl.scheduling.settings import ScheduleKind, ScheduleSettings
from megatron_rl.types.rollout import GenerationRequest, RolloutSegment, SamplingParams, TrajectoryState


def run(num_trajectories: int, num_engines: int, num_versions: int, seed: int = 1) -> dict[str, float]:
    """Asynchronous, cap 3, groups of 8; an engine returns a random quarter of its samples unfinished (a pause)."""
    samples_per_group, cap = 8, 3
    groups_per_batch = num_trajectories // samples_per_group // (cap + 1)
    settings = ScheduleSettings(
        groups_per_batch, samples_per_group, 1000, kind=ScheduleKind.ASYNCHRONOUS, max_staleness=cap, filter_groups=True
    )
    limit = num_trajectories // num_engines
    state = RolloutState(settings, [limit] * num_engines)
    windows = [AdmissionWindow(limit) for _ in range(num_engines)]
    rng = random.Random(seed)
    running: deque[str] = deque()
    num_events = num_groups = 0
    busy_s = 0.0
    held = []
    version = 0
    while version < num_versions:
        wanted = [(f"g{num_groups + i}", f"p{(num_groups + i) % 50_000}") for i in range(state.num_wanted)]
        num_groups += len(wanted)
        outcomes = [(rng.random() < 0.25, rng.random() < 0.5, rng.randrange(num_engines), rng.random()) for _ in range(2000)]
        started = time.process_time()
        for group_id, prompt_id in wanted:
            state.add_group(group_id, prompt_id)
        num_started = 0
        for _, sample in state.assign():
            running.append(sample.sample_id)
            num_started += 1
        num_events += len(wanted) + num_started
        for is_paused, is_correct, engine, usage in outcomes:
            if not running:
                break
            name = running.popleft()
            sample = state.on_returned(name, [(version, 100)], not is_paused)
            num_events += 2
            if sample is not None and sample.state is TrajectoryState.DONE:
                state.on_scored(name, is_correct)
                num_events += 1
            state.queue.set_limit(engine, windows[engine].on_usage(usage, state.queue.num_running_on(engine)))
            for _, resumed in state.assign():
                running.append(resumed.sample_id)
                num_events += 1
        state.take_dropped()
        if state.take_batch() is not None:
            version += 1
            state.on_version(version)
            num_events += 2
            busy_s += time.process_time() - started
            gc.collect()
            held.append(sys.getallocatedblocks())
        else:
            busy_s += time.process_time() - started
    tokens = state.ledger.tokens
    assert sum(tokens.values()) == state.ledger.num_sampled
    half = len(held) // 2
    return {
        "num_events": num_events,
        "controller_us_per_event": 1e6 * busy_s / num_events,
        "num_trajectories_ended": sum(state.ledger.samples.values()),
        "memory_growth": held[-1] / held[half],
    }


PREFIX, NUM_RESUMPTIONS, TOKENS_PER_PHASE, NUM_SAMPLES = 2048, 8, 48, 4
DIMS = ModelDims(
    num_layers=3, hidden_size=192, num_heads=6, num_kv_heads=2, head_dim=32, vocab_size=512, ffn_size=512,
    num_experts=0, top_k=0, moe_ffn_size=0, tied_embeddings=True, qk_norm=False, norm_topk_prob=False,
    norm_epsilon=1e-6, rope_theta=10000.0, max_positions=4096,
)  # fmt: skip


async def generate_in_phases(engine: EmbeddedEngine, kv: str) -> tuple[float, list[list[RolloutSegment]]]:
    """CPU seconds of a pause and resumption every `TOKENS_PER_PHASE` tokens, and the answers. `kv`: kept, stale, dropped."""
    total = TOKENS_PER_PHASE * (NUM_RESUMPTIONS + 1)
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(512) for _ in range(PREFIX)) for _ in range(NUM_SAMPLES)]
    started = time.process_time()
    answers = await asyncio.gather(*(_answer(engine, i, prompt, total, kv) for i, prompt in enumerate(prompts)))
    return time.process_time() - started, answers


async def _answer(
    engine: EmbeddedEngine, number: int, prompt: tuple[int, ...], total: int, kv: str
) -> list[RolloutSegment]:
    if kv != "dropped":  # one request; the engine is paused in place and resumed by the first sample
        request = GenerationRequest(f"r{number}", prompt, SamplingParams(total), number)
        answer = asyncio.ensure_future(engine.generate(request))
        if number == 0:
            base = engine.stats().num_tokens_generated
            for phase in range(NUM_RESUMPTIONS):
                target = base + (phase + 1) * TOKENS_PER_PHASE * NUM_SAMPLES
                while engine.stats().num_tokens_generated < target and not answer.done():
                    await asyncio.sleep(0.002)
                await engine.pause("in_place")
                if kv == "stale":
                    await engine.load_weights({"phase": "begin"})
                    await engine.load_weights({"phase": "commit", "version": await engine.policy_version() + 1})
                await engine.resume()
        return list(await answer)
    segments: list[RolloutSegment] = []
    tokens: tuple[int, ...] = ()
    for _ in range(NUM_RESUMPTIONS + 1):  # the request ends with its budget; the next one brings the whole prefix again
        request = GenerationRequest(f"r{number}", prompt + tokens, SamplingParams(TOKENS_PER_PHASE), number)
        segments += await engine.generate(request)
        tokens += segments[-1].token_ids
    return segments


def kept_against_reprefill(repeats: int = 2) -> dict[str, float]:
    """Ratios of tokens per CPU-second."""
    torch.set_num_threads(1)
    context = PREFIX + TOKENS_PER_PHASE * (NUM_RESUMPTIONS + 1)
    engine = EmbeddedEngine(
        DIMS, 1, torch.float32, num_slots=NUM_SAMPLES, max_context=context, stop_token_ids=()
    )  # fmt: skip
    for name, tensor in engine.weights.stacked.items():
        tensor.fill_(1.0) if "norm" in name else tensor.normal_(std=0.02)
    seconds: dict[str, list[float]] = {"kept": [], "stale": [], "dropped": []}
    for _ in range(repeats):
        sampled = {}
        for kv, times in seconds.items():
            elapsed, answers = asyncio.run(generate_in_phases(engine, kv))
            times.append(elapsed)
            sampled[kv] = [[token for segment in answer for token in segment.token_ids] for answer in answers]
            num_versions = max(len({segment.policy_version for segment in answer}) for answer in answers)
            assert num_versions == (NUM_RESUMPTIONS + 1 if kv == "stale" else 1), num_versions
        assert sampled["kept"] == sampled["dropped"]
    engine.close()
    return {f"partial_{kv}_vs_reprefill": min(seconds["dropped"]) / min(seconds[kv]) for kv in ("kept", "stale")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--versions", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    arguments = parser.parse_args()
    figures = run(arguments.trajectories, arguments.engines, arguments.versions)
    figures |= kept_against_reprefill()
    if arguments.json:
        print(json.dumps(figures))
    else:
        for key, value in figures.items():
            print(f"{key:28} {value:.4g}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
