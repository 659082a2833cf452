"""`megatron-rl COMMAND ...`: the table of commands. One file per command, imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.config.errors import ConfigError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """`module` has `add_parser(subparsers)`, which adds the command, and `run(args) -> int`, the exit status."""

    module: str
    help: str
    example: str


COMMANDS: Mapping[str, Command] = {
    "train": Command(
        "megatron_rl.cli.train",
        "train a policy as an experiment file says",
        "megatron-rl train configs/quickstart.yaml run.num_steps=20",
    ),
    "config": Command(
        "megatron_rl.cli.config",
        "check an experiment file and print it with every value resolved",
        "megatron-rl config configs/quickstart.yaml trainer.layout.tp=2",
    ),
    "loss-check": Command(
        "megatron_rl.cli.loss_check",
        "say whether the objective gives the same loss and gradient in every layout",
        "megatron-rl loss-check configs/quickstart.yaml algorithm.clip_high=0.28",
    ),
    "reshard-plan": Command(
        "megatron_rl.cli.reshard_plan",
        "say what a weight sync moves and how long it takes",
        "megatron-rl reshard-plan configs/quickstart.yaml --svg plan.svg",
    ),
    "doctor": Command(
        "megatron_rl.cli.doctor",
        "say what is installed, what works and what to do about the rest",
        "megatron-rl doctor --json",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; a mistake in a configuration is one line on stderr and status 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    chosen = argv[0] if argv and argv[0] in COMMANDS else None
    try:
        args = build_parser(chosen).parse_args(argv)
        return int(importlib.import_module(COMMANDS[args.command].module).run(args))
    except ConfigError as error:
        print(f"megatron-rl: {error}", file=sys.stderr)
        return EXIT_USAGE
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "megatron_rl":
            raise
        print(
            f"megatron-rl: {chosen} needs the Python package of {error.name}; see megatron-rl doctor", file=sys.stderr
        )
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser with the arguments of `chosen` alone, so that the modules of other commands stay unimported."""
    examples = "\n".join(f"  {command.example}" for command in COMMANDS.values())
    parser = argparse.ArgumentParser(
        prog="megatron-rl",
        description="Reinforcement learning of Mixture-of-Experts language models on Megatron-Core and SGLang.",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        if name == chosen:
            importlib.import_module(command.module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=command.help)
    return parser


if __name__ == "__main__":
    sys.exit(main())
