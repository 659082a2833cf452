"""Arithmetic of even splits, paddings and boxes."""

from __future__ import annotations

from megatron_rl.types.layout import ShardInterval


def shard_range(size: int, num_shards: int, shard: int) -> tuple[int, int]:
    """Start and stop of one of `num_shards` equal parts. Raises ValueError when they are not equal."""
    if size % num_shards:
        raise ValueError(f"{size} does not divide into {num_shards} equal shards")
    part = size // num_shards
    return shard * part, (shard + 1) * part


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def padded_engine_vocab(vocab_size: int, tp: int, multiple: int) -> int:
    """SGLang's padded vocabulary: a multiple of `multiple`, and of `multiple` x `tp` where that does not divide by `tp`."""
    padded = round_up(vocab_size, multiple)
    return padded if padded % tp == 0 else round_up(vocab_size, multiple * tp)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """A tensor as [rows, cols]: a vector is a column, leading dimensions are flattened."""
    if len(shape) == 1:
        return shape[0], 1
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1]


def intersect(source: ShardInterval, target: ShardInterval) -> tuple[ShardInterval, ShardInterval] | None:
    """The part of a whole tensor that both hold, as seen from each side; None when they share nothing."""
    row = max(source.global_row, target.global_row)
    col = max(source.global_col, target.global_col)
    row_end = min(source.global_row + source.num_rows, target.global_row + target.num_rows)
    col_end = min(source.global_col + source.num_cols, target.global_col + target.num_cols)
    if row >= row_end or col >= col_end:
        return None

    def seen_from(box: ShardInterval) -> ShardInterval:
        return ShardInterval(
            global_row=row,
            global_col=col,
            local_row=box.local_row + row - box.global_row,
            local_col=box.local_col + col - box.global_col,
            num_rows=row_end - row,
            num_cols=col_end - col,
        )

    return seen_from(source), seen_from(target)
