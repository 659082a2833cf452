"""The decoder as Megatron builds it, ending in hidden states instead of logits."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.trainer.attention import PackedSequences
from megatron_rl.trainer.layer_specs import build_block_spec

Model = TypeVar("Model", bound="DecoderModel")


class DecoderModel(GPTModel):
    """A `GPTModel` whose last stage returns hidden states: each role makes its own numbers from them."""

    def _postprocess(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return hidden_states

    def _preprocess(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        prepared = super()._preprocess(*args, **kwargs)
        packed = kwargs.get("packed_seq_params")
        if not isinstance(packed, PackedSequences):
            return prepared
        # [longest, 1, 1, d] by position -> [N, 1, d] by row, which Megatron's unpacked rotary path broadcasts over heads.
        decoder_input, frequencies, *rest = prepared
        return (decoder_input, frequencies[:, 0].index_select(0, packed.positions_N), *rest)


class PolicyModel(DecoderModel):
    """Ends in the vocabulary, from which log-probs are made in chunks (`logprobs`)."""

    def output_weight(self) -> Tensor:
        """The vocabulary shard [V / tp, H] that makes logits, on the last stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


class ValueModel(DecoderModel):
    """Ends in one number: `value_head` [1, H], the same on every tensor-parallel rank, stands in place of the vocabulary."""

    def __init__(self, *, config: TransformerConfig, share_embeddings_and_output_weights: bool, **kwargs: Any) -> None:
        super().__init__(config=config, share_embeddings_and_output_weights=False, **kwargs)
        if self.post_process:
            del self.output_layer
            self.value_head = torch.nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)

    def values(self, hidden_KH: Tensor) -> Tensor:
        """fp32 [K]."""
        return hidden_KH.float() @ self.value_head.weight[0].float()


def build_model_chunks(
    model_class: type[Model],
    config: TransformerConfig,
    dims: ModelDims,
    padded_vocab_size: int,
    *,
    transformer_engine: bool,
    device: torch.device,
) -> list[Model]:
    """This rank's chunks of the model, one per virtual pipeline stage. `parallel_state` must be initialised."""
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    chunks = []
    for index in range(num_chunks):
        vp_stage = index if num_chunks > 1 else None
        chunk = model_class(
            config=config,
            transformer_layer_spec=build_block_spec(config, transformer_engine=transformer_engine, vp_stage=vp_stage),
            vocab_size=padded_vocab_size,
            max_sequence_length=dims.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=dims.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=dims.rope_theta,
            vp_stage=vp_stage,
        )
        chunks.append(chunk.to(device))
    return chunks
