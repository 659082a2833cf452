from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.batching.replay import ReplayBuffer, ScoredGroup
from megatron_rl.config.algorithm_sections import ReplaySection
from megatron_rl.types.rollout import Prompt, TrajectoryGroup

PROMPT = Prompt("p", "?", (1,), "!", "s")


def scored(name: str, *advantages: float) -> ScoredGroup:
    return ScoredGroup(TrajectoryGroup(name, PROMPT, ()), np.array(advantages))


def names(groups: list[ScoredGroup]) -> list[str]:
    return [item.group.group_id for item in groups]


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
    weighed = {item.group.group_id: item.advantages_G.tolist() for item in both.draw(rng)}
    # p is 1/4 and 3/4: weights (2 p)^-1 = 2 and 2/3, over the larger
    np.testing.assert_allclose(weighed["small"], [0.5, -0.5])
    np.testing.assert_allclose(weighed["large"], [0.5, -0.5])


def test_alpha_zero_draws_uniformly_and_weighs_nothing() -> None:
    buffer = ReplayBuffer(ReplaySection(num_groups=2, alpha=0.0, beta=1.0))
    buffer.add([scored("a", 0.1, -0.1), scored("b", 5.0, -5.0)])
    assert {item.group.group_id: item.advantages_G[0] for item in buffer.draw(np.random.default_rng(1))} == {
        "a": 0.1,
        "b": 5.0,
    }
