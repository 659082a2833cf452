"""One stream per pair: plain boxes without a copy, all others through two buffers, and digests that overlap."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

from megatron_rl.resharding.boxes import Box, total_bytes
from megatron_rl.resharding.channel import Channel, ChannelError
from megatron_rl.resharding.digest import DIGEST_NAMES, new_digest
from megatron_rl.resharding.transports.protocol import NUM_BUFFERS, overlapped
from megatron_rl.resharding.transports.sockets import SocketTransport

SHAPES = [(7, 5), (1, 3), (64, 33), (5, 1), (130, 9)]


def plain_boxes(seed: int, dtype: torch.dtype) -> list[Box]:
    generator = torch.Generator().manual_seed(seed)
    return [Box(torch.randn(shape, generator=generator).to(dtype), dtype) for shape in SHAPES]


def strided_boxes(seed: int, dtype: torch.dtype) -> list[Box]:
    generator = torch.Generator().manual_seed(seed)
    wholes = [torch.randn((rows + 2, cols + 3), generator=generator).to(dtype) for rows, cols in SHAPES]
    return [Box(w[1 : 1 + rows, 2 : 2 + cols], dtype) for w, (rows, cols) in zip(wholes, SHAPES, strict=True)]


def move(source: list[Box], target: list[Box], bucket_bytes: int):
    """Both ends at once over a socket pair; their digests, and what each end still holds."""
    left, right = socket.socketpair()
    sender = SocketTransport(Channel(left, "receiver", 10.0), bucket_bytes)
    receiver = SocketTransport(Channel(right, "sender", 10.0), 2 * bucket_bytes + 1)  # each end has buckets of its own
    sender.submit_send(source)
    receiver.submit_recv(target)
    digests = [new_digest(DIGEST_NAMES[0]) for _ in range(2)]
    thread = threading.Thread(target=sender.run, args=(digests[0],))
    thread.start()
    try:
        receiver.run(digests[1])
    finally:
        thread.join()
        left.close(), right.close()
    return [digest.hexdigest() for digest in digests], sender, receiver


@pytest.mark.parametrize("bucket_bytes", [16, 700, 10**6])
@pytest.mark.parametrize("make_source", [plain_boxes, strided_boxes])
@pytest.mark.parametrize("make_target", [plain_boxes, strided_boxes])
@pytest.mark.parametrize("trainer_dtype", [torch.bfloat16, torch.float32])
def test_every_kind_of_box_arrives(make_source, make_target, trainer_dtype, bucket_bytes):
    source = [box._replace(dtype=torch.bfloat16) for box in make_source(1, trainer_dtype)]
    target = make_target(2, torch.bfloat16)
    digests, _, _ = move(source, target, bucket_bytes)
    assert digests[0] == digests[1]
    for theirs, ours in zip(source, target, strict=True):
        assert torch.equal(theirs.view.to(torch.bfloat16), ours.view)


def test_at_most_two_buckets_beside_the_weights():
    boxes = strided_boxes(1, torch.float32)
    _, sender, receiver = move(boxes, strided_boxes(2, torch.float32), 1200)
    for transport, bucket_bytes in ((sender, 1200), (receiver, 2401)):
        held = [buffer.numel() for buffer in transport._staging if buffer is not None]
        assert len(held) == NUM_BUFFERS and sum(held) <= NUM_BUFFERS * bucket_bytes < total_bytes(boxes)
    _, sender, _ = move(plain_boxes(1, torch.float32), plain_boxes(2, torch.float32), 1200)
    assert sender._staging == [None, None], "plain boxes need none"


def test_a_peer_that_goes_away_in_the_middle_is_one_line():
    left, right = socket.socketpair()
    transport = SocketTransport(Channel(left, "receiver r", 10.0), 64)
    transport.submit_send(plain_boxes(1, torch.float32) * 4000)
    right.close()
    with pytest.raises(ChannelError, match="receiver r: connection lost"):
        transport.run(new_digest(DIGEST_NAMES[0]))
    left.close()


def test_a_peer_that_falls_silent_is_noticed_in_time():
    left, right = socket.socketpair()
    transport = SocketTransport(Channel(right, "sender s", 0.2), 64)
    boxes = plain_boxes(1, torch.float32)
    transport.submit_recv(boxes)
    Channel(left, "receiver", 10.0).send_header({"kind": "stream"}, total_bytes(boxes))
    with pytest.raises(ChannelError, match="sender s: nothing moved within"):
        transport.run(new_digest(DIGEST_NAMES[0]))
    left.close(), right.close()


def test_the_first_stage_is_one_item_ahead_and_no_more():
    seen: list[str] = []
    released = threading.Event()

    def first(number, item):
        seen.append(f"first {number}")
        if number == 1:
            released.set()
        return item * 10

    def second(number, item, ready):
        assert released.wait(5.0), "item 1 is prepared while item 0 is used"
        assert ready == item * 10 and f"first {number + NUM_BUFFERS}" not in seen
        seen.append(f"second {number}")

    overlapped([1, 2, 3, 4], first, second)
    assert [event for event in seen if event.startswith("second")] == [f"second {i}" for i in range(4)]
