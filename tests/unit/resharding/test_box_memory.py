"""Boxes as bytes: what lies side by side is one span, rows apart are spans of their own, packing casts, hashes agree."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from megatron_rl.resharding.box_memory import hash_boxes, memory_at, pack, span_of, spans_of, unpack
from megatron_rl.resharding.boxes import Box, Boxes, total_bytes
from tests.unit.resharding.test_boxes import make_params, table


def read(spans_S2: np.ndarray, owner: object) -> bytes:
    return b"".join(bytes(memory_at(address, num_bytes, owner)) for address, num_bytes in spans_S2.tolist())


def as_bytes(boxes: Boxes) -> bytes:
    return b"".join(box.view.to(box.dtype).contiguous().view(torch.uint8).numpy().tobytes() for box in boxes)


def test_boxes_side_by_side_are_one_span():
    params = make_params()
    boxes = table((0, 0, 0, 3, 6), (0, 3, 0, 4, 6), (1, 0, 0, 2, 1), (0, 8, 0, 2, 6)).resolve(params)
    spans = spans_of(boxes)
    assert spans[:, 1].tolist() == [2 * 7 * 6, 2 * 2, 2 * 2 * 6]
    assert read(spans, boxes) == as_bytes(boxes)
    assert spans_of(boxes[:2]).tolist() == span_of(params["a.weight"].view(10, 6)[:7]).tolist()


def test_the_rows_of_a_strided_box_are_spans():
    boxes = table((0, 1, 2, 4, 3), (1, 0, 0, 7, 1), (0, 9, 0, 1, 2)).resolve(make_params())
    spans = spans_of(boxes)
    assert spans[:, 1].tolist() == [6, 6, 6, 6, 14, 4]
    assert read(spans, boxes) == as_bytes(boxes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_hash_is_of_the_bytes_that_travel(dtype):
    boxes = table((0, 1, 2, 4, 3), (1, 0, 0, 7, 1), (0, 0, 0, 10, 6)).resolve(make_params())
    boxes = Boxes.of([box._replace(dtype=dtype) for box in boxes])
    digest = hashlib.sha256()
    hash_boxes(boxes, digest)
    assert digest.hexdigest() == hashlib.sha256(as_bytes(boxes)).hexdigest()
    digest = hashlib.sha256()
    hash_boxes([], digest)
    assert digest.hexdigest() == hashlib.sha256().hexdigest()


def test_packing_casts_and_unpacking_brings_back():
    views = table((0, 0, 1, 10, 3), (1, 0, 0, 7, 1)).resolve(make_params())
    source = Boxes.of([Box(box.view.float() + 0.5, torch.bfloat16) for box in views])
    staging = torch.zeros(100, dtype=torch.uint8)
    values = pack(source, staging)
    assert values.numel() == total_bytes(source) == 74
    target = [
        Box(torch.zeros(10, 5, dtype=torch.bfloat16)[:, 1:4], torch.bfloat16),
        Box(torch.zeros(7, 1, dtype=torch.bfloat16), torch.bfloat16),
    ]
    unpack(values, Boxes.of(target))
    for ours, theirs in zip(target, source, strict=True):
        assert torch.equal(ours.view, theirs.view.to(torch.bfloat16))
