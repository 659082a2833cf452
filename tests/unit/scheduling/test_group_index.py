"""Groups by start, against a list that is searched."""

from __future__ import annotations

import random
from collections import Counter

from megatron_rl.scheduling.group_index import GroupIndex
from megatron_rl.scheduling.work import GroupWork


def test_it_counts_what_a_list_would():
    rng, index = random.Random(1), GroupIndex()
    groups = [GroupWork(f"g{serial}", "p", serial, 1.0) for serial in range(9)]
    ready: set[str] = set()
    for _ in range(3000):
        group = rng.choice(groups)
        action = rng.randrange(4)
        if action == 0:
            index.set_oldest(group, rng.randrange(5))
        elif action == 1 and group.oldest_version is not None and group.group_id not in ready:
            index.set_ready(group)
            ready.add(group.group_id)
        elif action == 2:
            assert index.unset_ready(group) == (group.group_id in ready)
            ready.discard(group.group_id)
        elif action == 3:
            index.leave(group)
            ready.discard(group.group_id)
        assert index.started == Counter(g.oldest_version for g in groups if g.oldest_version is not None)
        assert index.num_ready == len(ready)
        assert index.num_ready_by_start == Counter(g.oldest_version for g in groups if g.group_id in ready)
        assert all(index.is_ready(g) == (g.group_id in ready) for g in groups)
        for version in index.num_ready_by_start:
            members = [g for g in groups if g.group_id in ready and g.oldest_version == version]
            assert index.oldest_ready(version, 2) == members[:2]
