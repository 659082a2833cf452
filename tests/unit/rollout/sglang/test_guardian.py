import io
import os
import time

import pytest

from megatron_rl.rollout.sglang import guardian


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(guardian, "SHM_DIR", tmp_path)
    return tmp_path


def test_only_new_unmapped_files_of_sglang_are_unlinked(shared_memory):
    import mmap

    now = time.time()
    for name in (
        "sgl_shm_mq_12_ab",
        "sglang_loads_x.shm",
        "sgl_shm_mq_13_mapped",
        "sgl_other",
        "psm_1",
        "sgl_shm_mq_old",
    ):
        (shared_memory / name).write_bytes(b"x" * 4096)
    os.utime(shared_memory / "sgl_shm_mq_old", (now - 100, now - 100))
    with (shared_memory / "sgl_shm_mq_13_mapped").open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        guardian.unlink_orphaned_shared_memory(since=now - 1)
    assert sorted(path.name for path in shared_memory.iterdir()) == [
        "psm_1",
        "sgl_other",
        "sgl_shm_mq_13_mapped",
        "sgl_shm_mq_old",
    ]


def test_secrets_are_blotted_out_even_across_reads(capfdbinary):
    read, write = os.pipe()
    rest = b""
    with io.FileIO(write, "w") as file:
        for part in (b"one\nkey is hu", b"sh! again hush\nla", b"st hush"):
            file.write(part)
            rest = guardian.copy_output(read, [b"hush"], rest)
    assert guardian.copy_output(read, [b"hush"], rest) is None
    os.close(read)
    assert capfdbinary.readouterr().out == b"one\nkey is ***! again ***\nlast ***"


def test_processes_are_told_by_session():
    assert guardian.processes_of_session(2**30) == []
    assert os.getpid() in guardian.processes_of_session(os.getsid(0))
