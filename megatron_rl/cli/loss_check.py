"""`megatron-rl loss-check CONFIG [key=value ...]`: does the configured objective depend on the layout?"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from megatron_rl.config.load import load_experiment
from megatron_rl.config.resolve import resolve
from megatron_rl.config.sections import ModelSection
from megatron_rl.controller.loss_check import CheckResult, LossCheckError, check_layouts
from megatron_rl.model_families.registry import load_dims


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "loss-check",
        description="Train one step of the configured objective on a seeded synthetic batch, on a tiny model of the"
        " configured family, in several layouts: microbatch sizes, packing orders, and real ranks for DP, TP, CP and PP."
        " Prints loss and gradient norm of each. Exit status 1 when they differ beyond fp32 rounding.",
        epilog="example:\n  megatron-rl loss-check configs/quickstart.yaml algorithm.correction.kind=tis",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="experiment file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example algorithm.clip_high=0.28")
    parser.add_argument("--seed", type=int, default=1, help="of the synthetic batch (default 1)")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="longest wait for one launch of ranks (default 300)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")


def run(args: argparse.Namespace) -> int:
    config = resolve(load_experiment(args.config, args.overrides).config)
    started = time.monotonic()

    def report(line: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {line}", file=sys.stderr, flush=True)

    family = family_of(config.model)
    report(f"algorithm {config.algorithm.name}, a tiny {family}, seed {args.seed}")
    try:
        results = check_layouts(config.algorithm, family, seed=args.seed, report=report, timeout_s=args.timeout_s)
    except LossCheckError as error:
        print(f"megatron-rl: {error}", file=sys.stderr)
        return 1
    print(json.dumps(as_json(results)) if args.json else table(results))
    return 0 if all(result.is_equal for result in results) else 1


def family_of(section: ModelSection) -> str:
    if section.path is not None:
        return load_dims(section.path)[0].name
    assert section.family is not None, "checked when the configuration was loaded"
    return section.family


def table(results: Sequence[CheckResult]) -> str:
    """One row per layout, and the largest difference."""
    width = max(len(result.case.name) for result in results)
    lines = [f"{'layout':<{width}}  {'loss':>15}  {'gradient norm':>15}  {'loss gap':>9}  {'grad gap':>9}"]
    for result in results:
        verdict = "" if result.is_equal else "  DIFFERS"
        lines.append(
            f"{result.case.name:<{width}}  {result.loss:15.8g}  {result.grad_norm:15.8g}"
            f"  {result.loss_gap:9.1e}  {result.gradient_gap:9.1e}{verdict}"
        )
    num_wrong = sum(not result.is_equal for result in results)
    outcome = "all layouts agree" if num_wrong == 0 else f"{num_wrong} of {len(results)} layouts differ"
    gaps = max(r.loss_gap for r in results), max(r.gradient_gap for r in results)
    lines.append(f"{outcome}; largest difference: loss {gaps[0]:.1e}, gradient norm {gaps[1]:.1e}")
    return "\n".join(lines)


def as_json(results: Sequence[CheckResult]) -> dict[str, Any]:
    return {
        "all_equal": all(result.is_equal for result in results),
        "max_loss_gap": max(result.loss_gap for result in results),
        "max_gradient_gap": max(result.gradient_gap for result in results),
        "layouts": [
            {
                "name": result.case.name,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "loss_gap": result.loss_gap,
                "gradient_gap": result.gradient_gap,
                "is_equal": result.is_equal,
            }
            for result in results
        ],
    }
