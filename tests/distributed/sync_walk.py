"""What each trainer process does in the weight-sync tests: train, publish to a real engine, export, compare.

For every trainer layout all ranks build the policy anew, take one optimizer step, and publish twice with another step in
between. Rank 0 runs `WeightSync` and the engine's client; the others follow its commands. Then the ranks export a Hugging
Face folder, and rank 0 compares the engine's log-probs with transformers on a fresh load of it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megatron_rl.batching.build import build_microbatch, compute_denominators
from megatron_rl.checkpoint.hf_export import merge_export
from megatron_rl.config.algorithm_sections import AlgorithmSection
from megatron_rl.config.sections import OptimizerSection, SyncSection, TrainerSection
from megatron_rl.controller.model_setup import ModelSetup
from megatron_rl.controller.policy_worker import PolicyWorker
from megatron_rl.controller.probe import WeightProbe
from megatron_rl.controller.setups import WorkerSetup
from megatron_rl.controller.weight_sync import WeightSync
from megatron_rl.layout.coords import coords_of
from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.model_families.registry import get_family
from megatron_rl.resharding.plan import build_reshard_plan
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.rollout.embedded.engine import EmbeddedEngine
from megatron_rl.rollout.sglang.engine import SglangEngine
from megatron_rl.types.layout import EngineLayout, ParallelLayout
from megatron_rl.types.training import Minibatch, TrainBatch, TrainSample
from tests.distributed.launch import Rank

TEXT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 58, 40)
TIMEOUT_S = 60.0


class Commands:
    """Rank 0's `WeightSenders`: every call is broadcast to the other ranks, which wait for it in `follow`."""

    def __init__(self, worker: PolicyWorker, key: bytes) -> None:
        self.worker, self.key = worker, key

    async def send_weights(self, order):
        return await asyncio.to_thread(self._broadcast, "send_weights", order, self.key)

    async def score_tokens(self, token_ids):
        return (await asyncio.to_thread(self._broadcast, "score_tokens", token_ids))[: len(token_ids)]

    def _broadcast(self, method, *args):
        dist.broadcast_object_list([(method, *args)], src=0)
        return self._run(method, *args)

    def _run(self, method, *args):
        results = getattr(self.worker, method)(*args)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, results)
        return [result for part in gathered for result in part]

    def done(self) -> None:
        dist.broadcast_object_list([("done",)], src=0)

    def follow(self) -> None:
        while True:
            box: list[Any] = [None]
            dist.broadcast_object_list(box, src=0)
            if box[0][0] == "done":
                return
            self._run(*box[0])


def walk_sync(me: Rank, *, dims: dict, family: str, layouts: list[dict], engine: dict, key_hex: str) -> dict[str, float]:
    """Per layout, the largest log-prob difference between the engine and a fresh load, over two syncs."""
    results = {}
    for number, sizes in enumerate(layouts):
        split = sizes.get("layers_per_chunk")  # a list, after its way through JSON
        layout = ParallelLayout(**sizes | {"layers_per_chunk": None if split is None else tuple(split)})
        worker = PolicyWorker(worker_setup(ModelDims(**dims), family, layout, engine_layout_of(engine)), me.rank)
        worker.start(("127.0.0.1", me.port + number))
        commands = Commands(worker, bytes.fromhex(key_hex))
        with tempfile.TemporaryDirectory() as folder:
            box = [folder]
            dist.broadcast_object_list(box, src=0)
            if me.rank == 0:
                gap = asyncio.run(_publish_and_compare(commands, layout, family, dims, engine, Path(box[0])))
                results[str(sizes)] = gap
            else:
                for round_number in range(2):
                    train_step(worker, layout, round_number)
                    commands.follow()
                    worker.export_part(f"{box[0]}/parts-{round_number}")
                    dist.barrier()
        worker.stop()
    return results


async def _publish_and_compare(
    commands: Commands, layout: ParallelLayout, family: str, dims: dict, engine: dict, folder: Path
) -> float:
    model_dims = ModelDims(**dims)
    plan = build_reshard_plan(family, model_dims, layout, engine_layout_of(engine))
    target, addresses, close = await open_engine(engine, model_dims, commands.key)
    section = SyncSection(timeout_s=TIMEOUT_S, bucket_bytes=50_000)
    probe = WeightProbe([TEXT, TEXT[4:]], interval=1, tolerance=1e-3)
    sync = WeightSync(plan, commands, [target], addresses, commands.key, section, probe)
    worst = 0.0
    try:
        for round_number in range(2):
            train_step(commands.worker, layout, round_number)
            version = await sync.publish()
            assert await target.policy_version() == version == round_number
            commands.done()
            commands.worker.export_part(f"{folder}/parts-{round_number}")
            dist.barrier()
            fresh = folder / f"hf-{round_number}"
            merge_export(f"{folder}/parts-{round_number}", fresh, get_family(family), model_dims, torch.float32)
            scores = (await target.score([TEXT]))[0]
            reference = reference_logprobs(fresh)
            assert np.isfinite(scores).all() and np.ptp(reference) > 0.1, (scores, reference)
            worst = max(worst, float(np.abs(scores - reference).max()))
    finally:
        await close()
    return worst


async def open_engine(engine: dict, dims: ModelDims, key: bytes):
    if engine["kind"] == "sglang":
        options = {"tp_size": engine["tp"], "request_timeout_s": TIMEOUT_S, "receiver_dir": Path(engine["receiver_dir"])}
        attached = SglangEngine.attach(engine["url"], Path(engine["key_file"]), **options)
        return attached, list(await attached.open_receivers()), attached.close
    embedded = EmbeddedEngine(dims, engine["tp"], torch.float32, num_slots=2, max_context=64, stop_token_ids=())
    receivers = [Receiver(shard, key) for shard in embedded.weights.shards]
    for receiver in receivers:
        receiver.start()

    async def close() -> None:
        for receiver in receivers:
            receiver.close()
        embedded.close()

    return embedded, [receiver.address for receiver in receivers], close


def engine_layout_of(engine: dict) -> EngineLayout:
    return EngineLayout(tp=engine["tp"], ep=engine.get("ep", 1))


def train_step(worker: PolicyWorker, layout: ParallelLayout, seed: int) -> None:
    """One supervised step on random sequences, so that weights differ from the start and from round to round."""
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(2 * layout.dp):
        length = int(rng.integers(6, 14))
        samples.append(
            TrainSample(
                sample_id=str(number), group_id=str(number), token_ids_L=rng.integers(0, 60, length),
                loss_mask_L=np.arange(length) > 0, rollout_logprobs_L=np.zeros(length, np.float32),
                versions_L=np.zeros(length, np.int32), reward=0.0, advantage=0.0, is_correct=True, is_truncated=False,
            )
        )  # fmt: skip
    dp_rank = coords_of(layout, dist.get_rank()).dp
    mine = (build_microbatch(samples, [2 * dp_rank]), build_microbatch(samples, [2 * dp_rank + 1]))
    worker.sft_step(TrainBatch((Minibatch((mine,), compute_denominators(samples)),), len(samples)))


def reference_logprobs(folder: Path, token_ids: Sequence[int] = TEXT) -> np.ndarray:
    """What transformers computes for each token given those before it, 0 for the first, on a fresh load of the folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([list(token_ids)])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], logprobs.numpy()])


def worker_setup(dims: ModelDims, family: str, layout: ParallelLayout, engine_layout: EngineLayout) -> WorkerSetup:
    return WorkerSetup(
        model=ModelSetup(family, dims, None, seed=5, vocab_multiple=1),
        dtype="fp32",
        section=TrainerSection(optimizer=OptimizerSection(learning_rate=3e-3)),
        algorithm=AlgorithmSection(),
        critic=None,
        sync=SyncSection(timeout_s=TIMEOUT_S, bucket_bytes=50_000),
        layout=layout,
        engine_layout=engine_layout,
        temperature=1.0,
        seed=5,
        start_timeout_s=TIMEOUT_S,
        is_single_node=True,
    )
