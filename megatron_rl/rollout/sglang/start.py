"""Start the processes of an engine: keys, private directory, command and process in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from megatron_rl.config.sections import SglangSection
from megatron_rl.rollout.sglang.engine import SglangEngine
from megatron_rl.rollout.sglang.keys import EngineKeys, make_keys, write_key_file
from megatron_rl.rollout.sglang.launch_args import EnginePlace, plan_launch
from megatron_rl.rollout.sglang.process import SglangServer, free_port, make_work_dir, remove_work_dir


def start_server(
    name: str,
    section: SglangSection,
    place: EnginePlace,
    keys: EngineKeys,
    *,
    python: str,
    model_path: str,
    dtype: Literal["fp32", "bf16"],
    max_context: int,
    receiver_dir: Path,
    log_path: Path,
    load_format: Literal["auto", "dummy"] = "auto",
) -> SglangServer:
    """Start the process of one node of one engine and return at once; see `SglangServer.wait_ready`.

    Every node of an engine gets the same `keys`. `place.port` 0 takes a free one. `receiver_dir` was made by
    `create_receiver_dir`. Raises as `plan_launch` does.
    """
    work_dir = make_work_dir()
    key_file = work_dir / "keys.yaml"
    try:
        launch = plan_launch(
            section,
            replace(place, port=place.port or free_port(place.host)),
            python=python,
            model_path=model_path,
            dtype=dtype,
            max_context=max_context,
            key_file=key_file,
            receiver_dir=receiver_dir,
            load_format=load_format,
        )
        write_key_file(key_file, keys)
        return SglangServer.start(name, launch, keys, work_dir, log_path)
    except BaseException:
        remove_work_dir(work_dir)  # from here on it is the server's to remove
        raise


def start_engine(
    name: str,
    section: SglangSection,
    place: EnginePlace,
    *,
    python: str,
    model_path: str,
    dtype: Literal["fp32", "bf16"],
    max_context: int,
    receiver_dir: Path,
    log_path: Path,
    load_format: Literal["auto", "dummy"] = "auto",
    on_progress: Callable[[str], None] = lambda line: None,
) -> SglangEngine:
    """Start an engine on one node and wait until it serves (minutes, `section.start_timeout_s` at most).

    Raises EngineDeadError or TimeoutError, each in one line with the end of the log; nothing is left running then.
    """
    keys = make_keys()
    server = start_server(
        name,
        section,
        place,
        keys,
        python=python,
        model_path=model_path,
        dtype=dtype,
        max_context=max_context,
        receiver_dir=receiver_dir,
        log_path=log_path,
        load_format=load_format,
    )
    try:
        server.wait_ready(section.start_timeout_s, on_progress)
    except BaseException:
        server.stop()
        raise
    return SglangEngine(
        name,
        server.url,
        keys,
        tp_size=section.tp_size,
        request_timeout_s=section.request_timeout_s,
        server=server,
        receiver_dir=receiver_dir,
    )
