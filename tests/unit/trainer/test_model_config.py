from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_rl.config.sections import MegatronSection, OptimizerSection, TrainerSection
from megatron_rl.model_families.registry import get_family
from megatron_rl.trainer.model_config import plan_ddp_config, plan_optimizer_config, plan_transformer_config
from megatron_rl.types.layout import ParallelLayout

DIMS = get_family("qwen3_moe").debug_dims


def plan(section: TrainerSection | None = None, layout: ParallelLayout | None = None, **changes: Any) -> dict[str, Any]:
    return plan_transformer_config(
        dataclasses.replace(DIMS, **changes),
        section or TrainerSection(),
        layout or ParallelLayout(),
        torch.bfloat16,
        on_cpu=True,
        transformer_engine=False,
    )


def test_dims_land_in_their_fields() -> None:
    kwargs = plan()
    assert kwargs["kv_channels"] == DIMS.head_dim
    assert kwargs["num_query_groups"] == DIMS.num_kv_heads
    assert kwargs["moe_ffn_hidden_size"] == DIMS.moe_ffn_size
    assert kwargs["qk_layernorm"] is True
    assert kwargs["params_dtype"] is torch.bfloat16 and kwargs["bf16"] is True


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_renormalised_probabilities_mean_a_softmax_after_the_choice(norm_topk_prob: bool) -> None:
    assert plan(norm_topk_prob=norm_topk_prob)["moe_router_pre_softmax"] is not norm_topk_prob


def test_tensor_parallelism_brings_sequence_parallelism() -> None:
    assert plan(layout=ParallelLayout(tp=2, etp=2))["sequence_parallel"] is True
    assert plan()["sequence_parallel"] is False


def test_interleaved_stages_do_not_batch_their_sends() -> None:
    kwargs = plan(layout=ParallelLayout(pp=2, virtual_pp=2))
    assert kwargs["overlap_p2p_comm"] is True and kwargs["batch_p2p_comm"] is False
    assert kwargs["virtual_pipeline_model_parallel_size"] == 2


def test_an_uneven_pipeline_is_spelled_out() -> None:
    kwargs = plan(layout=ParallelLayout(pp=2, virtual_pp=2, layers_per_chunk=(2, 1, 0, 1)))
    chunks = [["embedding", "decoder", "decoder"], ["decoder"], [], ["decoder", "loss"]]
    assert kwargs["pipeline_model_parallel_layout"] == chunks
    assert "pipeline_model_parallel_layout" not in plan(layout=ParallelLayout(pp=2))


def test_overrides_come_last() -> None:
    section = TrainerSection(
        moe_aux_loss_coefficient=0.01,
        optimizer=OptimizerSection(clip_grad=1.0),
        megatron=MegatronSection(
            transformer={"moe_router_load_balancing_type": "seq_aux_loss"},
            optimizer={"clip_grad": 0.25},
            ddp={"grad_reduce_in_fp32": False},
        ),
    )
    kwargs = plan(section)
    assert kwargs["moe_router_load_balancing_type"] == "seq_aux_loss" and kwargs["moe_aux_loss_coeff"] == 0.01
    assert plan_optimizer_config(section, torch.float32)["clip_grad"] == 0.25
    assert plan_ddp_config(section)["grad_reduce_in_fp32"] is False


def test_a_dense_model_names_no_expert() -> None:
    dims = get_family("llama").debug_dims
    kwargs = plan_transformer_config(
        dims, TrainerSection(), ParallelLayout(), torch.float32, on_cpu=True, transformer_engine=True
    )
    assert "num_moe_experts" not in kwargs
    assert kwargs["apply_rope_fusion"] is True


def test_expert_bias_on_a_softmax_router_is_refused() -> None:
    with pytest.raises(ValueError, match=r"moe_expert_bias_update_rate.*sigmoid"):
        plan(TrainerSection(moe_expert_bias_update_rate=1e-3))
    sigmoid = MegatronSection(transformer={"moe_router_score_function": "sigmoid"})
    kwargs = plan(TrainerSection(moe_expert_bias_update_rate=1e-3, megatron=sigmoid))
    assert kwargs["moe_router_enable_expert_bias"] is True and kwargs["moe_router_bias_update_rate"] == 1e-3


def test_expert_tensor_parallelism_below_tp_needs_expert_parallelism() -> None:
    with pytest.raises(ValueError, match=r"trainer\.layout\.etp=2"):
        plan(layout=ParallelLayout(tp=2, etp=1))
    plan(layout=ParallelLayout(tp=2, ep=2, etp=1))
