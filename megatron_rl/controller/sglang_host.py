"""Starting a real SGLang server, or attaching to one, with its receivers open."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path

from megatron_rl.controller.interfaces import see_devices
from megatron_rl.controller.model_setup import ModelSetup
from megatron_rl.controller.setups import EngineSetup
from megatron_rl.controller.started_engine import StartedEngine
from megatron_rl.platforms.platform import select_platform
from megatron_rl.rollout.sglang.engine import SglangEngine
from megatron_rl.rollout.sglang.keys import make_keys
from megatron_rl.rollout.sglang.launch_args import EnginePlace, ServedModel
from megatron_rl.rollout.sglang.process import SglangServer
from megatron_rl.rollout.sglang.receiver_dir import create_receiver_dir
from megatron_rl.rollout.sglang.start import start_engine, start_node

logger = logging.getLogger(__name__)
WATCH_S = 1.0


async def start_sglang(setup: EngineSetup, number: int, interface: str, meeting: str | None) -> StartedEngine:
    """A server of our own on this node, or the one at `rollout.sglang.urls[number]`.

    `meeting` ("host:port" on this node) is where the nodes of an engine over several meet. The first weights of our own
    are random: a sync brings the real ones before any prompt.
    """
    engine = _attach(setup, number) if setup.section.sglang.urls else await _start(setup, number, interface, meeting)
    try:
        addresses = await engine.open_receivers()
    except BaseException:
        await engine.close()
        raise
    return StartedEngine(engine, list(addresses), engine.close)


class EngineNode:
    """What runs on each further node of an engine over several nodes: a server process that serves its ranks alone."""

    def __init__(self, setup: EngineSetup, number: int, node_rank: int, interface: str) -> None:
        self._setup, self._number, self._node_rank, self._interface = setup, number, node_rank, interface
        self._server: SglangServer | None = None

    async def start(self, meeting: str, devices: str | None = None) -> None:
        """Join the engine's first node at `meeting`; returns when this node is up. `devices`: see `EngineHost.start`."""
        see_devices(devices)
        name = f"{engine_name(self._number)}-node-{self._node_rank}"
        self._server = await asyncio.to_thread(
            start_node,
            name,
            self._setup.section.sglang,
            _place(self._setup, self._interface, meeting, self._node_rank),
            _served_model(self._setup, name),
            make_keys(),  # nobody calls this node: the first one serves all requests
            receiver_dir=_receiver_dir(self._setup, self._number),
            log_path=Path(self._setup.run_directory) / "logs" / f"{name}.log",
        )

    async def watch(self) -> None:
        """Never returns; raises EngineDeadError when the process has ended."""
        assert self._server is not None, "start the node first"
        while True:
            self._server.raise_if_dead()
            await asyncio.sleep(WATCH_S)

    async def stop(self) -> None:
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)


def engine_name(number: int) -> str:
    return f"engine-{number}"


def _attach(setup: EngineSetup, number: int) -> SglangEngine:
    section = setup.section.sglang
    assert section.key_file is not None
    return SglangEngine.attach(
        section.urls[number],
        Path(section.key_file),
        tp_size=section.tp_size,
        request_timeout_s=section.request_timeout_s,
        receiver_dir=Path(section.receiver_dirs[number]),
        routing=setup.model.dims.routing if setup.returns_routing else None,
    )


async def _start(setup: EngineSetup, number: int, interface: str, meeting: str | None) -> SglangEngine:
    name, receiver_dir = engine_name(number), _receiver_dir(setup, number)
    create_receiver_dir(receiver_dir, setup.key)
    return await asyncio.to_thread(
        start_engine,
        name,
        setup.section.sglang,
        _place(setup, interface, meeting, node_rank=0),
        _served_model(setup, name),
        receiver_dir=receiver_dir,
        log_path=Path(setup.run_directory) / "logs" / f"{name}.log",
        on_progress=logger.info,
    )


def _place(setup: EngineSetup, interface: str, meeting: str | None, node_rank: int) -> EnginePlace:
    return EnginePlace(
        host=interface,
        node_rank=node_rank,
        dist_init_addr=meeting,
        device="cuda" if select_platform(0).device.type == "cuda" else "cpu",
        cpu_cores=tuple(sorted(os.sched_getaffinity(0))),
        gives_memory_up=setup.is_colocated,
    )


def _served_model(setup: EngineSetup, name: str) -> ServedModel:
    folder = write_model_config(setup.model, Path(setup.run_directory) / "engines" / f"{name}-model")
    return ServedModel(
        sys.executable,
        str(folder),
        dtype="bf16" if setup.dtype == "bf16" else "fp32",
        max_context=setup.max_context,
        load_format="dummy",
        routing=setup.model.dims.routing if setup.returns_routing else None,
    )


def _receiver_dir(setup: EngineSetup, number: int) -> Path:
    """Where all ranks of an engine tell their addresses, on whatever node they are: the run directory is shared."""
    return Path(setup.run_directory) / "engines" / f"{engine_name(number)}-{setup.start_id}"


def write_model_config(model: ModelSetup, folder: Path) -> Path:
    """A model folder with a config.json and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.family.hf_from_dims(model.dims)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
