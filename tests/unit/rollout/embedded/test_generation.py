from __future__ import annotations

import numpy as np

from megatron_rl.rollout.embedded.generation import Generation, build_segments
from megatron_rl.types.rollout import FinishReason, PolicyVersion
from tests.unit.rollout.embedded.engine_models import request


def generated(count: int, *starts: tuple[int, int]) -> Generation:
    generation = Generation(request("a", [7, 8]))
    generation.token_ids = (7, 8, *range(20, 20 + count))
    generation.logprobs = -np.arange(count, dtype=np.float32)
    for version, start in starts:
        generation.enter_version(PolicyVersion(version), start)
    return generation


def test_one_segment_per_version_with_its_own_tokens() -> None:
    segments = build_segments(generated(5, (3, 0), (4, 2), (6, 4)), FinishReason.STOP, PolicyVersion(6))
    assert [(s.token_ids, s.policy_version, s.finish_reason.value) for s in segments] == [
        ((20, 21), 3, "switch"),
        ((22, 23), 4, "switch"),
        ((24,), 6, "stop"),
    ]
    assert segments[1].logprobs == (-2.0, -3.0)


def test_a_version_that_sampled_nothing_leaves_no_segment() -> None:
    segments = build_segments(generated(3, (1, 0), (2, 3), (3, 3)), FinishReason.ABORT, PolicyVersion(3))
    assert [(s.token_ids, s.policy_version, s.finish_reason.value) for s in segments] == [((20, 21, 22), 1, "abort")]
    skipped = build_segments(generated(3, (1, 0), (2, 1), (3, 1)), FinishReason.STOP, PolicyVersion(3))
    assert [(s.token_ids, s.policy_version) for s in skipped] == [((20,), 1), ((21, 22), 3)]


def test_the_same_version_again_goes_on_in_its_segment() -> None:
    segments = build_segments(generated(3, (1, 0), (1, 2)), FinishReason.LENGTH, PolicyVersion(1))
    assert [len(s.token_ids) for s in segments] == [3]


def test_a_request_without_tokens_still_says_why_it_ended() -> None:
    (segment,) = build_segments(generated(0), FinishReason.ABORT, PolicyVersion(5))
    assert (segment.token_ids, segment.policy_version, segment.finish_reason) == ((), 5, FinishReason.ABORT)
