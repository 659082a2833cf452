"""The long campaigns: `python -m tests.acceptance.campaigns NAME`."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.controller.run_directory import git_revision
from tests.acceptance.rollout_questions import measure as rollout_figures
from tests.acceptance.router_replay import measure as router_replay_figures
from tests.acceptance.whole_run import report, train
from tests.e2e.runs import ROOT
from tests.slurm.cluster import SlurmCluster

SEEDS = (1, 2, 3)
QUICKSTART_LIMIT_S = 480.0


def quickstart() -> bool:
    """From below 0.40 to above 0.80 within 8 minutes, on three seeds, in less than 6 GiB."""
    results = []
    for seed in SEEDS:
        figures = train("configs/quickstart.yaml", seed, timeout_s=900)
        results.append(report(
            "quickstart", figures,
            starts_below_040=figures["accuracy_before"] < 0.40, ends_above_080=figures["accuracy_after"] > 0.80,
            within_8_minutes=figures["wall_s"] < QUICKSTART_LIMIT_S, below_6_gib=figures["peak_memory_gib"] < 6.0,
            starts_within_30_s=figures["start_s"] < 30,
        ))  # fmt: skip
    return all(results)


def quickstart_no_learning() -> bool:
    """With the RL learning rate at 0 the accuracy does not move."""
    figures = train("configs/quickstart.yaml", 1, "trainer.optimizer.learning_rate=0", "run.num_steps=20", timeout_s=900)
    return report("quickstart_no_learning", figures, does_not_move=figures["accuracy_after"] == figures["accuracy_before"])


def quickstart_sglang() -> bool:
    """The same experiment on a real SGLang TP 2 server learns the same: mean of three seeds within 0.05."""
    engines = ("rollout.engine=sglang", "rollout.num_engines=1", "rollout.sglang.tp_size=2")
    results = {"embedded": [], "sglang": []}
    for seed in SEEDS:
        for kind, overrides in (("embedded", ()), ("sglang", engines)):
            figures = train("configs/quickstart.yaml", seed, *overrides, timeout_s=3600)
            report(f"quickstart_sglang/{kind}", figures)
            results[kind].append(figures["accuracy_after"])
    means = {kind: sum(values) / len(values) for kind, values in results.items()}
    return report("quickstart_sglang", {"means": means}, within_005=abs(means["sglang"] - means["embedded"]) <= 0.05)


SCHEDULES = {
    "lockstep": (),
    "one_step_off": ("rollout.schedule=one_step_off",),
    "asynchronous": ("rollout.schedule=asynchronous", "rollout.max_staleness=2"),
}


def schedules() -> bool:
    """Lockstep, one_step_off and asynchronous rollouts learn the same: means of three seeds within 0.05."""
    accuracies: dict[str, list[float]] = {kind: [] for kind in SCHEDULES}
    for seed in SEEDS:  # in turns, so that a busy machine slows all of them
        for kind, overrides in SCHEDULES.items():
            figures = train("configs/quickstart.yaml", seed, *overrides, timeout_s=1800)
            report(f"schedules/{kind}", figures)
            accuracies[kind].append(figures["accuracy_after"])
    means = {kind: sum(values) / len(values) for kind, values in accuracies.items()}
    gap = max(abs(mean - means["lockstep"]) for mean in means.values())
    return report("schedules", {"means": means, "largest_gap_to_lockstep": gap}, within_005=gap <= 0.05)


def heavy_tail() -> bool:
    """Where few answers are long, a step takes less time one_step_off and asynchronously than in lockstep."""
    names = ("time/step_s", "time/generate_s", "time/train_s", "rollout/efficiency", "length/mean", "length/max")
    steps = {}
    with tempfile.TemporaryDirectory() as folder:
        source = f"data.sources.1.path={write_laps(Path(folder) / 'laps.jsonl')}"
        for kind, overrides in SCHEDULES.items():
            figures = train("configs/experiments/heavy_tail.yaml", 1, source, *overrides, timeout_s=1800, means=names)
            report(f"heavy_tail/{kind}", figures)
            steps[kind] = figures["means"]["time/step_s"]
    return report(
        "heavy_tail", {"step_s": steps},
        **{f"{kind}_is_faster": steps[kind] < steps["lockstep"] for kind in SCHEDULES if kind != "lockstep"},
    )  # fmt: skip


def write_laps(path: Path) -> Path:
    """Runs through the alphabet from one letter to another, with up to two laps more."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    cases = [(first, laps, last) for first in range(26) for laps in range(3) for last in range(26)]
    random.Random(7).shuffle(cases)
    with path.open("w") as file:
        for first, laps, last in cases:
            length = (last - first) % 26 + 1 + 26 * laps
            answer = "".join(letters[(first + i) % 26] for i in range(length))
            file.write(json.dumps({"prompt": f"{letters[first]}{'ABC'[laps]}{letters[last]}=", "answer": answer}) + "\n")
    return path


def vapo() -> bool:
    """VAPO with its critic learns what GSPO does (mean of three seeds within 0.05); once more without value pretraining."""
    runs = {
        "gspo": ("configs/quickstart.yaml",),
        "vapo": ("configs/experiments/vapo_quickstart.yaml",),
        "vapo_no_pretraining": ("configs/experiments/vapo_quickstart.yaml", "critic.pretraining.num_steps=0"),
    }
    results: dict[str, list[float]] = {name: [] for name in runs}
    for seed in SEEDS:
        for name, (config, *overrides) in runs.items():
            figures = train(config, seed, *overrides, timeout_s=3600)
            report(f"vapo/{name}", figures)
            results[name].append(figures["accuracy_after"])
    means = {name: round(sum(values) / len(values), 4) for name, values in results.items()}
    return report("vapo", {"means": means}, within_005=means["vapo"] >= means["gspo"] - 0.05)


def tools() -> bool:
    """A tiny model learns to call a calculator and a Python interpreter, a few steps each, and rather does than not."""
    results = []
    numbers = [(a, sign, b) for a in range(2, 100) for b in range(2, 100) for sign in "+*"]
    random.Random(5).shuffle(numbers)
    calls = {"calculator_tool": "[{}]={};", "python_tool": "[print({})]={}\n;"}
    for config, shape in calls.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "sums.jsonl"
            with path.open("w") as file:
                for a, sign, b in numbers[:6000]:
                    text, value = f"{a}{sign}{b}", a + b if sign == "+" else a * b
                    file.write(json.dumps({"prompt": text, "answer": shape.format(text, value)}) + "\n")
            figures = train(
                f"configs/experiments/{config}.yaml", 1, f"data.sources.0.path={path}", "run.num_steps=15",
                timeout_s=1200, means=("generate/tool_calls", "generate/tool_failures", "rollout/logprob_gap"),
            )  # fmt: skip
        results.append(report(
            f"tools/{config}", figures,
            calls_its_tool=figures["means"]["generate/tool_calls"] > 0.5,
            learns=figures["accuracy_after"] > figures["accuracy_before"],
            log_probs_agree=figures["logprob_gap_max"] < 1e-4,
        ))  # fmt: skip
    return all(results)


def smollm2() -> bool:
    """SmolLM2-135M learns one-digit arithmetic zero-shot and two-digit one-shot, with both engines."""
    if not (ROOT / "models/smollm2_135m/config.json").exists():
        sys.exit("prepare the model first: .venv/bin/python checkpoints_tools/dequantize.py --help")
    results = []
    tasks = (("smollm2_135m_cpu", 0.10, 0.60), ("smollm2_135m_cpu_two_digits", 0.20, 0.35))
    engines = {"embedded": (), "sglang": ("rollout.engine=sglang", "rollout.num_engines=1", "rollout.sglang.tp_size=1")}
    for config, below, above in tasks:
        for kind, overrides in engines.items():
            figures = train(f"configs/experiments/{config}.yaml", 1, *overrides, timeout_s=7200)
            results.append(report(
                f"smollm2/{config}/{kind}", figures,
                starts_below=figures["accuracy_before"] < below, ends_above=figures["accuracy_after"] > above,
                step_below_20_s=figures["step_s_median"] <= 20, below_8_gib=figures["peak_memory_gib"] <= 8,
            ))  # fmt: skip
    return all(results)


def slurm() -> bool:
    """slurm/train.sbatch runs the quick start on two nodes of an emulated Slurm cluster to the same end."""
    with SlurmCluster(num_nodes=2, cpus_per_node=2, gpus_per_node=0) as cluster:
        directory = Path(cluster.shared) / "run"
        started = time.monotonic()
        job = cluster.submit(
            [str(ROOT / "slurm/train.sbatch"), str(ROOT / "configs/quickstart.yaml"), f"run.directory={directory}",
             "telemetry.progress=plain"],
            MEGATRON_RL_VENV=str(Path(sys.executable).parent.parent),
        )  # fmt: skip
        result = cluster.wait(job, timeout_s=1800)
        if result.exit_code != 0:
            sys.exit(f"job failed with {result.exit_code}:\n{result.output[-3000:]}")
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        left = cluster.processes()
    accuracies = {row["step"]: round(row["eval/accuracy"], 4) for row in rows if "eval/accuracy" in row}
    figures = {
        "command": "sbatch --nodes=2 slurm/train.sbatch configs/quickstart.yaml",
        "seed": 1,
        "revision": git_revision(),
        "accuracies": accuracies,
        "wall_s": round(time.monotonic() - started, 1),
        "processes_left": left,
    }
    return report("slurm", figures, ends_above_080=accuracies[max(accuracies)] > 0.80, nothing_left=not left)


def router_replay() -> bool:
    """R3 brings the log-probs of a bf16 MoE nearer to a real SGLang's; replaying the trainer's own experts changes no bit."""
    figures = router_replay_figures(seed=1, num_warm_start=72)
    return report(
        "router_replay", figures,
        kl_falls=figures["kl_on"] < figures["kl_off"], gap_falls=figures["gap_on"] < figures["gap_off"],
        own_replay_is_bit_equal=bool(figures["own_replay_is_bit_equal"]),
    )  # fmt: skip


def rollout_questions() -> bool:
    """What practitioners ask about generation, on two real SGLang servers: splits, chunks, early stops, streaming."""
    return report("rollout_questions", asyncio.run(rollout_figures(seed=1, rounds=3)))


def sglang_tp1() -> bool:
    """Weights of four trainer layouts arrive in a real SGLang server of one rank (the first tier has TP 2)."""
    return _slow_tests("sglang_tp1", "tests/sglang/test_weights_arrive.py")


def sglang_places() -> bool:
    """Whole runs on an SGLang engine over two nodes (one of which dies, too) and on one that was started elsewhere."""
    return _slow_tests("sglang_places", "tests/sglang/test_whole_runs.py")


def sync_kills() -> bool:
    """A trainer, an engine or a connection is struck at many moments of a sync: no engine serves a mixture, nothing hangs."""
    return _slow_tests("sync_kills", "tests/distributed/test_sync_kills.py")


def _slow_tests(name: str, path: str) -> bool:
    status = pytest.main(["-v", "-s", "-m", "slow", "--import-mode=importlib", str(ROOT / path)])
    return report(name, {"revision": git_revision()}, passed=status == 0)


CAMPAIGNS: dict[str, Callable[[], bool]] = {
    "quickstart": quickstart,
    "quickstart_no_learning": quickstart_no_learning,
    "quickstart_sglang": quickstart_sglang,
    "schedules": schedules,
    "heavy_tail": heavy_tail,
    "rollout_questions": rollout_questions,
    "vapo": vapo,
    "tools": tools,
    "smollm2": smollm2,
    "slurm": slurm,
    "router_replay": router_replay,
    "sglang_tp1": sglang_tp1,
    "sglang_places": sglang_places,
    "sync_kills": sync_kills,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="launch/acceptance.sh",
        description="Long campaigns. " + " ".join(f"{name}: {run.__doc__}" for name, run in CAMPAIGNS.items()),
        epilog="example: bash launch/acceptance.sh quickstart",
    )
    parser.add_argument("name", nargs="?", choices=CAMPAIGNS)
    name = parser.parse_args().name
    if name is None:
        parser.print_help()
        return 0
    return 0 if CAMPAIGNS[name]() else 1


if __name__ == "__main__":
    sys.exit(main())
