"""What the checkpoint commands share: progress on stderr, and one line instead of a traceback for a person's mistake."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from megatron_rl.checkpoint.hf_folder import CheckpointError
from megatron_rl.model_families.hf_config import UnsupportedModelError

warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")  # of every GPU package that is absent
warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron|torch\.distributed)\.")

Item = TypeVar("Item")
REPORT_INTERVAL_S = 2.0


def parse(description: str, example: str, add_arguments: Callable[[argparse.ArgumentParser], None]) -> argparse.Namespace:
    """The arguments of a command whose --help ends in an example."""
    parser = argparse.ArgumentParser(
        description=description, epilog=f"example:\n  {example}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    return parser.parse_args()


def run(command: Callable[[], None]) -> int:
    """The exit status of a command: 0, or 2 after one line on stderr."""
    try:
        command()
    except (CheckpointError, UnsupportedModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def report_progress(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """The items, with a line on stderr every two seconds and one at the end."""
    started = reported = time.monotonic()
    for count, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - reported > REPORT_INTERVAL_S or count == total:
            reported = now
            print(f"{what}: {count} of {total} ({now - started:.1f} s)", file=sys.stderr)
