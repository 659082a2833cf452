"""Megatron-Core's own resharding (`megatron.core.resharding`) against this library's, where both can: a dense model from
TP 2 to TP 1 on two ranks. It moves Megatron parameters into Megatron parameters, and none of a Mixture-of-Experts whose
experts are modules of their own; so it is no contestant of the main benchmark.

Both sides take turns on the same processes, from the same source model. Every rank holds a source shard and a whole target.
"""

from __future__ import annotations

import copy
import os
import secrets
import statistics
import time
import traceback
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.resharding.refit import swap_model_weights
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config.sections import TrainerSection
from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.model_families.registry import get_family
from megatron_rl.model_families.shards import count_parameters
from megatron_rl.platforms.platform import CpuPlatform
from megatron_rl.resharding import box_sender
from megatron_rl.resharding.box_sender import SendOptions
from megatron_rl.resharding.control import ReceiverControl
from megatron_rl.resharding.execute import WeightSender
from megatron_rl.resharding.hops import sources_of
from megatron_rl.resharding.plan import build_reshard_plan
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.trainer.layer_specs import build_block_spec
from megatron_rl.trainer.model import PolicyModel, build_model_chunks
from megatron_rl.trainer.model_config import plan_transformer_config
from megatron_rl.trainer.parallel import init_distributed, init_model_parallel
from megatron_rl.types.layout import EngineLayout, ParallelLayout
from megatron_rl.types.resharding import SyncOrder
from tests.benchmarks.rank_processes import run_ranks, seconds_of
from tests.benchmarks.resharding_ranks import NO_DIGEST, end_with

FAMILY, LAYOUT, ENGINE, NUM_RANKS = "llama", ParallelLayout(tp=2), EngineLayout(1, 2), 2
KEY = b"m" * 32
CONTESTANTS = ("megatron_core", "p2p", "shm")


def refit_dims(is_small: bool) -> ModelDims:
    layers, hidden, ffn, vocab = (2, 128, 320, 1000) if is_small else (4, 1024, 4096, 16000)
    return ModelDims(
        num_layers=layers, hidden_size=hidden, num_heads=16, num_kv_heads=4, head_dim=hidden // 16, vocab_size=vocab,
        ffn_size=ffn, num_experts=0, top_k=0, moe_ffn_size=0, tied_embeddings=False, qk_norm=False, norm_topk_prob=True,
        norm_epsilon=1e-6, rope_theta=1e4, max_positions=512,
    )  # fmt: skip


def measure_refit(rounds: int, is_small: bool, deadline_s: float) -> dict[str, Any]:
    """Median seconds of each side, and how many times faster this library is. Raises TimeoutError after `deadline_s`."""
    reports = run_ranks(refit_rank, NUM_RANKS, rounds, is_small, deadline_s)
    seconds = seconds_of(reports, CONTESTANTS, rounds)
    num_bytes = 2 * count_parameters(get_family(FAMILY), refit_dims(is_small))
    return {
        "refit_gigabytes": num_bytes / 1e9,
        "refit_bit_exact": int(all(report["bit_exact"] for report in reports)),
        **{f"refit_{name}_s": statistics.median(times) for name, times in seconds.items()},
        **{
            f"{name}_vs_megatron_core": statistics.median(
                a / b for a, b in zip(seconds["megatron_core"], seconds[name], strict=True)
            )
            for name in ("p2p", "shm")
        },
    }


def refit_rank(number: int, port: int, rounds: int, is_small: bool, timeout_s: float, barrier: Any, results: Any) -> None:
    try:
        end_with(os.getppid())
        torch.set_num_threads(1)
        results.put(_run(number, port, rounds, refit_dims(is_small), timeout_s, barrier))
    except BaseException:  # noqa: BLE001 - whatever it was, the parent reports it
        results.put({"error": f"rank {number}: {traceback.format_exc()}"})
        barrier.abort()
    finally:
        results.close()
        results.join_thread()
        os._exit(0)


def _run(number: int, port: int, rounds: int, dims: ModelDims, timeout_s: float, barrier: Any) -> dict[str, Any]:
    platform = CpuPlatform()
    platform.prepare_megatron()
    init_distributed(
        platform, rank=number, world_size=NUM_RANKS, master_address="127.0.0.1", master_port=port, timeout_s=timeout_s
    )
    init_model_parallel(LAYOUT, seed=1)
    source = build_source(dims)
    target = build_target(dims, number)
    chunk = {name: parameter.data for name, parameter in source.named_parameters()}
    plan = build_reshard_plan(FAMILY, dims, LAYOUT, ENGINE)
    params = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in plan.target_shapes.items()}
    receiver = Receiver(params, KEY)
    receiver.start()
    addresses: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(addresses, receiver.address)
    syncs = {name: Sync(plan, number, [tuple(a) for a in addresses], name, timeout_s) for name in ("p2p", "shm")}
    box_sender.DIGEST_NAMES = (NO_DIGEST,)  # Megatron's side proves nothing either
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTESTANTS}
    is_exact = True
    for round_number in range(rounds + 1):
        for turn, name in enumerate(CONTESTANTS):
            fill(source, 10 * round_number + turn)
            if name != "megatron_core":
                syncs[name].announce()
            barrier.wait(timeout_s)
            begun = time.monotonic()
            if name == "megatron_core":
                swap_model_weights(source, target, "gloo")
            else:
                syncs[name].run(chunk)
            spans[name].append((begun, time.monotonic()))
            barrier.wait(timeout_s)
            is_exact = is_exact and holds(target if name == "megatron_core" else params, source, dims)
    return {"spans": spans, "bit_exact": is_exact}


class Sync:
    """This library's sync of one transport; rank 0 announces."""

    def __init__(self, plan: Any, number: int, addresses: list[Any], name: str, timeout_s: float) -> None:
        self.plan, self.number, self.addresses = plan, number, addresses
        options = SendOptions(4 * 1024 * 1024, timeout_s, "p2p" if name == "p2p" else "ipc")
        self.sender = WeightSender(plan, number, addresses, KEY, options)
        self.controls = [ReceiverControl(r, a, KEY, timeout_s) for r, a in enumerate(addresses)] if number == 0 else []
        self.order: list[Any] = [None]

    def announce(self) -> None:
        if self.controls:
            dtypes = dict.fromkeys(self.plan.target_shapes, "bfloat16")
            self.order[0] = SyncOrder(secrets.token_hex(4), 1, tuple(self.addresses), dtypes, self.plan.layout_digest)
            for control in self.controls:
                control.begin(self.order[0].sync, 1, sources_of(self.plan, control.target_rank), is_staged=False)
        dist.broadcast_object_list(self.order, src=0)

    def run(self, chunk: dict[str, torch.Tensor]) -> None:
        self.sender.send([chunk], self.order[0])


def build_source(dims: ModelDims) -> PolicyModel:
    config = transformer_config(dims, LAYOUT)
    (model,) = build_model_chunks(
        PolicyModel, config, dims, dims.vocab_size, transformer_engine=False, device=torch.device("cpu")
    )  # fmt: skip
    model.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    return model


def build_target(dims: ModelDims, number: int) -> PolicyModel:
    """A whole model on this rank, with groups of its own: alone in tensor parallelism, two in data parallelism."""
    alone = [dist.new_group([rank]) for rank in range(NUM_RANKS)][number]
    groups = ProcessGroupCollection.use_mpu_process_groups()
    for field in fields(groups):
        group = getattr(groups, field.name, None)
        if field.name.startswith(("tp", "expt_tp", "mp")) and group is not None:
            setattr(groups, field.name, alone)
    groups = copy.copy(groups)
    groups.dp = dist.group.WORLD
    config = transformer_config(dims, ParallelLayout())
    model = PolicyModel(
        config=config,
        transformer_layer_spec=build_block_spec(config, transformer_engine=False),
        vocab_size=dims.vocab_size,
        max_sequence_length=dims.max_positions,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=dims.rope_theta,
        pg_collection=groups,
    )
    model.pg_collection = groups
    return model


def transformer_config(dims: ModelDims, layout: ParallelLayout) -> TransformerConfig:
    planned = plan_transformer_config(
        dims, TrainerSection(), layout, torch.bfloat16, on_cpu=True, transformer_engine=False
    )  # fmt: skip
    return TransformerConfig(**planned)


def fill(model: PolicyModel, version: int) -> None:
    """New values, the same in every replica of a parameter."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for number, parameter in enumerate(model.parameters()):
        shift = rank * 17 if getattr(parameter, "tensor_model_parallel", False) else 0
        values = torch.arange(parameter.numel(), dtype=torch.int32).mul_(1237).add_(shift + 31 * number + 7 * version)
        parameter.data.view(-1).copy_(values.remainder_(997).to(torch.float32).div_(997.0))


def holds(target: Any, source: PolicyModel, dims: ModelDims) -> bool:
    """Whether a vocabulary (split by rows) and a projection (split by columns) of the target are the ranks' source shards."""
    if isinstance(target, dict):
        held = target["model.embed_tokens.weight"], target["model.layers.0.mlp.down_proj.weight"]
    else:
        held = target.embedding.word_embeddings.weight.data, target.decoder.layers[0].mlp.linear_fc2.weight.data
    shards = source.embedding.word_embeddings.weight.data, source.decoder.layers[0].mlp.linear_fc2.weight.data
    vocab, projection = (gather(shard, dim) for dim, shard in enumerate(shards))
    pairs = ((held[0][: dims.vocab_size], vocab[: dims.vocab_size]), (held[1], projection))
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


def gather(shard: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(shard, dtype=torch.float16) for _ in range(NUM_RANKS)]
    dist.all_gather(parts, shard.view(torch.float16))
    return torch.cat(parts, dim).view(torch.bfloat16)
