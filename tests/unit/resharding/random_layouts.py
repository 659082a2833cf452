"""Random models and layouts: all sizes unequal where they can be, every axis used, divisible where it must be."""

from __future__ import annotations

import dataclasses
import math
import random

from megatron_rl.model_families.registry import declared_family
from megatron_rl.types.layout import EngineLayout, ParallelLayout


@dataclasses.dataclass(frozen=True)
class Case:
    family: str
    dims: object
    layout: ParallelLayout
    engine: EngineLayout
    vocab_multiple: int
    relay: bool
    cut_rows: int


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    family = rng.choice(("qwen3_moe", "qwen3_moe", "llama", "deepseek_v3"))
    is_moe, is_mla = family != "llama", family == "deepseek_v3"
    engine_tp = rng.choice((1, 2, 3, 4, 6))
    engine = EngineLayout(
        tp=engine_tp,
        num_engines=rng.choice((1, 1, 1, 2, 3)),
        vocab_multiple=rng.choice((1, 4, 16)),
        ep=rng.choice(divisors(engine_tp)) if is_moe else 1,
        attention_dp=rng.choice((1, 1, rng.choice(divisors(engine_tp)))),
    )
    layout = random_trainer(rng, is_moe)
    kv_heads = rng.choice(
        [k for k in range(1, 13) if k % layout.tp == 0 and (k % engine.attention_tp == 0 or engine.attention_tp % k == 0)]
    )
    heads = kv_heads * engine.attention_tp // math.gcd(kv_heads, engine.attention_tp) * rng.choice((1, 1, 2))
    if is_mla:
        heads = kv_heads = math.lcm(layout.tp, engine.attention_tp)
    num_layers = sum(layout.layers_per_chunk) if layout.layers_per_chunk else layout.pp * layout.virtual_pp
    num_experts = math.lcm(layout.ep, engine.ep) * rng.choice((1, 2)) if is_moe else 0
    dims = dataclasses.replace(
        declared_family(family).debug_dims,
        num_layers=num_layers,
        hidden_size=rng.choice((5, 7, 11)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=rng.choice((2, 3)),
        vocab_size=rng.randrange(13, 60),
        ffn_size=math.lcm(layout.tp, engine.tp) * rng.choice((1, 3)),
        num_experts=num_experts,
        moe_ffn_size=math.lcm(layout.etp, engine.moe_tp) * rng.choice((1, 2, 3)) if is_moe else 0,
        tied_embeddings=rng.random() < 0.5,
    )
    if is_mla:
        dims = dataclasses.replace(
            dims,
            rope_head_dim=1,
            value_head_dim=rng.choice((2, 3)),
            q_lora_rank=layout.tp * rng.choice((2, 3)),
            kv_lora_rank=layout.tp * rng.choice((2, 3)) - 1,  # with the rotary part a multiple of TP
            shared_ffn_size=math.lcm(layout.tp, engine.tp) * rng.choice((1, 2)),
            num_dense_layers=rng.randrange(num_layers + 1),
        )
    return Case(
        family, dims, layout, engine, rng.choice((1, 3)), engine.num_engines > 1 and rng.random() < 0.4,
        rng.choice((1, 2, 128)),
    )  # fmt: skip


def random_trainer(rng: random.Random, is_moe: bool) -> ParallelLayout:
    tp, cp = rng.choice((1, 2, 3)), rng.choice((1, 1, 1, 2))
    pp = rng.choice((1, 2, 2, 3))
    virtual_pp = rng.choice((1, 2)) if pp > 1 else 1
    dp = rng.choice((1, 1, 2, 3))
    etp = rng.choice(divisors(tp * cp * dp)) if is_moe else 1
    ep = rng.choice(divisors(tp * cp * dp // etp)) if is_moe else 1
    split = None
    if rng.random() < 0.4:
        split = tuple(rng.choice((0, 1, 1, 2)) for _ in range(pp * virtual_pp))
        split = split if sum(split) else (*split[:-1], 1)
    return ParallelLayout(tp=tp, pp=pp, virtual_pp=virtual_pp, cp=cp, ep=ep, etp=etp, dp=dp, layers_per_chunk=split)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
