"""What SGLang calls inside each tensor-parallel rank (`--custom-weight-loader`): opens the rank's weight receiver.

The first call starts one `Receiver` thread over the rank's own parameters and publishes its address as
`receiver-{tp_rank}.json` in the directory that MEGATRON_RL_RECEIVER_DIR names (mode 700, holding `key` of mode 600).
Weights then arrive through the receiver, between SGLang's begin and end of a weight update; the later calls are the
commits, which let the model refresh what it derives from its weights. No call carries a tensor.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.resharding.receiver import Receiver

if TYPE_CHECKING:
    import torch

DIR_ENV = "MEGATRON_RL_RECEIVER_DIR"
HOST_ENV = "MEGATRON_RL_RECEIVER_HOST"

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
            refresh_derived(model)
        else:
            _receivers.append(open_receiver(model, directory, os.environ.get(HOST_ENV, "127.0.0.1"), tp_rank))
    except Exception as error:  # noqa: BLE001 - the boundary to SGLang's scheduler, which ends with any exception
        publish(error_file, f"TP rank {tp_rank}: {type(error).__name__}: {error}")


def open_receiver(model: torch.nn.Module, directory: Path, host: str, tp_rank: int) -> Receiver:
    """Start the receiver of this rank and publish where it listens."""
    key = read_key(directory)
    packed = [name for name, module in model.named_modules() if getattr(module, "use_intel_amx_backend", False)]
    if packed:
        raise RuntimeError(f"{packed[0]} keeps its weight packed for AMX, not in the engine layout; remove sgl_kernel")
    receiver = Receiver(dict(model.named_parameters()), key, host)
    receiver.start()
    address = {"host": receiver.address[0], "port": receiver.address[1], "pid": os.getpid()}
    publish(directory / f"receiver-{tp_rank}.json", json.dumps(address))
    return receiver


def refresh_derived(model: Any) -> None:
    """Do what the model's own `load_weights` would do last (weights absorbed into others, as in MLA).

    SGLang leaves this to the loader: its `end_weight_update` skips it after a custom load.
    """
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
