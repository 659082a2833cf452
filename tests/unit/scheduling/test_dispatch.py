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


def test_order_comes_before_arrival():
    queue: DispatchQueue[str] = DispatchQueue([9])
    for item, order in (("b", (1, -2.0)), ("c", (1, -1.0)), ("a", (0, 5.0)), ("d", (1, -1.0))):
        queue.put(item, order)
    assert queue.remove("c") and not queue.remove("c")
    queue.reorder(lambda item: (-ord(item),))
    assert [item for _, item in queue.assign()] == ["d", "b", "a"]


def test_engines_fill_up_side_by_side():
    queue: DispatchQueue[int] = DispatchQueue([3, 1, 2])
    for item in range(5):
        queue.put(item)
    assert [engine for engine, _ in queue.assign()] == [0, 1, 2, 0, 2]
    queue.put(5)
    assert [engine for engine, _ in queue.assign()] == [0]


def test_an_item_waits_for_its_engine_and_is_stolen_when_another_would_idle():
    queue: DispatchQueue[str] = DispatchQueue([1, 1])
    queue.put("own", engine=1)
    queue.put("shared")
    assert list(queue.assign()) == [(0, "shared"), (1, "own")]
    queue.put("own", engine=1)
    assert not list(queue.assign())
    queue.finish(0)
    assert list(queue.assign()) == [(0, "own")]  # engine 1 is still busy


def test_a_lowered_limit_lets_what_runs_run_on():
    queue: DispatchQueue[int] = DispatchQueue([3])
    for item in range(6):
        queue.put(item)
    assert len(list(queue.assign())) == 3
    queue.set_limit(0, 1)
    queue.finish(0)
    queue.finish(0)
    assert not list(queue.assign()) and queue.num_running_on(0) == 1
    queue.finish(0)
    assert len(list(queue.assign())) == 1
    queue.set_limit(0, 3)
    assert len(list(queue.assign())) == 2


def test_random_sticky_items_run_once_and_the_heaps_stay_small():
    rng = random.Random(7)
    queue: DispatchQueue[int] = DispatchQueue([2] * 5)
    running, done = [], []
    for item in range(3000):
        queue.put(item, (rng.randrange(3),), rng.choice([None, rng.randrange(5)]))
        running += queue.assign()
        while len(running) > rng.randrange(10):
            engine, ended = running.pop(rng.randrange(len(running)))
            done.append(ended)
            queue.finish(engine)
            running += queue.assign()
    assert sorted(done + [item for _, item in running]) == list(range(3000)) and not queue.num_waiting
    assert max(len(heap._rows) for heap in (queue._shared, queue._sticky, *queue._own)) < 500


def test_capacity_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        DispatchQueue([2, 0])
