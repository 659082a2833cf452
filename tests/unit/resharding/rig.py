"""A small world for the sync tests: trainer ranks simulated one after another, real receivers, real connections."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from megatron_rl.checkpoint.hf_folder import RandomSource
from megatron_rl.checkpoint.hf_shards import import_params
from megatron_rl.model_families.registry import get_family
from megatron_rl.model_families.shards import engine_boxes, engine_shapes
from megatron_rl.resharding.box_sender import SendOptions
from megatron_rl.resharding.boxes import as_matrix
from megatron_rl.resharding.control import ReceiverControl
from megatron_rl.resharding.execute import WeightSender
from megatron_rl.resharding.hops import relay_rounds, sources_of
from megatron_rl.resharding.plan import ReshardPlan, build_reshard_plan
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.resharding.verify import check_digests, check_receiver
from megatron_rl.types.layout import EngineLayout, ParallelLayout
from megatron_rl.types.resharding import SyncOrder

KEY = b"k" * 32
TIMEOUT_S = 20.0
FILL = 7.0
"""What engine parameters hold before the first sync."""


@dataclass
class World:
    """Trainer ranks and engine ranks of one model. `chunks[r]` are rank r's parameters; `params(r)` engine rank r's."""

    family: str
    layout: ParallelLayout
    engine: EngineLayout
    dtype: torch.dtype
    trainer_dtype: torch.dtype = torch.float32
    options: dict = field(default_factory=dict)
    relay: bool = False
    cut_rows: int = 128
    is_local: bool = True
    dims_changes: ClassVar[dict] = {}

    def __post_init__(self):
        self.dims = replace(get_family(self.family).debug_dims, **self.dims_changes)
        self.plan: ReshardPlan = build_reshard_plan(
            self.family, self.dims, self.layout, self.engine, relay=self.relay, cut_rows=self.cut_rows
        )
        self.load(11)
        self.receivers = [Receiver(self.make_params(), KEY, is_local=self.is_local) for _ in range(self.engine.num_ranks)]
        for receiver in self.receivers:
            receiver.start()
        addresses = [receiver.address for receiver in self.receivers]
        self.controls = [ReceiverControl(rank, address, KEY, TIMEOUT_S) for rank, address in enumerate(addresses)]
        options = SendOptions(**{"bucket_bytes": 4096, "timeout_s": TIMEOUT_S, "transport": "p2p", **self.options})
        self.senders = [WeightSender(self.plan, r, addresses, KEY, options) for r in range(self.layout.world_size)]
        self.version = 0

    def make_params(self) -> dict[str, torch.Tensor]:
        return {name: torch.full(shape, FILL, dtype=self.dtype) for name, shape in self.plan.target_shapes.items()}

    def load(self, seed: int) -> None:
        """New weights on every trainer rank, written into the tensors that are there."""
        self.source = RandomSource(seed, self.dims.num_layers)
        options = {"spec": "local", "vocab_multiple": 1, "dtype": self.trainer_dtype}
        fresh = [
            import_params(self.source, get_family(self.family), self.dims, self.layout, rank, **options)
            for rank in range(self.layout.world_size)
        ]
        if not hasattr(self, "chunks"):
            self.chunks = [[dict(chunk) for chunk in chunks] for chunks in fresh]
        for mine, theirs in zip(self.chunks, fresh, strict=True):
            for chunk, new in zip(mine, theirs, strict=True):
                for name, tensor in new.items():
                    chunk[name].copy_(tensor)

    def begin(self, *, is_staged: bool = False) -> SyncOrder:
        self.version += 1
        dtypes = [check_receiver(self.plan, control.target_rank, control.describe()) for control in self.controls]
        addresses = tuple(receiver.address for receiver in self.receivers)
        order = SyncOrder(f"{self.version}-{secrets.token_hex(4)}", self.version, addresses, dtypes[0], self.plan.layout_digest)
        for control in self.controls:
            control.begin(order.sync, self.version, sources_of(self.plan, control.target_rank), is_staged=is_staged)
        return order

    def sync(self, *, is_staged: bool = False) -> SyncOrder:
        """A whole sync, proven by digests."""
        order = self.begin(is_staged=is_staged)
        sent = [d for sender, chunks in zip(self.senders, self.chunks, strict=True) for d in sender.send(chunks, order)]
        for hop in (hop for hops in relay_rounds(self.plan, order.dtypes) for hop in hops):
            control, address = self.controls[hop.source_rank], order.addresses[hop.target_rank]
            sent.append(control.relay(order.sync, order.version, hop, address, 4096))
        check_digests(self.plan, sent, [control.finish(order.sync) for control in self.controls])
        return order

    def params(self, rank: int) -> dict[str, torch.Tensor]:
        return self.receivers[rank]._params

    def assert_whole(self, source: RandomSource | None = None) -> None:
        """Every live row of every engine parameter equals the slice of the Hugging Face tensor, bit for bit."""
        read, family = source or self.source, get_family(self.family)
        want = [expected_shard(family, self.dims, self.engine, read, self.dtype, r) for r in range(self.engine.tp)]
        live = live_vocab_rows(self.dims, self.engine)
        for rank in range(self.engine.num_ranks):
            for name, value in want[rank % self.engine.tp].items():
                rows = live[rank % self.engine.tp] if name in ("model.embed_tokens.weight", "lm_head.weight") else None
                assert torch.equal(self.params(rank)[name][:rows], value[:rows]), f"engine rank {rank}: {name}"

    def assert_untouched(self) -> None:
        assert all(bool((p == FILL).all()) for r in range(self.engine.num_ranks) for p in self.params(r).values())

    def close(self) -> None:
        for part in (*self.senders, *self.controls, *self.receivers):
            part.close()


@contextlib.contextmanager
def world(*arguments, **options) -> Iterator[World]:
    made = World(*arguments, **options)
    try:
        yield made
    finally:
        made.close()


def live_vocab_rows(dims, engine: EngineLayout) -> list[int]:
    """Rows of the vocabulary that are no padding, per engine rank."""
    padded = -(-dims.vocab_size // engine.vocab_multiple) * engine.vocab_multiple
    part = -(-padded // engine.tp)
    return [min(max(dims.vocab_size - rank * part, 0), part) for rank in range(engine.tp)]


def expected_shard(family, dims, engine: EngineLayout, source, dtype, rank: int) -> dict[str, torch.Tensor]:
    """Engine parameters of one TP rank, sliced directly from the Hugging Face tensors, without the plan."""
    shapes = engine_shapes(family, dims, engine.tp, engine.vocab_multiple)
    params = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    for rule in family.rules_for(dims):
        if rule.engine_name is None:
            continue
        for layer in range(dims.num_layers if rule.is_layered else 1):
            matrix = as_matrix(params[rule.engine_name.format(layer=layer)])
            for expert in range(dims.num_experts if rule.is_expert else 1):
                offset = expert * (matrix.shape[0] // dims.num_experts) if rule.is_expert else 0
                for component, template in enumerate(rule.hf_names):
                    name, shape = template.format(layer=layer, expert=expert), family.shape_of(template, dims)
                    for box in engine_boxes(family, rule, component, dims, engine.tp, rank, engine.vocab_multiple):
                        rows = slice(offset + box.local_row, offset + box.local_row + box.num_rows)
                        cols = slice(box.local_col, box.local_col + box.num_cols)
                        matrix[rows, cols] = source.read(name, shape, box).to(dtype)
    return params
