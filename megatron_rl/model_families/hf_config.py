"""Reading a Hugging Face config.json's dictionary: what must be there, what may, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class UnsupportedModelError(ValueError):
    """A config.json that no family here can serve; the message is one line."""


def required(config: Mapping[str, Any], key: str) -> Any:
    """The value of `key`. Raises UnsupportedModelError when it is absent or null."""
    if config.get(key) is None:
        raise UnsupportedModelError(f"config.json: key '{key}' is missing (model_type {config.get('model_type')!r})")
    return config[key]


def optional(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of `key`, or `default` when it is absent or null."""
    value = config.get(key)
    return default if value is None else value


def rope_theta(config: Mapping[str, Any]) -> float:
    """The RoPE base, from transformers 4's `rope_theta` or transformers 5's `rope_parameters`; scaling is refused."""
    parameters = config.get("rope_parameters") or {}
    if parameters.get("rope_type", "default") != "default":
        raise UnsupportedModelError(f"config.json: rope_type {parameters['rope_type']!r} is not supported, only 'default'")
    return float(parameters.get("rope_theta", optional(config, "rope_theta", 10000.0)))


def single_token(config: Mapping[str, Any], key: str) -> int | None:
    """A token id; of a list (several end tokens) the first."""
    value = config.get(key)
    return value[0] if isinstance(value, list) else value


def reject_features(config: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    """Refuse a config whose value for a key differs from the only one supported (absent and null count as supported)."""
    for key, value in allowed.items():
        found = config.get(key)
        if found is not None and found != value:
            raise UnsupportedModelError(f"config.json: {key} = {found!r} is not supported, only {value!r}")
