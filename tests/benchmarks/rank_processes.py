"""The ranks of a benchmark: forked processes that take turns on one machine, with a deadline for all."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Any


def run_ranks(rank_main: Callable[..., None], num_ranks: int, rounds: int, is_small: bool, deadline_s: float) -> list[Any]:
    """What each rank reports; `rank_main(rank, port, rounds, is_small, deadline_s, barrier, results)` is its life.

    Raises TimeoutError after `deadline_s`, RuntimeError with the first rank's error. No rank outlives the call.
    """
    context = multiprocessing.get_context("fork")  # every rank starts with torch imported
    results, barrier = context.Queue(), context.Barrier(num_ranks)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        context.Process(target=rank_main, args=(rank, port, rounds, is_small, deadline_s, barrier, results), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    reports: list[dict[str, Any]] = []
    ends_s = time.monotonic() + deadline_s
    try:
        for _ in ranks:
            reports.append(results.get(timeout=max(ends_s - time.monotonic(), 0.0)))
    except Empty:
        raise TimeoutError(f"{rank_main.__name__}: not done within {deadline_s:.0f} s; raise --deadline") from None
    finally:
        for process in ranks:
            process.join(max(ends_s - time.monotonic(), 1.0) if len(reports) == num_ranks else 0.0)
            if process.is_alive():
                process.kill()
    if failed := [report["error"] for report in reports if "error" in report]:
        raise RuntimeError(failed[0])
    return reports


def seconds_of(reports: Sequence[Any], contestants: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Per contestant and round the last rank's end minus the first rank's start. The first round warms up."""
    return {
        name: [
            max(report["spans"][name][i][1] for report in reports) - min(report["spans"][name][i][0] for report in reports)
            for i in range(1, rounds + 1)
        ]
        for name in contestants
    }
