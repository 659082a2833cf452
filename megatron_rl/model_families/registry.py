"""The table of families: one line each."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.model_families import deepseek_v3, llama, qwen3_moe
from megatron_rl.model_families.declaration import ModelDims, ModelFamily
from megatron_rl.model_families.hf_config import UnsupportedModelError

FAMILIES: dict[str, ModelFamily] = {
    "qwen3_moe": qwen3_moe.FAMILY,
    "llama": llama.FAMILY,
}

DECLARED_ONLY: dict[str, ModelFamily] = {
    "deepseek_v3": deepseek_v3.FAMILY,
}
"""Families that plans and checkpoint arithmetic know, but that neither trainer nor engine builds yet."""


def get_family(name: str) -> ModelFamily:
    """The family of that name, to be trained. Raises UnsupportedModelError naming the nearest."""
    if name in FAMILIES:
        return FAMILIES[name]
    if name in DECLARED_ONLY:
        raise UnsupportedModelError(
            f"model.family: '{name}' is declared for plans (megatron-rl reshard-plan) only, not trained"
        )
    near = difflib.get_close_matches(name, FAMILIES, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(FAMILIES)}"
    raise UnsupportedModelError(f"model.family: '{name}' is unknown{hint}")


def declared_family(name: str) -> ModelFamily:
    """The family of that name, trained or only declared. Raises UnsupportedModelError naming the nearest."""
    return DECLARED_ONLY[name] if name in DECLARED_ONLY else get_family(name)


def family_of(config: Mapping[str, Any], *, declared_too: bool = False) -> ModelFamily:
    """The family that serves a config.json's `architectures`."""
    architectures = config.get("architectures") or []
    families = FAMILIES | DECLARED_ONLY if declared_too else FAMILIES
    for family in families.values():
        if set(architectures) & set(family.hf_architectures):
            return family
    known = ", ".join(name for family in families.values() for name in family.hf_architectures)
    raise UnsupportedModelError(f"config.json: architectures {architectures} are not supported; supported: {known}")


def load_dims(folder: str | Path, *, declared_too: bool = False) -> tuple[ModelFamily, ModelDims]:
    """Family and dims of a Hugging Face folder. Raises UnsupportedModelError naming the file when it is not one.

    `declared_too`: also of the families that are not trained.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModelError(f"{path}: not found; model.path must be a Hugging Face model folder") from None
    except json.JSONDecodeError as error:
        raise UnsupportedModelError(f"{path}: not valid JSON ({error})") from None
    family = family_of(config, declared_too=declared_too)
    return family, family.dims_from_hf(config)
