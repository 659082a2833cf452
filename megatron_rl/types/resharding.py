"""Nouns of weight resharding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class SourceParam(NamedTuple):
    """A trainer-side parameter: virtual chunk and the name inside it."""

    chunk: int
    name: str


@dataclass(frozen=True, slots=True)
class TransferOp:
    """One box that one trainer rank sends to one engine rank. Rows and columns are of matrix views (see `ShardInterval`)."""

    source_rank: int
    source: SourceParam
    source_row: int
    source_col: int
    target_rank: int
    """Engine number * engine TP + TP rank."""
    target: str
    target_row: int
    target_col: int
    num_rows: int
    num_cols: int


@dataclass(frozen=True, slots=True)
class ShardDigest:
    """What one engine rank received in one sync, as each side saw it.

    `digests[s]` is the hash of the buckets from trainer rank s in order; `num_elements` the weights they covered.
    """

    target_rank: int
    num_elements: int
    digests: dict[int, str]


@dataclass(frozen=True, slots=True)
class SyncOrder:
    """What the controller tells every trainer rank: bring the engine ranks to `version`.

    `sync` names this attempt; `addresses[r]` is the receiver of engine rank r; `dtypes` says how the engines hold each
    parameter; `plan` is the layout digest of the controller's plan.
    """

    sync: str
    version: int
    addresses: tuple[tuple[str, int], ...]
    dtypes: Mapping[str, str]
    plan: str
