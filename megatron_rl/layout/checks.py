"""Checks that need model sizes: each returns (key path, reason) pairs and changes nothing."""

from __future__ import annotations

from typing import Protocol

from megatron_rl.types.layout import ParallelLayout


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
    def num_experts(self) -> int: ...


def _not_divisible(key: str, size: int, what: str, count: int) -> tuple[str, str]:
    possible = ", ".join(str(divisor) for divisor in range(1, min(count, 64) + 1) if count % divisor == 0)
    return key, f"{size} does not divide {what} ({count}); possible: {possible}"


def check_trainer_layout(
    dims: SizedModel, layout: ParallelLayout, section: str = "trainer.layout"
) -> list[tuple[str, str]]:
    """Sizes of the model that a Megatron layout (of `section`) does not divide, or combinations that Megatron refuses."""
    problems: list[tuple[str, str]] = []
    base = f"{section}."
    for what, count in (("the query heads", dims.num_heads), ("the key-value heads", dims.num_kv_heads)):
        if count % layout.tp:
            problems.append(_not_divisible(base + "tp", layout.tp, what, count))
    num_chunks = layout.pp * layout.virtual_pp
    if dims.num_layers % num_chunks:
        key = base + ("virtual_pp" if layout.virtual_pp > 1 else "pp")
        problems.append(_not_divisible(key, num_chunks, "the layers", dims.num_layers))
    if layout.virtual_pp > 1 and layout.pp == 1:
        problems.append((base + "virtual_pp", f"needs pp of at least 2; set {base}virtual_pp=1"))
    if dims.num_experts:
        if dims.num_experts % layout.ep:
            problems.append(_not_divisible(base + "ep", layout.ep, "the experts", dims.num_experts))
        if dims.moe_ffn_size % layout.etp:
            problems.append(_not_divisible(base + "etp", layout.etp, "moe_intermediate_size", dims.moe_ffn_size))
    else:
        if layout.ep > 1:
            problems.append((base + "ep", f"{layout.ep} but the model has no experts; set it to 1"))
        if dims.ffn_size % layout.tp:
            problems.append(_not_divisible(base + "tp", layout.tp, "intermediate_size", dims.ffn_size))
    return problems


def check_engine_layout(dims: SizedModel, tp: int, key: str) -> list[tuple[str, str]]:
    """Sizes that the engine's tensor parallelism does not divide; `key` is the setting that chose `tp`."""
    problems: list[tuple[str, str]] = []
    if dims.num_heads % tp:
        problems.append(_not_divisible(key, tp, "the query heads", dims.num_heads))
    if dims.num_kv_heads % tp and tp % dims.num_kv_heads:
        problems.append((key, f"{tp} neither divides nor is a multiple of the key-value heads ({dims.num_kv_heads})"))
    size, what = (dims.moe_ffn_size, "moe_intermediate_size") if dims.num_experts else (dims.ffn_size, "intermediate_size")
    if size % tp:
        problems.append(_not_divisible(key, tp, what, size))
    return problems
