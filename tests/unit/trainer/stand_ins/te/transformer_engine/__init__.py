"""A recording stand-in for Transformer Engine: the names that Megatron-Core 0.16 and 0.19 import, in plain torch, for one rank.

`RECORD` lists what was built and called. It computes what Transformer Engine computes, so results can be compared.
"""

from __future__ import annotations

import sys
import types
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

__version__ = "2.2.0"
RECORD: list[tuple[str, dict[str, Any]]] = []


def _weight(rows: int, cols: int, options: dict[str, Any]) -> nn.Parameter:
    weight = nn.Parameter(torch.empty(rows, cols, dtype=options["params_dtype"], device=options["device"]))
    options["init_method"](weight.data)
    return weight


class Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__()
        RECORD.append(("Linear", {"in": in_features, "out": out_features}))
        self.weight = _weight(out_features, in_features, options)
        self.parallel_mode = options["parallel_mode"]

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return linear(x, self.weight)


class LayerNormLinear(nn.Module):
    def __init__(self, in_features: int, out_features: int, eps: float, **options: Any) -> None:
        super().__init__()
        RECORD.append(("LayerNormLinear", {"in": in_features, "out": out_features, "norm": options["normalization"]}))
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=options["params_dtype"]))
        self.weight = _weight(out_features, in_features, options)
        self.eps = eps

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return linear(rms_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps), self.weight)


class GroupedLinear(nn.Module):
    def __init__(self, num_gemms: int, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__()
        RECORD.append(("GroupedLinear", {"num_gemms": num_gemms, "in": in_features, "out": out_features}))
        self.num_gemms = num_gemms
        for index in range(num_gemms):
            setattr(self, f"weight{index}", _weight(out_features, in_features, options))

    def forward(self, x: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        parts = x.split(m_splits)
        return torch.cat([linear(part, getattr(self, f"weight{index}")) for index, part in enumerate(parts)])


class RMSNorm(nn.Module):
    def __init__(self, eps: float, **options: Any) -> None:
        super().__init__()
        size = options["normalized_shape"] if "normalized_shape" in options else options["hidden_size"]  # 0.19, 0.16
        RECORD.append(("RMSNorm", {"size": size}))
        self.weight = nn.Parameter(torch.ones(size, dtype=options["params_dtype"]))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


class DotProductAttention(nn.Module):
    def __init__(self, num_attention_heads: int, kv_channels: int, **_options: Any) -> None:
        super().__init__()
        RECORD.append(("DotProductAttention", {"heads": num_attention_heads, "kv_channels": kv_channels}))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        bounds = options["cu_seqlens_q_padded"].tolist()
        RECORD.append(("attention", {"mask": options["attn_mask_type"], "format": options["qkv_format"], "cu_seqlens": bounds}))
        repeats = query.shape[1] // key.shape[1]
        outputs = []
        for start, stop in pairwise(bounds):
            q, k, v = (
                part[start:stop].transpose(0, 1)
                for part in (query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1))
            )
            outputs.append(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1))
        return torch.cat(outputs)


def apply_rotary_pos_emb(t: Tensor, freqs: Tensor, *, cu_seqlens: Tensor, **options: Any) -> Tensor:
    RECORD.append(("rope", {"format": options["tensor_format"], "fused": options["fused"]}))
    lengths = cu_seqlens.diff().tolist()
    angles = torch.cat([freqs[:length, 0] for length in lengths])
    half = torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1)
    return t * angles.cos().to(t.dtype) + half * angles.sin().to(t.dtype)


class FusedAdam(torch.optim.AdamW):
    def __init__(self, params: Any, *, adam_w_mode: bool, **options: Any) -> None:
        RECORD.append(("FusedAdam", {"adam_w_mode": adam_w_mode}))
        super().__init__(params, **options)


def multi_tensor_applier(operation: Any, _overflow: Tensor, lists: list[list[Tensor]], *args: Any) -> Any:
    return operation(lists, *args)


def multi_tensor_l2norm(lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    RECORD.append(("multi_tensor_l2norm", {"tensors": len(lists[0])}))
    return torch.stack([tensor.norm() for tensor in lists[0]]).norm().reshape(1), None


def multi_tensor_scale(lists: list[list[Tensor]], scale: float) -> None:
    RECORD.append(("multi_tensor_scale", {"tensors": len(lists[0])}))
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_scale_tensor(lists: list[list[Tensor]], scale: Tensor) -> None:
    multi_tensor_scale(lists, float(scale))


def _module(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(f"{__name__}.{name}")
    module.__dict__.update(names)
    sys.modules[module.__name__] = module
    return module


def _empty(name: str) -> type:
    return type(name, (), {})


pytorch = _module(
    "pytorch",
    __path__=[],
    Linear=Linear,
    LayerNormLinear=LayerNormLinear,
    GroupedLinear=GroupedLinear,
    RMSNorm=RMSNorm,
    DotProductAttention=DotProductAttention,
    distributed=_module(
        "pytorch.distributed",
        CudaRNGStatesTracker=_empty("CudaRNGStatesTracker"),
        activation_recompute_forward=None,
        checkpoint=None,
    ),
    ops=types.SimpleNamespace(Sequential=_empty("Sequential"), FusibleOperation=_empty("FusibleOperation")),
    fp8=_module("pytorch.fp8", FP8GlobalStateManager=_empty("FP8GlobalStateManager"), fp8_autocast=None, fp8_model_init=None),
    tensor=_module("pytorch.tensor", __path__=[], QuantizedTensor=_empty("QuantizedTensor")),
    attention=_module("pytorch.attention", apply_rotary_pos_emb=apply_rotary_pos_emb),
    optimizers=_module(
        "pytorch.optimizers",
        FusedAdam=FusedAdam,
        FusedSGD=torch.optim.SGD,
        multi_tensor_applier=multi_tensor_applier,
        multi_tensor_l2norm=multi_tensor_l2norm,
        multi_tensor_scale=multi_tensor_scale,
        multi_tensor_scale_tensor=multi_tensor_scale_tensor,
    ),
)
common = _module("common", recipe=types.SimpleNamespace(DelayedScaling=_empty("DelayedScaling")))
