"""What one process does to show what the layout tests switch off: auxiliary loss, expert bias, bf16; and a critic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_rl.config.sections import MegatronSection, OptimizerSection
from megatron_rl.layout.coords import coords_of
from megatron_rl.trainer.parallel import destroy_model_parallel, init_model_parallel
from megatron_rl.types.layout import ParallelLayout
from tests.distributed.critic_worker import show_worker
from tests.distributed.launch import Rank
from tests.distributed.walk import count, debug_dims, joined, pack, policy, sequences, split

SIGMOID = MegatronSection(transformer={"moe_router_score_function": "sigmoid"})


def show_mechanisms(me: Rank, *, folder: str) -> dict[str, Any]:
    """On one rank."""
    layout = ParallelLayout()
    batch = sequences(debug_dims("qwen3_moe").vocab_size)
    whole = [pack(batch, list(range(len(batch))))]
    results: dict[str, Any] = {}
    with joined(me) as platform:
        for name, coefficient in {"plain": 0.0, "aux": 0.1}.items():
            with policy(me, platform, "qwen3_moe", layout, moe_aux_loss_coefficient=coefficient) as trainer:
                results[name] = [trainer.sft_minibatch(whole, count(batch)) for _ in range(3)]
                results[f"{name}_load"] = expert_load(trainer, whole)

        with policy(me, platform, "qwen3_moe", layout, moe_expert_bias_update_rate=0.01, megatron=SIGMOID) as trainer:
            before = expert_biases(trainer)
            trainer.compute_logprobs(whole)
            after_scoring = expert_biases(trainer)
            trainer.sft_minibatch(whole, count(batch))
            results["bias"] = {"before": before, "after_scoring": after_scoring, "after_step": expert_biases(trainer)}

        for distributed in (True, False):
            with policy(me, platform, "llama", layout, dtype="bf16", distributed_optimizer=distributed) as trainer:
                trainer.begin_phase(OptimizerSection(learning_rate=1e-3, num_warmup_steps=4), 20)
                steps = [trainer.sft_minibatch(whole, count(batch)) for _ in range(20)]
                parameter = next(trainer.chunks[0].parameters())
                inner = trainer.optimizer.chained_optimizers[0].optimizer
                masters = [item for group in inner.param_groups for item in group["params"]]
                results[f"bf16_{distributed}"] = {
                    "losses": [step["loss/supervised"] for step in steps],
                    "learning_rates": [step["learning_rate"] for step in steps],
                    "parameter": str(parameter.dtype),
                    "masters": sorted({str(item.dtype) for item in masters}),
                    "rounded": all(
                        torch.equal(item.main_param.view(-1).bfloat16(), item.data.view(-1))
                        for item in trainer.chunks[0].parameters()
                    ),
                }
        with policy(me, platform, "llama", layout) as trainer:
            results["refused_step"] = refused_step(trainer, whole, count(batch))
            broken = {name: torch.full_like(value, torch.nan) for name, value in trainer.chunk_parameters()[0].items()}
            trainer.load_parameters([broken])
            try:
                trainer.sft_minibatch(whole, count(batch))
            except FloatingPointError as error:
                results["not_finite"] = str(error)
            try:
                trainer.load_parameters([{**broken, "decoder.final_layernorm.weight": torch.ones(7)}])
            except ValueError as error:
                results["wrong_shape"] = str(error)
        results["offload"] = {
            str(distributed): show_offload(me, platform, whole, count(batch), distributed) for distributed in (True, False)
        }
    results["worker"] = show_worker(Path(folder))
    return results


def refused_step(trainer: Any, whole: list[Any], denominators: Any) -> dict[str, Any]:
    """A step, one with a gradient that is infinite, and the next one, against the same without the one in between."""
    start = [{name: value.clone() for name, value in chunk.items()} for chunk in trainer.chunk_parameters()]
    expected = [trainer.sft_minibatch(whole, denominators)["loss/supervised"] for _ in range(3)][2]
    trainer.load_parameters(start)
    trainer.sft_minibatch(whole, denominators)
    hook = next(trainer.chunks[0].parameters()).register_hook(lambda gradient: gradient * torch.inf)
    try:
        trainer.sft_minibatch(whole, denominators)
        message = ""
    except FloatingPointError as error:
        message = str(error)
    hook.remove()
    losses = [trainer.sft_minibatch(whole, denominators)["loss/supervised"] for _ in range(2)]
    return {"message": message, "losses": losses, "expected": expected}


def show_offload(me: Rank, platform: Any, whole: list[Any], denominators: Any, distributed: bool) -> dict[str, Any]:
    """Three steps, with and without giving all memory up between them; here as on a device, where storages are freed."""
    shown: dict[str, Any] = {}
    for gives_up in (False, True):
        with policy(me, platform, "qwen3_moe", ParallelLayout(), dtype="bf16", distributed_optimizer=distributed) as trainer:
            for parked in trainer._parked.values():
                parked._moves = lambda storage: True
            steps = []
            for _ in range(3):
                steps.append(trainer.sft_minibatch(whole, denominators))
                if gives_up:
                    before = [parameter.detach().clone() for parameter in trainer.chunks[0].parameters()]
                    held = trainer.offload(("gradients", "optimizer"))
                    kept = all(map(torch.equal, before, trainer.chunks[0].parameters()))
                    held |= trainer.offload(("parameters",))
                    left = [sum(t.untyped_storage().nbytes() for t in trainer._tensors_of(state)) for state in held]
                    trainer.onload(("parameters", "gradients", "optimizer"))
                    shown |= {"held": held, "left": left, "kept": kept}
            shown[f"steps_{gives_up}"] = steps
    shown["num_parameters"] = sum(before_.numel() for before_ in before)
    return shown


def expert_biases(trainer: Any) -> list[list[float]]:
    return [layer.mlp.router.expert_bias.tolist() for layer in trainer.chunks[0].decoder.layers]


def expert_load(trainer: Any, microbatches: list[Any]) -> float:
    """How uneven the experts' shares are: the largest over the mean, averaged over layers."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.router.register_forward_hook(lambda _m, _i, output: seen.append(output[1].sum(0)))
        for layer in trainer.chunks[0].decoder.layers
    ]
    trainer.compute_logprobs(microbatches)
    for hook in hooks:
        hook.remove()
    return float(torch.stack([(item.max() / item.float().mean()) for item in seen]).mean())


def uneven_shares(me: Rank) -> list[dict[str, float]]:
    """Two data-parallel ranks, one of which holds every sequence; the other brings empty microbatches."""
    layout = ParallelLayout(dp=2, ep=2)
    with joined(me) as platform, policy(me, platform, "qwen3_moe", layout) as trainer:
        batch = sequences(trainer.dims.vocab_size)
        mine = list(range(len(batch))) if me.rank == 0 else []
        microbatches = [pack(batch, part) for part in split(mine, 2)]
        return [trainer.sft_minibatch(microbatches, count(batch)) for _ in range(2)]


def megatron_groups(me: Rank, *, layouts: list[dict[str, int]]) -> list[dict[str, Any]]:
    """Per layout: this rank's place in Megatron's own groups, and in ours."""
    results = []
    with joined(me):
        for sizes in layouts:
            layout = ParallelLayout(**sizes)
            init_model_parallel(layout, seed=1)
            ours = coords_of(layout, me.rank)
            results.append(
                {
                    "tp": [parallel_state.get_tensor_model_parallel_rank(), ours.tp],
                    "cp": [parallel_state.get_context_parallel_rank(), ours.cp],
                    "dp": [parallel_state.get_data_parallel_rank(), ours.dp],
                    "pp": [parallel_state.get_pipeline_model_parallel_rank(), ours.pp],
                    "ep": [parallel_state.get_expert_model_parallel_rank(), ours.ep],
                    "etp": [parallel_state.get_expert_tensor_parallel_rank(), ours.etp],
                    "expert_dp": [parallel_state.get_expert_data_parallel_rank(), ours.expert_dp],
                }
            )
            destroy_model_parallel()
    return results
