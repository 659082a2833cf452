"""Both ends of a sync hash with what both have; without xxhash the standard library serves."""

from __future__ import annotations

import hashlib
import importlib
import sys
from importlib.machinery import PathFinder

import pytest

from megatron_rl.resharding import digest


@pytest.fixture
def without_xxhash(monkeypatch):
    """The module as it is where xxhash is not installed."""

    class Blocker:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return None if name == "xxhash" else PathFinder.find_spec(name, path, target)

    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if f is not PathFinder] + [Blocker])
    monkeypatch.delitem(sys.modules, "xxhash", raising=False)
    yield importlib.reload(digest)
    monkeypatch.undo()
    importlib.reload(digest)


def test_the_standard_library_serves_where_xxhash_is_absent(without_xxhash):
    assert without_xxhash.DIGEST_NAMES == ("blake2b",)
    assert without_xxhash.choose_digest(["xxh3_128", "blake2b"]) == "blake2b"
    hashed = without_xxhash.new_digest("blake2b")
    hashed.update(b"ab")
    hashed.update(memoryview(b"c"))
    assert hashed.hexdigest() == hashlib.blake2b(b"abc", digest_size=16).hexdigest()


def test_the_senders_fastest_digest_is_taken():
    assert digest.DIGEST_NAMES[0] == "xxh3_128"
    assert digest.choose_digest(digest.DIGEST_NAMES) == "xxh3_128"
    assert digest.choose_digest(["blake2b", "xxh3_128"]) == "blake2b"
