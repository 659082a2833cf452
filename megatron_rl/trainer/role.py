"""What every trained model of a trainer rank does, whatever its head: build, weights in and out, score, optimize.

Shape suffixes: _T packed tokens (token-aligned), _N rows of this rank, _K scored predictions, _c numbers that the head gives
a prediction, H hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.config.sections import OptimizerSection, TrainerSection
from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.model_families.shards import padded_vocab
from megatron_rl.platforms.platform import Platform, free_cached_memory
from megatron_rl.scheduling.colocation import TRAINER_STATES
from megatron_rl.trainer.attention import pack_for_local_attention, pack_for_transformer_engine
from megatron_rl.trainer.layer_specs import shares_prompts, uses_transformer_engine
from megatron_rl.trainer.model import DecoderModel, build_model_chunks
from megatron_rl.trainer.model_config import DTYPES, plan_ddp_config, plan_optimizer_config, plan_transformer_config
from megatron_rl.trainer.objective import Objective, sum_metrics
from megatron_rl.trainer.offload import ParkedState, gradients_of, optimizer_state_of, parameters_of
from megatron_rl.trainer.optimizer import build_optimizer, build_schedule, forget_moments
from megatron_rl.trainer.packed_inputs import PackedInputs, plan_packed_inputs
from megatron_rl.trainer.router_replay import RouterRows, chosen_by_layer, install_router_replay
from megatron_rl.types.layout import ParallelLayout
from megatron_rl.types.training import Microbatch


@dataclass(frozen=True, slots=True)
class _Prepared:
    """One microbatch on the device."""

    microbatch: Microbatch
    token_ids: Tensor  # [1, N]
    positions: Tensor  # [1, N]
    packed: Any
    scored_rows_K: Tensor
    target_ids_K: Tensor
    num_slots: int
    prediction_of_T: Tensor
    is_scored_T: Tensor
    router_rows: RouterRows
    chosen: dict[int, Tensor]  # by layer, filled by a scoring pass where routers can replay


class MegatronRole(ABC):
    """One rank of a trained model. `init_distributed` and `init_model_parallel` come first; every method is collective.

    A role scores token t from the hidden state that chose it: the last layer's row of the token before, which has seen
    the tokens up to t - 1 and not t. `num_optimizer_steps` is the length of the learning-rate schedule. A role that is not
    trained has neither gradients nor an optimizer: it scores.
    """

    model_class: ClassVar[type[DecoderModel]]
    is_head_split: ClassVar[bool]
    """Whether tensor-parallel ranks hold parts of the head, so that each gives a part of the hidden states' gradient."""

    @abstractmethod
    def _score_rows(self, model: Any, hidden_KH: Tensor, target_ids_K: Tensor) -> Tensor:
        """fp32 [K, c], the same on all tensor-parallel ranks; `target_ids_K` are the tokens that the rows chose."""

    def __init__(
        self,
        dims: ModelDims,
        dtype: str,
        trainer: TrainerSection,
        layout: ParallelLayout,
        platform: Platform,
        *,
        seed: int,
        vocab_multiple: int = 1,
        num_optimizer_steps: int = 1,
        replays_routing: bool = False,
        is_trained: bool = True,
    ) -> None:
        self.dims, self.trainer, self.layout, self.platform = dims, trainer, layout, platform
        self.uses_transformer_engine = uses_transformer_engine(trainer.layer_spec)
        self.shares_prompts = shares_prompts(trainer, layout, transformer_engine=self.uses_transformer_engine)
        torch_dtype = DTYPES[dtype]
        platform.prepare_torch(torch_dtype)
        platform.seed(seed)
        self.config = TransformerConfig(
            **plan_transformer_config(
                dims,
                trainer,
                layout,
                torch_dtype,
                on_cpu=platform.device.type == "cpu",
                transformer_engine=self.uses_transformer_engine,
            )
        )
        self.chunks: list[Any] = build_model_chunks(
            self.model_class,
            self.config,
            dims,
            padded_vocab(dims, layout.tp, vocab_multiple),
            transformer_engine=self.uses_transformer_engine,
            device=platform.device,
        )
        self.replays_routing = replays_routing
        if replays_routing:
            install_router_replay(self.chunks, self.config)
        self.ddp_chunks: list[Any] = self.chunks
        self.optimizer: Any = None
        if is_trained:
            self._build_optimizer(torch_dtype, num_optimizer_steps)

    def _build_optimizer(self, torch_dtype: torch.dtype, num_optimizer_steps: int) -> None:
        """Gradients, their reduction, the optimizer and its schedule."""
        trainer = self.trainer
        ddp_config = DistributedDataParallelConfig(**plan_ddp_config(trainer))
        self.ddp_chunks = [
            DistributedDataParallel(self.config, ddp_config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(self.chunks)
        ]
        optimizer_config = OptimizerConfig(**plan_optimizer_config(trainer, torch_dtype))
        self.optimizer = build_optimizer(optimizer_config, self.ddp_chunks, trainer.fused_optimizer)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        if ddp_config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.ddp_chunks]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self._schedule = build_schedule(self.optimizer, trainer.optimizer, num_optimizer_steps)
        self._parked = {state: ParkedState(keeps_values=state != "gradients") for state in TRAINER_STATES}

    # -- device memory ------------------------------------------------------------------------------------------------

    def offload(self, states: Sequence[str]) -> dict[str, int]:
        """Give the device memory of these states up; the bytes of each. Nothing that reads them may be called until
        `onload`. Gradients come back as zeros."""
        self.platform.synchronize()
        for chunk in self.ddp_chunks if "parameters" in states else ():
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)  # gathers that wait for the next forward pass
        num_bytes = {state: self._parked[state].offload(self._tensors_of(state)) for state in states}
        free_cached_memory(self.platform.device)
        return num_bytes

    def onload(self, states: Sequence[str]) -> None:
        """Take back what `offload` gave up."""
        for state in states:
            self._parked[state].onload()
        self.platform.synchronize()

    def _tensors_of(self, state: str) -> list[Tensor]:
        if state == "parameters":
            return parameters_of(self.ddp_chunks)
        if state == "gradients":
            return gradients_of(self.ddp_chunks)
        return optimizer_state_of(self.optimizer, self.ddp_chunks)

    # -- weights ------------------------------------------------------------------------------------------------------

    def chunk_parameters(self) -> list[dict[str, Tensor]]:
        """Per virtual chunk: Megatron's local names (layer and expert indices local) -> the weights that compute."""
        for ddp_chunk in self.ddp_chunks if self.optimizer is not None else ():
            if ddp_chunk.ddp_config.overlap_param_gather:
                ddp_chunk.start_param_sync(force_sync=True)
        return [{name: parameter.data for name, parameter in chunk.named_parameters()} for chunk in self.chunks]

    def load_parameters(self, chunks: Sequence[Mapping[str, Tensor]]) -> None:
        """Copy weights in, by the names of `chunk_parameters`, and renew the fp32 masters and Adam's moments.

        Raises ValueError when names or shapes differ.
        """
        own = self.chunk_parameters()
        if len(own) != len(chunks):
            raise ValueError(f"weights for {len(chunks)} model chunks were given, this rank has {len(own)}")
        for index, (mine, theirs) in enumerate(zip(own, chunks, strict=True)):
            if odd := sorted(mine.keys() ^ theirs.keys()):
                raise ValueError(f"model chunk {index}: parameter {odd[0]} is on one side only ({len(odd)} such names)")
            for name, parameter in mine.items():
                if parameter.shape != theirs[name].shape:
                    raise ValueError(f"{name}: expected shape {tuple(parameter.shape)}, got {tuple(theirs[name].shape)}")
                parameter.copy_(theirs[name])
        if self.optimizer is not None:
            self.optimizer.reload_model_params()
            forget_moments(self.optimizer)

    def begin_phase(self, section: OptimizerSection, num_optimizer_steps: int) -> None:
        """Start a new learning-rate schedule with fresh Adam moments (warm start, then RL)."""
        forget_moments(self.optimizer)
        self._schedule = build_schedule(self.optimizer, section, num_optimizer_steps)

    # -- scores -------------------------------------------------------------------------------------------------------

    def compute_scores(
        self,
        microbatches: Sequence[Microbatch],
        *,
        score_all: bool = False,
        experts_out: list[np.ndarray] | None = None,
    ) -> list[np.ndarray]:
        """Token-aligned float32 scores [T] (the head's first number) of each microbatch of this data-parallel rank,
        returned on all its ranks.

        0 outside the loss mask, or only on first tokens with `score_all`. `experts_out` receives per microbatch the
        experts [T, Y, K] that this rank's routers chose, unknown where other ranks did.
        """
        for chunk in self.ddp_chunks:
            chunk.eval()
        prepared = self._prepare_all(microbatches, score_all)
        with torch.no_grad():
            outputs = self._run(prepared, None, forward_only=True)
        if experts_out is not None:
            whole = prepared[: len(microbatches)]
            experts_out += [item.router_rows.of_tokens(item.chosen, self.dims.routing) for item in whole]
        for chunk in self.ddp_chunks:
            chunk.train()
        lengths = [microbatch.num_tokens for microbatch in microbatches]
        packed = torch.zeros(sum(lengths), dtype=torch.float32, device=self.platform.device)
        if outputs:
            packed = torch.cat(outputs)
        if self.layout.pp > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(packed, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        return [part.cpu().numpy() for part in packed.split(lengths)]

    def sum_over_data_parallel(self, statistics: np.ndarray) -> np.ndarray:
        """A small fp64 vector added over the data-parallel ranks, who hold different sequences."""
        total = torch.tensor(statistics, dtype=torch.float64, device=self.platform.device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.cpu().numpy()

    # -- training -----------------------------------------------------------------------------------------------------

    def _optimize(self, microbatches: Sequence[Microbatch], objective: Objective) -> dict[str, float]:
        """One optimizer step. Returns the same metrics on every rank.

        All data-parallel ranks bring equally many microbatches. Raises FloatingPointError, on every rank, when the
        gradient norm is not finite; weights and moments are those of before the step then.
        """
        for chunk in self.ddp_chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = self._run(self._prepare_all(microbatches, False), objective, forward_only=False)
        self._schedule.step(increment=1)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        metrics = self._reduce_metrics(parts)
        try:
            _, grad_norm, _ = self.optimizer.step()
        except FloatingPointError as error:
            raise FloatingPointError(f"{error} (metrics: {metrics})") from None
        return {**metrics, "grad_norm": float(grad_norm), "learning_rate": float(learning_rate)}

    def _reduce_metrics(self, parts: list[Mapping[str, tuple[Tensor, Tensor]]]) -> dict[str, float]:
        """Weighted means over microbatches and data-parallel ranks; context-parallel ranks computed the same ones."""
        metrics: dict[str, float] = {}
        if parts:
            totals = sum_metrics(parts)
            names = sorted(totals)
            pairs = torch.stack([totals[name] for name in names])
            dist.all_reduce(pairs, group=parallel_state.get_data_parallel_group())
            metrics = {name: total / max(weight, 1e-30) for name, (total, weight) in zip(names, pairs.tolist(), strict=True)}
        if self.layout.pp > 1:
            box = [metrics]
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast_object_list(box, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
            metrics = box[0]
        return metrics

    # -- forward and backward -----------------------------------------------------------------------------------------

    def _prepare_all(self, microbatches: Sequence[Microbatch], score_all: bool) -> list[_Prepared]:
        """All of them on the device, topped up with empty ones to what interleaved stages need."""
        whole = list(microbatches)
        multiple = self.layout.pp if self.layout.virtual_pp > 1 else 1
        whole += [empty_microbatch()] * (-len(whole) % multiple)
        if not whole:
            raise ValueError("no microbatch was given; a rank without samples brings empty ones")
        return [self._prepare(microbatch, score_all) for microbatch in whole]

    def _run(self, prepared: Sequence[_Prepared], objective: Objective | None, *, forward_only: bool) -> list[Any]:
        """Through Megatron's schedule. On the last stage: per microbatch the objective's metrics, or scores [T]."""
        iterators = [iter(prepared) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, objective=objective, num_microbatches=len(prepared)),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.ddp_chunks if len(self.chunks) > 1 else self.ddp_chunks[0],
            num_microbatches=len(prepared),
            seq_length=prepared[0].token_ids.shape[1] * self.layout.cp,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=objective is None,
        )

    def _prepare(self, microbatch: Microbatch, score_all: bool) -> _Prepared:
        device = self.platform.device
        inputs: PackedInputs = plan_packed_inputs(
            microbatch,
            tp=self.layout.tp,
            cp=self.layout.cp,
            cp_rank=parallel_state.get_context_parallel_rank(),
            score_all=score_all,
            share_prompts=self.shares_prompts,
        )
        if self.uses_transformer_engine:
            packed = pack_for_transformer_engine(inputs, device)
        else:
            packed = pack_for_local_attention(inputs, self.layout.cp, device)

        router_rows = RouterRows.of(inputs, self.layout)
        if self.replays_routing and microbatch.experts_TYK is not None:
            packed.experts_by_layer = router_rows.by_layer(microbatch.experts_TYK, device)

        def on_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        return _Prepared(
            microbatch=microbatch,
            token_ids=on_device(inputs.token_ids_N)[None],
            positions=on_device(inputs.positions_N)[None],
            packed=packed,
            scored_rows_K=on_device(inputs.scored_rows_K),
            target_ids_K=on_device(inputs.target_ids_K),
            num_slots=inputs.num_slots,
            prediction_of_T=on_device(inputs.prediction_of_T),
            is_scored_T=on_device(inputs.is_scored_T),
            router_rows=router_rows,
            chosen={},
        )

    def _forward_step(
        self,
        iterator: Iterator[_Prepared],
        chunk: Any,
        *,
        objective: Objective | None,
        num_microbatches: int,
    ) -> tuple[Tensor, Any]:
        item = next(iterator)
        output = chunk(
            input_ids=item.token_ids,
            position_ids=item.positions,
            attention_mask=None,
            packed_seq_params=item.packed,
        )
        model = chunk if self.optimizer is None else chunk.module
        if self.replays_routing and objective is None:
            item.chosen.update(chosen_by_layer(model))

        def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
            scores_Tc = self._score(model, hidden, item)
            if non_loss_data:
                return scores_Tc[:, 0]
            assert objective is not None
            share = objective(item.microbatch, *scores_Tc.unbind(1))
            # The schedule multiplies by cp and divides by the number of microbatches, gradient reduction divides by
            # dp * cp: what remains is the sum of all shares.
            return share.loss * (num_microbatches * self.layout.dp), share.metrics

        return output, finish

    def _score(self, model: Any, hidden: Tensor, item: _Prepared) -> Tensor:
        """Hidden states of the last stage [N (/ tp), 1, H] -> token-aligned scores [T, c]."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=self.is_head_split)
        elif self.is_head_split:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        scored_KH = hidden[:, 0].index_select(0, item.scored_rows_K)
        scores_Kc = self._score_rows(model, scored_KH, item.target_ids_K)
        slots_c = torch.nn.functional.pad(scores_Kc, (0, 0, 0, item.num_slots - len(scores_Kc)))
        if self.layout.cp > 1:
            # Every context-parallel rank computes the whole loss; each takes the gradient of its own rows alone.
            slots_c = gather_from_sequence_parallel_region(
                slots_c, tensor_parallel_output_grad=False, group=parallel_state.get_context_parallel_group()
            )
        return torch.where(item.is_scored_T[:, None], slots_c.index_select(0, item.prediction_of_T), 0.0)


def empty_microbatch() -> Microbatch:
    """No sequence, no token, and every token array that a loss may read."""
    nothing = np.zeros(0, dtype=np.float32)
    return Microbatch(
        token_ids_T=np.zeros(0, dtype=np.int64),
        cu_seqlens=np.zeros(1, dtype=np.int32),
        loss_mask_T=np.zeros(0, dtype=bool),
        versions_T=np.zeros(0, dtype=np.int32),
        rewards_S=nothing,
        is_correct_S=np.zeros(0, dtype=bool),
        sample_index_S=np.zeros(0, dtype=np.int32),
        token_arrays=dict.fromkeys(
            ("rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs", "values", "returns", "chosen"), nothing
        ),
    )
