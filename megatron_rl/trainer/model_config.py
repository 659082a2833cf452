"""From our sections to the keyword arguments of Megatron's own dataclasses. Pure: nothing of Megatron is built here.

`trainer.megatron.{transformer,optimizer,ddp}` overrides come last, so every field stays within reach of the YAML.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu

from megatron_rl.config.sections import TrainerSection
from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.types.layout import ParallelLayout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def plan_transformer_config(
    dims: ModelDims,
    trainer: TrainerSection,
    layout: ParallelLayout,
    dtype: torch.dtype,
    *,
    on_cpu: bool,
    transformer_engine: bool,
) -> dict[str, Any]:
    """Keyword arguments of `TransformerConfig` for a decoder with RMSNorm, RoPE and gated SiLU.

    Fusions that need Transformer Engine follow `transformer_engine`. Raises ValueError for what Megatron gets wrong or
    lacks: expert tensor parallelism below TP without expert parallelism, and expert bias with a softmax router.
    """
    kwargs: dict[str, Any] = {
        "num_layers": dims.num_layers,
        "hidden_size": dims.hidden_size,
        "ffn_hidden_size": dims.ffn_size or dims.moe_ffn_size,
        "num_attention_heads": dims.num_heads,
        "num_query_groups": dims.num_kv_heads,
        "kv_channels": dims.head_dim,
        "qk_layernorm": dims.qk_norm,
        "layernorm_epsilon": dims.norm_epsilon,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": on_cpu,
        "bias_activation_fusion": transformer_engine,
        "bias_dropout_fusion": transformer_engine,
        "apply_rope_fusion": transformer_engine,
        "persist_layer_norm": transformer_engine,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "moe_token_dispatcher_type": "alltoall",  # dense models too: Megatron refuses its default for packed pipelines
        **_parallel_kwargs(layout),
        **_recompute_kwargs(trainer.recompute),
    }
    if dims.num_experts:
        kwargs |= _moe_kwargs(dims, trainer, layout, transformer_engine)
    kwargs |= trainer.megatron.transformer
    if kwargs.get("moe_router_enable_expert_bias") and kwargs.get("moe_router_score_function", "softmax") != "sigmoid":
        raise ValueError(
            "trainer.moe_expert_bias_update_rate: expert bias needs a sigmoid router, this model has a softmax router; "
            "set it to 0 or trainer.megatron.transformer.moe_router_score_function=sigmoid"
        )
    return kwargs


def _parallel_kwargs(layout: ParallelLayout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.tp > 1,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.virtual_pp if layout.virtual_pp > 1 else None,
        **_pipeline_split(layout),
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        # Packed microbatches differ in length: stages exchange shapes before tensors.
        "variable_seq_lengths": layout.pp > 1,
        # Interleaved stages over batched sends are silently wrong on gloo.
        "overlap_p2p_comm": layout.virtual_pp > 1,
        "batch_p2p_comm": layout.virtual_pp == 1,
    }


def _pipeline_split(layout: ParallelLayout) -> dict[str, Any]:
    """Megatron's flexible pipeline layout: what each chunk holds, in pipeline order."""
    if layout.layers_per_chunk is None:
        return {}
    chunks = [["decoder"] * num_layers for num_layers in layout.layers_per_chunk]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return {"pipeline_model_parallel_layout": chunks}


def _recompute_kwargs(recompute: str) -> dict[str, Any]:
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if recompute == "selective":
        return {"recompute_granularity": "selective"}
    return {}


def _moe_kwargs(dims: ModelDims, trainer: TrainerSection, layout: ParallelLayout, transformer_engine: bool) -> dict[str, Any]:
    if layout.ep == 1 and layout.etp != layout.tp:
        # Without expert parallelism Megatron reduces expert gradients like dense ones, not over the expert replicas.
        raise ValueError(
            f"trainer.layout.etp={layout.etp} with tp={layout.tp} and ep=1: expert gradients would be wrong; "
            f"set trainer.layout.etp={layout.tp}, or ep above 1"
        )
    has_aux_loss = trainer.moe_aux_loss_coefficient > 0
    has_expert_bias = trainer.moe_expert_bias_update_rate > 0
    return {
        "num_moe_experts": dims.num_experts,
        "moe_ffn_hidden_size": dims.moe_ffn_size,
        "moe_router_topk": dims.top_k,
        "moe_router_pre_softmax": not dims.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": transformer_engine,
        "moe_router_load_balancing_type": "aux_loss" if has_aux_loss else "none",
        "moe_aux_loss_coeff": trainer.moe_aux_loss_coefficient,
        "moe_router_enable_expert_bias": has_expert_bias,
        **({"moe_router_bias_update_rate": trainer.moe_expert_bias_update_rate} if has_expert_bias else {}),
    }


def plan_optimizer_config(trainer: TrainerSection, dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments of `OptimizerConfig`."""
    section = trainer.optimizer
    return {
        "optimizer": section.kind,
        "lr": section.learning_rate,
        "min_lr": section.min_learning_rate,
        "weight_decay": section.weight_decay,
        "adam_beta1": section.beta1,
        "adam_beta2": section.beta2,
        "adam_eps": section.epsilon,
        "clip_grad": section.clip_grad,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": section.distributed,
        **trainer.megatron.optimizer,
    }


def plan_ddp_config(trainer: TrainerSection) -> dict[str, Any]:
    """Keyword arguments of `DistributedDataParallelConfig`: gradients are summed in fp32 whatever the weights are."""
    return {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": trainer.optimizer.distributed,
        **trainer.megatron.ddp,
    }
