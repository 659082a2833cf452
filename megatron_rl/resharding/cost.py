"""What a plan costs: bytes and messages per rank, seconds on a given network, against gather-and-broadcast. Pure arithmetic.

The model: every GPU has a network card and a link to the GPUs of its node, both full duplex; a sync lasts as long as its
busiest link at `efficiency` of its rate, plus `message_s` per message of its busiest rank, plus what buckets cannot hide:
the first is packed before anything moves, the last unpacked after, and with relay each engine on the ring adds one bucket.
Gather-and-broadcast (all-gather over TP and EP, then whole Hugging Face tensors to every engine rank) is charged with what
its receivers must take in alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_rl.model_families.registry import declared_family
from megatron_rl.model_families.shards import count_parameters
from megatron_rl.resharding.plan import ReshardPlan

GB = 1e9


@dataclass(frozen=True, slots=True)
class Network:
    """Rates per GPU and direction in 1e9 bytes per second; the defaults are those of an H100 node with 400 Gb/s per GPU.

    `efficiency` is the part of a link's rate that large messages reach. `is_colocated`: engine rank r runs on the GPU of
    trainer rank r; else engines have nodes of their own.
    """

    nic_gb_per_s: float = 50.0
    nvlink_gb_per_s: float = 450.0
    memory_gb_per_s: float = 1500.0
    efficiency: float = 0.85
    message_s: float = 20e-6
    ranks_per_node: int = 8
    is_colocated: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SyncCost:
    """Bytes and messages per rank and what follows. A message is everything of one (source, target) pair."""

    sent_bytes: np.ndarray
    """Per trainer rank."""
    received_bytes: np.ndarray
    """Per engine rank, from trainers and neighbours."""
    relayed_bytes: np.ndarray
    """Per engine rank, passed on to its neighbour."""
    num_sent: np.ndarray
    """Messages per trainer rank."""
    num_received: np.ndarray
    """Messages per engine rank."""
    shard_bytes: int
    """The largest number of bytes that an engine rank holds (padding apart)."""
    sender_bound_bytes: float
    largest_message_bytes: int
    largest_bucket_bytes: int
    nic_bound_s: float
    """What the engine rank that receives most needs at the full rate of its card; 0 when nothing crosses nodes."""
    seconds: float
    broadcast_bytes: int
    """Per engine rank with gather-and-broadcast."""
    broadcast_s: float
    held_bytes_total: int
    """What all engine ranks hold together."""

    @property
    def receive_ratio(self) -> float:
        """Bytes received over bytes held, of all engine ranks together: 1 when nothing comes twice."""
        return float(self.received_bytes.sum()) / self.held_bytes_total


def compute_cost(plan: ReshardPlan, network: Network, *, bucket_bytes: int, bytes_per_element: int = 2) -> SyncCost:
    """The cost of one sync of `plan`. `bytes_per_element` is of the engines' dtype."""
    sources, targets, sizes = _pairs(plan)
    sizes = sizes * bytes_per_element
    num_trainers, num_engine_ranks = plan.layout.world_size, plan.engine_layout.num_ranks
    relayed = plan.num_relayed() * bytes_per_element
    neighbour = (np.arange(num_engine_ranks) + plan.engine_layout.tp) % num_engine_ranks
    direct = np.bincount(targets, weights=sizes, minlength=num_engine_ranks).astype(np.int64)
    passed_on = np.zeros(num_engine_ranks, dtype=np.int64)
    np.add.at(passed_on, neighbour, relayed)
    links = _link_loads(plan, network, sources, targets, sizes, relayed, neighbour)
    num_sent = np.bincount(sources, minlength=num_trainers)
    num_received = np.bincount(targets, minlength=num_engine_ranks) + (passed_on > 0)
    largest = int(max(sizes.max(initial=0), relayed.max(initial=0)))
    bucket = min(bucket_bytes, largest)
    rate = {
        "nic": network.nic_gb_per_s * GB * network.efficiency,
        "nvlink": network.nvlink_gb_per_s * GB * network.efficiency,
        "memory": network.memory_gb_per_s * GB,
    }
    seconds = max(float(load.max(initial=0)) / rate[kind] for kind, loads in links.items() for load in loads)
    seconds += network.message_s * int(max(num_sent.max(initial=0), num_received.max(initial=0)))
    seconds += 2 * bucket / rate["memory"]
    if plan.key.relay:
        seconds += max(plan.engine_layout.num_engines - 2, 0) * bucket / rate["nic"]
    held = np.tile(_held_elements(plan), plan.engine_layout.num_engines) * bytes_per_element
    whole = count_parameters(declared_family(plan.key.family_name), plan.key.dims) * bytes_per_element
    nic_in = float(links["nic"][1].max(initial=0))
    return SyncCost(
        sent_bytes=np.bincount(sources, weights=sizes, minlength=num_trainers).astype(np.int64),
        received_bytes=direct + passed_on,
        relayed_bytes=relayed,
        num_sent=num_sent,
        num_received=num_received,
        shard_bytes=int(held.max()),
        sender_bound_bytes=plan.sender_bound() * bytes_per_element,
        largest_message_bytes=largest,
        largest_bucket_bytes=bucket,
        nic_bound_s=nic_in / (network.nic_gb_per_s * GB),
        seconds=seconds,
        broadcast_bytes=whole,
        broadcast_s=whole / rate["nic"],
        held_bytes_total=int(held.sum()),
    )


def _pairs(plan: ReshardPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(trainer rank, engine rank, elements) of every pair that exchanges something."""
    spans, num_targets = plan.spans.columns, plan.engine_layout.num_ranks
    keys = spans["source_rank"].astype(np.int64) * num_targets + spans["target_rank"]
    pairs, inverse = np.unique(keys, return_inverse=True)
    sizes = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(sizes, inverse, spans["num_elements"])
    return pairs // num_targets, pairs % num_targets, sizes


def _held_elements(plan: ReshardPlan) -> np.ndarray:
    """Live elements per rank of one engine, from the boxes that proof of coverage has counted."""
    return np.bincount(
        plan.boxes.columns["target_rank"], weights=plan.boxes.num_elements, minlength=plan.engine_layout.tp
    ).astype(np.int64)


def _link_loads(
    plan: ReshardPlan,
    network: Network,
    sources: np.ndarray,
    targets: np.ndarray,
    sizes: np.ndarray,
    relayed: np.ndarray,
    neighbour: np.ndarray,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Bytes out of and into every GPU, per kind of link; on one GPU they go through its memory."""
    per_node, num_trainers = network.ranks_per_node, plan.layout.world_size
    first = 0 if network.is_colocated else -(-num_trainers // per_node) * per_node
    num_gpus = max(first + len(relayed), num_trainers)
    senders = np.concatenate([sources, first + np.arange(len(relayed))])
    receivers = np.concatenate([first + targets, first + neighbour])
    sizes = np.concatenate([sizes, relayed])
    is_local, is_near = senders == receivers, senders // per_node == receivers // per_node
    loads = {}
    for kind, chosen in (("memory", is_local), ("nvlink", is_near & ~is_local), ("nic", ~is_near)):
        loads[kind] = (
            np.bincount(senders[chosen], weights=sizes[chosen], minlength=num_gpus),
            np.bincount(receivers[chosen], weights=sizes[chosen], minlength=num_gpus),
        )
    return loads
