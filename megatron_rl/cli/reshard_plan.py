"""`megatron-rl reshard-plan CONFIG [key=value ...]`: what a weight sync of this experiment moves, and how long it takes.

Needs neither torch nor the model's weights: the sizes come from `model.dims` or the config.json of `model.path`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.load import LoadedExperiment, load_experiment
from megatron_rl.config.resolve import resolve
from megatron_rl.config.sections import DataSection, ExperimentConfig, ModelSection
from megatron_rl.controller.layouts import engine_layout, trainer_layout
from megatron_rl.layout.checks import check_engine_layout, check_trainer_layout
from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.model_families.hf_config import UnsupportedModelError
from megatron_rl.model_families.registry import declared_family, load_dims
from megatron_rl.resharding.cost import GB, Network, SyncCost, compute_cost
from megatron_rl.resharding.picture import draw_plan
from megatron_rl.resharding.plan import ReshardPlan, build_reshard_plan
from megatron_rl.types.layout import EngineLayout, ParallelLayout

EXIT_USAGE = 2
MAX_LINES = 24
"""Of the table of a side; --json has every rank."""
SEND_BOUND = 1.25
"""Above this many times the bytes that an engine rank receives, sending decides and a relay is worth its hops."""


def add_parser(subparsers: Any) -> None:
    defaults = Network()
    parser = subparsers.add_parser(
        "reshard-plan",
        description="What one weight sync of an experiment moves from which trainer rank to which engine rank, and how long"
        " it takes on a given network. Reads no weights and starts nothing.",
        epilog="example:\n  megatron-rl reshard-plan configs/experiments/qwen3_30b_a3b_2x8.yaml rollout.num_engines=1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="experiment file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example rollout.num_engines=4")
    parser.add_argument("--json", action="store_true", help="one JSON object with every rank instead of the table")
    parser.add_argument("--svg", metavar="FILE", help="draw who sends to whom (small layouts)")
    parser.add_argument("--relay", action="store_true", help="trainers send every slice once, engines pass it on")
    parser.add_argument("--colocated", action="store_true", help="engine rank r is on the GPU of trainer rank r")
    for name, default, what in (
        ("nic", defaults.nic_gb_per_s, "network card per GPU, GB/s and direction"),
        ("nvlink", defaults.nvlink_gb_per_s, "link to the GPUs of the node, GB/s and direction"),
        ("efficiency", defaults.efficiency, "part of a link's rate that large messages reach"),
    ):
        parser.add_argument(f"--{name}", type=float, default=default, help=f"{what} (default {default:g})")
    parser.add_argument("--ranks-per-node", type=int, default=defaults.ranks_per_node, help="GPUs per node (default 8)")


def run(args: argparse.Namespace) -> int:
    """Prints the plan's figures; returns the exit status. A ConfigError is the caller's to print."""
    try:
        network = _network(args)
        loaded = load_experiment(args.config, args.overrides)
        config = resolve(loaded.config)
        if config.cluster.placement == "colocated":
            network = replace(network, is_colocated=True)
        start = time.perf_counter()
        plan = plan_experiment(loaded, config, relay=args.relay or config.sync.relay)
        plan_s = time.perf_counter() - start
        dtype = config.rollout.embedded.dtype if config.rollout.engine == "embedded" else config.model.dtype
        width = 4 if dtype == "fp32" else 2
        cost = compute_cost(plan, network, bucket_bytes=config.sync.bucket_bytes, bytes_per_element=width)
        if args.svg:
            _write(Path(args.svg), draw_plan(plan, describe(plan), bytes_per_element=width))
    except (UnsupportedModelError, ValueError, OSError) as error:
        print(f"megatron-rl: {error}", file=sys.stderr)
        return EXIT_USAGE
    print(json.dumps(as_json(plan, cost, plan_s)) if args.json else "\n".join(as_table(plan, cost, plan_s)))
    return 0


def plan_experiment(loaded: LoadedExperiment, config: ExperimentConfig, *, relay: bool) -> ReshardPlan:
    """The plan of a resolved experiment. Raises ConfigError with file and line for sizes that do not divide."""
    family_name, dims = model_dims(config.model, config.data)
    layout, engine = trainer_layout(config.trainer.layout), engine_layout(config.rollout)
    loaded.provenance.reject(check_trainer_layout(dims, layout))
    loaded.provenance.reject(check_engine_layout(dims, engine, f"rollout.{config.rollout.engine}"))
    on_gpus = config.cluster.gpus_per_trainer_rank > 0
    is_te = config.trainer.layer_spec == "transformer_engine" or (config.trainer.layer_spec == "auto" and on_gpus)
    return build_reshard_plan(
        family_name,
        dims,
        layout,
        engine,
        spec="te" if is_te else "local",
        trainer_vocab_multiple=config.model.vocab_multiple,
        relay=relay,
    )


def model_dims(section: ModelSection, data: DataSection) -> tuple[str, ModelDims]:
    """Family and dims of an experiment; the vocabulary of a random start may follow from its tokenizer."""
    if section.path is not None:
        family, dims = load_dims(section.path, declared_too=True)
        return family.name, dims
    if section.family is None:
        raise UnsupportedModelError("model.family: needed where model.path is not set")
    sizes = dict(section.dims)
    if "vocab_size" not in sizes:
        from megatron_rl.data.tokenizer import load_tokenizer  # most plans need no tokenizer, and no package for one

        sizes["vocab_size"] = load_tokenizer(data.tokenizer, None).vocab_size
    return section.family, declared_family(section.family).dims_from_hf(sizes)


def describe(plan: ReshardPlan) -> str:
    """Both layouts in one line."""
    return f"{plan.key.family_name}: {_trainer(plan.layout)} -> {_engines(plan.engine_layout)}"


def as_table(plan: ReshardPlan, cost: SyncCost, plan_s: float) -> Iterator[str]:
    """What a person reads."""
    yield describe(plan)
    yield f"planned and proven in {plan_s:.2f} s: {plan.num_ops} boxes, coverage 100 %, every box from a rank that owns it"
    yield ""
    yield f"{'':25}{'most':>12}{'mean':>12}   least possible most"
    forced = f"{_gb(cost.sender_bound_bytes)} (ownership; x{cost.sent_bytes.max() / max(cost.sender_bound_bytes, 1):.3f})"
    held = f"{_gb(cost.shard_bytes)} (its shard; received over held {cost.receive_ratio:.2f})"
    yield f"{'sent by a trainer rank':25}{_gb(cost.sent_bytes.max()):>12}{_gb(cost.sent_bytes.mean()):>12}   {forced}"
    yield f"{'received by an engine':25}{_gb(cost.received_bytes.max()):>12}{_gb(cost.received_bytes.mean()):>12}   {held}"
    if plan.key.relay:
        yield f"{'passed on by an engine':25}{_gb(cost.relayed_bytes.max()):>12}{_gb(cost.relayed_bytes.mean()):>12}"
    yield f"{'messages per trainer':25}{cost.num_sent.max():>12}{cost.num_sent.mean():>12.1f}   {cost.num_sent.sum()} in all"
    yield f"{'messages per engine':25}{cost.num_received.max():>12}{cost.num_received.mean():>12.1f}"
    yield f"largest message {_gb(cost.largest_message_bytes)}, largest bucket {_gb(cost.largest_bucket_bytes)}"
    yield ""
    yield from _rank_lines("trainer rank", "sent", cost.sent_bytes, cost.num_sent)
    yield from _rank_lines("engine rank", "received", cost.received_bytes, cost.num_received)
    yield ""
    factor = f", {cost.seconds / cost.nic_bound_s:.2f} x the NIC bound of {cost.nic_bound_s:.3f} s" if cost.nic_bound_s else ""
    yield f"predicted sync           {cost.seconds:.3f} s{factor}"
    times = (
        f"{cost.broadcast_bytes / cost.received_bytes.max():.1f} x the bytes, {cost.broadcast_s / cost.seconds:.1f} x the time"
    )
    yield f"gather and broadcast     {_gb(cost.broadcast_bytes)} per engine rank, at least {cost.broadcast_s:.3f} s: {times}"
    if not plan.key.relay and cost.sender_bound_bytes > SEND_BOUND * cost.received_bytes.max():
        yield "sending decides: more engines than the trainers can serve at once; see --relay"


def as_json(plan: ReshardPlan, cost: SyncCost, plan_s: float) -> dict[str, Any]:
    """The same, and every rank."""
    return {
        "family": plan.key.family_name,
        "trainer": _sizes(plan.layout),
        "engines": _sizes(plan.engine_layout),
        "relay": plan.key.relay,
        "fingerprint": plan.fingerprint,
        "plan_s": plan_s,
        "num_boxes": plan.num_ops,
        "predicted_s": cost.seconds,
        "nic_bound_s": cost.nic_bound_s,
        "sender_bound_bytes": cost.sender_bound_bytes,
        "sent_bytes_max": int(cost.sent_bytes.max()),
        "sent_bytes_mean": float(cost.sent_bytes.mean()),
        "received_bytes_max": int(cost.received_bytes.max()),
        "shard_bytes": cost.shard_bytes,
        "receive_ratio": cost.receive_ratio,
        "num_messages": int(cost.num_sent.sum()),
        "largest_message_bytes": cost.largest_message_bytes,
        "largest_bucket_bytes": cost.largest_bucket_bytes,
        "broadcast_bytes": cost.broadcast_bytes,
        "broadcast_s": cost.broadcast_s,
        "sent_bytes": cost.sent_bytes.tolist(),
        "num_sent": cost.num_sent.tolist(),
        "received_bytes": cost.received_bytes.tolist(),
        "num_received": cost.num_received.tolist(),
        "relayed_bytes": cost.relayed_bytes.tolist(),
    }


def _rank_lines(side: str, verb: str, sizes: np.ndarray, counts: np.ndarray) -> Iterator[str]:
    """Neighbouring ranks that look alike share a line."""
    shown = [(_gb(size), int(count)) for size, count in zip(sizes, counts, strict=True)]
    starts = [rank for rank in range(len(shown)) if rank == 0 or shown[rank] != shown[rank - 1]]
    for position, first in enumerate(starts[:MAX_LINES]):
        stop = starts[position + 1] if position + 1 < len(starts) else len(shown)
        ranks = f"{side} {first}" if stop == first + 1 else f"{side}s {first}-{stop - 1}"
        yield f"{ranks:25}{shown[first][0]:>12} {verb} in {shown[first][1]} messages"
    if len(starts) > MAX_LINES:
        yield f"{side}s {starts[MAX_LINES]}-{len(shown) - 1}: see --json"


def _trainer(layout: ParallelLayout) -> str:
    names = ("tp", "pp", "virtual_pp", "cp", "ep", "etp", "dp")
    sizes = " ".join(f"{name}{getattr(layout, name)}" for name in names if getattr(layout, name) > 1)
    return f"{layout.world_size} trainer ranks ({sizes or 'single'})"


def _engines(layout: EngineLayout) -> str:
    extra = f" EP {layout.ep}" if layout.ep > 1 else ""
    extra += f" attention DP {layout.attention_dp}" if layout.attention_dp > 1 else ""
    return f"{layout.num_engines} engines x TP {layout.tp}{extra}"


def _sizes(layout: ParallelLayout | EngineLayout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in type(layout).__slots__}


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.3f} GB" if num_bytes >= GB / 10 else f"{num_bytes / 1e6:.3f} MB"


def _network(args: argparse.Namespace) -> Network:
    network = Network(
        nic_gb_per_s=args.nic,
        nvlink_gb_per_s=args.nvlink,
        efficiency=args.efficiency,
        ranks_per_node=args.ranks_per_node,
        is_colocated=args.colocated,
    )
    for option, value in (("nic", args.nic), ("nvlink", args.nvlink), ("ranks-per-node", args.ranks_per_node)):
        if value <= 0:
            raise ValueError(f"--{option}: expected a value above 0, got {value:g}")
    if not 0 < args.efficiency <= 1:
        raise ValueError(f"--efficiency: expected a value above 0 and at most 1, got {args.efficiency:g}")
    return network


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
