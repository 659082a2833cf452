"""What the rollout scheduler costs per event: 100,000 trajectories under way on 1,000 scripted engines, one process.

    python -m tests.benchmarks.rollout --json

An event is a start, a return, a score, a report of KV use or a group's release; batches and versions are counted as one
each and their whole cost is included. Memory is sampled after each version, once the number under way has settled.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
import tracemalloc
from collections import deque

from megatron_rl.scheduling.admission import AdmissionWindow
from megatron_rl.scheduling.rollout_state import RolloutState
from megatron_rl.scheduling.settings import ScheduleKind, ScheduleSettings
from megatron_rl.types.rollout import TrajectoryState


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
    held, events_at = [], []
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
            held.append(tracemalloc.get_traced_memory()[0] if tracemalloc.is_tracing() else 0)
            events_at.append(num_events)
        else:
            busy_s += time.process_time() - started
    tokens = state.ledger.tokens
    assert sum(tokens.values()) == state.ledger.num_sampled
    half = len(held) // 2
    return {
        "num_events": num_events,
        "controller_us_per_event": 1e6 * busy_s / num_events,
        "memory_growth": held[-1] / held[half] if held[half] else 0.0,
        "memory_mib": held[-1] / 2**20,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--versions", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    arguments = parser.parse_args()
    figures = run(arguments.trajectories, arguments.engines, arguments.versions)
    tracemalloc.start()  # apart from the timing, which it slows down
    traced = run(arguments.trajectories, arguments.engines, arguments.versions)
    figures |= {key: traced[key] for key in ("memory_growth", "memory_mib")}
    if arguments.json:
        print(json.dumps(figures))
    else:
        for key, value in figures.items():
            print(f"{key:28} {value:.4g}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
