"""Slices sent by simulated trainer ranks over the real channel into real receivers equal direct slices of the whole."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import numpy as np
import pytest
import torch

from megatron_rl.model_families.registry import FAMILIES
from megatron_rl.resharding import channel
from megatron_rl.resharding.box_sender import SendOptions
from megatron_rl.resharding.boxes import as_matrix
from megatron_rl.resharding.channel import ChannelError
from megatron_rl.resharding.execute import WeightSender, _Pair
from megatron_rl.resharding.hops import relay_rounds
from megatron_rl.resharding.plan import build_reshard_plan
from megatron_rl.resharding.verify import SyncError, check_receiver
from megatron_rl.types.layout import EngineLayout, ParallelLayout
from tests.unit.resharding.rig import KEY, world

LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(tp=2),
    ParallelLayout(pp=2, virtual_pp=2),
    ParallelLayout(tp=2, pp=2, ep=2, dp=2),
    ParallelLayout(tp=2, etp=2, dp=2),
    ParallelLayout(dp=3),
]


@pytest.mark.parametrize("family_name", sorted(FAMILIES))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("engine", [EngineLayout(1, 1), EngineLayout(2, 2), EngineLayout(4, 1, 16)], ids=str)
def test_synced_shards_equal_direct_slices(family_name, layout, engine):
    if not FAMILIES[family_name].debug_dims.num_experts:
        layout = ParallelLayout(tp=layout.tp, pp=layout.pp, virtual_pp=layout.virtual_pp, dp=layout.dp)
    dtype = torch.bfloat16 if engine.num_engines == 2 else torch.float32
    with world(family_name, layout, engine, dtype) as one:
        one.sync()
        one.assert_whole()


@pytest.mark.parametrize("is_local", [True, False], ids=["unix", "tcp"])
def test_connections_are_kept_and_follow_new_weights(is_local):
    with world("qwen3_moe", ParallelLayout(tp=2, pp=2), EngineLayout(2, 1), torch.float32, is_local=is_local) as one:
        one.sync()
        channels = [pair.sender._channel for sender in one.senders for pair in sender._pairs]
        for seed in (12, 13):
            one.load(seed)
            one.sync()
            one.assert_whole()
        assert [pair.sender._channel for sender in one.senders for pair in sender._pairs] == channels
        for chunk in (chunk for chunks in one.chunks for chunk in chunks):  # parameters that moved are found again
            for name in chunk:
                chunk[name] = chunk[name].clone()
        one.load(14)
        one.sync()
        one.assert_whole()


@pytest.mark.parametrize("is_local", [True, False], ids=["unix", "tcp"])
def test_a_connection_that_went_idle_too_long_is_opened_anew(is_local):
    with world("llama", ParallelLayout(), EngineLayout(2, 1), torch.float32, is_local=is_local) as one:
        one.sync()
        for receiver in one.receivers:
            for connection in list(receiver._connections):
                connection.shutdown(2)
        one.load(3)
        one.sync()
        one.assert_whole()


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("engine", [EngineLayout(2, 3), EngineLayout(1, 4)], ids=str)
def test_engines_pass_on_what_entered_elsewhere(engine, is_staged):
    with world("qwen3_moe", ParallelLayout(tp=2, pp=2), engine, torch.bfloat16, relay=True, cut_rows=1) as one:
        for seed in (12, 13):
            one.load(seed)
            order = one.sync(is_staged=is_staged)
            if is_staged:
                for control in one.controls:
                    control.apply(order.sync)
            one.assert_whole()
        sent = one.plan.num_elements_between().sum()
        whole = build_reshard_plan(one.family, one.dims, one.layout, one.engine).num_elements_between().sum()
        assert sent * engine.num_engines == whole, "the trainers send every slice once"


def test_a_neighbour_that_is_gone_is_named_and_nothing_is_finished():
    with world("llama", ParallelLayout(), EngineLayout(1, 3), torch.bfloat16, relay=True, cut_rows=1) as one:
        order = one.begin()
        one.senders[0].send(one.chunks[0], order)
        first, second, *_ = relay_rounds(one.plan, order.dtypes)
        hop = second[0]
        with pytest.raises(ChannelError, match=r"incomplete: no end from sources \[3\]"):  # origin 2 came not yet to engine 0
            one.controls[hop.source_rank].relay(order.sync, 1, hop, order.addresses[hop.target_rank], 4096)
        hop = first[0]
        host, port = order.addresses[hop.target_rank]
        one.receivers[hop.target_rank].close()
        with pytest.raises(ChannelError, match=rf"receiver {host}:{port}: cannot connect"):
            one.controls[hop.source_rank].relay(order.sync, 1, hop, order.addresses[hop.target_rank], 4096)
        with pytest.raises(ChannelError, match=r"incomplete: no end from sources \[2, 3\]"):
            one.controls[0].finish(order.sync)


def nudge(one, fraction: float) -> None:
    """Change some weights of the whole model, so that replicas stay equal."""
    for chunks in one.chunks:
        for chunk in chunks:
            for tensor in chunk.values():
                bits = tensor.view(-1).view(torch.int16)
                bits[:: max(int(1 / fraction), 1)] ^= 3


def test_deltas_between_whole_syncs(monkeypatch):
    sent: list[tuple[str, int]] = []
    send = channel.Channel.send_header
    monkeypatch.setattr(
        channel.Channel, "send_header", lambda c, header, size: (sent.append((header.get("kind"), size)), send(c, header, size))
    )
    options = {"full_interval": 4}
    with world("qwen3_moe", ParallelLayout(tp=2), EngineLayout(2, 1), torch.bfloat16, torch.bfloat16, options) as one:
        kinds = []
        for _ in range(6):
            sent.clear()
            one.sync()
            kinds.append({kind for kind, size in sent if kind in ("stream", "delta")})
            whole = int(one.plan.num_elements_between().sum()) * 2
            moved = sum(size for kind, size in sent if kind in ("stream", "delta"))
            assert moved == whole if kinds[-1] == {"stream"} else moved < whole // 4, (kinds, moved, whole)
            for chunks, rank in zip(one.chunks, range(2), strict=True):
                assert_equal_source(one, chunks, rank)
            nudge(one, 0.01)
        assert kinds == [{"stream"}, {"delta"}, {"delta"}, {"stream"}, {"delta"}, {"delta"}]  # versions 1 to 6


def test_an_engine_rank_that_holds_something_else_gets_everything():
    options = {"full_interval": 100}
    with world("llama", ParallelLayout(), EngineLayout(2, 1), torch.bfloat16, torch.bfloat16, options) as one:
        one.sync()
        nudge(one, 0.01)
        one.receivers[1]._held[0] = (False, "another digest")
        one.params(1)["model.norm.weight"].fill_(5.0)
        one.sync()  # rank 0 gets a delta, rank 1 everything
        assert_equal_source(one, one.chunks[0], 0)
        nudge(one, 0.01)
        one.params(0)["model.norm.weight"].fill_(5.0)
        with pytest.raises(ChannelError, match="arrived wrong"):
            one.sync()  # the digest of the whole shard tells that the base had been changed
        one.sync()
        assert_equal_source(one, one.chunks[0], 0)


def assert_equal_source(one, chunks, rank: int) -> None:
    """Every box of a trainer rank stands in the engine's parameters."""
    for op in (op for target in range(one.engine.num_ranks) for op in one.plan.ops_between(rank, target)):
        source, target = as_matrix(chunks[op.source.chunk][op.source.name]), as_matrix(one.params(op.target_rank)[op.target])
        theirs = target[op.target_row : op.target_row + op.num_rows, op.target_col : op.target_col + op.num_cols]
        ours = source[op.source_row : op.source_row + op.num_rows, op.source_col : op.source_col + op.num_cols]
        assert torch.equal(ours.contiguous().view(torch.int16), theirs.contiguous().view(torch.int16)), op


def test_received_elements_are_the_shard_and_no_more():
    family = FAMILIES["qwen3_moe"]
    dims = family.debug_dims
    plan = build_reshard_plan("qwen3_moe", dims, ParallelLayout(tp=2, ep=2, dp=2), EngineLayout(2, 1))
    per_rank = plan.num_elements_between().sum(axis=0)
    padding = [sum(part - live for _ in range(2)) * dims.hidden_size for part, live in ((64, 64), (64, 37))]
    for rank in range(2):
        shard = sum(int(np.prod(shape)) for shape in plan.target_shapes.values())
        assert per_rank[rank] == shard - padding[rank]


def test_models_that_differ_are_named():
    plan = build_reshard_plan("llama", FAMILIES["llama"].debug_dims, ParallelLayout(), EngineLayout(1, 1))
    described = {name: (shape, "float32") for name, shape in plan.target_shapes.items()}
    assert check_receiver(plan, 0, described) == dict.fromkeys(plan.target_shapes, "float32")
    missing = dict(list(described.items())[1:])
    with pytest.raises(SyncError, match=r"embed_tokens"):
        check_receiver(plan, 0, missing)
    with pytest.raises(SyncError, match=r"lm_head"):
        check_receiver(plan, 0, described | {"lm_head.weight": ((128, 48), "float32")})
    with pytest.raises(SyncError, match=r"shape \(48, 9\)"):
        check_receiver(plan, 0, described | {"model.norm.weight": ((48, 9), "float32")})


def test_after_one_failure_no_further_engine_rank_is_begun(monkeypatch):
    with world("llama", ParallelLayout(), EngineLayout(1, 5), torch.float32) as one:
        begun, is_cut = set(), threading.Event()

        def send(pair, params, order):
            begun.add(pair._target)
            if pair._target == 1:
                raise ChannelError("receiver 1: gone")
            assert is_cut.wait(30)
            raise ChannelError("connection lost")

        monkeypatch.setattr(_Pair, "send", send)
        monkeypatch.setattr(one.senders[0], "close", is_cut.set)
        with pytest.raises(ChannelError, match="receiver 1: gone"):
            one.senders[0].send(one.chunks[0], one.begin())
        assert begun <= {0, 1, 2}


def test_engine_ranks_that_never_answer_end_the_send_in_time():
    with contextlib.ExitStack() as stack, world("llama", ParallelLayout(), EngineLayout(1, 3), torch.float32) as one:
        order = one.begin()
        mute = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname() for _ in range(3)]
        sender = WeightSender(one.plan, 0, mute, KEY, SendOptions(bucket_bytes=4096, timeout_s=0.5, transport="socket"))
        begun = time.monotonic()
        with pytest.raises(ChannelError, match=r"127\.0\.0\.1|were not reached within"):
            sender.send(one.chunks[0], order)
        assert time.monotonic() - begun < 10
