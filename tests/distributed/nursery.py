"""The process that `launch` starts once: it imports what ranks need, and forks a rank of a test whenever it is asked to.

Orders come as JSON lines on standard input, `{"folder", "world_size", "timeout_s"}`; rank r finds its call in the folder's
`call_r.json`, writes to `output_r.txt` and leaves `result_r.json`. Each order is answered by a line on standard output:
`{"failed": [rank, exit status] or null, "late": [ranks], "cpu_s": what all ranks computed}`.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

PRELOADED = (
    "numba",
    "torch._dynamo",  # else every rank's first optimizer step imports it
    "megatron_rl.controller.loss_check_rank",
    "megatron_rl.trainer.critic",
)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no reply
    for name in PRELOADED:
        importlib.import_module(name)
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1 or threading.active_count() > 1:
        raise RuntimeError(f"{num_threads} threads run after the imports; a fork would lose them")
    for line in sys.stdin:
        order = json.loads(line)
        ranks = {_fork(Path(order["folder"]), rank): rank for rank in range(order["world_size"])}
        before = _children_cpu_s()
        reply = _wait(ranks, order["timeout_s"])
        print(json.dumps(reply | {"cpu_s": _children_cpu_s() - before}), file=replies, flush=True)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _fork(folder: Path, rank: int) -> int:
    if pid := os.fork():
        return pid
    _be_rank(folder, rank)


def _be_rank(folder: Path, rank: int) -> NoReturn:
    try:
        output = os.open(folder / f"output_{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        call = json.loads((folder / f"call_{rank}.json").read_text())
        module = importlib.import_module(call["module"])
        me = importlib.import_module("tests.distributed.launch").Rank(**call["me"])
        result = getattr(module, call["name"])(me, **call["kwargs"])
        (folder / f"result_{rank}.json").write_text(json.dumps(result))
    except BaseException:  # noqa: BLE001 - whatever it was, the parent must see it
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a rank that failed must not wait for the others in a destructor
    sys.exit(0)  # as every process ends: what it started ends with it


def _wait(ranks: dict[int, int], timeout_s: float) -> dict[str, object]:
    """Until all ended, one failed, or it is too late; who still runs then is ended, and so is everyone when the tests are."""
    deadline, parent = time.monotonic() + timeout_s, os.getppid()
    failed = None
    while ranks and failed is None and time.monotonic() < deadline and os.getppid() == parent:
        for pid, rank in list(ranks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del ranks[pid]
                if status and failed is None:
                    failed = [rank, os.waitstatus_to_exitcode(status)]
        time.sleep(0.02)
    for pid in ranks:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return {"failed": failed, "late": [] if failed else sorted(ranks.values())}


if __name__ == "__main__":
    main()
