"""A whole Megatron model, without gradients or optimizer, in this one process on CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config.sections import MegatronSection, TrainerSection
from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.platforms.platform import CpuPlatform
from megatron_rl.trainer.model import PolicyModel, build_model_chunks
from megatron_rl.trainer.model_config import plan_transformer_config
from megatron_rl.trainer.parallel import destroy_distributed, init_distributed, init_model_parallel
from megatron_rl.types.layout import ParallelLayout

ONE_RANK = ParallelLayout()
SPEC = "local"
START_TIMEOUT_S = 60.0


@contextmanager
def one_rank_model(dims: ModelDims, dtype: torch.dtype) -> Iterator[PolicyModel]:
    """The model with weights that are not initialised, inside a process group of one."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    platform = CpuPlatform()
    platform.prepare_megatron()
    init_distributed(
        platform, rank=0, world_size=1, master_address="127.0.0.1", master_port=0, timeout_s=START_TIMEOUT_S
    )
    try:
        init_model_parallel(ONE_RANK, seed=1)
        trainer = TrainerSection(
            layer_spec="local", megatron=MegatronSection(transformer={"perform_initialization": False})
        )
        config = TransformerConfig(
            **plan_transformer_config(dims, trainer, ONE_RANK, dtype, on_cpu=True, transformer_engine=False)
        )
        (model,) = build_model_chunks(
            PolicyModel, config, dims, dims.vocab_size, transformer_engine=False, device=platform.device
        )
        yield model
    finally:
        destroy_distributed()
