from __future__ import annotations

import subprocess
import sys

from megatron_rl.platforms import host_heap
from megatron_rl.platforms.host_heap import HostHeap


def test_the_heap_is_given_back_when_enough_has_gathered(monkeypatch):
    resident, trims = [100], []
    heap = HostHeap(slack_bytes=50)
    monkeypatch.setattr(host_heap, "_resident_bytes", lambda: resident[0])
    heap._trim = trims.append
    assert heap.trim() and len(trims) == 1, "the first time it learns where the process stands"
    for resident[0], is_due in ((120, False), (150, False), (151, True), (180, False)):
        assert heap.trim() == is_due
    assert len(trims) == 2


def test_a_trimmed_heap_is_smaller():
    blocks = [bytearray(64 * 1024) for _ in range(4000)]  # below the size that is mapped on its own
    kept, size = blocks[::100], host_heap._resident_bytes()
    del blocks
    assert HostHeap(slack_bytes=0).trim()
    assert host_heap._resident_bytes() < size - 150 * 2**20 and len(kept) == 40


def test_a_large_block_is_used_again_without_page_faults() -> None:
    """In a process of its own, since the setting lasts as long as the process does."""
    code = """
import resource
from megatron_rl.platforms.host_heap import keep_freed_memory
def faults_of_a_block():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * int(4e7)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults_of_a_block()
assert faults_of_a_block() > 5_000, "mapped anew"
keep_freed_memory()
faults_of_a_block()
assert faults_of_a_block() < 100
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
