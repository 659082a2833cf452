"""Hugging Face folders: reading boxes of tensors without loading the whole, and writing shards with an index."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_rl.layout.intervals import matrix_shape
from megatron_rl.types.layout import ShardInterval

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message is one line that names the file or tensor."""


class TensorSource(Protocol):
    """Where whole (Hugging Face) tensors come from, by name and box."""

    def read(self, name: str, shape: tuple[int, ...], box: ShardInterval) -> torch.Tensor:
        """The box as a matrix. Raises CheckpointError when the tensor is absent or has another shape."""
        ...


class FolderSource:
    """The safetensors files of a Hugging Face folder, opened lazily and kept open."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise CheckpointError(f"{folder}: not found; expected a Hugging Face model folder")
        self._file_of = self._read_index()
        self._open: dict[str, Any] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._file_of)

    def widest_dtype(self) -> torch.dtype:
        """fp32 if any tensor is, else bf16: what holds every value. Raises CheckpointError for other dtypes."""
        found = {str(self._handle(file).get_slice(name).get_dtype()) for name, file in self._file_of.items()}
        if odd := sorted(found - {"F32", "BF16"}):
            raise CheckpointError(f"{self._folder}: has tensors of dtype {odd[0]}, expected F32 or BF16")
        return torch.float32 if "F32" in found else torch.bfloat16

    def read(self, name: str, shape: tuple[int, ...], box: ShardInterval) -> torch.Tensor:
        if name not in self._file_of:
            raise CheckpointError(f"{self._folder}: tensor '{name}' is missing; the folder is incomplete or of another model")
        handle = self._handle(self._file_of[name])
        view = handle.get_slice(name)
        if tuple(view.get_shape()) != shape:
            raise CheckpointError(
                f"{self._folder}: tensor '{name}' has shape {tuple(view.get_shape())}, expected {shape}; "
                "config.json and the weights do not belong together"
            )
        rows = slice(box.global_row, box.global_row + box.num_rows)
        if len(shape) == 1:
            return view[rows].unsqueeze(1)
        return view[rows, box.global_col : box.global_col + box.num_cols]

    def _read_index(self) -> dict[str, str]:
        index = self._folder / INDEX_NAME
        if index.exists():
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        if not (self._folder / SINGLE_NAME).exists():
            raise CheckpointError(f"{self._folder}: has neither {SINGLE_NAME} nor {INDEX_NAME}")
        return dict.fromkeys(self._handle_of(SINGLE_NAME).keys(), SINGLE_NAME)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = self._handle_of(file)
        return self._open[file]

    def _handle_of(self, file: str) -> Any:
        path = self._folder / file
        if not path.exists():
            raise CheckpointError(f"{path}: named by {INDEX_NAME} but not there; the download is incomplete")
        try:
            return safe_open(str(path), framework="pt")
        except SafetensorError as error:
            raise CheckpointError(f"{path}: cut short or not a safetensors file ({error}); fetch it again") from None


class RandomSource:
    """A random start that is the same under every layout: each tensor is drawn from a seed of its own name.

    Norm weights are 1, everything else is normal with standard deviation `std`; weights that write into the residual
    stream (o_proj, down_proj) are scaled by 1/sqrt(2 * num_layers), as GPT-2 and Megatron do.
    """

    def __init__(self, seed: int, num_layers: int, std: float = 0.02) -> None:
        self._seed = seed
        self._std = std
        self._residual_scale = (2 * num_layers) ** -0.5
        self._cache: dict[str, torch.Tensor] = {}

    def read(self, name: str, shape: tuple[int, ...], box: ShardInterval) -> torch.Tensor:
        tensor = self.whole(name, shape).reshape(matrix_shape(shape))
        return tensor[box.global_row : box.global_row + box.num_rows, box.global_col : box.global_col + box.num_cols]

    def whole(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The whole tensor. The last one is kept, since a fused parameter asks for it several times."""
        if name not in self._cache:
            self._cache.clear()
            self._cache[name] = self._draw(name, shape)
        return self._cache[name]

    def _draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        drawn = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(drawn, "little") >> 1)
        scale = self._residual_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        return torch.randn(shape, generator=generator) * (self._std * scale)


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    files: Iterable[Mapping[str, torch.Tensor]],
    write_extras: Callable[[Path], None] | None = None,
) -> None:
    """Write a Hugging Face folder: one safetensors file per mapping, an index, config.json, then `write_extras` into it.

    The folder is written beside its final name and renamed, so a reader never sees half of it.
    """
    final = Path(folder)
    if final.exists():
        raise CheckpointError(f"{final}: already exists; remove it or choose another output folder")
    temporary = final.with_name(f"{final.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        _write_files(temporary, config, files)
        if write_extras is not None:
            write_extras(temporary)
        temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # only there when something failed


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer files that are there."""
    target.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def _write_files(folder: Path, config: Mapping[str, Any], files: Iterable[Mapping[str, torch.Tensor]]) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(files, start=1):
        file = f"model-{number:05d}.safetensors"
        save_file(dict(tensors), str(folder / file), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if set(weight_map.values()) == {"model-00001.safetensors"}:
        (folder / "model-00001.safetensors").rename(folder / SINGLE_NAME)
    else:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=1, sort_keys=True), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
