"""The window on an engine whose KV cache fills with what runs."""

from __future__ import annotations

import random

import pytest

from megatron_rl.scheduling.admission import AdmissionWindow


def test_it_settles_below_the_cache_of_the_engine():
    for seed in range(20):
        rng = random.Random(seed)
        room = rng.randint(20, 200)
        window = AdmissionWindow(256, 512)
        usages = []
        for _ in range(800):
            num_running = window.limit
            usage = min(1.0, num_running / room * rng.uniform(0.95, 1.05))
            window.on_usage(usage, num_running)
            usages.append(usage)
        late = usages[400:]
        assert 0.75 < sum(late) / len(late) < 0.97
        assert sum(usage > 0.95 for usage in late) < 80


def test_one_decrease_until_the_engine_has_come_down():
    window = AdmissionWindow(100)
    assert window.on_usage(0.99, 100) == 75
    assert window.on_usage(0.99, 95) == 75  # still emptying
    assert window.on_usage(0.99, 74) == 55


def test_a_preemption_counts_as_full_and_an_idle_engine_does_not_grow():
    window = AdmissionWindow(10, 20)
    assert window.on_usage(0.5, 10, num_preempted=1) == 7
    assert window.on_usage(0.1, 3) == 7
    assert window.on_usage(0.9, 7) == 7
    for _ in range(50):
        window.on_usage(0.1, window.limit)
    assert window.limit == 20
    for _ in range(50):
        window.on_usage(1.0, window.limit)
    assert window.limit == 1


def test_a_window_needs_room():
    with pytest.raises(ValueError, match="start 0"):
        AdmissionWindow(0)
