"""Weight sync, measured in one run on the same processes: 4 trainer ranks (TP2 PP2 EP2) to 4 engine ranks (TP4).

    python tests/benchmarks/resharding.py [--json] [--rounds 5] [--small]

Contestants move the same bytes of one MoE model (about 0.6 GB of bf16) into the same engine parameters and take turns, so
that a busy machine slows all of them; figures are medians. `gather_broadcast` is what most systems do: all-gather every
parameter over TP and EP, broadcast whole tensors in buckets, one pipeline stage after another. `per_slice` sends each box
as one gloo message. `gloo_ceiling`: four pairs send a quarter of the bytes each. `memcpy`: each engine rank copies its
bytes once. `p2p` and `shm` are the library's own sync; both also run with digests on both sides (`*_verified`); `p2p_tcp` is
p2p as between machines, where there is no Unix socket. A time is the last rank's end minus the first rank's start on
CLOCK_MONOTONIC. `bit_exact`: in the last round, after every contestant that moves weights, every engine parameter equals the
slice of the Hugging Face tensor. The delta figures are of real Adam steps at learning rate 1e-6 in steady state, in GB of
weights per CPU-second of one core. `*_vs_megatron_core`: against Megatron-Core's own resharding, on a model that it can move
(`megatron_refit.py`).

Needs about five times the model's bytes of memory, and ends within `--deadline` seconds per part, or says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.resharding import delta
from megatron_rl.resharding.boxes import Box

sys.path.insert(0, str(Path(__file__).parents[2]))  # it also runs as a file

from tests.benchmarks.megatron_refit import measure_refit
from tests.benchmarks.rank_processes import run_ranks, seconds_of
from tests.benchmarks.resharding_ranks import CONTESTANTS, NUM_RANKS, model_dims, rank_main


def measure_syncs(rounds: int, is_small: bool, deadline_s: float) -> dict[str, Any]:
    """Seconds of every contestant per round, and whether every sync was bit-exact."""
    reports = run_ranks(rank_main, NUM_RANKS, rounds, is_small, deadline_s)
    seconds = seconds_of(reports, CONTESTANTS, rounds)
    return {"seconds": seconds, "bit_exact": int(all(report["bit_exact"] for report in reports))}


def measure_delta() -> dict[str, float]:
    """Adam (fp32 masters, bf16 weights) on a small regression; the last steps' changes, encoded and applied."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(256, 2048), torch.nn.SiLU(), torch.nn.Linear(2048, 256))
    for layer in (net[0], net[2]):
        torch.nn.init.normal_(layer.weight, std=0.02)
    teacher = torch.randn(256, 256) / 16
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-6, betas=(0.9, 0.95))
    weights = [net[0].weight, net[2].weight]
    base, fractions = delta.DeltaBase(), []
    held = [torch.empty_like(w, dtype=torch.bfloat16) for w in weights]
    for step in range(60):
        inputs = torch.randn(64, 256)
        optimizer.zero_grad()
        (net(inputs) - inputs @ teacher).square().mean().backward()
        optimizer.step()
        boxes = [Box(w.detach().to(torch.bfloat16), torch.bfloat16) for w in weights]
        payload = base.encode(boxes)
        base.digest = "known"
        if payload is None:
            for at, box in zip(held, boxes, strict=True):
                at.copy_(box.view)
            continue
        delta.apply_delta(payload, [Box(at, torch.bfloat16) for at in held])
        assert all(torch.equal(at, box.view) for at, box in zip(held, boxes, strict=True))
        if step >= 40:
            fractions.append(len(payload) / sum(box.num_bytes for box in boxes))
    changed = statistics.mean(fractions) / 1.5 / 1.02  # a byte and a value of two, few skips
    return {"delta_bytes_fraction": statistics.mean(fractions), **measure_delta_speed(changed)}


def measure_delta_speed(fraction: float) -> dict[str, float]:
    """Best of several passes over 128 MB of which `fraction` changes."""
    rng = np.random.default_rng(2)
    weights = torch.from_numpy(rng.integers(-(2**15), 2**15, (8192, 8192), dtype=np.int16)).view(torch.bfloat16)
    target, base = weights.clone(), weights.clone().view(-1).view(torch.int16)
    gigabytes, encode, apply = weights.numel() * 2 / 1e9, 0.0, 0.0
    for _ in range(5):
        weights.view(-1).view(torch.int16)[torch.from_numpy(rng.random(weights.numel(), dtype=np.float32) < fraction)] ^= 1
        begun = time.thread_time()
        gaps, values = delta.encode_box(weights, base)
        encoded = time.thread_time()
        delta.apply_box(target, gaps, values)
        applied = time.thread_time()
        encode, apply = max(encode, gigabytes / (encoded - begun)), max(apply, gigabytes / (applied - encoded))
    assert torch.equal(weights.view(torch.int16), target.view(torch.int16))
    return {"delta_encode_gbps": encode, "delta_apply_gbps": apply}


def compare(measured: dict[str, Any], num_bytes: int) -> dict[str, Any]:
    seconds = {name: statistics.median(times) for name, times in measured["seconds"].items()}

    def ratio(slower: str, faster: str) -> float:
        """The median over rounds of the ratio within a round: rounds differ more than contestants do."""
        pairs = zip(measured["seconds"][slower], measured["seconds"][faster], strict=True)
        return statistics.median(a / b for a, b in pairs)

    return {
        "p2p_vs_gather_broadcast": ratio("gather_broadcast", "p2p"),
        "p2p_vs_per_slice": ratio("per_slice", "p2p"),
        "p2p_vs_gloo_ceiling": ratio("gloo_ceiling", "p2p"),
        "p2p_tcp_vs_gather_broadcast": ratio("gather_broadcast", "p2p_tcp"),
        "p2p_tcp_vs_gloo_ceiling": ratio("gloo_ceiling", "p2p_tcp"),
        "shm_vs_gather_broadcast": ratio("gather_broadcast", "shm"),
        "shm_vs_memcpy": ratio("shm", "memcpy"),
        "p2p_verified_vs_gather_broadcast": ratio("gather_broadcast", "p2p_verified"),
        "p2p_verified_vs_gloo_ceiling": ratio("gloo_ceiling", "p2p_verified"),
        "shm_verified_vs_gather_broadcast": ratio("gather_broadcast", "shm_verified"),
        "shm_verified_vs_memcpy": ratio("shm_verified", "memcpy"),
        "bit_exact": measured["bit_exact"],
        "gigabytes": num_bytes / 1e9,
        "load_average": os.getloadavg()[0],
        **{f"{name}_s": value for name, value in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one that warms up")
    parser.add_argument("--small", action="store_true", help="a model of a few MB: does it run?")
    parser.add_argument("--deadline", type=float, default=150.0, help="seconds that the ranks may take")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    options = arguments.rounds, arguments.small, arguments.deadline
    figures = compare(measure_syncs(*options), model_dims(arguments.small)[1]) | measure_delta() | measure_refit(*options)
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps(rounded) if arguments.json else "\n".join(f"{k:34} {v}" for k, v in rounded.items()), flush=True)


if __name__ == "__main__":
    main()
