"""A hop that hangs does not stand in the way of the next sync's."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from megatron_rl.resharding.channel import ChannelError
from megatron_rl.resharding.control import ReceiverControl
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.resharding.relay import Passer
from tests.unit.resharding.rig import KEY, TIMEOUT_S

ROWS = np.array([(0, 0, 0, 4, 3)], dtype=np.int64)


def test_a_hop_of_an_earlier_sync_that_hangs_is_cut_off(monkeypatch):
    held = {"a.weight": torch.arange(12.0).view(4, 3)}
    receiver = Receiver({"a.weight": torch.zeros(4, 3)}, KEY)
    receiver.start()
    control, passer = ReceiverControl(0, receiver.address, KEY, TIMEOUT_S), Passer(KEY)
    header = {
        "number": 5, "who": "engine rank 0", "target": 1, "to": receiver.address, "names": ["a.weight"], "version": 1,
        "bucket_bytes": 64, "timeout_s": TIMEOUT_S,
    }  # fmt: skip
    reached, opened = threading.Event(), threading.Event()
    original = Receiver._receive

    def hang_once(self, *arguments):
        if not reached.is_set():
            reached.set()
            opened.wait(TIMEOUT_S)
        return original(self, *arguments)

    monkeypatch.setattr(Receiver, "_receive", hang_once)
    errors: list[ChannelError] = []

    def first() -> None:
        with pytest.raises(ChannelError) as caught:
            passer.pass_on(held, header | {"sync": "one"}, bytearray(ROWS.tobytes()))
        errors.append(caught.value)

    try:
        control.begin("one", 1, [5], is_staged=False)
        thread = threading.Thread(target=first)
        thread.start()
        assert reached.wait(TIMEOUT_S)
        control.begin("two", 1, [5], is_staged=False)
        digest = passer.pass_on(held, header | {"sync": "two"}, bytearray(ROWS.tobytes()))
        thread.join(TIMEOUT_S)
        assert len(errors) == 1 and control.finish("two").digests == {5: digest}
        assert torch.equal(receiver._params["a.weight"], held["a.weight"])
    finally:
        opened.set()
        for part in (passer, control, receiver):
            part.close()
