"""Time and memory of planning, and how even the result is, for published models and for a trillion weights on 1,024 ranks.

    python tests/benchmarks/reshard_plan.py [--json]

Per layout, in a process of its own: `plan_s` wall-clock and `plan_cpu_s` CPU seconds to build and prove the plan,
`peak_mb` the growth of the process's peak memory, `num_boxes` transfers, `sender_over_bound` the most loaded sender over
what ownership forces, `receive_ratio` bytes received over bytes held, `predicted_over_nic` the predicted sync over the NIC
bound of an H100 cluster. Then the worst of each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ("qwen3_30b_a3b_2x8", "qwen3_235b_a22b_16x8", "deepseek_v3_8x32")
NAMES = (*EXPERIMENTS, "trillion_32x32", "trillion_128x8")


def measure(name: str) -> dict[str, Any]:
    """Plan one layout in this process."""
    from megatron_rl.cli.reshard_plan import model_dims
    from megatron_rl.config.load import load_experiment
    from megatron_rl.config.resolve import resolve
    from megatron_rl.controller.layouts import engine_layout, trainer_layout
    from megatron_rl.resharding.cost import Network, compute_cost
    from megatron_rl.resharding.plan import build_reshard_plan
    from megatron_rl.types.layout import EngineLayout

    known = name if name in EXPERIMENTS else "deepseek_v3_8x32"
    config = resolve(load_experiment(ROOT / "configs" / "experiments" / f"{known}.yaml").config)
    family, dims = model_dims(config.model, config.data)
    layout, engine = trainer_layout(config.trainer.layout), engine_layout(config.rollout)
    if name not in EXPERIMENTS:  # 1.04e12 weights: 60 layers of 384 experts
        dims = dataclasses.replace(dims, num_experts=384, num_dense_layers=1, vocab_size=163840)
        layout = dataclasses.replace(layout, tp=8, ep=32, dp=8)
        engine = EngineLayout(32, 32, ep=32) if name == "trillion_32x32" else EngineLayout(8, 128)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, cpu = time.perf_counter(), time.process_time()
    plan = build_reshard_plan(family, dims, layout, engine, spec="te")
    plan_s, plan_cpu_s = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cost = compute_cost(plan, Network(), bucket_bytes=config.sync.bucket_bytes)
    return {
        "name": name,
        "num_trainer_ranks": layout.world_size,
        "num_engine_ranks": engine.num_ranks,
        "plan_s": plan_s,
        "plan_cpu_s": plan_cpu_s,
        "peak_mb": (peak - before) / 1024,
        "process_mb": peak / 1024,
        "num_boxes": plan.num_ops,
        "sender_over_bound": float(cost.sent_bytes.max() / cost.sender_bound_bytes),
        "receive_ratio": cost.receive_ratio,
        "predicted_s": cost.seconds,
        "predicted_over_nic": cost.seconds / cost.nic_bound_s,
        "broadcast_over_predicted": cost.broadcast_s / cost.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--only", choices=NAMES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(args.only)))
        return
    rows = []
    for name in NAMES:
        command = [sys.executable, __file__, "--only", name]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout))
    worst = {
        key: max(row[key] for row in rows)
        for key in ("plan_s", "plan_cpu_s", "process_mb", "sender_over_bound", "receive_ratio", "predicted_over_nic")
    }
    if args.json:
        print(json.dumps({**worst, "layouts": rows}))
        return
    for row in rows:
        print("  ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()))
    print("worst:", "  ".join(f"{key} {value:.3f}" for key, value in worst.items()))


if __name__ == "__main__":
    main()
