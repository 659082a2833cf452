"""Where each value of an experiment was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_rl.config.errors import ConfigError, Location, join_path
from megatron_rl.config.yaml_tree import Node

Problem = tuple[str, str]
"""(key path, reason): what a check returns."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Key path -> place, for every key that a file or an override gave."""

    root: Location
    places: Mapping[str, Location]

    @classmethod
    def from_tree(cls, tree: Node) -> Provenance:
        places: dict[str, Location] = {}

        def walk(node: Node, path: str) -> None:
            children: Iterable[tuple[str | int, Node]] = ()
            if isinstance(node.value, dict):
                children = node.value.items()
            elif isinstance(node.value, list):
                children = enumerate(node.value)
            for key, child in children:
                places[join_path(path, key)] = child.location
                walk(child, join_path(path, key))

        walk(tree, "")
        return cls(tree.location, places)

    def locate(self, key_path: str) -> Location:
        """The place of `key_path`; of the nearest section above it where the key itself was left at its default."""
        while key_path:
            if key_path in self.places:
                return self.places[key_path]
            key_path = key_path.rpartition(".")[0]
        return self.root

    def error(self, key_path: str, reason: str) -> ConfigError:
        """The one-line error for a problem that a check found."""
        return ConfigError(self.locate(key_path), key_path, reason)

    def reject(self, problems: Iterable[Problem]) -> None:
        """Raises `ConfigError` for the first problem, if there is one."""
        for key_path, reason in problems:
            raise self.error(key_path, reason)
