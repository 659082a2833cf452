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
from megatron_rl.rollout.sglang.keys import make_keys, write_key_file
from megatron_rl.rollout.sglang.launch_args import EnginePlace, plan_launch
from megatron_rl.rollout.sglang.process import SglangServer, free_port, make_work_dir
from megatron_rl.rollout.sglang.receiver_dir import create_receiver_dir

logger = logging.getLogger(__name__)


async def start_sglang(setup: EngineSetup, number: int) -> StartedEngine:
    """One server of our own on this node. Its first weights are random: a sync brings the real ones before any prompt."""
    section, name, run_directory = setup.section.sglang, f"engine-{number}", Path(setup.run_directory)
    host, device = "127.0.0.1", select_platform(0).device.type
    place = EnginePlace(
        host=host,
        port=free_port(host),
        device="cuda" if device == "cuda" else "cpu",
        cpu_cores=tuple(sorted(os.sched_getaffinity(0))),
    )
    receiver_dir = run_directory / "engines" / f"{name}-{secrets.token_hex(4)}"
    create_receiver_dir(receiver_dir, setup.key)
    keys, work_dir = make_keys(), make_work_dir()
    write_key_file(work_dir / "keys.yaml", keys)
    launch = plan_launch(
        section,
        place,
        python=sys.executable,
        model_path=str(write_model_config(setup.model, run_directory / "engines" / f"{name}-model")),
        dtype="bf16" if setup.dtype == "bf16" else "fp32",
        max_context=setup.max_context,
        key_file=work_dir / "keys.yaml",
        receiver_dir=receiver_dir,
        load_format="dummy",
    )
    server = SglangServer.start(name, launch, keys, work_dir, run_directory / "logs" / f"{name}.log")
    engine = SglangEngine(
        name,
        server.url,
        keys,
        tp_size=section.tp_size,
        request_timeout_s=section.request_timeout_s,
        server=server,
        receiver_dir=receiver_dir,
    )
    try:
        seconds = await asyncio.to_thread(server.wait_ready, section.start_timeout_s, logger.info)
        addresses = await engine.open_receivers()
    except BaseException:
        await engine.close()
        raise
    logger.info("%s serves after %.0f s", name, seconds)
    return StartedEngine(engine, list(addresses), engine.close)


def write_model_config(model: ModelSetup, folder: Path) -> Path:
    """A model folder with a config.json and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.family.hf_from_dims(model.dims)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
