"""The groups under way by the version under which they started: how many there are, and which are ready."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.scheduling.work import GroupWork


class GroupIndex:
    """What a batch is planned from. `started[v]`: groups that started under version v, ready ones included."""

    def __init__(self) -> None:
        self.started: dict[int, int] = {}
        self.num_ready = 0
        self._ready: dict[int, dict[str, GroupWork]] = {}

    @property
    def num_ready_by_start(self) -> Mapping[int, int]:
        return {version: len(groups) for version, groups in self._ready.items()}

    def oldest_ready(self, version: int, count: int) -> list[GroupWork]:
        """The first `count` ready groups of a start, in the order of their release."""
        return sorted(self._ready[version].values(), key=lambda group: group.serial)[:count]

    def is_ready(self, group: GroupWork) -> bool:
        return group.oldest_version is not None and group.group_id in self._ready.get(group.oldest_version, ())

    def set_ready(self, group: GroupWork) -> None:
        assert group.oldest_version is not None
        self._ready.setdefault(group.oldest_version, {})[group.group_id] = group
        self.num_ready += 1

    def unset_ready(self, group: GroupWork) -> bool:
        """Whether it was."""
        if group.oldest_version is None or not self.is_ready(group):
            return False
        del self._ready[group.oldest_version][group.group_id]
        if not self._ready[group.oldest_version]:
            del self._ready[group.oldest_version]
        self.num_ready -= 1
        return True

    def set_oldest(self, group: GroupWork, version: int | None) -> None:
        """The group's start changes; one that is ready moves along."""
        old = group.oldest_version
        if version == old:
            return
        is_ready = self.unset_ready(group)
        if old is not None:
            self.started[old] -= 1
            if not self.started[old]:
                del self.started[old]
        group.oldest_version = version
        if version is not None:
            self.started[version] = self.started.get(version, 0) + 1
        if is_ready:
            self.set_ready(group)

    def leave(self, group: GroupWork) -> None:
        self.unset_ready(group)
        self.set_oldest(group, None)
