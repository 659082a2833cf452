"""Draws, what comes back, and rounds of late prompts."""

from __future__ import annotations

from megatron_rl.rollout.prompt_supply import PlannedGroup, PromptSupply
from megatron_rl.types.rollout import Prompt


def supply(groups_per_batch=3):
    drawn = []

    def draw(count):
        first = len(drawn)
        drawn.extend(Prompt(f"p{first + i}", "q", (1,), "a", "s") for i in range(count))
        return drawn[first:]

    return PromptSupply(draw, groups_per_batch, lambda names: [len(name) for name in names])


def test_groups_are_named_by_draw_and_planned():
    made = supply()
    assert not made.begin_round()
    groups = [made.next() for _ in range(4)]
    assert [group.group_id for group in groups] == ["step-1/p0", "step-1/p1", "step-1/p2", "step-2/p3"]
    assert groups[0].num_samples == 2 and made.num_draws == 2


def test_what_had_no_part_in_a_round_comes_first_in_the_next():
    made = supply()
    groups = [made.next() for _ in range(3)]
    made.put_back(groups[1:])
    assert [made.next() for _ in range(2)] == groups[1:]
    assert made.next().group_id == "step-2/p3"


def test_late_prompts_get_a_round_when_they_fill_it():
    made = supply(2)
    late = [made.next().prompt for _ in range(3)]
    made.put_late(late[2])
    assert not made.begin_round() and made.next().group_id == "step-2/p3"
    made.put_late(late[0])
    made.put_late(late[1])
    assert made.begin_round()
    assert [made.next() for _ in range(3)] == [
        PlannedGroup("tail-1/p2", late[2], 2),
        PlannedGroup("tail-1/p0", late[0], 2),
        PlannedGroup("tail-1/p1", late[1], 2),
    ]
    assert made.next().group_id == "step-3/p4"  # dynamic sampling wants another one
    assert not made.begin_round()
