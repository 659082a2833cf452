"""Tiny random Hugging Face models of unequal sizes, and the engine shards cut from their tensors by plain slicing."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.model_families.registry import get_family
from megatron_rl.rollout.embedded.engine import EmbeddedEngine
from megatron_rl.rollout.embedded.weights import ShardedWeights
from megatron_rl.types.rollout import GenerationRequest, SamplingParams

T = TypeVar("T")

MOE = dataclasses.replace(
    get_family("qwen3_moe").debug_dims,
    num_layers=3,
    hidden_size=40,
    num_heads=8,
    num_kv_heads=2,
    head_dim=12,
    vocab_size=101,
    num_experts=6,
    top_k=2,
    moe_ffn_size=36,
)
DENSE = dataclasses.replace(
    get_family("llama").debug_dims,
    num_layers=2,
    hidden_size=42,
    num_heads=6,
    num_kv_heads=3,
    head_dim=12,
    vocab_size=77,
    ffn_size=54,
)


def family_name(dims: ModelDims) -> str:
    return "qwen3_moe" if dims.num_experts else "llama"


def hf_model(dims: ModelDims, seed: int, scale: float = 0.3) -> PreTrainedModel:
    """A random model whose every tensor (norms included) is far from a constant, so that a missed one shows."""
    values = get_family(family_name(dims)).hf_from_dims(dims)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else scale * noise)
    return model


def hf_tensors(model: PreTrainedModel) -> Callable[[str], torch.Tensor]:
    """Access by checkpoint name; transformers keeps experts fused in memory, checkpoints keep them apart."""
    state = model.state_dict()

    def get(name: str) -> torch.Tensor:
        if name in state:
            return state[name]
        prefix, _, rest = name.partition(".experts.")
        expert, projection, _ = rest.split(".")
        fused = state[f"{prefix}.experts.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"][int(expert)]
        return fused if projection == "down_proj" else fused.chunk(2)[0 if projection == "gate_proj" else 1]

    return get


def fill(weights: ShardedWeights, model: PreTrainedModel) -> None:
    """Cut every shard from the model's tensors."""
    get, dims, tp = hf_tensors(model), weights.dims, weights.tp
    for rank, shard in enumerate(weights.shards):
        _fill_ends(shard, get, dims, rank)
        for layer in range(dims.num_layers):
            _fill_layer(shard, get, dims, tp, rank, f"model.layers.{layer}.")


def _fill_ends(shard: dict[str, torch.Tensor], get: Callable[[str], torch.Tensor], dims: ModelDims, rank: int) -> None:
    shard["model.norm.weight"].copy_(get("model.norm.weight"))
    for name in ["model.embed_tokens.weight"] + ([] if dims.tied_embeddings else ["lm_head.weight"]):
        rows = len(shard[name])
        part = get(name)[rank * rows : (rank + 1) * rows]
        shard[name][: len(part)].copy_(part)


def _fill_layer(
    shard: dict[str, torch.Tensor],
    get: Callable[[str], torch.Tensor],
    dims: ModelDims,
    tp: int,
    rank: int,
    prefix: str,
) -> None:
    def column(name: str) -> torch.Tensor:
        return get(prefix + name).chunk(tp, 0)[rank]

    def row(name: str) -> torch.Tensor:
        return get(prefix + name).chunk(tp, 1)[rank]

    def kv(name: str) -> torch.Tensor:
        heads = get(prefix + name).unflatten(0, (dims.num_kv_heads, dims.head_dim))
        per_rank = max(dims.num_kv_heads // tp, 1)
        first = rank * dims.num_kv_heads // tp
        return heads[first : first + per_rank].flatten(0, 1)

    parts = [column("self_attn.q_proj.weight"), kv("self_attn.k_proj.weight"), kv("self_attn.v_proj.weight")]
    shard[prefix + "self_attn.qkv_proj.weight"].copy_(torch.cat(parts))
    shard[prefix + "self_attn.o_proj.weight"].copy_(row("self_attn.o_proj.weight"))
    replicated = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    replicated += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if dims.qk_norm else []
    replicated += ["mlp.gate.weight"] if dims.num_experts else []
    for name in replicated:
        shard[prefix + name].copy_(get(prefix + name))
    for expert in range(dims.num_experts):
        mlp = f"mlp.experts.{expert}."
        gate_up = torch.cat([column(mlp + "gate_proj.weight"), column(mlp + "up_proj.weight")])
        shard[prefix + "mlp.experts.w13_weight"][expert].copy_(gate_up)
        shard[prefix + "mlp.experts.w2_weight"][expert].copy_(row(mlp + "down_proj.weight"))
    if not dims.num_experts:
        gate_up = torch.cat([column("mlp.gate_proj.weight"), column("mlp.up_proj.weight")])
        shard[prefix + "mlp.gate_up_proj.weight"].copy_(gate_up)
        shard[prefix + "mlp.down_proj.weight"].copy_(row("mlp.down_proj.weight"))


def build_engine(
    model: PreTrainedModel,
    dims: ModelDims,
    tp: int = 1,
    num_slots: int = 8,
    max_context: int = 64,
    stop_token_ids: tuple[int, ...] = (),
    returns_routing: bool = False,
) -> EmbeddedEngine:
    engine = EmbeddedEngine(
        dims, tp, torch.float32, num_slots=num_slots, max_context=max_context, stop_token_ids=stop_token_ids,
        returns_routing=returns_routing,
    )  # fmt: skip
    fill(engine.weights, model)
    return engine


def request(
    name: str, token_ids: Sequence[int], seed: int = 0, max_new_tokens: int = 8, **sampling
) -> GenerationRequest:
    return GenerationRequest(name, tuple(token_ids), SamplingParams(max_new_tokens, **sampling), seed)


class StepGate:
    """Holds the engine's worker at the end of its n-th step, until a command that the test has queued may run."""

    def __init__(self, engine: EmbeddedEngine, num_steps: int) -> None:
        self._loop, self._reached = asyncio.get_running_loop(), asyncio.Event()
        self._released = threading.Event()
        scheduler = engine._scheduler
        inner, left = scheduler.step, num_steps

        def step() -> None:
            nonlocal left
            inner()
            left -= 1
            if left == 0:
                self._loop.call_soon_threadsafe(self._reached.set)
                assert self._released.wait(30.0)

        scheduler.step = step

    async def run(self, command: Coroutine[Any, Any, T]) -> T:
        """Wait for the step, queue the command and let the worker go on."""
        await asyncio.wait_for(self._reached.wait(), 30.0)
        task = asyncio.create_task(command)
        await asyncio.sleep(0)  # the task runs up to its await: the command is queued
        self._released.set()
        return await asyncio.wait_for(task, 30.0)
