"""Router replay (arXiv 2510.11370): a MoE layer visits the experts that were chosen elsewhere, with its own probabilities.

Megatron's routers ask a `RouterReplay` for their top k. Ours differs from Megatron's in where the choice comes from: it
travels with the packed parameters of the microbatch, so that pipeline schedules and full recomputation, which run a layer
again for an earlier microbatch, cannot mix two of them up; and tokens whose experts are unknown choose for themselves.

Shape suffixes: _T tokens of the microbatch, _Y decoder layers, _K experts per token, _N rows that this rank's routers see
(its context-parallel part, cut by sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.trainer.packed_inputs import PackedInputs
from megatron_rl.types.layout import ParallelLayout
from megatron_rl.types.routing import RoutingShape, unknown_expert


class ReplayedChoice(RouterReplay):
    """One router's choice: its own, or `experts_NK` (-1 where unknown). `chosen_NK` is what the last call came to."""

    def __init__(self) -> None:
        # Megatron's own constructor enters a list of the process, in which two models would mix.
        self.experts_NK: Tensor | None = None
        self.chosen_NK: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(scores of the chosen experts, experts), each [N, K]; gradients go to the scores of the chosen ones."""
        assert default_compute_topk is not None
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.experts_NK is not None:
            chosen = torch.where(self.experts_NK < 0, chosen, self.experts_NK)
            values = scores.gather(1, chosen)
        self.chosen_NK = chosen.detach()
        return values, chosen


def install_router_replay(chunks: Sequence[torch.nn.Module], config: TransformerConfig) -> None:
    """Let every router of the model take its experts from the packed parameters of its microbatch, where they hold some.

    Raises ValueError when the model has no router, or a setting runs routers past the replay.
    """
    key = "algorithm.router_replay"
    if not config.num_moe_experts:
        raise ValueError(f"{key}: this model has no experts; set it to off")
    if config.moe_router_fusion:
        raise ValueError(f"{key}: does not go with trainer.megatron.transformer.moe_router_fusion; set that to false")
    modules = set(config.recompute_modules or ()) if config.recompute_granularity == "selective" else set()
    if modules & {"moe", "mlp"}:
        raise ValueError(
            f"{key}: does not go with trainer.megatron.transformer.recompute_modules {sorted(modules & {'moe', 'mlp'})}, "
            "which runs routers again outside of their layer; use trainer.recompute=full or other modules"
        )
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            for router in _routers(layer):
                choice = router.router_replay = ReplayedChoice()
                layer.register_forward_pre_hook(_arm(choice, router.layer_number), with_kwargs=True)


@dataclass(frozen=True, slots=True)
class RouterRows:
    """Which tokens of a microbatch this rank's routers see: rows `first`, ... of all context-parallel ranks' rows."""

    row_of_T: np.ndarray
    first: int
    num_rows: int

    @classmethod
    def of(cls, inputs: PackedInputs, layout: ParallelLayout) -> RouterRows:
        """Sequence parallelism cuts the rows of a context-parallel rank over its tensor-parallel ranks."""
        num_rows = len(inputs.token_ids_N) // layout.tp
        place = parallel_state.get_context_parallel_rank() * layout.tp + parallel_state.get_tensor_model_parallel_rank()
        return cls(inputs.row_of_T, place * num_rows, num_rows)

    def by_layer(self, experts_TYK: np.ndarray, device: torch.device) -> dict[int, Tensor]:
        """Megatron's layer number -> int64 [N, K], -1 where unknown.

        A row that several tokens share (a shared prompt) takes the experts of the first of them that has any.
        """
        unknown = unknown_expert(experts_TYK.dtype)
        mine = self._tokens()[::-1]
        has_any = (experts_TYK[mine] != unknown).any(axis=(1, 2))
        mine = mine[np.argsort(has_any, kind="stable")]  # what shall stay is written last
        experts_NYK = np.full((self.num_rows, *experts_TYK.shape[1:]), unknown, dtype=experts_TYK.dtype)
        experts_NYK[self.row_of_T[mine] - self.first] = experts_TYK[mine]
        wide = np.where(experts_NYK == unknown, -1, experts_NYK.astype(np.int64))
        layers = torch.from_numpy(np.ascontiguousarray(wide.transpose(1, 0, 2))).to(device)
        return {number + 1: experts_NK for number, experts_NK in enumerate(layers)}

    def of_tokens(self, chosen: Mapping[int, Tensor], shape: RoutingShape) -> np.ndarray:
        """`chosen` as [T, Y, K]; unknown where another rank computed the token or holds the layer."""
        experts_TYK = shape.empty(len(self.row_of_T))
        mine = self._tokens()
        for layer_number, chosen_NK in chosen.items():
            experts_TYK[mine, layer_number - 1] = chosen_NK.cpu().numpy()[self.row_of_T[mine] - self.first]
        return experts_TYK

    def _tokens(self) -> np.ndarray:
        return np.flatnonzero((self.row_of_T >= self.first) & (self.row_of_T < self.first + self.num_rows))


def chosen_by_layer(chunk: torch.nn.Module) -> dict[int, Tensor]:
    """Megatron's layer number -> the experts [N, K] that the chunk's last forward pass visited."""
    return {
        router.layer_number: router.router_replay.chosen_NK for layer in chunk.decoder.layers for router in _routers(layer)
    }


def _arm(choice: ReplayedChoice, layer_number: int) -> Callable[..., None]:
    def before_layer(_layer: torch.nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        choice.experts_NK = kwargs["packed_seq_params"].experts_by_layer.get(layer_number)

    return before_layer


def _routers(layer: torch.nn.Module) -> Iterator[Any]:
    return (module for module in layer.modules() if isinstance(module, TopKRouter))
