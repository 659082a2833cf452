"""Tokens per second of the embedded engine and of transformers.generate: same model sizes, prompts and lengths.

    python tests/benchmarks/embedded_engine.py [--json] [--case NAME] [--sequences 64] [--repeats 3]

Both sample at temperature 1 over the full vocabulary. The contestants take turns, so that a busy machine slows all of
them; the figures are the best of the repeats, per second and per CPU-second of this process (which a busy machine
hardly moves). transformers returns no log-probs here, the engine always does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.model_families.registry import get_family
from megatron_rl.rollout.embedded.engine import EmbeddedEngine
from megatron_rl.types.rollout import GenerationRequest, SamplingParams

NEW_TOKENS, PROMPT_TOKENS = 32, 8
COMMON = {"norm_epsilon": 1e-6, "rope_theta": 10000.0, "max_positions": 512}
CASES = {
    "qwen3_moe_tiny": ModelDims(
        num_layers=3, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=100, ffn_size=128,
        num_experts=8, top_k=2, moe_ffn_size=128, tied_embeddings=False, qk_norm=True, norm_topk_prob=True, **COMMON,
    ),
    "llama_576": ModelDims(
        num_layers=6, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, vocab_size=49152, ffn_size=1536,
        num_experts=0, top_k=0, moe_ffn_size=0, tied_embeddings=True, qk_norm=False, norm_topk_prob=False, **COMMON,
    ),
}  # fmt: skip


def tp_sizes(dims: ModelDims) -> tuple[int, int]:
    """One shard, and the smallest number above it that divides the heads and their keys and values."""
    return 1, next(tp for tp in (2, 3) if dims.num_heads % tp == 0 and dims.num_kv_heads % tp == 0)


def build_reference(dims: ModelDims) -> PreTrainedModel:
    values = get_family("qwen3_moe" if dims.num_experts else "llama").hf_from_dims(dims)
    torch.manual_seed(0)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def build_engine(dims: ModelDims, tp: int, num_slots: int) -> EmbeddedEngine:
    """An engine with random weights of the same scale: speed does not depend on their values."""
    context = PROMPT_TOKENS + NEW_TOKENS
    engine = EmbeddedEngine(dims, tp, torch.float32, num_slots=num_slots, max_context=context, stop_token_ids=())
    for name, tensor in engine.weights.stacked.items():
        tensor.fill_(1.0) if "norm" in name else tensor.normal_(std=0.02)
    return engine


def reference_run(model: PreTrainedModel, prompts: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        output = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        assert output.shape[1] == PROMPT_TOKENS + NEW_TOKENS

    return run


def engine_run(engine: EmbeddedEngine, prompts: torch.Tensor) -> Callable[[], None]:
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS)
    requests = [GenerationRequest(str(i), tuple(row), sampling, seed=i) for i, row in enumerate(prompts.tolist())]

    async def generate() -> None:
        answers = await asyncio.gather(*(engine.generate(request) for request in requests))
        assert all(len(segments[0].token_ids) == NEW_TOKENS for segments in answers)

    return lambda: asyncio.run(generate())


def measure(name: str, num_sequences: int, repeats: int) -> dict[str, float | str | int]:
    dims = CASES[name]
    prompts = torch.randint(dims.vocab_size, (num_sequences, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    engines = {tp: build_engine(dims, tp, num_sequences) for tp in tp_sizes(dims)}
    contestants = {"transformers": reference_run(build_reference(dims), prompts)}
    contestants |= {f"embedded_tp{tp}": engine_run(engine, prompts) for tp, engine in engines.items()}
    best = {key: (float("inf"), float("inf")) for key in contestants}
    for repeat in range(repeats + 1):
        for key, run in contestants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            spent = time.perf_counter() - wall, time.process_time() - cpu
            if repeat:  # the first round warms up
                best[key] = min(best[key][0], spent[0]), min(best[key][1], spent[1])
    for engine in engines.values():
        engine.close()
    result: dict[str, float | str | int] = {"case": name, "sequences": num_sequences, "new_tokens": NEW_TOKENS}
    for key, (wall, cpu) in best.items():
        result[f"{key}_tokens_per_s"] = round(num_sequences * NEW_TOKENS / wall)
        result[f"{key}_tokens_per_cpu_s"] = round(num_sequences * NEW_TOKENS / cpu)
    for tp in engines:
        ours, theirs = best[f"embedded_tp{tp}"], best["transformers"]
        result[f"ratio_tp{tp}"] = round(theirs[0] / ours[0], 2)
        result[f"cpu_ratio_tp{tp}"] = round(theirs[1] / ours[1], 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per case")
    parser.add_argument("--case", choices=CASES, help="only this model")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    for name in [arguments.case] if arguments.case else list(CASES):
        result = measure(name, arguments.sequences, arguments.repeats)
        if arguments.json:
            print(json.dumps(result), flush=True)
        else:
            print("  ".join(f"{key} {value}" for key, value in result.items()), flush=True)


if __name__ == "__main__":
    main()
