"""The Ray actors: thin shells around plain classes.

The plain classes are imported inside the actor's process only: the driver needs neither Megatron nor an engine, and a
trainer's interpreter need not have SGLang, nor an engine's Megatron.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from typing import Any

from megatron_rl.controller.setups import EngineSetup, WorkerSetup


class TrainerActor:
    """One `PolicyWorker`."""

    def __init__(self, setup: WorkerSetup, rank: int) -> None:
        _prepare_process(is_first=rank == 0)
        self._worker = importlib.import_module("megatron_rl.controller.policy_worker").PolicyWorker(setup, rank)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._worker, method)(*args)


class EngineActor:
    """One `EngineHost`; calls run side by side on the actor's event loop."""

    def __init__(self, setup: EngineSetup, number: int) -> None:
        _prepare_process(is_first=number == 0)
        self._host = importlib.import_module("megatron_rl.controller.engine_host").EngineHost(setup, number)

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self._host, method)(*args)


def _prepare_process(*, is_first: bool) -> None:
    """Log what the first of its kind logs (all say the same), and drop what other libraries warn of on every start:
    the parts that are not installed (the log names the ones chosen) and torch functions that Megatron still calls.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    logging.getLogger("megatron_rl").setLevel(logging.INFO if is_first else logging.WARNING)
    for module in (r"megatron\.core", r"torch\.distributed"):
        warnings.filterwarnings("ignore", module=module)
