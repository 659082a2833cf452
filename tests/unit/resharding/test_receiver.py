"""What a receiver refuses, and what a sender that goes away leaves behind."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from megatron_rl.resharding.box_memory import span_of
from megatron_rl.resharding.channel import ChannelError, connect
from megatron_rl.resharding.control import ReceiverControl
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.types.layout import EngineLayout, ParallelLayout
from tests.unit.resharding.rig import FILL, KEY, TIMEOUT_S, world

OPEN = {
    "kind": "open", "sync": "s", "source": 0, "transport": "socket", "bucket_bytes": 64, "timeout_s": 5.0,
    "digests": ["blake2b"], "delta_base": None,
}  # fmt: skip
TABLE = {"kind": "table", "source": 0, "names": ["a.weight"]}


def rows(*boxes) -> bytes:
    return np.array(boxes, dtype=np.int64).tobytes()


@pytest.fixture(params=[True, False], ids=["unix", "tcp"])
def receiver(request):
    made = Receiver({"a.weight": torch.full((5, 3), FILL)}, KEY, is_local=request.param)
    made.start()
    yield made
    made.close()


@pytest.fixture
def control(receiver):
    made = ReceiverControl(0, receiver.address, KEY, TIMEOUT_S)
    yield made
    made.close()


@pytest.fixture
def channel(receiver):
    made = connect(*receiver.address, KEY, TIMEOUT_S)
    yield made
    made.close()


def test_wrong_key_is_refused_and_nothing_is_written(receiver, control):
    with pytest.raises(ChannelError, match="another key"):
        connect(*receiver.address, b"x" * 32, TIMEOUT_S)
    assert control.describe() == {"a.weight": ((5, 3), "float32")}


def test_absent_receiver_is_one_clear_line(receiver):
    address = receiver.address
    receiver.close()
    with pytest.raises(ChannelError, match="cannot connect"):
        connect(*address, KEY, TIMEOUT_S)


@pytest.mark.parametrize(
    ("header", "payload", "message"),
    [
        (TABLE | {"names": ["b.weight"]}, rows((0, 0, 0, 1, 3)), "b.weight"),
        (TABLE, rows((0, 4, 0, 2, 3)), r"a.weight\[4:6, 0:3\] is outside"),
        (TABLE, rows((0, 0, -1, 1, 3)), "outside"),
        (OPEN | {"source": 5}, b"", "source 5 may not open here"),
        (OPEN | {"sync": "t"}, b"", "sync t is not being received"),
        (OPEN | {"digests": ["md4"]}, b"", "no digest in common"),
        (OPEN | {"transport": "pigeon"}, b"", "unknown transport"),
        ({"kind": "finish", "sync": "s"}, b"", r"no end from sources \[0\]"),
        ({"kind": "apply", "sync": "s"}, b"", "incomplete"),
        ({"kind": "dance"}, b"", "dance"),
    ],
)  # fmt: skip
def test_a_message_that_does_not_fit_is_answered_in_one_line(receiver, control, channel, header, payload, message):
    control.begin("s", 3, [0], is_staged=False)
    channel.ask(TABLE, rows((0, 1, 0, 2, 3)))
    with pytest.raises(ChannelError, match=message):
        channel.ask(header, payload)
    assert bool((receiver._params["a.weight"] == FILL).all())


@pytest.mark.parametrize("num_bytes", [8, 36])
def test_a_stream_of_another_size_breaks_the_update(control, channel, num_bytes):
    control.begin("s", 3, [0], is_staged=False)
    channel.ask(TABLE, rows((0, 1, 0, 2, 3)))
    channel.ask(OPEN)
    with pytest.raises(ChannelError):  # it may hang up between header and bytes
        channel.send({"kind": "stream"}, bytes(num_bytes))
        channel.expect()
    with pytest.raises(ChannelError, match=r"incomplete: source 0: .*expected a stream of 24 bytes"):
        control.finish("s")


def test_a_sender_that_goes_away_leaves_the_update_incomplete(control, channel):
    control.begin("s", 1, [0, 1], is_staged=False)
    channel.ask(TABLE, rows((0, 1, 0, 2, 3)))
    channel.ask(OPEN)
    channel.send_header({"kind": "stream"}, 24)
    channel.send_spans(span_of(torch.zeros(3)))
    channel.close()
    with pytest.raises(ChannelError, match="incomplete"):
        control.finish("s")


def test_a_new_sync_ends_the_writing_of_the_one_before(receiver, control, channel):
    control.begin("s", 1, [0], is_staged=False)
    channel.ask(TABLE, rows((0, 0, 0, 5, 3)))
    channel.ask(OPEN)
    channel.send_header({"kind": "stream"}, 60)  # and then silence
    control.begin("t", 1, [0], is_staged=False)
    with pytest.raises(ChannelError):
        channel.expect()
    assert bool((receiver._params["a.weight"] == FILL).all())
    with pytest.raises(ChannelError, match="sync s is not being received"):
        control.finish("s")


def test_staged_slices_wait_beside_weights_that_serve():
    with world("qwen3_moe", ParallelLayout(tp=2, pp=2), EngineLayout(2, 1), torch.bfloat16) as one:
        one.sync(is_staged=True)
        one.assert_untouched()
        for seed in (1, 2):
            before = one.source if seed > 1 else None
            one.load(seed)
            order = one.sync(is_staged=True)
            if before is not None:
                one.assert_whole(before)
            for control in one.controls:
                control.apply(order.sync)
            one.assert_whole()
        assert bool((one.params(1)["lm_head.weight"][-1] == FILL).all()), "padding rows stay as they were"


def test_receiver_closes_its_threads():
    before = threading.active_count()
    receiver = Receiver({"a.weight": torch.zeros(5, 3)}, KEY)
    receiver.start()
    channel = connect(*receiver.address, KEY, TIMEOUT_S)
    receiver.close()
    with pytest.raises(ChannelError):
        channel.ask({"kind": "describe"})
    assert threading.active_count() <= before + 1  # the connection's own thread may still be unwinding
