"""Model weights in Megatron's distributed format (`torch_dist`), which every parallel layout can save and load.

A checkpoint is a folder as Megatron-LM lays it out: `latest_checkpointed_iteration.txt` says "release", and `release/` holds
the tensors and `common.pt`, where family, dims and dtype stand beside Megatron's own keys. Optimizer state is not in it.

Tensor names are those of the Transformer Engine layer spec, so that a checkpoint written under the local spec loads there.
`torch.distributed` and Megatron's `parallel_state` must be initialised, except for `read_checkpoint_model`. Saving starts
processes (multiprocessing, spawn): the program's main file needs a `__main__` guard.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.module import MegatronModule

from megatron_rl.checkpoint.hf_folder import CheckpointError
from megatron_rl.model_families.declaration import ModelDims, ModelFamily
from megatron_rl.model_families.registry import get_family

TRACKER_NAME = "latest_checkpointed_iteration.txt"
RELEASE = "release"
TOKENIZER_FOLDER = "tokenizer"
_OWN_KEY = "megatron_rl"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class CheckpointModel:
    """Which model a checkpoint holds."""

    family: ModelFamily
    dims: ModelDims
    dtype: torch.dtype


def save_megatron_checkpoint(
    folder: str | Path,
    chunks: Sequence[MegatronModule],
    model: CheckpointModel,
    write_extras: Callable[[Path], None] | None = None,
) -> None:
    """Write the weights of this rank's model chunks. Collective over all ranks, which share the file system.

    Rank 0 calls `write_extras` with the folder before it gets its final name. Raises CheckpointError on every rank when the
    folder exists.
    """
    final = Path(folder)
    temporary = final.with_name(f"{final.name}.tmp")
    is_first = dist.get_rank() == 0
    exists = [final.exists()]
    dist.broadcast_object_list(exists, src=0)
    if exists[0]:
        raise CheckpointError(f"{final}: already exists; remove it or choose another output folder")
    try:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
            (temporary / RELEASE).mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(_common_state(model) | _sharded_state(chunks), str(temporary / RELEASE))
        if is_first:
            (temporary / TRACKER_NAME).write_text(RELEASE, encoding="utf-8")
            if write_extras is not None:
                write_extras(temporary)
            temporary.rename(final)
        dist.barrier()
    finally:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)  # only there when something failed


def load_megatron_checkpoint(folder: str | Path, chunks: Sequence[MegatronModule]) -> list[dict[str, torch.Tensor]]:
    """This rank's weights, per model chunk by the names inside it, as `PolicyTrainer.load_parameters` takes them.

    Collective. The chunks say which shards are wanted and in which dtype; their own tensors may be overwritten. Rows of
    vocabulary padding are zero. Raises CheckpointError when the checkpoint is incomplete or of another model.
    """
    release = _release_folder(folder)
    state = _sharded_state(chunks)
    for sharded in state.values():
        for tensor in sharded.values():
            if isinstance(tensor, ShardedTensor) and tensor.allow_shape_mismatch:
                tensor.data.detach().zero_()  # padding, which the checkpoint may not have
    try:
        loaded = dist_checkpointing.load(state, str(release))
    except (CheckpointingException, KeyError) as error:
        raise CheckpointError(f"{release}: {_first_line(error)}") from error
    return [
        {name: tensor for name, tensor in loaded[key].items() if isinstance(tensor, torch.Tensor)}
        for key in _chunk_keys(len(chunks))
    ]


def read_checkpoint_model(folder: str | Path) -> CheckpointModel:
    """Family, dims and dtype from the checkpoint alone. Raises CheckpointError when it does not tell them."""
    path = _release_folder(folder) / "common.pt"
    try:
        common = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not found; the checkpoint is incomplete") from None
    except (RuntimeError, EOFError, UnpicklingError) as error:
        raise CheckpointError(f"{path}: cut short or not written by torch.save ({_first_line(error)})") from None
    if _OWN_KEY not in common:
        raise CheckpointError(f"{path}: does not say which model it is; only checkpoints written by megatron_rl do")
    own = common[_OWN_KEY]
    return CheckpointModel(get_family(own["family"]), ModelDims(**own["dims"]), _DTYPES[own["dtype"]])


def _common_state(model: CheckpointModel) -> dict[str, Any]:
    dtype = next(name for name, value in _DTYPES.items() if value is model.dtype)
    own = {"family": model.family.name, "dims": asdict(model.dims), "dtype": dtype}
    return {"checkpoint_version": 3.0, "iteration": 0, _OWN_KEY: own}


def _chunk_keys(num_chunks: int) -> list[str]:
    """Megatron-LM's keys of the model chunks."""
    return ["model"] if num_chunks == 1 else [f"model{index}" for index in range(num_chunks)]


def _sharded_state(chunks: Sequence[MegatronModule]) -> dict[str, dict[str, Any]]:
    states = [chunk.sharded_state_dict() for chunk in chunks]
    for state in states:
        _use_transformer_engine_names(state)
    return dict(zip(_chunk_keys(len(chunks)), states, strict=True))


def _use_transformer_engine_names(state: Mapping[str, Any]) -> None:
    """Megatron's local spec files the norm before any MLP under the name that it has when fused into a dense one."""
    keys = {sharded.key for sharded in state.values()}
    fused = ".mlp.linear_fc1.layer_norm_weight"
    for sharded in state.values():
        layer = sharded.key.removesuffix(fused)
        if sharded.key.endswith(fused) and f"{layer}.mlp.router.weight" in keys:
            sharded.key = f"{layer}.pre_mlp_layernorm.weight"


def _release_folder(folder: str | Path) -> Path:
    """Where the tensors are: below the folder that Megatron-LM is given, or the folder itself."""
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"{path}: not found; expected a Megatron checkpoint folder")
    tracker = path / TRACKER_NAME
    if tracker.exists():
        latest = tracker.read_text(encoding="utf-8").strip()
        if latest != RELEASE and not latest.isdecimal():
            raise CheckpointError(f"{tracker}: '{latest}', expected '{RELEASE}' or a number")
        path = path / (latest if latest == RELEASE else f"iter_{int(latest):07d}")
    if not (path / "metadata.json").exists():
        raise CheckpointError(f"{path}: has no metadata.json; expected a distributed checkpoint (torch_dist)")
    return path


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
