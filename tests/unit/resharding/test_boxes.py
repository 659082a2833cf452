"""Boxes as columns and as views: what is large is split by rows, what does not fit is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.resharding.boxes import Box, Boxes, PairTable, pieces, total_bytes


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


def test_views_alone_are_boxes_too():
    views = [Box(box.view, torch.float32, box.label) for box in table((0, 1, 2, 9, 3), (1, 2, 0, 4, 1)).resolve(make_params())]
    boxes = Boxes.of(views)
    assert [(box.dtype, box.label) for box in boxes] == [(torch.float32, view.label) for view in views]
    assert all(torch.equal(box.view, view.view) for box, view in zip(boxes, views, strict=True))
    assert total_bytes(views) == 4 * (27 + 4) and Boxes.of(boxes) is boxes


@pytest.mark.parametrize("row", [(0, 0, 0, 11, 6), (0, -1, 0, 2, 6), (0, 0, 4, 1, 3), (1, 0, 0, 1, 2), (0, 3, 3, 0, 1)])
def test_a_box_outside_of_its_parameter_is_named(row):
    with pytest.raises(ValueError, match=r"\.weight\[.*\] is outside of a parameter of \("):
        table(row).resolve(make_params())


def test_the_extents_are_where_the_views_lie():
    boxes = table((0, 0, 0, 3, 6), (0, 4, 1, 5, 4), (1, 2, 0, 4, 1), (0, 9, 2, 1, 3)).resolve(make_params())
    extents = boxes.extents
    assert extents.address_N.tolist() == [box.view.data_ptr() for box in boxes]
    assert extents.row_bytes_N.tolist() == [2 * box.view.shape[1] for box in boxes]
    assert extents.pitch_N.tolist() == [12, 12, 2, 12]
    assert extents.is_whole_N.tolist() == [box.view.is_contiguous() for box in boxes] == [True, False, True, True]


def test_only_what_travels_as_it_lies_is_in_place():
    whole = torch.zeros(4, 6)
    for view, dtype, are_in_place in (
        (whole[1:, 2:5], torch.float32, True),
        (whole[1:, 2:5], torch.bfloat16, False),
        (whole.t(), torch.float32, False),
        (whole[:, :1], torch.float32, True),
    ):
        assert Boxes.of([Box(view, dtype)]).matrices.are_in_place == are_in_place


@pytest.mark.parametrize("max_bytes", [1, 12, 30, 50, 1000])
def test_pieces_keep_the_order_and_the_limit(max_bytes):
    boxes = table((0, 0, 0, 7, 6), (1, 0, 0, 7, 1), (0, 8, 1, 2, 4)).resolve(make_params())
    parts = list(pieces(boxes, max_bytes))
    row_bytes = max(2 * box.view.shape[1] for box in boxes)
    assert all(total_bytes(part) <= max(max_bytes, row_bytes) for part in parts)
    whole = torch.cat([box.view.reshape(-1) for box in boxes])
    assert torch.equal(torch.cat([box.view.reshape(-1) for part in parts for box in part]), whole)
    assert parts[0][0].label == "a.weight[0:7, 0:6]"
