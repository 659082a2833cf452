"""The child process of `math_verification`: reads [reference, response] lines, writes one verdict line for each.

It ends when its input ends, and is ended by the kernel (SIGALRM, default action) when one comparison takes longer than
the deadline given as first argument, in seconds: no Python code has to run for that.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys

from math_verify import parse, verify

MAX_MEMORY_BYTES = 8 << 30  # address space: a power tower must not take the node's memory before its time is up


def compare(reference: str, response: str) -> str:
    """`equal`, `different` or `bad_reference`."""
    if "$" not in reference and "\\boxed" not in reference:
        reference = f"${reference}$"
    gold = parse(reference, parsing_timeout=None)
    if not gold:
        return "bad_reference"
    is_equal = verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None)
    return "equal" if is_equal else "different"


def main(deadline_s: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes our input
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    compare("1", "1")  # the first parse builds grammars; that is not the first response's fault
    _answer("ready")
    for line in sys.stdin:
        reference, response = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, deadline_s)
        try:
            verdict = compare(reference, response)
        except (MemoryError, RecursionError):
            verdict = "gave_up"
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _answer(verdict)


def _answer(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
