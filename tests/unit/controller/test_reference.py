"""The reference: whose weights it holds, when they change, and that the policy's come back."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.config.algorithm_sections import ReferenceSection
from megatron_rl.controller.reference import Reference, swapped_weights


def filled(value: float) -> list[dict[str, torch.Tensor]]:
    return [{"a": torch.full((3, 2), value)}, {"b": torch.full((4,), value)}]


def held_by(reference: Reference) -> float:
    live = filled(-1.0)
    with reference.swapped_into(live):
        values = {float(v) for chunk in live for tensor in chunk.values() for v in tensor.flatten()}
    assert all((tensor == -1.0).all() for chunk in live for tensor in chunk.values())
    (value,) = values
    return value


def test_swapped_weights_come_back_bit_by_bit() -> None:
    live = [{"a": torch.randn(3, 2), "b": torch.randn(5)}, {"a": torch.randn(4)}]
    other = [{name: torch.full_like(tensor, 7.0) for name, tensor in chunk.items()} for chunk in live]
    before = [{name: tensor.clone() for name, tensor in chunk.items()} for chunk in live]
    with pytest.raises(KeyError), swapped_weights(live, other):
        assert all((tensor == 7.0).all() for chunk in live for tensor in chunk.values())
        raise KeyError
    for old, new in zip(before, live, strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize("storage", ["device", "cpu"])
def test_it_is_the_policy_at_the_beginning_of_the_last_phase(storage: str) -> None:
    reference = Reference(ReferenceSection(storage=storage))
    policy = filled(1.0)
    reference.begin_phase(policy)
    for chunk in policy:
        for tensor in chunk.values():
            tensor.fill_(2.0)  # training moves the policy, not the copy
    reference.end_step(policy)
    assert held_by(reference) == 1.0
    reference.begin_phase(policy)
    assert held_by(reference) == 2.0


def test_it_is_renewed_every_so_many_steps() -> None:
    reference = Reference(ReferenceSection(refresh_interval=2))
    reference.begin_phase(filled(0.0))
    seen = []
    for step in range(1, 6):
        reference.end_step(filled(float(step)))
        seen.append(held_by(reference))
    assert seen == [0.0, 2.0, 2.0, 4.0, 4.0]


def test_a_teacher_stays() -> None:
    reference = Reference(ReferenceSection(path="teacher"), lambda: filled(9.0))
    reference.begin_phase(filled(0.0))
    reference.end_step(filled(1.0))
    assert held_by(reference) == 9.0


def test_a_refreshed_reference_goes_on_where_it_stopped() -> None:
    section = ReferenceSection(refresh_interval=3, storage="cpu")
    first = Reference(section)
    first.begin_phase(filled(0.0))
    for step in range(1, 5):
        first.end_step(filled(float(step)))
    second = Reference(section)
    second.begin_phase(filled(-5.0))
    second.load_state_dict(first.state_dict())
    seen = []
    for step in range(5, 7):
        seen.append(held_by(second))
        second.end_step(filled(float(step)))
    assert [*seen, held_by(second)] == [3.0, 3.0, 6.0]
    with pytest.raises(ValueError, match="0/a is on one side only"):
        second.load_state_dict({name: tensor for name, tensor in first.state_dict().items() if name != "0/a"})


def test_a_teacher_is_not_in_the_checkpoint() -> None:
    teacher = Reference(ReferenceSection(path="teacher"), lambda: filled(9.0))
    assert list(teacher.state_dict()) == ["num_steps"]
    teacher.load_state_dict({"num_steps": torch.tensor(4)})
    assert held_by(teacher) == 9.0
