"""Bytes, messages and seconds of small plans, against sums over their transfers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_rl.model_families.registry import FAMILIES
from megatron_rl.model_families.shards import count_parameters
from megatron_rl.resharding.cost import Network, compute_cost
from megatron_rl.resharding.plan import build_reshard_plan
from megatron_rl.types.layout import EngineLayout, ParallelLayout

DIMS = dataclasses.replace(FAMILIES["qwen3_moe"].debug_dims, vocab_size=128)
LAYOUT = ParallelLayout(tp=2, pp=2, ep=2, dp=2)
SLOW = Network(nic_gb_per_s=1e-3, nvlink_gb_per_s=4e-3, memory_gb_per_s=1e9, efficiency=0.5, message_s=0.0, ranks_per_node=4)


def plan(engine: EngineLayout, **options):
    return build_reshard_plan("qwen3_moe", DIMS, LAYOUT, engine, **options)


def test_bytes_and_messages_are_those_of_the_transfers():
    made = plan(EngineLayout(2, 2))
    cost = compute_cost(made, SLOW, bucket_bytes=1000, bytes_per_element=4)
    sent, received, pairs = np.zeros(8, int), np.zeros(4, int), {}
    for row in range(made.num_ops):
        op = made.op(row)
        size = op.num_rows * op.num_cols * 4
        sent[op.source_rank] += size
        received[op.target_rank] += size
        pairs[op.source_rank, op.target_rank] = pairs.get((op.source_rank, op.target_rank), 0) + size
    np.testing.assert_array_equal(cost.sent_bytes, sent)
    np.testing.assert_array_equal(cost.received_bytes, received)
    assert cost.num_sent.sum() == cost.num_received.sum() == len(pairs)
    assert cost.largest_message_bytes == max(pairs.values()) and cost.largest_bucket_bytes == 1000
    assert cost.receive_ratio == 1.0
    assert cost.broadcast_bytes == 4 * count_parameters(FAMILIES["qwen3_moe"], DIMS)


def test_a_sync_lasts_as_long_as_its_busiest_link():
    """Engines of their own nodes: everything crosses the cards, and the busiest is a sender's or a receiver's."""
    made = plan(EngineLayout(2, 2))
    cost = compute_cost(made, SLOW, bucket_bytes=1, bytes_per_element=2)
    busiest = max(cost.sent_bytes.max(), cost.received_bytes.max())
    assert cost.seconds == pytest.approx(busiest / (1e6 * 0.5), rel=1e-6)
    assert cost.nic_bound_s == pytest.approx(cost.received_bytes.max() / 1e6)
    waiting = dataclasses.replace(SLOW, message_s=3.0)
    messages = max(cost.num_sent.max(), cost.num_received.max())
    assert compute_cost(made, waiting, bucket_bytes=1).seconds == pytest.approx(cost.seconds + 3.0 * messages)


def test_colocated_ranks_keep_their_node_and_their_gpu():
    """Trainers 0-7 on two nodes, engine ranks 0-3 on the first: stage 1 crosses, stage 0 does not, and some stay on a GPU."""
    made = plan(EngineLayout(2, 2))
    elements = made.num_elements_between()
    cost = compute_cost(made, dataclasses.replace(SLOW, is_colocated=True), bucket_bytes=1)
    assert cost.nic_bound_s == pytest.approx(2 * elements[4:].sum(axis=0).max() / 1e6)
    assert cost.nic_bound_s < compute_cost(made, SLOW, bucket_bytes=1).nic_bound_s
    near = elements[:4, :4].copy()
    np.fill_diagonal(near, 0)
    crossing, inside = elements[4:], near
    slowest = max(
        2 * max(crossing.sum(axis=0).max(), crossing.sum(axis=1).max()) / (1e6 * 0.5),
        2 * max(inside.sum(axis=0).max(), inside.sum(axis=1).max()) / (4e6 * 0.5),
    )
    assert cost.seconds == pytest.approx(slowest, rel=1e-6)


def test_relay_moves_the_load_from_trainers_to_engines():
    engine = EngineLayout(2, 12)
    direct = compute_cost(plan(engine), SLOW, bucket_bytes=1)
    relayed = compute_cost(plan(engine, relay=True, cut_rows=1), SLOW, bucket_bytes=1)
    assert relayed.sent_bytes.sum() * 12 == direct.sent_bytes.sum()
    np.testing.assert_array_equal(relayed.received_bytes, direct.received_bytes)
    assert relayed.seconds < 0.5 * direct.seconds
    assert relayed.relayed_bytes.max() < relayed.received_bytes.max()
