"""Which trainer ranks hold the same shard, and how much each of them should send so that sending is even.

A *source class* is the set of ranks that hold one shard: the data- and context-parallel copies of a dense shard, the
expert-data-parallel copies of an expert shard, or a whole pipeline stage for a replicated parameter. A rank is in three
classes of its stage at once, and any split of a class's bytes over its ranks is allowed.

Lower bound: the classes of any set S can be sent by none but the ranks N(S) in them, so some rank sends at least
load(S) / |N(S)|. The largest such quotient over all S is what ownership forces, and it can be reached (the loads are
divisible; this is the max-flow min-cut theorem on classes -> ranks). `balance` finds it with Dinkelbach's iteration: try a
quotient, and where the flow does not fit, the minimum cut names a set with a larger one. The sets that are then tight are
taken out and the rest is balanced again, so that not only the maximum is least but every other load as even as can be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, lcm

import numpy as np

from megatron_rl.types.layout import ParallelLayout


@dataclass(frozen=True, slots=True)
class SourceClasses:
    """The classes of a layout by number: per stage one per TP rank, one for the whole stage, one per expert shard."""

    layout: ParallelLayout

    @property
    def num_expert_shards(self) -> int:
        return self.layout.ep * self.layout.etp

    @property
    def per_stage(self) -> int:
        return self.layout.tp + 1 + self.num_expert_shards

    @property
    def num_classes(self) -> int:
        return self.layout.pp * self.per_stage

    @property
    def ranks_per_stage(self) -> int:
        return self.layout.world_size // self.layout.pp

    def dense(self, stage: int, tp: int) -> int:
        return stage * self.per_stage + tp

    def replicated(self, stage: int) -> int:
        return stage * self.per_stage + self.layout.tp

    def expert(self, stage: int, ep: int, etp: int) -> int:
        return stage * self.per_stage + self.layout.tp + 1 + ep * self.layout.etp + etp

    def pattern(self, class_id: int) -> tuple[int, int]:
        """(modulus, residue): ranks of the stage whose number within it has that residue are in the class.

        Megatron's order has TP fastest among dense coordinates, and ETP then EP among expert coordinates.
        """
        kind = class_id % self.per_stage
        if kind < self.layout.tp:
            return self.layout.tp, kind
        if kind == self.layout.tp:
            return 1, 0
        return self.num_expert_shards, kind - self.layout.tp - 1

    def members(self, class_id: int) -> np.ndarray:
        """The ranks of a class, ascending."""
        modulus, residue = self.pattern(class_id)
        first = class_id // self.per_stage * self.ranks_per_stage
        return np.arange(first + residue, first + self.ranks_per_stage, modulus, dtype=np.int64)

    @property
    def num_groups(self) -> int:
        """Ranks of a stage with the same number modulo this are in the same classes."""
        return lcm(self.layout.tp, self.num_expert_shards)

    def groups(self, kind: int) -> tuple[int, ...]:
        modulus, residue = self.pattern(kind)
        return tuple(range(residue, self.num_groups, modulus))


def stage_quotas(classes: SourceClasses, loads: np.ndarray) -> tuple[list[np.ndarray], float]:
    """Per class the elements that each member should send (in rank order), and the least possible maximum of any rank.

    `loads[c]` is what class c has to send, in elements.
    """
    quotas: list[np.ndarray] = []
    bound = 0.0
    per_group = classes.ranks_per_stage // classes.num_groups
    patterns = tuple(classes.groups(kind) for kind in range(classes.per_stage))
    for stage in range(classes.layout.pp):
        stage_loads = loads[stage * classes.per_stage : (stage + 1) * classes.per_stage]
        shares, stage_bound = balance(tuple(map(int, stage_loads)), patterns, (per_group,) * classes.num_groups)
        bound = max(bound, stage_bound)
        for kind in range(classes.per_stage):
            modulus, residue = classes.pattern(kind)
            group_of_member = np.arange(residue, classes.ranks_per_stage, modulus) % classes.num_groups
            amounts = np.zeros(classes.num_groups)
            amounts[list(shares[kind])] = [amount / per_group for amount in shares[kind].values()]
            quotas.append(amounts[group_of_member])
    return quotas, bound


def tied_share_of_first(classes: SourceClasses, loads: np.ndarray, tied: np.ndarray) -> np.ndarray:
    """Per TP rank, the part (0..1) of the tied embedding that the first stage should send; the last stage sends the rest.

    `tied[tp]` is the embedding's load, which is not in `loads`.
    """
    last, groups, per_group = classes.layout.pp - 1, classes.num_groups, classes.ranks_per_stage // classes.num_groups
    stage_loads = [loads[stage * classes.per_stage : (stage + 1) * classes.per_stage] for stage in (0, last)]
    kinds = [classes.groups(kind) for kind in range(classes.per_stage)]
    patterns = [*kinds, *(tuple(group + groups for group in kind) for kind in kinds)]
    patterns += [(*kinds[tp], *(group + groups for group in kinds[tp])) for tp in range(classes.layout.tp)]
    every = (*map(int, stage_loads[0]), *map(int, stage_loads[1]), *map(int, tied))
    shares, _ = balance(every, tuple(patterns), (per_group,) * (2 * groups))
    first = [sum(amount for group, amount in share.items() if group < groups) for share in shares[-classes.layout.tp :]]
    return np.array([amount / load if load else 1.0 for amount, load in zip(first, tied, strict=True)])


@lru_cache(maxsize=256)
def balance(
    loads: tuple[int, ...], groups_of: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]
) -> tuple[tuple[dict[int, float], ...], float]:
    """Split each load over its groups so that the loads per member are as even as can be (lexicographically least maximum).

    Group g has `sizes[g]` equal members. Returns per load {group: amount}, and the largest load of a member.
    """
    shares: list[dict[int, float]] = [{} for _ in loads]
    remaining = [number for number, load in enumerate(loads) if load]
    free = set(range(len(sizes)))
    bound = 0.0
    while remaining:
        reach = {number: [group for group in groups_of[number] if group in free] for number in remaining}
        tight, numerator, denominator = list(remaining), *_ratio(remaining, loads, reach, sizes)
        while True:
            flows, cut = _max_flow(loads, reach, sizes, numerator, denominator)
            if not cut:
                break
            tight, numerator, denominator = cut, *_ratio(cut, loads, reach, sizes)
        bound = max(bound, numerator / denominator)
        for number in tight:
            shares[number] = {group: amount / denominator for group, amount in flows[number].items()}
            free -= set(reach[number])
        remaining = [number for number in remaining if number not in set(tight)]
    return tuple(shares), bound


def _ratio(numbers: Sequence[int], loads: Sequence[int], reach: dict[int, list[int]], sizes: Sequence[int]) -> tuple[int, int]:
    load = sum(loads[number] for number in numbers)
    size = sum(sizes[group] for group in {group for number in numbers for group in reach[number]})
    divisor = gcd(load, size)
    return load // divisor, size // divisor


def _max_flow(
    loads: Sequence[int], reach: dict[int, list[int]], sizes: Sequence[int], numerator: int, denominator: int
) -> tuple[dict[int, dict[int, int]], list[int]]:
    """Send every load into groups of capacity size * numerator / denominator (all scaled by the denominator, exact).

    Returns the flows and the loads on the source side of a minimum cut: empty when everything fits. Shortest augmenting
    paths over classes and groups; a first pass that fills evenly leaves few of them.
    """
    left = {number: loads[number] * denominator for number in reach}
    room = {group: sizes[group] * numerator for groups in reach.values() for group in groups}
    flows: dict[int, dict[int, int]] = {number: dict.fromkeys(groups, 0) for number, groups in reach.items()}
    users: dict[int, list[int]] = {group: [] for group in room}
    for number, groups in reach.items():
        for group in groups:
            users[group].append(number)
    for number in sorted(reach, key=lambda n: len(reach[n])):  # those with the least choice first
        groups = reach[number]
        for position, group in enumerate(groups):
            amount = min(-(-left[number] // (len(groups) - position)), room[group])
            _move(flows, left, room, number, group, amount)
    while True:
        path_to, end = _search(flows, left, room, reach, users)
        if end is None:
            return flows, [number for number in reach if ("class", number) in path_to] if any(left.values()) else []
        _augment(flows, left, room, path_to, end)


def _move(
    flows: dict[int, dict[int, int]], left: dict[int, int], room: dict[int, int], number: int, group: int, amount: int
) -> None:
    flows[number][group] += amount
    left[number] -= amount
    room[group] -= amount


Node = tuple[str, int]


def _search(
    flows: dict[int, dict[int, int]],
    left: dict[int, int],
    room: dict[int, int],
    reach: dict[int, list[int]],
    users: dict[int, list[int]],
) -> tuple[dict[Node, Node | None], int | None]:
    """Breadth first from every load that is not placed yet; the predecessors, and a group with room or None."""
    before: dict[Node, Node | None] = {("class", number): None for number in reach if left[number]}
    queue = deque(before)
    while queue:
        kind, number = node = queue.popleft()
        if kind == "class":
            steps = [("group", group) for group in reach[number]]
        else:
            if room[number]:
                return before, number
            steps = [("class", user) for user in users[number] if flows[user][number]]
        for step in steps:
            if step not in before:
                before[step] = node
                queue.append(step)
    return before, None


def _augment(
    flows: dict[int, dict[int, int]],
    left: dict[int, int],
    room: dict[int, int],
    before: dict[Node, Node | None],
    end: int,
) -> None:
    edges: list[tuple[int, int, int]] = []  # (load, group, +1 forward or -1 back)
    node: Node = ("group", end)
    while (previous := before[node]) is not None:
        edges.append((previous[1], node[1], 1) if node[0] == "group" else (node[1], previous[1], -1))
        node = previous
    amount = min([left[node[1]], room[end], *(flows[n][g] for n, g, sign in edges if sign < 0)])
    for number, group, sign in edges:
        flows[number][group] += sign * amount
    left[node[1]] -= amount
    room[end] -= amount
