"""GGUF files (llama.cpp's format, often quantised) as whole Hugging Face tensors, dequantised one at a time.

The file is memory-mapped: what is held at once is one tensor. Tensor names and the order of query and key rows follow
llama.cpp's converter (convert_hf_to_gguf.py), which interleaves the two rotary halves of each head for `llama`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import AutoTokenizer

from megatron_rl.checkpoint.hf_folder import CheckpointError
from megatron_rl.layout.intervals import matrix_shape
from megatron_rl.model_families.declaration import ModelDims, ModelFamily
from megatron_rl.model_families.registry import get_family
from megatron_rl.types.layout import ShardInterval

FAMILY_OF = {"llama": "llama"}
"""GGUF's general.architecture -> the family that serves it."""

_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


class GgufSource:
    """A GGUF file as a `TensorSource`, with the family and dims that its header tells."""

    family: ModelFamily
    dims: ModelDims

    def __init__(self, path: str | Path) -> None:
        """Raises CheckpointError when the file is absent, is no GGUF file or holds a model that no family serves."""
        self._path = Path(path)
        if not self._path.is_file():
            raise CheckpointError(f"{path}: not found; expected a GGUF file")
        try:
            reader = GGUFReader(self._path)
        except (ValueError, IndexError, KeyError) as error:
            raise CheckpointError(f"{path}: cut short or not a GGUF file ({error})") from None
        self._fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture = self._field("general.architecture")
        if architecture not in FAMILY_OF:
            raise CheckpointError(f"{path}: architecture '{architecture}' is not supported; supported: {', '.join(FAMILY_OF)}")
        self.family = get_family(FAMILY_OF[architecture])
        self.dims = self.family.dims_from_hf(self._llama_config())

    def read(self, name: str, shape: tuple[int, ...], box: ShardInterval) -> torch.Tensor:
        """The box of a Hugging Face tensor in float32. Raises CheckpointError when it is absent or has another shape."""
        matrix = self.whole(name, shape).reshape(matrix_shape(shape))
        return matrix[box.global_row : box.global_row + box.num_rows, box.global_col : box.global_col + box.num_cols]

    def whole(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The whole Hugging Face tensor in float32."""
        own_name = gguf_name(name)
        if own_name not in self._tensors:
            raise CheckpointError(f"{self._path}: tensor '{own_name}' ('{name}') is missing")
        tensor = self._tensors[own_name]
        found = tuple(int(size) for size in reversed(tensor.shape))  # GGUF counts the fastest dimension first
        if found != shape:
            raise CheckpointError(f"{self._path}: tensor '{own_name}' has shape {found}, expected {shape}")
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).reshape(shape)
        if own_name.endswith("attn_q.weight"):
            return _split_rotary_halves(values, self.dims.num_heads)
        if own_name.endswith("attn_k.weight"):
            return _split_rotary_halves(values, self.dims.num_kv_heads)
        return values

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer that the header carries, with its chat template, as Hugging Face files."""
        AutoTokenizer.from_pretrained(self._path.parent, gguf_file=self._path.name).save_pretrained(folder)

    def _llama_config(self) -> dict[str, Any]:
        """The header as the dictionary of a config.json. Features that the family does not have are refused."""
        scaling = self._fields.get("llama.rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in self._tensors:
            raise CheckpointError(f"{self._path}: scaled RoPE is not supported")
        hidden, num_heads = self._field("llama.embedding_length"), self._field("llama.attention.head_count")
        return {
            "model_type": "llama",
            "num_hidden_layers": self._field("llama.block_count"),
            "hidden_size": hidden,
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._fields.get("llama.attention.head_count_kv", num_heads),
            "head_dim": self._fields.get("llama.attention.key_length", hidden // num_heads),
            "vocab_size": len(self._field("tokenizer.ggml.tokens")),
            "intermediate_size": self._field("llama.feed_forward_length"),
            "rms_norm_eps": _shortest(self._field("llama.attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self._fields.get("llama.rope.freq_base", 10000.0)),
            "max_position_embeddings": self._field("llama.context_length"),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self._fields.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._fields.get("tokenizer.ggml.eos_token_id"),
        }

    def _field(self, key: str) -> Any:
        if key not in self._fields:
            raise CheckpointError(f"{self._path}: the header has no '{key}'")
        return self._fields[key]


def gguf_name(hf_name: str) -> str:
    """GGUF's name of a Hugging Face tensor. Raises CheckpointError for one that GGUF does not have."""
    if hf_name in _OUTER:
        return _OUTER[hf_name]
    prefix, _, rest = hf_name.removeprefix("model.layers.").partition(".")
    if not hf_name.startswith("model.layers.") or rest not in _LAYER:
        raise CheckpointError(f"tensor '{hf_name}' has no GGUF counterpart")
    return f"blk.{prefix}.{_LAYER[rest]}"


def _split_rotary_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head: from (x0, y0, x1, y1, ...), as llama.cpp rotates pairs, to (x0, x1, ..., y0, y1, ...)."""
    rows, cols = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, cols).transpose(1, 2).reshape(rows, cols)


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 9.999999747378752e-06 -> 1e-05."""
    return float(f"{value:.7g}")
