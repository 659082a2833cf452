"""Deltas are lossless: compiled and vectorised form write the same bytes, and what does not fit is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.resharding import delta
from megatron_rl.resharding.boxes import Box


def draw_box(rng: np.random.Generator, rows: int, cols: int, pad: int) -> torch.Tensor:
    """Random bf16 bits, NaNs and all; with `pad` columns of something else beside it."""
    bits = rng.integers(-(2**15), 2**15, (rows, cols + pad), dtype=np.int16)
    return torch.from_numpy(bits).view(torch.bfloat16)[:, pad // 2 : pad // 2 + cols]


def change(rng: np.random.Generator, view: torch.Tensor, fraction: float) -> None:
    mask = torch.from_numpy(rng.random(tuple(view.shape)) < fraction)
    bits = view.view(torch.int16)
    bits[mask] = bits[mask] ^ 0x11


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@given(
    seed=st.integers(0, 2**32),
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 90), st.sampled_from([0, 0, 3])), min_size=1, max_size=5),
    fraction=st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]),
)
@settings(max_examples=120, deadline=None)
def test_a_delta_brings_the_old_values_to_the_new_ones(seed, shapes, fraction):
    rng = np.random.default_rng(seed)
    source = [Box(draw_box(rng, *shape), torch.bfloat16) for shape in shapes]
    whole = [torch.zeros(rows + 1, cols + 2, dtype=torch.bfloat16) for rows, cols, _ in shapes]
    target = [Box(w[:-1, 1:-1] if shape[2] else w[:-1, :-2].clone(), torch.bfloat16) for w, shape in zip(whole, shapes)]
    base = delta.DeltaBase()
    assert base.encode(source) is None, "nothing was sent before"
    base.digest = "known"
    for box, at in zip(source, target, strict=True):
        at.view.copy_(box.view)
    for _ in range(2):
        for box in source:
            change(rng, box.view, fraction)
        payload = base.encode(source)
        delta.apply_delta(payload, target)
        assert all(same(box.view, at.view) for box, at in zip(source, target, strict=True))
    assert all(not w[-1].any() and not w[:, 0].any() for w in whole), "nothing beside the boxes is written"


@pytest.mark.parametrize("fraction", [0.0, 0.002, 0.2])
def test_compiled_and_vectorised_forms_write_the_same_bytes(monkeypatch, fraction):
    rng = np.random.default_rng(3)
    new = draw_box(rng, 257, 523, 3)
    old = new.contiguous().view(-1).view(torch.int16).clone()
    change(rng, new, fraction)
    compiled = delta.encode_box(new, old.clone())
    monkeypatch.setattr(delta, "has_numba", lambda: False)
    base = old.clone()
    vectorised = delta.encode_box(new, base)
    assert [part.tolist() for part in compiled] == [part.tolist() for part in vectorised]
    assert torch.equal(base, new.contiguous().view(-1).view(torch.int16)), "the base takes the new values"
    target = torch.zeros(257, 530, dtype=torch.bfloat16)[:, 4:527]
    target.view(torch.int16).copy_(old.view(257, 523))
    delta.apply_box(target, *vectorised)
    assert same(target, new)


def test_size_is_what_the_format_says():
    rng = np.random.default_rng(4)
    box = Box(torch.zeros(1000, 1003, dtype=torch.bfloat16), torch.bfloat16)
    base = delta.DeltaBase()
    base.remember([box])
    base.digest = "known"
    change(rng, box.view, 0.011)
    payload = base.encode([box])
    changed = int(box.view.view(torch.int16).count_nonzero())
    assert 16 + 3 * changed <= len(payload) < 16 + 3 * changed + 1_003_000 // delta.SKIP
    assert delta.is_worth_it(payload, [box]) and len(payload) / 2_006_000 < 0.02


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize(
    ("gaps", "values"),
    [([3, 20], [1, 2]), ([255, 0], [1]), ([1], []), ([], [1]), ([0] * 13, [7] * 13)],
    ids=["outside", "outside after a skip", "value missing", "gap missing", "too many"],
)
def test_what_does_not_fit_a_box_is_refused(monkeypatch, is_compiled, gaps, values):
    monkeypatch.setattr(delta, "has_numba", lambda: is_compiled)
    whole = torch.zeros(5, 6, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"does not fit a box \(3, 4\)"):
        delta.apply_box(whole[1:4, 1:5], np.array(gaps, np.uint8), np.array(values, np.uint16))
    assert not whole[0].any() and not whole[4].any() and not whole[:, 0].any() and not whole[:, 5].any()


def test_a_payload_of_another_size_is_refused():
    boxes = [Box(torch.zeros(2, 3, dtype=torch.bfloat16), torch.bfloat16)]
    table = np.array([[2, 1]], dtype=np.int64).tobytes()
    for payload in (b"", table, table + bytes(5), np.array([[-2, 2]], dtype=np.int64).tobytes() + bytes(2)):
        with pytest.raises(ValueError, match=f"delta of {len(payload)} bytes"):
            delta.apply_delta(payload, boxes)
