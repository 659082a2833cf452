"""What a model family declares, once, for the trainer, resharding, checkpoints and the planner alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from megatron_rl.types.routing import RoutingShape


class Shard(Enum):
    """How a parameter is split over tensor-parallel ranks."""

    COLUMN = "column"  # over rows of the weight (output features)
    ROW = "row"  # over columns of the weight (input features)
    VOCAB = "vocab"  # over rows of a padded vocabulary
    EXPERT_COLUMN = "expert_column"  # one expert; its rows over the expert-TP group
    EXPERT_ROW = "expert_row"  # one expert; its columns over the expert-TP group
    REPLICATED = "replicated"  # the same on every rank


class Fused(Enum):
    """Which Hugging Face tensors one Megatron (and engine) parameter is made of."""

    QKV = "qkv"  # q, k, v: Megatron interleaves per KV group, the engine stacks [q; k; v] of its heads
    GATE_UP = "gate_up"  # gate, up: both stack [gate; up] per rank


@dataclass(frozen=True, slots=True)
class ModelDims:
    """The sizes of one model. Every weight shape follows from them and the family's rules."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    ffn_size: int
    """Intermediate size of a dense MLP (unused when every layer is MoE)."""
    num_experts: int
    """0: dense."""
    top_k: int
    moe_ffn_size: int
    norm_epsilon: float
    rope_theta: float
    max_positions: int
    tied_embeddings: bool
    qk_norm: bool
    norm_topk_prob: bool
    """Renormalise the probabilities of the chosen experts to sum 1."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    num_dense_layers: int = 0
    """The first layers of a MoE model that are dense."""
    shared_ffn_size: int = 0
    """Intermediate size of the experts that every token visits; 0: none."""
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    """Above 0: latent attention (MLA); `head_dim` is then that of queries and keys, rotary part included."""
    rope_head_dim: int = 0
    value_head_dim: int = 0

    @property
    def dense_layers(self) -> range:
        return range(self.num_dense_layers if self.num_experts else self.num_layers)

    @property
    def moe_layers(self) -> range:
        return range(self.num_dense_layers, self.num_layers if self.num_experts else self.num_dense_layers)

    @property
    def routing(self) -> RoutingShape:
        """Raises ValueError for a model without experts."""
        if not self.num_experts:
            raise ValueError("algorithm.router_replay: this model has no experts; set it to off")
        return RoutingShape(self.num_layers, self.top_k, self.num_experts, self.num_dense_layers)


@dataclass(frozen=True, slots=True)
class ParamRule:
    """One parameter, or one per `{layer}` and `{expert}` (global indices), on all three sides.

    `megatron_name` is the name under Megatron's local layer spec; `te_name` the one under the Transformer Engine spec
    (None: the same). `hf_names` are the Hugging Face tensors that it holds, in fusion order. `engine_name` is SGLang's;
    None marks a second copy that only Megatron holds (tied embeddings on the last pipeline stage). `when` says for which
    dims the parameter exists, `layers` in which layers (None: in all).

    Where one engine parameter is made of several of Megatron's, `engine_offset` gives the rows of it that come before this
    one. `over_attention_tp`: the engine splits it over the ranks of one attention copy, which are fewer than all under
    data-parallel attention. `te_shard` and `engine_shard` are the splits under the Transformer Engine spec and in the
    engine, where they differ from `shard`.
    """

    megatron_name: str
    hf_names: tuple[str, ...]
    engine_name: str | None
    shard: Shard
    fused: Fused | None = None
    te_name: str | None = None
    when: Callable[[ModelDims], bool] | None = None
    layers: Callable[[ModelDims], range] | None = None
    engine_offset: Callable[[ModelDims], int] | None = None
    over_attention_tp: bool = False
    te_shard: Shard | None = None
    engine_shard: Shard | None = None

    @property
    def is_expert(self) -> bool:
        return self.shard in (Shard.EXPERT_COLUMN, Shard.EXPERT_ROW)

    @property
    def is_replicated(self) -> bool:
        return self.shard is Shard.REPLICATED

    @property
    def is_layered(self) -> bool:
        return "{layer}" in self.megatron_name

    @property
    def is_on_first_stage(self) -> bool:
        """For parameters outside the layers: the embedding opens the pipeline, everything else closes it."""
        return self.megatron_name.startswith("embedding.")

    def layers_in(self, dims: ModelDims) -> range:
        """The global layers that have this parameter; one entry for a parameter outside the layers."""
        if not self.is_layered:
            return range(1)
        return range(dims.num_layers) if self.layers is None else self.layers(dims)

    def under(self, spec: str) -> ParamRule:
        """This rule as Megatron's layer spec `spec` ("local" or "te") splits it."""
        return replace(self, shard=self.te_shard) if spec == "te" and self.te_shard else self

    def in_engine(self) -> ParamRule:
        """This rule as the engine splits it."""
        return replace(self, shard=self.engine_shard) if self.engine_shard else self

    def name_in_megatron(self, layer: int = 0, expert: int = 0, *, spec: str = "local") -> str:
        """The name inside one model chunk: `layer` counts within the chunk, `expert` within the expert-parallel rank."""
        template = self.te_name if spec == "te" and self.te_name else self.megatron_name
        return template.format(layer=layer, expert=expert)


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A family of architectures.

    `dims_from_hf` reads config.json's dictionary and `hf_from_dims` writes it; `shape_of` gives the Hugging Face shape of
    a template in `hf_names`; `debug_dims` is a tiny model whose sizes are all unequal, so that a transpose cannot pass.
    """

    name: str
    hf_architectures: tuple[str, ...]
    dims_from_hf: Callable[[Mapping[str, Any]], ModelDims]
    hf_from_dims: Callable[[ModelDims], dict[str, Any]]
    params: tuple[ParamRule, ...]
    shape_of: Callable[[str, ModelDims], tuple[int, ...]]
    debug_dims: ModelDims

    def rules_for(self, dims: ModelDims) -> tuple[ParamRule, ...]:
        """The rules that exist for these dims, in declaration order."""
        return tuple(rule for rule in self.params if (rule.when is None or rule.when(dims)) and len(rule.layers_in(dims)))
