import json
import stat

import pytest

from megatron_rl.rollout.sglang import receiver_dir
from megatron_rl.rollout.sglang.errors import EngineReplyError


def test_the_directory_and_its_key_are_private(tmp_path):
    path = tmp_path / "a" / "receivers"
    receiver_dir.create_receiver_dir(path, b"\x00key")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700 and stat.S_IMODE((path / "key").stat().st_mode) == 0o600
    assert (path / "key").read_bytes() == b"\x00key"
    with pytest.raises(FileExistsError):
        receiver_dir.create_receiver_dir(path, b"key")


def test_addresses_come_in_rank_order(tmp_path):
    for rank in (2, 0, 1):
        text = json.dumps({"host": f"10.0.0.{rank}", "port": 900 + rank, "pid": 1})
        (tmp_path / f"receiver-{rank}.json").write_text(text)
    expected = (("10.0.0.0", 900), ("10.0.0.1", 901), ("10.0.0.2", 902))
    assert receiver_dir.read_addresses("e", tmp_path, 3) == expected
    receiver_dir.forget_receivers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_failed_or_is_silent_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(receiver_dir, "PUBLISH_TIMEOUT_S", 0.05)
    with pytest.raises(EngineReplyError, match=r"engine e: receiver-0\.json did not appear in .*"):
        receiver_dir.read_addresses("e", tmp_path, 2)
    (tmp_path / "receiver-1.error").write_text("TP rank 1: PermissionError: mode 755\n")
    with pytest.raises(EngineReplyError, match="engine e: TP rank 1: PermissionError: mode 755"):
        receiver_dir.read_addresses("e", tmp_path, 2)
