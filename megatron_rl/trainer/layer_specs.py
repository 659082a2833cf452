"""Which modules a transformer layer is made of: Transformer Engine's through Megatron's own spec, or local ones of ours."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any, Literal

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.config.sections import TrainerSection
from megatron_rl.trainer.attention import PackedAttention
from megatron_rl.types.layout import ParallelLayout

logger = logging.getLogger(__name__)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm with a gain (arXiv:1910.07467, eq. 4), allowed under sequence parallelism.

    The gain is marked `sequence_parallel`, so that Megatron sums its gradient over the ranks that each saw a part.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_unused: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


def uses_transformer_engine(layer_spec: Literal["auto", "local", "transformer_engine"]) -> bool:
    """Decide between the two specs and say so in the log.

    Raises ModuleNotFoundError when Transformer Engine is asked for and is not installed.
    """
    is_installed = importlib.util.find_spec("transformer_engine") is not None
    if layer_spec == "transformer_engine" and not is_installed:
        raise ModuleNotFoundError(
            "trainer.layer_spec=transformer_engine: the package transformer_engine is not installed; "
            "install it (docs/install_gpu.md) or set trainer.layer_spec=local"
        )
    chosen = is_installed and layer_spec != "local"
    logger.info(
        "layer spec: %s (asked for: %s, transformer_engine %s)",
        "transformer_engine" if chosen else "local",
        layer_spec,
        "installed" if is_installed else "not installed",
    )
    return chosen


def shares_prompts(trainer: TrainerSection, layout: ParallelLayout, *, transformer_engine: bool) -> bool:
    """Decide whether the prompt of a group may be computed once for all its answers, and say so in the log.

    Context parallelism cuts every sequence by itself, and Transformer Engine's packed kernels know no shared keys: there
    every sequence is computed whole. Raises ValueError when sharing is asked for in spite of that.
    """
    obstacle = None
    if layout.cp > 1:
        obstacle = f"trainer.layout.cp={layout.cp}"
    elif transformer_engine:
        obstacle = "Transformer Engine's attention (trainer.layer_spec=local is without)"
    if trainer.shared_prompts == "on" and obstacle:
        raise ValueError(f"trainer.shared_prompts=on does not go with {obstacle}; set it to auto or off")
    chosen = trainer.shared_prompts != "off" and obstacle is None
    logger.info(
        "shared prompts: %s (asked for: %s%s)",
        "possible" if chosen else "no", trainer.shared_prompts, f"; not with {obstacle}" if obstacle else "",
    )  # fmt: skip
    return chosen


def build_block_spec(
    config: TransformerConfig, *, transformer_engine: bool, vp_stage: int | None = None
) -> ModuleSpec | TransformerBlockSubmodules:
    """The spec of the transformer block of one (virtual) pipeline stage."""
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    attention.q_layernorm = attention.k_layernorm = RMSNorm if config.qk_layernorm else IdentityOp
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
