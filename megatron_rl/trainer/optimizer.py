"""Megatron's optimizer and learning-rate schedule over this rank's model chunks."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.config.sections import OptimizerSection

logger = logging.getLogger(__name__)


def build_optimizer(
    config: OptimizerConfig, chunks: Sequence[DistributedDataParallel], fused: Literal["auto", "torch", "apex"]
) -> MegatronOptimizer:
    """The optimizer that Megatron builds, fused where the machine has a fused one, and a log line that names it.

    Megatron takes Transformer Engine's FusedAdam, else NVIDIA apex's, else torch's. Raises ModuleNotFoundError when
    `apex` is asked for and neither is installed.
    """
    if fused == "apex" and megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        what = "is another product of that name" if importlib.util.find_spec("apex") else "is not installed"
        raise ModuleNotFoundError(
            f"trainer.fused_optimizer=apex: NVIDIA apex {what}; install it from NVIDIA's source (docs/install_gpu.md) "
            "or set trainer.fused_optimizer=torch"
        )
    if fused == "torch":
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
    optimizer = megatron_optimizer.get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    kinds = set()
    for inner in inner_optimizers(optimizer):
        kinds.add(f"{type(inner).__module__}.{type(inner).__qualname__}")
        if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            for group in inner.param_groups:
                group["fused"] = True
    _refuse_nonfinite_norms(optimizer)
    logger.info("optimizer: %s (asked for: %s)", ", ".join(sorted(kinds)) or "none on this rank", fused)
    return optimizer


def _refuse_nonfinite_norms(optimizer: MegatronOptimizer) -> None:
    """Let a step raise FloatingPointError, on every rank, when the gradient norm is not finite: Megatron asks for the norm
    before it changes anything, so weights and moments stay as they were."""
    compute_norm = optimizer.get_grad_norm

    def finite_norm() -> float:
        norm = compute_norm()
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {norm}")
        return norm

    optimizer.get_grad_norm = finite_norm


def inner_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """The torch optimizers inside Megatron's, dense parameters before experts."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for part in parts:
        if part.optimizer is not None:
            yield part.optimizer


def forget_moments(optimizer: MegatronOptimizer) -> None:
    """Drop Adam's moments and step counts, so that the next step starts as the first one did."""
    for inner in inner_optimizers(optimizer):
        inner.state.clear()
        for group in inner.param_groups:
            group.pop("step", None)  # fused optimizers count in the group


def build_schedule(optimizer: MegatronOptimizer, section: OptimizerSection, num_steps: int) -> OptimizerParamScheduler:
    """Linear warm-up over `num_warmup_steps`, then `schedule` down to `min_learning_rate` at step `num_steps`.

    Step the schedule before the optimizer, so that the first of n warm-up steps runs at 1/n.
    """
    for group in optimizer.param_groups:  # Megatron put the rates of its own config here; they outrank the scheduler's
        group["max_lr"], group["min_lr"] = section.learning_rate, section.min_learning_rate
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=section.learning_rate,
        min_lr=section.min_learning_rate,
        lr_warmup_steps=section.num_warmup_steps,
        lr_decay_steps=max(num_steps, section.num_warmup_steps + 1),
        lr_decay_style=section.schedule,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
