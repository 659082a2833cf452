"""A Hugging Face folder -> a Megatron distributed checkpoint (torch_dist) that every parallel layout loads.

One process holds the model once, in the dtype of the folder. The format does not know of layouts: Megatron cuts the
tensors when it loads them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from command import parse, report_progress, run
from one_rank import ONE_RANK, SPEC, one_rank_model

from megatron_rl.checkpoint.hf_folder import CheckpointError, FolderSource, copy_tokenizer
from megatron_rl.checkpoint.hf_shards import read_params
from megatron_rl.checkpoint.megatron_dist import TOKENIZER_FOLDER, CheckpointModel, save_megatron_checkpoint
from megatron_rl.model_families.registry import load_dims


def main() -> int:
    args = parse(
        "Convert a Hugging Face folder to a Megatron distributed checkpoint (torch_dist).",
        "python checkpoints_tools/hf_to_megatron.py --input models/smollm2_135m --output models/smollm2_135m_megatron",
        _add_arguments,
    )
    return run(lambda: convert(args.input, args.output))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", type=Path, required=True, help="the Hugging Face folder")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write; must not exist")


def convert(folder: Path, output: Path) -> None:
    """Write the checkpoint. Raises CheckpointError; nothing is left then."""
    if output.exists():
        raise CheckpointError(f"{output}: already exists; remove it or choose another output folder")
    family, dims = load_dims(folder)
    source = FolderSource(folder)
    dtype = source.widest_dtype()
    with one_rank_model(dims, dtype) as model:
        parameters = dict(model.named_parameters())
        values = read_params(source, family, dims, ONE_RANK, 0, spec=SPEC, vocab_multiple=1, dtype=dtype)
        with torch.no_grad():
            for _, name, tensor in report_progress(values, len(parameters), "parameters"):
                parameters[name].copy_(tensor)
        save_megatron_checkpoint(
            output,
            [model],
            CheckpointModel(family, dims, dtype),
            write_extras=lambda temporary: copy_tokenizer(folder, temporary / TOKENIZER_FOLDER),
        )
    print(f"wrote {output}: {family.name}, {dims.num_layers} layers, {dtype}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
