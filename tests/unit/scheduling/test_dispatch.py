"""The shared queue, driven by random events."""

from __future__ import annotations

import random

import pytest

from megatron_rl.scheduling.dispatch import DispatchQueue


def test_every_item_runs_once_and_no_engine_is_overfull():
    for seed in range(50):
        rng = random.Random(seed)
        capacities = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
        queue: DispatchQueue[int] = DispatchQueue(capacities)
        running: list[list[int]] = [[] for _ in capacities]
        num_put, done = 0, []
        while len(done) < 40:
            event = rng.randrange(3)
            engine = rng.randrange(len(capacities))
            if event == 0 and num_put < 40:
                queue.put(num_put)
                num_put += 1
            elif event == 1:
                item = queue.pull(engine)
                if item is not None:
                    running[engine].append(item)
            elif running[engine]:
                done.append(running[engine].pop(0))
                queue.finish(engine)
            assert all(len(items) <= capacity for items, capacity in zip(running, capacities, strict=True))
            assert queue.num_running == sum(map(len, running))
            assert queue.num_waiting + queue.num_running + len(done) == num_put
        assert sorted(done) == list(range(40))


def test_pull_is_first_in_first_out():
    queue: DispatchQueue[str] = DispatchQueue([1, 2])
    for item in "abc":
        queue.put(item)
    assert [queue.pull(1), queue.pull(0), queue.pull(0)] == ["a", "b", None]


def test_capacity_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        DispatchQueue([2, 0])
