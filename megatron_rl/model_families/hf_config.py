"""Reading a Hugging Face config.json's dictionary: what must be there, what may, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.model_families.declaration import ModelDims


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


def decoder_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelDims` that every decoder family reads from the same keys."""
    num_heads, hidden = required(config, "num_attention_heads"), required(config, "hidden_size")
    return {
        "num_layers": required(config, "num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": num_heads,
        "num_kv_heads": optional(config, "num_key_value_heads", num_heads),
        "head_dim": optional(config, "head_dim", hidden // num_heads),
        "vocab_size": required(config, "vocab_size"),
        "norm_epsilon": optional(config, "rms_norm_eps", 1e-6),
        "rope_theta": rope_theta(config),
        "tied_embeddings": optional(config, "tie_word_embeddings", False),
        "bos_token_id": single_token(config, "bos_token_id"),
        "eos_token_id": single_token(config, "eos_token_id"),
    }


def hf_decoder_keys(dims: ModelDims) -> dict[str, Any]:
    """The config.json keys that every decoder family writes alike: the inverse of `decoder_fields`."""
    return {
        "hidden_act": "silu",
        "num_hidden_layers": dims.num_layers,
        "hidden_size": dims.hidden_size,
        "num_attention_heads": dims.num_heads,
        "num_key_value_heads": dims.num_kv_heads,
        "head_dim": dims.head_dim,
        "vocab_size": dims.vocab_size,
        "intermediate_size": dims.ffn_size,
        "rms_norm_eps": dims.norm_epsilon,
        "rope_theta": dims.rope_theta,
        "max_position_embeddings": dims.max_positions,
        "tie_word_embeddings": dims.tied_embeddings,
        "bos_token_id": dims.bos_token_id,
        "eos_token_id": dims.eos_token_id,
    }
