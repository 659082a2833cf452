"""`megatron-rl config FILE [key=value ...]`: the experiment as it would run."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_rl.config.load import load_experiment
from megatron_rl.config.resolve import batch_equation, dump_yaml, resolve


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "config",
        description="Check an experiment and print it with every derivable value filled in. The output is an experiment"
        " file of its own; how one step is cut into batches follows as a comment.",
        epilog="example:\n  megatron-rl config configs/quickstart.yaml trainer.layout.tp=2 run.name=tp2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", help="experiment file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example run.num_steps=20")


def run(args: argparse.Namespace) -> int:
    config = resolve(load_experiment(args.file, args.overrides).config)
    print(dump_yaml(config))
    for line in batch_equation(config).splitlines():
        print(f"# {line}")
    return 0
