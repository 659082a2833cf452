"""What SGLang calls inside each tensor-parallel rank (`--custom-weight-loader`): opens the rank's weight receiver.

The first call starts one `Receiver` thread over the rank's own parameters; every call publishes its address as
`receiver-{tp_rank}.json` in the directory that MEGATRON_RL_RECEIVER_DIR names (mode 700, holding `key` of mode 600).
Weights then arrive through the receiver. Each update makes two more calls, one before the first slice and one after the
last: they wait for the device, so that no step reads weights that are being written, and let the model refresh what it
derives from them. No call carries a tensor.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_rl.platforms.cpu_bf16 import keep_widened
from megatron_rl.resharding.receiver import Receiver

DIR_ENV = "MEGATRON_RL_RECEIVER_DIR"
HOST_ENV = "MEGATRON_RL_RECEIVER_HOST"

SWITCH_INTERVAL_S = 1e-4
"""After how long a thread of the server hands the interpreter to a receiver that wants it. A scheduler spins while it is
paused; with Python's 5 ms every piece that arrives would wait that long.
"""

_receivers: list[Receiver] = []
"""The receiver of this process, once it is open. It lives as long as the server."""


def load(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Never raises: an exception here would end the server. A failure is one line in `receiver-{tp_rank}.error`."""
    from sglang.srt.runtime_context import get_parallel  # only inside a server

    tp_rank = get_parallel().tp_rank
    directory = Path(os.environ.get(DIR_ENV, ""))
    error_file = directory / f"receiver-{tp_rank}.error"
    try:
        error_file.unlink(missing_ok=True)
        if named_tensors:
            raise ValueError(f"the control call carries {len(named_tensors)} tensors, expected none")
        if _receivers:
            settle(model)
        else:
            _receivers.append(open_receiver(model, directory, os.environ.get(HOST_ENV, "127.0.0.1")))
        host, port = _receivers[0].address
        publish(directory / f"receiver-{tp_rank}.json", json.dumps({"host": host, "port": port, "pid": os.getpid()}))
    except Exception as error:  # noqa: BLE001 - the boundary to SGLang's scheduler, which ends with any exception
        publish(error_file, f"TP rank {tp_rank}: {type(error).__name__}: {error}")


def open_receiver(model: torch.nn.Module, directory: Path, host: str) -> Receiver:
    """Start the receiver of this rank over its parameters, as they lie in memory."""
    key = read_key(directory)
    packed = [name for name, module in model.named_modules() if getattr(module, "use_intel_amx_backend", False)]
    if packed:
        raise RuntimeError(f"{packed[0]} keeps its weight packed for AMX, not in the engine layout; remove sgl_kernel")
    receiver = Receiver(dict(model.named_parameters()), key, host)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    receiver.start()
    return receiver


def settle(model: Any) -> None:
    """Wait for launched steps and copies, then refresh what is derived from the weights, here and in the model.

    A step may still run on the device when SGLang says that it is paused (its scheduler runs ahead). Weights that are
    absorbed into others, as in MLA, are the loader's to refresh: SGLang skips it after a custom load.
    """
    torch.get_device_module(next(model.parameters()).device).synchronize()
    keep_widened(model.parameters())
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()


def read_key(directory: Path) -> bytes:
    """The key of this run's receivers. Raises PermissionError if others could read it."""
    key_file = directory / "key"
    for path, allowed in ((directory, 0o700), (key_file, 0o600)):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & ~allowed:
            raise PermissionError(f"{path}: mode {mode:o}, expected {allowed:o}")
    return key_file.read_bytes()


def publish(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n")
    temporary.rename(path)
