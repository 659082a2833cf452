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

import ray

from megatron_rl.controller.setups import EngineSetup, WorkerSetup


class TrainerActor:
    """One `PolicyWorker`."""

    def __init__(self, setup: WorkerSetup, rank: int) -> None:
        _prepare_process(is_first=rank == 0)
        worker_class = importlib.import_module("megatron_rl.controller.policy_worker").PolicyWorker
        self._worker = worker_class(setup, rank, _interface(setup.is_single_node))

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._worker, method)(*args)


class CriticActor:
    """One `CriticWorker`."""

    def __init__(self, setup: WorkerSetup, rank: int) -> None:
        _prepare_process(is_first=rank == 0)
        worker_class = importlib.import_module("megatron_rl.controller.critic_worker").CriticWorker
        self._worker = worker_class(setup, rank, _interface(setup.is_single_node))

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._worker, method)(*args)


class ReferenceActor:
    """One `ReferenceWorker`."""

    def __init__(self, setup: WorkerSetup, rank: int) -> None:
        _prepare_process(is_first=rank == 0)
        worker_class = importlib.import_module("megatron_rl.controller.reference_worker").ReferenceWorker
        self._worker = worker_class(setup, rank, _interface(setup.is_single_node))

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._worker, method)(*args)


class EngineActor:
    """One `EngineHost`; calls run side by side on the actor's event loop."""

    def __init__(self, setup: EngineSetup, number: int) -> None:
        _prepare_process(is_first=number == 0)
        host_class = importlib.import_module("megatron_rl.controller.engine_host").EngineHost
        self._host = host_class(setup, number, _interface(setup.is_single_node))

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self._host, method)(*args)


class EngineNodeActor:
    """One further node of an engine over several (`EngineNode`)."""

    def __init__(self, setup: EngineSetup, number: int, node_rank: int) -> None:
        _prepare_process(is_first=False)
        node_class = importlib.import_module("megatron_rl.controller.sglang_host").EngineNode
        self._node = node_class(setup, number, node_rank, _interface(setup.is_single_node))

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self._node, method)(*args)


def _interface(is_single_node: bool) -> str:
    """The one address that this process listens on: the loopback, or the one by which the cluster knows this node."""
    return "127.0.0.1" if is_single_node else ray.util.get_node_ip_address()


def _prepare_process(*, is_first: bool) -> None:
    """Log what the first of its kind logs (all say the same), and drop what other libraries warn of on every start:
    the parts that are not installed (the log names the ones chosen) and torch functions that Megatron still calls.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    logging.getLogger("megatron_rl").setLevel(logging.INFO if is_first else logging.WARNING)
    for module in (r"megatron\.core", r"torch\.distributed"):
        warnings.filterwarnings("ignore", module=module)
