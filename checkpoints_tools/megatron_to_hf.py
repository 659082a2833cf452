"""A Megatron distributed checkpoint (torch_dist), saved under any parallel layout -> a Hugging Face folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from command import parse, report_progress, run
from one_rank import ONE_RANK, SPEC, one_rank_model

from megatron_rl.checkpoint.hf_export import assemble_tensors, hf_tensor_shapes, write_model
from megatron_rl.checkpoint.hf_folder import CheckpointError, copy_tokenizer
from megatron_rl.checkpoint.hf_shards import export_params
from megatron_rl.checkpoint.megatron_dist import TOKENIZER_FOLDER, load_megatron_checkpoint, read_checkpoint_model


def main() -> int:
    args = parse(
        "Convert a Megatron distributed checkpoint (torch_dist) written by megatron_rl to a Hugging Face folder.",
        "python checkpoints_tools/megatron_to_hf.py --input models/smollm2_135m_megatron --output models/smollm2_135m_again",
        _add_arguments,
    )
    return run(lambda: convert(args.input, args.output))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", type=Path, required=True, help="the checkpoint folder")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write; must not exist")


def convert(folder: Path, output: Path) -> None:
    """Write the Hugging Face folder. Raises CheckpointError; nothing is left then."""
    if output.exists():
        raise CheckpointError(f"{output}: already exists; remove it or choose another output folder")
    saved = read_checkpoint_model(folder)
    family, dims, dtype = saved.family, saved.dims, saved.dtype
    with one_rank_model(dims, dtype) as model, torch.no_grad():
        chunks = load_megatron_checkpoint(folder, [model])
        boxes = export_params(chunks, family, dims, ONE_RANK, 0, spec=SPEC, vocab_multiple=1)
        num_tensors = sum(1 for _ in hf_tensor_shapes(family, dims))
        tensors = report_progress(assemble_tensors(boxes, family, dims, dtype), num_tensors, "tensors")
        write_model(
            output,
            family,
            dims,
            tensors,
            dtype,
            write_extras=lambda temporary: copy_tokenizer(folder / TOKENIZER_FOLDER, temporary),
        )
    print(f"wrote {output}: {family.name}, {dims.num_layers} layers, {dtype}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
