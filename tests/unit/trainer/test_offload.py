"""Storages leave and come back behind the same tensors. That training does not notice is in tests/distributed."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.trainer.offload import ParkedState, distinct_storages


class Moving(ParkedState):
    """As on a device, where storages do move."""

    def _moves(self, storage):
        return True


def tensors() -> dict[str, torch.Tensor]:
    buffer = torch.arange(24, dtype=torch.bfloat16)
    return {"buffer": buffer, "first": buffer[:10].view(2, 5), "rest": buffer[10:], "other": torch.arange(7.0)}


def test_views_of_one_storage_are_one_storage():
    held = tensors()
    assert [storage.nbytes() for storage in distinct_storages(held.values())] == [48, 28]


@pytest.mark.parametrize("keeps_values", [True, False])
def test_every_view_is_valid_again(keeps_values):
    held, before = tensors(), tensors()
    state = Moving(keeps_values=keeps_values)
    for _ in range(2):
        assert state.offload(held.values()) == 76
        assert [storage.nbytes() for storage in distinct_storages(held.values())] == [0, 0]
        assert state.offload(held.values()) == 0, "what has left does not leave twice"
        state.onload()
        for name, tensor in held.items():
            assert torch.equal(tensor, before[name] if keeps_values else torch.zeros_like(before[name])), name
    held["rest"][3] = 5
    assert held["buffer"][13] == 5


def test_host_memory_is_used_again_and_follows_what_is_new():
    state, held = Moving(keeps_values=True), tensors()
    for turn in range(3):
        held["other"] = torch.full((7,), float(turn))  # the optimizer's state was made anew
        state.offload(held.values())
        state.onload()
        assert held["other"].tolist() == [turn] * 7
    assert {size: len(buffers) for size, buffers in state._free.items()} == {48: 1, 28: 1}


def test_on_a_cpu_nothing_moves_and_the_bytes_are_told():
    held = tensors()
    state = ParkedState(keeps_values=True)
    assert state.offload(held.values()) == 76
    assert held["first"].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] and not state._free
    state.onload()
