"""Process groups: torch.distributed and Megatron's `parallel_state` from one `ParallelLayout`."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_rl.platforms.platform import Platform
from megatron_rl.types.layout import ParallelLayout


def init_distributed(
    platform: Platform, *, rank: int, world_size: int, master_address: str, master_port: int, timeout_s: float
) -> None:
    """Join the trainer's process group. Rank 0 listens on `master_address:master_port`; all wait at most `timeout_s`."""
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(master_address, master_port, world_size, is_master=rank == 0, timeout=timeout)
    dist.init_process_group(platform.backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def init_model_parallel(layout: ParallelLayout, *, seed: int) -> None:
    """Cut the process group into Megatron's groups. Raises ValueError when the layout does not fill the world."""
    if dist.get_world_size() != layout.world_size:
        raise ValueError(f"trainer.layout needs {layout.world_size} ranks, {dist.get_world_size()} have joined")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.virtual_pp if layout.virtual_pp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def destroy_model_parallel() -> None:
    """Forget Megatron's groups; the process group stays."""
    parallel_state.destroy_model_parallel()


def destroy_distributed() -> None:
    """Leave everything. Harmless when nothing was joined."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
