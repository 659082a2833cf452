"""Slices sent by simulated trainer ranks over the real channel into real receivers equal direct slices of the whole."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from megatron_rl.checkpoint.hf_folder import RandomSource
from megatron_rl.checkpoint.hf_shards import import_params
from megatron_rl.layout.intervals import matrix_shape
from megatron_rl.model_families.registry import FAMILIES
from megatron_rl.model_families.shards import engine_boxes, engine_shapes
from megatron_rl.resharding.channel import ChannelError, connect
from megatron_rl.resharding.execute import begin_receive, bucketed, describe_receiver, execute_send, finish_receive
from megatron_rl.resharding.plan import build_reshard_plan
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.resharding.verify import SyncError, check_digests, check_receiver, sources_of
from megatron_rl.types.layout import EngineLayout, ParallelLayout

KEY = b"k" * 32
TIMEOUT_S = 20.0


def expected_shards(family, dims, engine: EngineLayout, source: RandomSource, dtype) -> list[dict[str, torch.Tensor]]:
    """Engine parameters sliced directly from the Hugging Face tensors, without the plan."""
    shards = []
    for rank in range(engine.tp):
        shapes = engine_shapes(family, dims, engine.tp, engine.vocab_multiple)
        params = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        for rule in family.rules_for(dims):
            if rule.engine_name is None:
                continue
            for layer in range(dims.num_layers if rule.is_layered else 1):
                matrix = params[rule.engine_name.format(layer=layer)]
                matrix = matrix.view(-1, 1) if matrix.ndim == 1 else matrix.view(-1, matrix.shape[-1])
                for expert in range(dims.num_experts if rule.is_expert else 1):
                    offset = expert * (matrix.shape[0] // dims.num_experts) if rule.is_expert else 0
                    for component, template in enumerate(rule.hf_names):
                        shape = family.shape_of(template, dims)
                        whole = source.whole(template.format(layer=layer, expert=expert), shape)
                        whole = whole.reshape(matrix_shape(shape))
                        for box in engine_boxes(family, rule, component, dims, engine.tp, rank, engine.vocab_multiple):
                            rows = slice(offset + box.local_row, offset + box.local_row + box.num_rows)
                            cols = slice(box.local_col, box.local_col + box.num_cols)
                            matrix[rows, cols] = whole[
                                box.global_row : box.global_row + box.num_rows,
                                box.global_col : box.global_col + box.num_cols,
                            ].to(dtype)
        shards.append(params)
    return shards


def run_sync(plan, family, dims, layout, engine, source, dtype, *, version=1, bucket_bytes=4096):
    receivers = [
        Receiver({n: torch.full(s, 7.0, dtype=dtype) for n, s in plan.target_shapes.items()}, KEY)
        for _ in range(engine.num_ranks)
    ]
    try:
        for receiver in receivers:
            receiver.start()
        addresses = [receiver.address for receiver in receivers]
        for rank, address in enumerate(addresses):
            assert check_receiver(plan, rank, describe_receiver(address, KEY, TIMEOUT_S)) == str(dtype)[6:]
            begin_receive(address, KEY, TIMEOUT_S, version=version, sources=sources_of(plan, rank))
        sent = []
        for rank in range(layout.world_size):
            chunks = import_params(
                source, family, dims, layout, rank, spec="local", vocab_multiple=1, dtype=torch.float32
            )
            sent += execute_send(
                plan, rank, chunks, addresses, key=KEY, version=version, dtype=dtype,
                bucket_bytes=bucket_bytes, timeout_s=TIMEOUT_S,
            )  # fmt: skip
        received = [
            finish_receive(address, KEY, TIMEOUT_S, version=version, target_rank=rank)
            for rank, address in enumerate(addresses)
        ]
        check_digests(plan, sent, received)
        return [receiver._params for receiver in receivers]
    finally:
        for receiver in receivers:
            receiver.close()


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
    family = FAMILIES[family_name]
    dims = family.debug_dims
    if not dims.num_experts:
        layout = ParallelLayout(tp=layout.tp, pp=layout.pp, virtual_pp=layout.virtual_pp, dp=layout.dp)
    source = RandomSource(11, dims.num_layers)
    plan = build_reshard_plan(family_name, dims, layout, engine)
    dtype = torch.bfloat16 if engine.num_engines == 2 else torch.float32
    got = run_sync(plan, family, dims, layout, engine, source, dtype)
    want = expected_shards(family, dims, engine, source, dtype)
    per_rank = engine_padding_rows(dims, engine)
    for rank, params in enumerate(got):
        for name, value in want[rank % engine.tp].items():
            live = per_rank[rank % engine.tp] if name in ("model.embed_tokens.weight", "lm_head.weight") else None
            assert torch.equal(params[name][:live], value[:live]), f"engine rank {rank}: {name}"


def engine_padding_rows(dims, engine) -> list[int]:
    padded = -(-dims.vocab_size // engine.vocab_multiple) * engine.vocab_multiple
    padded = -(-padded // engine.tp) * engine.tp
    part = padded // engine.tp
    return [int(np.clip(dims.vocab_size - rank * part, 0, part)) for rank in range(engine.tp)]


def test_received_elements_are_the_shard_and_no_more():
    family = FAMILIES["qwen3_moe"]
    dims = family.debug_dims
    plan = build_reshard_plan("qwen3_moe", dims, ParallelLayout(tp=2, ep=2, dp=2), EngineLayout(2, 1))
    per_rank = plan.num_elements_between().sum(axis=0)
    padding = [sum(part - live for _ in range(2)) * dims.hidden_size for part, live in ((64, 64), (64, 37))]
    for rank in range(2):
        shard = sum(int(np.prod(shape)) for shape in plan.target_shapes.values())
        assert per_rank[rank] == shard - padding[rank]


def test_buckets_keep_order_and_split_large_boxes():
    plan = build_reshard_plan("llama", FAMILIES["llama"].debug_dims, ParallelLayout(tp=2), EngineLayout(1, 1))
    whole = list(plan.ops_between(0, 0))
    buckets = list(bucketed(iter(whole), 1000))
    assert all(sum(op.num_rows * op.num_cols for op in bucket) <= 1000 for bucket in buckets)
    assert sum(op.num_rows * op.num_cols for b in buckets for op in b) == sum(o.num_rows * o.num_cols for o in whole)
    names = [op.target for bucket in buckets for op in bucket]
    assert list(dict.fromkeys(names)) == list(dict.fromkeys(op.target for op in whole))


def make_receiver() -> Receiver:
    receiver = Receiver({"a.weight": torch.zeros(5, 3)}, KEY)
    receiver.start()
    return receiver


def test_wrong_key_is_refused_and_nothing_is_written():
    receiver = make_receiver()
    try:
        with pytest.raises(ChannelError, match="another key"):
            connect(*receiver.address, b"x" * 32, TIMEOUT_S)
        assert describe_receiver(receiver.address, KEY, TIMEOUT_S) == {"a.weight": ((5, 3), "float32")}
    finally:
        receiver.close()


def test_absent_receiver_is_one_clear_line():
    receiver = make_receiver()
    address = receiver.address
    receiver.close()
    with pytest.raises(ChannelError, match="cannot connect"):
        connect(*address, KEY, TIMEOUT_S)


@pytest.mark.parametrize(
    ("header", "payload", "message"),
    [
        ({"kind": "bucket", "version": 3, "source": 0, "boxes": [["b.weight", 0, 0, 1, 3]]}, 12, "b.weight"),
        ({"kind": "bucket", "version": 3, "source": 0, "boxes": [["a.weight", 4, 0, 2, 3]]}, 24, "outside"),
        ({"kind": "bucket", "version": 3, "source": 0, "boxes": [["a.weight", 0, 0, 1, 3]]}, 24, "24 bytes"),
        ({"kind": "bucket", "version": 3, "source": 0, "boxes": [["a.weight", 0, 0, 2, 3]]}, 8, "8 bytes"),
        ({"kind": "open", "version": 3, "source": 0, "digests": ["blake2b"]}, 0, "once each"),
        ({"kind": "bucket", "version": 2, "source": 0, "boxes": []}, 0, "version 2"),
        ({"kind": "bucket", "version": 3, "source": 5, "boxes": []}, 0, "5"),
        ({"kind": "dance", "version": 3}, 0, "dance"),
    ],
)
def test_a_message_that_does_not_fit_fails_the_update(header, payload, message):
    receiver = make_receiver()
    try:
        begin_receive(receiver.address, KEY, TIMEOUT_S, version=3, sources=[0])
        channel = connect(*receiver.address, KEY, TIMEOUT_S)
        channel.ask({"kind": "open", "version": 3, "source": 0, "digests": ["blake2b"]})
        channel.send(header, bytes(payload))
        answer, _ = channel.receive()
        assert message in answer["error"]
        channel.close()
        with pytest.raises(ChannelError, match="incomplete"):
            finish_receive(receiver.address, KEY, TIMEOUT_S, version=3, target_rank=0)
    finally:
        receiver.close()


def test_a_sender_that_goes_away_leaves_the_update_incomplete():
    receiver = make_receiver()
    try:
        begin_receive(receiver.address, KEY, TIMEOUT_S, version=1, sources=[0, 1])
        channel = connect(*receiver.address, KEY, TIMEOUT_S)
        channel.ask({"kind": "open", "version": 1, "source": 0, "digests": ["blake2b"]})
        channel.send({"kind": "bucket", "version": 1, "source": 0, "boxes": [["a.weight", 0, 0, 1, 3]]}, bytes(12))
        channel.ask({"kind": "end", "version": 1, "source": 0})
        channel.close()
        with pytest.raises(ChannelError, match=r"trainer ranks \[1\]"):
            finish_receive(receiver.address, KEY, TIMEOUT_S, version=1, target_rank=0)
    finally:
        receiver.close()


def test_models_that_differ_are_named():
    plan = build_reshard_plan("llama", FAMILIES["llama"].debug_dims, ParallelLayout(), EngineLayout(1, 1))
    described = {name: (shape, "float32") for name, shape in plan.target_shapes.items()}
    assert check_receiver(plan, 0, described) == "float32"
    missing = dict(list(described.items())[1:])
    with pytest.raises(SyncError, match=r"embed_tokens"):
        check_receiver(plan, 0, missing)
    with pytest.raises(SyncError, match=r"lm_head"):
        check_receiver(plan, 0, described | {"lm_head.weight": ((128, 48), "float32")})
    with pytest.raises(SyncError, match=r"shape \(48, 9\)"):
        check_receiver(plan, 0, described | {"model.norm.weight": ((48, 9), "float32")})


def test_receiver_closes_its_threads():
    before = threading.active_count()
    receiver = make_receiver()
    channel = connect(*receiver.address, KEY, TIMEOUT_S)
    receiver.close()
    with pytest.raises(ChannelError):
        channel.ask({"kind": "describe"})
    assert threading.active_count() <= before + 1  # the connection's own thread may still be unwinding
