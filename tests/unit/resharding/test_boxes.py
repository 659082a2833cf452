"""Boxes as bytes: what lies side by side is one span, what is large is split by rows, what does not fit is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.resharding.boxes import Box, PairTable, bytes_of, pack, pieces, spans_of, total_bytes, unpack


def table(*rows) -> PairTable:
    return PairTable(("a.weight", "b.weight"), np.array(rows, dtype=np.int64))


def make_params() -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.arange(60, dtype=torch.bfloat16).view(2, 5, 6),
        "b.weight": torch.arange(7, dtype=torch.bfloat16),
    }


def test_boxes_are_views_of_matrices():
    params = make_params()
    boxes = table((0, 1, 2, 9, 3), (1, 2, 0, 4, 1)).resolve(params)
    assert torch.equal(boxes[0].view, params["a.weight"].view(10, 6)[1:, 2:5])
    assert torch.equal(boxes[1].view[:, 0], params["b.weight"][2:6])
    assert boxes[0].label == "a.weight[1:10, 2:5]" and total_bytes(boxes) == 2 * (27 + 4)
    boxes[1].view.fill_(-1.0)
    assert params["b.weight"].tolist() == [0, 1, -1, -1, -1, -1, 6]


@pytest.mark.parametrize("row", [(0, 0, 0, 11, 6), (0, -1, 0, 2, 6), (0, 0, 4, 1, 3), (1, 0, 0, 1, 2), (0, 3, 3, 0, 1)])
def test_a_box_outside_of_its_parameter_is_named(row):
    with pytest.raises(ValueError, match=r"\.weight\[.*\] is outside of a parameter of \("):
        table(row).resolve(make_params())


def test_boxes_side_by_side_are_one_span():
    params = make_params()
    boxes = table((0, 0, 0, 3, 6), (0, 3, 0, 4, 6), (1, 0, 0, 2, 1), (0, 8, 0, 2, 6)).resolve(params)
    spans = spans_of(boxes)
    assert [len(span) for span in spans] == [2 * 7 * 6, 2 * 2, 2 * 2 * 6]
    assert bytes(spans[0]) == bytes(bytes_of(params["a.weight"].view(10, 6)[:7]))
    assert all(box.is_plain for box in boxes) and not table((0, 0, 1, 2, 2)).resolve(params)[0].is_plain
    assert not Box(boxes[0].view, torch.float32).is_plain, "a cast needs a buffer"


@pytest.mark.parametrize("max_bytes", [1, 12, 30, 50, 1000])
def test_pieces_keep_the_order_and_the_limit(max_bytes):
    boxes = table((0, 0, 0, 7, 6), (1, 0, 0, 7, 1), (0, 8, 1, 2, 4)).resolve(make_params())
    parts = list(pieces(boxes, max_bytes))
    row_bytes = max(2 * box.view.shape[1] for box in boxes)
    assert all(total_bytes(part) <= max(max_bytes, row_bytes) for part in parts)
    whole = torch.cat([box.view.reshape(-1) for box in boxes])
    assert torch.equal(torch.cat([box.view.reshape(-1) for part in parts for box in part]), whole)


def test_packing_casts_and_unpacking_brings_back():
    source = [
        Box(box.view.float() + 0.5, torch.bfloat16) for box in table((0, 0, 1, 10, 3), (1, 0, 0, 7, 1)).resolve(make_params())
    ]
    staging = torch.zeros(100, dtype=torch.uint8)
    values = pack(source, staging)
    assert values.numel() == total_bytes(source) == 74
    target = [
        Box(torch.zeros(10, 5, dtype=torch.bfloat16)[:, 1:4], torch.bfloat16),
        Box(torch.zeros(7, 1, dtype=torch.bfloat16), torch.bfloat16),
    ]
    unpack(values, target)
    for ours, theirs in zip(target, source, strict=True):
        assert torch.equal(ours.view, theirs.view.to(torch.bfloat16))
