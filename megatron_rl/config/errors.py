"""The one error that a person's mistake in a configuration becomes, and how near misses are named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, slots=True)
class Location:
    """Where a value was written: a line of a file, or (line None) an override on the command line."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class ConfigError(ValueError):
    """A configuration cannot be used. `str()` is one line: `file:line: key.path: reason`.

    `key_path` is empty when the fault is not about one key (a missing file, a YAML syntax error).
    """

    def __init__(self, location: Location, key_path: str, reason: str) -> None:
        self.location = location
        self.key_path = key_path
        self.reason = " ".join(reason.split())
        super().__init__(": ".join(part for part in (str(location), key_path, self.reason) if part))


def join_path(prefix: str, key: str | int) -> str:
    return f"{prefix}.{key}" if prefix else str(key)


def did_you_mean(key: str, siblings: Iterable[str], all_paths: Sequence[str] = ()) -> str:
    """`; did you mean ...?` for the nearest sibling, else for a key of that name elsewhere (rather in the same section);
    else the valid siblings.

    `key`, `siblings` and `all_paths` are full key paths; nearness is that of their last words.
    """
    siblings = list(siblings)
    leaf, section = key.rpartition(".")[2], key.partition(".")[0]
    for paths in (siblings, all_paths):
        by_leaf: dict[str, str] = {}
        for path in sorted(paths, key=lambda path: path.partition(".")[0] != section):
            by_leaf.setdefault(path.rpartition(".")[2], path)
        if near := get_close_matches(leaf, by_leaf, n=1, cutoff=0.7):
            return f"; did you mean {by_leaf[near[0]]}?"
    return f"; valid here: {', '.join(path.rpartition('.')[2] for path in siblings)}" if siblings else ""
