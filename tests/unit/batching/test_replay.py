"""Which old groups are drawn, how they are weighed, and that a buffer comes back from a file."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megatron_rl.batching.replay import ReplayBuffer, ScoredGroup
from megatron_rl.config.algorithm_sections import ReplaySection
from megatron_rl.types.training import TrainSample


def scored(name: str, *advantages: float, experts: bool = False) -> ScoredGroup:
    return ScoredGroup(tuple(sample(name, number, value, experts) for number, value in enumerate(advantages)))


def sample(name: str, number: int, advantage: float, experts: bool) -> TrainSample:
    length = 3 + 2 * number
    rng = np.random.default_rng([number, *name.encode()])
    return TrainSample(
        sample_id=f"{name}/{number}",
        group_id=name,
        token_ids_L=rng.integers(0, 99, length),
        loss_mask_L=rng.random(length) < 0.5,
        rollout_logprobs_L=rng.normal(size=length).astype(np.float32),
        versions_L=rng.integers(-1, 5, length).astype(np.int32),
        reward=float(number),
        advantage=advantage,
        is_correct=number % 2 == 1,
        is_truncated=number == 0,
        num_prompt_tokens=2,
        experts_LYK=rng.integers(0, 8, (length, 4, 2)).astype(np.uint8) if experts else None,
    )


def names(groups: list[ScoredGroup]) -> list[str]:
    return [group.samples[0].group_id for group in groups]


def advantages(groups: list[ScoredGroup]) -> dict[str, list[float]]:
    return {group.samples[0].group_id: [item.advantage for item in group.samples] for group in groups}


def test_recent_groups_are_drawn_and_old_ones_forgotten() -> None:
    buffer = ReplayBuffer(ReplaySection(num_groups=5, num_steps=2))
    rng = np.random.default_rng(0)
    assert buffer.draw(rng) == []
    for step in range(4):
        buffer.add([scored(f"s{step}", 1.0, -1.0), scored(f"flat{step}", 0.0, 0.0)])
    assert sorted(names(buffer.draw(rng))) == ["s2", "s3"]
    off = ReplayBuffer(ReplaySection())
    off.add([scored("a", 1.0)])
    assert off.draw(rng) == []


def test_the_draw_follows_the_priority_and_the_weight_undoes_it() -> None:
    section = ReplaySection(num_groups=1, alpha=1.0, beta=1.0)
    buffer = ReplayBuffer(section)
    buffer.add([scored("small", 0.5, -0.5), scored("large", 1.5, -1.5)])
    rng = np.random.default_rng(3)
    drawn = [names(buffer.draw(rng))[0] for _ in range(4000)]
    assert drawn.count("large") / len(drawn) == pytest.approx(0.75, abs=0.03)
    both = ReplayBuffer(ReplaySection(num_groups=2, alpha=1.0, beta=1.0))
    both.add([scored("small", 0.5, -0.5), scored("large", 1.5, -1.5)])
    weighed = advantages(both.draw(rng))
    # p is 1/4 and 3/4: weights (2 p)^-1 = 2 and 2/3, over the larger
    np.testing.assert_allclose(weighed["small"], [0.5, -0.5])
    np.testing.assert_allclose(weighed["large"], [0.5, -0.5])


def test_alpha_zero_draws_uniformly_and_weighs_nothing() -> None:
    buffer = ReplayBuffer(ReplaySection(num_groups=2, alpha=0.0, beta=1.0))
    buffer.add([scored("a", 0.1, -0.1), scored("b", 5.0, -5.0)])
    assert advantages(buffer.draw(np.random.default_rng(1))) == {"a": [0.1, -0.1], "b": [5.0, -5.0]}


def test_a_buffer_comes_back_from_a_file(tmp_path: Path) -> None:
    buffer = ReplayBuffer(ReplaySection(num_groups=4, num_steps=3))
    for step in (
        [scored("gone", 1.0)],
        [scored("a", 0.5, -2.0, 0.25, experts=True), scored("b", 3.0)],
        [],
        [scored("c", -1.0, 1.0)],
    ):
        buffer.add(step)
    save_file(buffer.state_dict(), tmp_path / "replay.safetensors")
    other = ReplayBuffer(ReplaySection(num_groups=4, num_steps=3))
    other.load_state_dict(load_file(tmp_path / "replay.safetensors"))
    mine, theirs = buffer.draw(np.random.default_rng(7)), other.draw(np.random.default_rng(7))
    assert sorted(names(mine)) == ["a", "b", "c"]
    for group, twin in zip(mine, theirs, strict=True):
        for old, new in zip(group.samples, twin.samples, strict=True):
            for field in fields(TrainSample):
                np.testing.assert_equal(getattr(new, field.name), getattr(old, field.name), field.name)
                assert type(getattr(new, field.name)) is type(getattr(old, field.name))
    for buffers in (buffer, other):
        buffers.add([scored("d", 1.0)])
    assert (
        sorted(names(other.draw(np.random.default_rng(0))))
        == sorted(names(buffer.draw(np.random.default_rng(0))))
        == ["c", "d"]
    )


def test_an_empty_buffer_has_a_state_too() -> None:
    other = ReplayBuffer(ReplaySection(num_groups=2))
    other.load_state_dict(ReplayBuffer(ReplaySection(num_groups=2)).state_dict())
    assert other.draw(np.random.default_rng(0)) == []
