"""bf16 weights as fp8 with a scale per 128 x 128 block, made on the trainer's side in the engine's layout.

The engine holds `name` as float8_e4m3fn and `name` + `_scale_inv` as float32, one value per block: weight = fp8 * scale
(SGLang's and DeepSeek's block format). The source is the bf16 weight that would be exported, never the fp32 master: what
is quantised is what the log-probs of a bf16 engine would be made of.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from megatron_rl.resharding.boxes import Boxes, Matrices, PairTable, dtype_of

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
FP8 = "float8_e4m3fn"
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def quantize_blocks(weight_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp8 [R, C], float32 scales [ceil(R / 128), ceil(C / 128)]) of a bf16 matrix.

    A block's scale is its largest magnitude / 448; a block of zeros has scale 1.
    """
    rows, cols = weight_RC.shape
    padded = torch.nn.functional.pad(weight_RC.float(), (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    scales = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    scaled = (blocks / scales[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    return scaled.view(padded.shape)[:rows, :cols].to(torch.float8_e4m3fn), scales


def with_scales(target: PairTable, dtypes: Mapping[str, str]) -> tuple[PairTable, np.ndarray]:
    """The target's boxes as they travel, and the trainer's box that each is made of.

    A quantised box is two: its values and its scales. Wider elements come first, so that every box is aligned in a bucket.
    """
    names = list(target.names)
    for name in target.names:
        if dtypes[name] == FP8:
            names.append(name + SCALE_SUFFIX)
    numbers = {name: number for number, name in enumerate(names)}
    rows, origins = [], []
    for origin, (number, row, col, num_rows, num_cols) in enumerate(target.rows_N5.tolist()):
        rows.append((number, row, col, num_rows, num_cols))
        origins.append(origin)
        if dtypes[names[number]] == FP8:
            scale = numbers[names[number] + SCALE_SUFFIX]
            rows.append((scale, row // BLOCK, col // BLOCK, -(-num_rows // BLOCK), -(-num_cols // BLOCK)))
            origins.append(origin)
    widths = np.array([-dtype_of(dtypes[names[number]]).itemsize for number, *_ in rows])
    order = np.argsort(widths, kind="stable")
    return PairTable(tuple(names), np.array(rows, dtype=np.int64)[order]), np.array(origins)[order]


def check_block_boxes(target: PairTable, dtypes: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError naming the first quantised box that does not consist of whole blocks of the engine's parameter."""
    for number, row, col, num_rows, num_cols in target.rows_N5.tolist():
        name = target.names[number]
        if dtypes[name] != FP8:
            continue
        *stacked, height, width = shapes[name]
        ends_rows = (row + num_rows) % BLOCK == 0 or (not stacked and row + num_rows == height)
        ends_cols = (col + num_cols) % BLOCK == 0 or col + num_cols == width
        if row % BLOCK or col % BLOCK or not ends_rows or not ends_cols or (stacked and height % BLOCK):
            box = f"[{row}:{row + num_rows}, {col}:{col + num_cols}]"
            raise ValueError(
                f"fp8: the slice {box} of '{name}' {shapes[name]} is not made of whole {BLOCK} x {BLOCK} blocks; choose a "
                f"tensor parallelism whose slices are multiples of {BLOCK}, or an engine that holds it in bf16"
            )


def made_boxes(sources: Boxes, target: PairTable, origins: np.ndarray, dtypes: Mapping[str, str]) -> Boxes:
    """What travels, made of the trainer's boxes: each box is quantised once, from its values rounded to bf16."""
    kinds = [(dtype_of(dtypes[name]), name.endswith(SCALE_SUFFIX)) for name in target.names]
    if len(set(kinds)) == 1 and kinds[0][0] is not torch.float8_e4m3fn:  # nothing is made
        matrices = sources.matrices.tensors
        return Boxes(Matrices(matrices, [kinds[0][0]] * len(matrices)), sources.rows_N5[origins], target.labels)
    tensors: list[torch.Tensor] = []
    travel_dtypes: list[torch.dtype] = []
    numbers: dict[tuple[int, torch.dtype, bool], int] = {}
    """Which matrix it is: of a source and a dtype, or of one quantised box."""
    rows_N5 = sources.rows_N5[origins]
    for at, (origin, number) in enumerate(zip(origins.tolist(), target.rows_N5[:, 0].tolist(), strict=True)):
        dtype, is_scale = kinds[number]
        is_made = is_scale or dtype is torch.float8_e4m3fn
        key = (origin if is_made else int(rows_N5[at, 0]), dtype, is_made)
        if key not in numbers:
            if is_made:
                values, scales = quantize_blocks(sources[origin].view.to(torch.bfloat16))
                for made in (values, scales):
                    numbers[origin, made.dtype, True] = len(tensors)
                    tensors.append(made)
                    travel_dtypes.append(made.dtype)
            else:
                numbers[key] = len(tensors)
                tensors.append(sources.matrices.tensors[key[0]])
                travel_dtypes.append(dtype)
        rows_N5[at, 0] = numbers[key]
        if is_made:
            rows_N5[at, 1:] = (0, 0, *tensors[numbers[key]].shape)
    return Boxes(Matrices(tensors, travel_dtypes), rows_N5, target.labels)


def count_weights(table: PairTable) -> int:
    """The elements of all boxes but scales."""
    is_weight = np.array([not name.endswith(SCALE_SUFFIX) for name in table.names])
    rows_N5 = table.rows_N5[is_weight[table.rows_N5[:, 0]]]
    return int((rows_N5[:, 3] * rows_N5[:, 4]).sum())
