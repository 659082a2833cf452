"""Checks that need model sizes: each returns (key path, reason) pairs and changes nothing."""

from __future__ import annotations

from typing import Protocol

from megatron_rl.types.layout import EngineLayout, ParallelLayout


class SizedModel(Protocol):
    """What a check needs of a model's dims."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def moe_ffn_size(self) -> int: ...
    @property
    def shared_ffn_size(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_dense_layers(self) -> int: ...


def _not_divisible(key: str, size: int, what: str, count: int) -> tuple[str, str]:
    possible = ", ".join(str(divisor) for divisor in range(1, min(count, 64) + 1) if count % divisor == 0)
    return key, f"{size} does not divide {what} ({count}); possible: {possible}"


def _mlp_sizes(dims: SizedModel) -> list[tuple[str, int]]:
    """The intermediate sizes that are split over all tensor-parallel ranks: of dense layers and of shared experts."""
    sizes = []
    if dims.num_dense_layers or not dims.num_experts:
        sizes.append(("intermediate_size", dims.ffn_size))
    if dims.shared_ffn_size:
        sizes.append(("the shared experts' intermediate size", dims.shared_ffn_size))
    return sizes


def check_trainer_layout(
    dims: SizedModel, layout: ParallelLayout, section: str = "trainer.layout"
) -> list[tuple[str, str]]:
    """Sizes of the model that a Megatron layout (of `section`) does not divide, or combinations that Megatron refuses."""
    problems: list[tuple[str, str]] = []
    base = f"{section}."
    heads = (("the query heads", dims.num_heads), ("the key-value heads", dims.num_kv_heads))
    for what, count in (*heads, *_mlp_sizes(dims)):
        if count % layout.tp:
            problems.append(_not_divisible(base + "tp", layout.tp, what, count))
    problems += _check_pipeline(dims, layout, base)
    if dims.num_experts:
        if dims.num_experts % layout.ep:
            problems.append(_not_divisible(base + "ep", layout.ep, "the experts", dims.num_experts))
        if dims.moe_ffn_size % layout.etp:
            problems.append(_not_divisible(base + "etp", layout.etp, "moe_intermediate_size", dims.moe_ffn_size))
    elif layout.ep > 1:
        problems.append((base + "ep", f"{layout.ep} but the model has no experts; set it to 1"))
    return problems


def _check_pipeline(dims: SizedModel, layout: ParallelLayout, base: str) -> list[tuple[str, str]]:
    problems: list[tuple[str, str]] = []
    num_chunks, split = layout.pp * layout.virtual_pp, layout.layers_per_chunk
    if split is None and dims.num_layers % num_chunks:
        key, reason = _not_divisible(
            base + ("virtual_pp" if layout.virtual_pp > 1 else "pp"), num_chunks, "the layers", dims.num_layers
        )
        problems.append((key, f"{reason}; or give {base}layers_per_chunk"))
    if split is not None and len(split) != num_chunks:
        reason = (
            f"expected one entry per chunk (pp {layout.pp} x virtual_pp {layout.virtual_pp} = {num_chunks}), got {len(split)}"
        )
        problems.append((base + "layers_per_chunk", reason))
    elif split is not None and (sum(split) != dims.num_layers or min(split) < 0):
        reason = f"expected counts that add up to the {dims.num_layers} layers, got {list(split)}"
        problems.append((base + "layers_per_chunk", reason))
    if layout.virtual_pp > 1 and layout.pp == 1:
        problems.append((base + "virtual_pp", f"needs pp of at least 2; set {base}virtual_pp=1"))
    return problems


def check_engine_layout(dims: SizedModel, layout: EngineLayout, section: str) -> list[tuple[str, str]]:
    """Sizes that the engine's parallelism does not divide; `section` is the one whose settings chose it."""
    tp_key, ep_key, dp_key = (f"{section}.{name}" for name in ("tp_size", "ep_size", "attn_dp_size"))
    problems: list[tuple[str, str]] = []
    for key, size in ((ep_key, layout.ep), (dp_key, layout.attention_dp)):
        if layout.tp % size:
            problems.append(_not_divisible(key, size, "the engine's ranks", layout.tp))
    if problems:
        return problems
    attention_key = dp_key if layout.attention_dp > 1 else tp_key
    if dims.num_heads % layout.attention_tp:
        problems.append(_not_divisible(attention_key, layout.attention_tp, "the query heads", dims.num_heads))
    if dims.num_kv_heads % layout.attention_tp and layout.attention_tp % dims.num_kv_heads:
        reason = f"{layout.attention_tp} neither divides nor is a multiple of the key-value heads ({dims.num_kv_heads})"
        problems.append((attention_key, reason))
    for what, size in _mlp_sizes(dims):
        if size % layout.tp:
            problems.append(_not_divisible(tp_key, layout.tp, what, size))
    if not dims.num_experts:
        if layout.ep > 1:
            problems.append((ep_key, f"{layout.ep} but the model has no experts; set it to 1"))
        return problems
    if dims.num_experts % layout.ep:
        problems.append(_not_divisible(ep_key, layout.ep, "the experts", dims.num_experts))
    if dims.moe_ffn_size % layout.moe_tp:
        key = ep_key if layout.ep > 1 else tp_key
        problems.append(_not_divisible(key, layout.moe_tp, "moe_intermediate_size", dims.moe_ffn_size))
    return problems


def check_router_replay(dims: SizedModel, mode: str) -> list[tuple[str, str]]:
    """Replay needs a model that routes."""
    if mode == "off" or dims.num_experts:
        return []
    return [("algorithm.router_replay", f"{mode} needs a model with experts, this one has none; expected off")]


def check_context(max_positions: int, max_prompt_tokens: int, max_new_tokens: int, key: str) -> list[tuple[str, str]]:
    """A prompt and its answer must fit into the model's positions. `key`: where `max_new_tokens` stands."""
    room = max_positions - max_prompt_tokens
    if max_new_tokens <= room:
        return []
    reason = f"the model has {max_positions} positions, prompts take up to data.max_prompt_tokens={max_prompt_tokens} of them"
    return [(f"{key}.max_new_tokens", f"expected at most {max(room, 0)} ({reason}), got {max_new_tokens}")]
