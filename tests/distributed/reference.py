"""What transformers says about the test's model and batch, sequence by sequence."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from megatron_rl.checkpoint.hf_folder import write_folder
from megatron_rl.model_families.registry import get_family
from tests.distributed.walk import SpreadSource, debug_dims, sequences


def transformers_logprobs(family_name: str, folder: Path) -> list[list[float]]:
    """Token-aligned log-probs at temperature 0.8, 0 for first tokens."""
    family, dims = get_family(family_name), debug_dims(family_name)
    source = SpreadSource(dims.num_layers)
    tensors = {}
    for rule in family.rules_for(dims):
        for layer in range(dims.num_layers if rule.is_layered else 1):
            for expert in range(dims.num_experts if rule.is_expert else 1):
                for template in rule.hf_names:
                    name = template.format(layer=layer, expert=expert)
                    tensors[name] = source.whole(name, family.shape_of(template, dims))
    write_folder(folder / "model", family.hf_from_dims(dims), [tensors])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    results = []
    with torch.no_grad():
        for item in sequences(dims.vocab_size):
            tokens = torch.from_numpy(item["token_ids"])
            logprobs = torch.log_softmax(model(tokens[None]).logits[0] / 0.8, dim=-1)
            picked = logprobs[:-1].gather(1, tokens[1:, None])[:, 0]
            results.append([0.0, *picked.tolist()])
    return results
