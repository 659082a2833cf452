"""The hash over what was sent and what was written. Both sides of a sync agree on one by name before the first byte.

XXH3 checks memory at tens of GB/s; where the xxhash package is absent, BLAKE2b of the standard library does it at about
1 GB/s.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Protocol


class Digest(Protocol):
    def update(self, data: memoryview | bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


def _blake2b() -> Digest:
    return hashlib.blake2b(digest_size=16)


_DIGESTS: dict[str, Callable[[], Digest]] = {"blake2b": _blake2b}
if importlib.util.find_spec("xxhash") is not None:
    import xxhash

    _DIGESTS = {"xxh3_128": xxhash.xxh3_128, **_DIGESTS}

DIGEST_NAMES = tuple(_DIGESTS)
"""What this process can compute, fastest first."""


def choose_digest(offered: Sequence[str]) -> str:
    """The first of the peer's names that this process knows. Raises ValueError when there is none."""
    for name in offered:
        if name in _DIGESTS:
            return name
    raise ValueError(f"no digest in common: the sender offers {', '.join(offered)}, here are {', '.join(DIGEST_NAMES)}")


def new_digest(name: str) -> Digest:
    return _DIGESTS[name]()
