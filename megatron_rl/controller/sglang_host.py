"""Starting a real SGLang server, or attaching to one, with its receivers open."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import sys
from pathlib import Path

from megatron_rl.controller.model_setup import ModelSetup
from megatron_rl.controller.setups import EngineSetup
from megatron_rl.controller.started_engine import StartedEngine
from megatron_rl.platforms.platform import select_platform
from megatron_rl.rollout.sglang.engine import SglangEngine
from megatron_rl.rollout.sglang.launch_args import EnginePlace
from megatron_rl.rollout.sglang.receiver_dir import create_receiver_dir
from megatron_rl.rollout.sglang.start import start_engine

logger = logging.getLogger(__name__)


async def start_sglang(setup: EngineSetup, number: int, interface: str) -> StartedEngine:
    """A server of our own on this node, or the one at `rollout.sglang.urls[number]`.

    The first weights of our own are random: a sync brings the real ones before any prompt.
    """
    engine = _attach(setup, number) if setup.section.sglang.urls else await _start(setup, number, interface)
    try:
        addresses = await engine.open_receivers()
    except BaseException:
        await engine.close()
        raise
    return StartedEngine(engine, list(addresses), engine.close)


def _attach(setup: EngineSetup, number: int) -> SglangEngine:
    section = setup.section.sglang
    assert section.key_file is not None
    return SglangEngine.attach(
        section.urls[number],
        Path(section.key_file),
        tp_size=section.tp_size,
        request_timeout_s=section.request_timeout_s,
        receiver_dir=Path(section.receiver_dirs[number]),
    )


async def _start(setup: EngineSetup, number: int, interface: str) -> SglangEngine:
    name, directory = f"engine-{number}", Path(setup.run_directory)
    receiver_dir = directory / "engines" / f"{name}-{secrets.token_hex(4)}"
    create_receiver_dir(receiver_dir, setup.key)
    return await asyncio.to_thread(
        start_engine,
        name,
        setup.section.sglang,
        EnginePlace(
            host=interface,
            device="cuda" if select_platform(0).device.type == "cuda" else "cpu",
            cpu_cores=tuple(sorted(os.sched_getaffinity(0))),
        ),
        python=sys.executable,
        model_path=str(write_model_config(setup.model, directory / "engines" / f"{name}-model")),
        dtype="bf16" if setup.dtype == "bf16" else "fp32",
        max_context=setup.max_context,
        receiver_dir=receiver_dir,
        log_path=directory / "logs" / f"{name}.log",
        load_format="dummy",
        on_progress=logger.info,
    )


def write_model_config(model: ModelSetup, folder: Path) -> Path:
    """A model folder with a config.json and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.family.hf_from_dims(model.dims)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
