"""Whole GRPO steps, generation included, of this stack and of TRL's GRPOTrainer on the same machine.

    python tests/benchmarks/end_to_end.py [--json] [--case smollm2] [--precision fp32] [--steps 4] [--turns 2]
                                           [--seed 1] [--accuracy]

The first call sets up TRL in a virtual environment of its own (`.venv-trl`). Both train the same model from the same folder on
the same prompts with the same reward, precision (bf16 compute, fp32 master weights, or all fp32), learning rate and number
of samples, with two threads. They take turns; the figures are the medians over all steps but the first of every turn.
Memory is the sum over all processes of a contestant. `--accuracy`: both answer the same held-out prompts at the end of
their last turn (give `--turns 1 --steps 40`); beside it stands the mean reward of the samples of the later half of the
steps. `--precision`: that of both, in the place of the case's own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from megatron_rl.config.load import load_experiment
from megatron_rl.config.resolve import resolve
from megatron_rl.controller.model_setup import build_model_setup
from megatron_rl.data.bundle import build_data
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.types.rollout import Prompt

sys.path.insert(0, str(Path(__file__).parents[2]))  # it also runs as a file

from tests.e2e.memory import peak_memory
from tests.e2e.runs import ROOT, running

TRL = ("trl==1.16.0", "torch==2.13.0", "transformers==5.19.0")
ENVIRONMENT = ROOT / ".venv-trl"
NUM_THREADS = 2
TURN_LIMIT_S = 7200.0


@dataclass(frozen=True)
class Case:
    """What both contestants train. `overrides` make the experiment's objective the one that TRL is given."""

    config: str
    precision: str
    overrides: tuple[str, ...]
    reward: str

    def in_precision(self, precision: str | None) -> Case:
        if precision is None:
            return self
        return replace(self, precision=precision, overrides=(*self.overrides, f"model.dtype={precision}"))


CASES = {
    # Held-out prompts enough to tell two accuracies apart: one sampled answer to each is off by 0.015.
    "smollm2": Case(
        "configs/experiments/smollm2_135m_cpu_two_digits.yaml", "bf16", ("run.num_eval_prompts=1024",), "last_integer"
    ),
    # From random weights: every answer has about the same length for both, and no step is skipped for want of variance.
    "tiny": Case(
        "configs/quickstart.yaml",
        "fp32",
        ("algorithm.loss=ppo", "algorithm.clip_low=0.2", "algorithm.clip_high=0.2", "trainer.minibatches_per_step=1",
         "trainer.warm_start.num_steps=0", "trainer.optimizer.schedule=constant", "trainer.optimizer.num_warmup_steps=0"),
        "exact_match",
    ),
}  # fmt: skip


@dataclass
class Figures:
    """All turns of one contestant: what each measured step took and sampled."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """The mean of each step's samples, in the last turn."""
    accuracy: float | None = None
    peak_bytes: int = 0

    def add(
        self, seconds: list[float], tokens: list[float], rewards: list[float], accuracy: float | None, peak_bytes: int
    ) -> None:
        self.seconds += seconds[1:]
        self.tokens += tokens[1:]
        self.rewards = rewards
        self.accuracy = accuracy
        self.peak_bytes = max(self.peak_bytes, peak_bytes)

    def describe(self) -> str:
        return (
            f"{statistics.median(self.seconds):.1f} s per step, rewards {[round(r, 3) for r in self.rewards]}, {self.accuracy}"
        )

    def late_reward(self) -> float:
        return statistics.mean(self.rewards[len(self.rewards) // 2 :])


def set_up_trl() -> Path:
    """The interpreter of TRL's environment, made on the first call."""
    python, stamp = ENVIRONMENT / "bin/python", ENVIRONMENT / ".installed"
    if not (stamp.exists() and stamp.read_text() == " ".join(TRL)):
        report_progress(f"installing {' '.join(TRL)} into {ENVIRONMENT.name}")
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *TRL], check=True)
        stamp.write_text(" ".join(TRL))
    return python


def specify(case: Case, steps: int, seed: int, has_accuracy: bool, folder: Path) -> dict[str, Any]:
    """What TRL is to train: what the experiment says, as plain values."""
    config = resolve(load_experiment(ROOT / case.config, [*case.overrides, f"run.seed={seed}"]).config)
    tokenizer = load_tokenizer(config.data.tokenizer, config.model.path)
    data = build_data(config.data, config.run.num_eval_prompts, tokenizer)
    model = config.model.path
    if model is None:
        dims = build_model_setup(config.model, 1, tokenizer.vocab_size)
        model = str(folder / "model")
        values = dims.family.hf_from_dims(dims.dims)
        set_seed(seed)
        reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
        reference.config.update({"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id})
        reference.generation_config.update(eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id)
        reference.save_pretrained(model)
        tokenizer.save(Path(model))

    def rows(prompts: list[Prompt]) -> list[dict[str, Any]]:
        decode = load_decoder(Path(model))
        return [{"text": decode(p.token_ids), "token_ids": list(p.token_ids), "answer": p.answer} for p in prompts]

    return {
        "model": str(Path(model).resolve()),
        "prompts": rows(list(data.train_sampler.next(config.run.prompts_per_step * steps))),
        "eval_prompts": rows(list(data.eval_prompts)) if has_accuracy else [],
        "reward": case.reward,
        "precision": case.precision,
        "num_threads": NUM_THREADS,
        "steps": steps,
        "prompts_per_step": config.run.prompts_per_step,
        "samples_per_prompt": config.run.samples_per_prompt,
        "max_new_tokens": config.rollout.sampling.max_new_tokens,
        "learning_rate": config.trainer.optimizer.learning_rate,
        "seed": seed,
    }


def load_decoder(folder: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def run_ours(case: Case, spec: dict[str, Any], folder: Path, figures: Figures) -> None:
    interval = spec["steps"] if spec["eval_prompts"] else 0
    overrides = [*case.overrides, f"run.num_steps={spec['steps']}", f"run.seed={spec['seed']}",
                 f"run.eval_interval={interval}",
                 f"model.path={spec['model']}", "model.dims=null", "telemetry.progress=plain"]  # fmt: skip
    with running(folder / "ours", case.config, *overrides) as run, peak_memory(run.processes) as peak:
        status = run.wait(TURN_LIMIT_S)
        if status != 0:
            sys.exit(f"the run failed with status {status}:\n{run.output[-3000:]}")
        rows = run.metrics()[1:]
    seconds = [row["time/step_s"] - row.get("time/eval_s", 0.0) for row in rows]
    tokens, rewards = ([row[key] for row in rows] for key in ("rollout/num_tokens", "reward/mean"))
    figures.add(seconds, tokens, rewards, rows[-1].get("eval/accuracy"), peak[0])


def run_trl(python: Path, spec: dict[str, Any], folder: Path, figures: Figures) -> None:
    specification, result = folder / "specification.json", folder / "trl.json"
    specification.write_text(json.dumps(spec))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(NUM_THREADS),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [str(python), str(ROOT / "tests/benchmarks/trl_run.py"), str(specification), str(result)]
    process = psutil.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def pids() -> list[int]:
        try:
            return [process.pid, *(child.pid for child in process.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    with peak_memory(pids) as peak:
        output, _ = process.communicate(timeout=TURN_LIMIT_S)
    if process.returncode != 0:
        sys.exit(f"TRL failed with status {process.returncode}:\n{output[-3000:]}")
    found = json.loads(result.read_text())
    figures.add(found["seconds"], found["tokens"], found["rewards"], found["accuracy"], peak[0])


def compare(name: str, precision: str | None, steps: int, turns: int, seed: int, has_accuracy: bool) -> dict[str, float | str]:
    case, ours, trl, python = CASES[name].in_precision(precision), Figures(), Figures(), set_up_trl()
    for turn in range(turns):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            spec = specify(case, steps, seed, has_accuracy and turn == turns - 1, folder)
            report_progress(f"{name}, turn {turn + 1} of {turns}")
            run_ours(case, spec, folder, ours)
            report_progress(f"  ours: {ours.describe()}; now TRL")
            run_trl(python, spec, folder, trl)
            report_progress(f"  TRL: {trl.describe()}")
    num_samples = spec["prompts_per_step"] * spec["samples_per_prompt"]
    seconds, trl_seconds = statistics.median(ours.seconds), statistics.median(trl.seconds)
    figures: dict[str, float | str] = {
        "case": name,
        "precision": case.precision,
        f"{name}_step_s": round(seconds, 3),
        f"{name}_step_s_trl": round(trl_seconds, 3),
        f"{name}_samples_per_s": round(num_samples / seconds, 3),
        f"{name}_samples_per_s_vs_trl": round(trl_seconds / seconds, 2),
        f"{name}_tokens_per_s_vs_trl": round((sum(ours.tokens) / sum(ours.seconds)) / (sum(trl.tokens) / sum(trl.seconds)), 2),
        f"{name}_peak_memory_gib": round(ours.peak_bytes / 2**30, 2),
        f"{name}_peak_memory_vs_trl": round(ours.peak_bytes / trl.peak_bytes, 3),
    }
    if ours.accuracy is not None and trl.accuracy is not None:
        figures |= {f"{name}_accuracy": round(ours.accuracy, 4), f"{name}_accuracy_trl": round(trl.accuracy, 4)}
        figures |= {f"{name}_late_reward": round(ours.late_reward(), 4), f"{name}_late_reward_trl": round(trl.late_reward(), 4)}
    return figures


def report_progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per case")
    parser.add_argument("--case", choices=CASES, help="only this one")
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="of both contestants")
    parser.add_argument("--steps", type=int, default=4, help="of each turn; the first is not counted")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1, help="of the prompts, the samples and random weights")
    parser.add_argument("--accuracy", action="store_true", help="answer the held-out prompts after the last turn")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps: at least 2, since the first of a turn is not counted")
    for name in [arguments.case] if arguments.case else list(CASES):
        figures = compare(name, arguments.precision, arguments.steps, arguments.turns, arguments.seed, arguments.accuracy)
        text = json.dumps(figures) if arguments.json else "\n".join(f"{key:36} {value}" for key, value in figures.items())
        print(text, flush=True)


if __name__ == "__main__":
    main()
