"""Start the processes of an engine: keys, private directory, command and process in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron_rl.config.rollout_sections import SglangSection
from megatron_rl.rollout.sglang.engine import SglangEngine
from megatron_rl.rollout.sglang.keys import EngineKeys, make_keys, write_key_file
from megatron_rl.rollout.sglang.launch_args import EnginePlace, ServedModel, plan_launch
from megatron_rl.rollout.sglang.process import SglangServer, free_port, make_work_dir, remove_work_dir


def start_node(
    name: str,
    section: SglangSection,
    place: EnginePlace,
    model: ServedModel,
    keys: EngineKeys,
    *,
    receiver_dir: Path,
    log_path: Path,
    on_progress: Callable[[str], None] = lambda line: None,
) -> SglangServer:
    """Start the process of one node of one engine and wait until it is up (minutes, `section.start_timeout_s` at most).

    An engine over nodes comes up on all of them together. `place.port` 0 takes a free one. Raises as `plan_launch` does,
    and EngineDeadError or TimeoutError, each in one line with the end of the log; nothing is left running then.
    """
    work_dir = make_work_dir()
    key_file = work_dir / "keys.yaml"
    try:
        placed = replace(place, port=place.port or free_port(place.host))
        launch = plan_launch(section, placed, model, key_file=key_file, receiver_dir=receiver_dir)
        write_key_file(key_file, keys)
        server = SglangServer.start(name, launch, keys, work_dir, log_path)
    except BaseException:
        remove_work_dir(work_dir)  # from here on it is the server's to remove
        raise
    try:
        server.wait_ready(section.start_timeout_s, on_progress)
    except BaseException:
        server.stop()
        raise
    return server


def start_engine(
    name: str,
    section: SglangSection,
    place: EnginePlace,
    model: ServedModel,
    *,
    receiver_dir: Path,
    log_path: Path,
    on_progress: Callable[[str], None] = lambda line: None,
) -> SglangEngine:
    """Start an engine's first (or only) node, the one that serves requests. Waits and raises as `start_node` does.

    `receiver_dir` was made by `create_receiver_dir`.
    """
    keys = make_keys()
    server = start_node(
        name, section, place, model, keys, receiver_dir=receiver_dir, log_path=log_path, on_progress=on_progress
    )
    return SglangEngine(
        name,
        server.url,
        keys,
        tp_size=section.tp_size,
        request_timeout_s=section.request_timeout_s,
        server=server,
        receiver_dir=receiver_dir,
        routing=model.routing,
    )
