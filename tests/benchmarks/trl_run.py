"""GRPO with TRL's GRPOTrainer, as `end_to_end.py` asks for it: one JSON specification in, one JSON object out.

    <python with trl> tests/benchmarks/trl_run.py SPECIFICATION RESULT

Runs in an environment of its own: of this repository it needs the rewards alone, which import no heavy package.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

from megatron_rl.rewards.registry import load_reward
from megatron_rl.types.rollout import Prompt

EVALUATED_AT_ONCE = 64


class StepClock(TrainerCallback):
    """When each optimizer step ended. Generation is inside a step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def run(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`seconds` per step (the first warms up), `tokens` sampled per step, `accuracy` on the held-out prompts or None."""
    torch.set_num_threads(spec["num_threads"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    check_prompts(spec["prompts"] + spec["eval_prompts"], tokenizer)
    reward = load_reward(spec["reward"])
    answers = {row["text"]: row["answer"] for row in spec["prompts"] + spec["eval_prompts"]}

    def score(text: str, completion_ids: list[int]) -> float:
        response = tokenizer.decode(completion_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        prompt = Prompt("prompt", text, (), answers[text], "benchmark", {})
        is_finished = bool(completion_ids) and completion_ids[-1] == tokenizer.eos_token_id
        return reward(prompt, response, is_finished).reward

    def score_all(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [score(text, ids) for text, ids in zip(prompts, completion_ids, strict=True)]

    num_samples = spec["prompts_per_step"] * spec["samples_per_prompt"]
    options = GRPOConfig(
        output_dir=str(folder), max_steps=spec["steps"], use_cpu=True, bf16=spec["precision"] == "bf16", seed=spec["seed"],
        per_device_train_batch_size=num_samples, gradient_accumulation_steps=1, num_generations=spec["samples_per_prompt"],
        max_completion_length=spec["max_new_tokens"], temperature=1.0, top_p=1.0, top_k=0, shuffle_dataset=False,
        beta=0.0, epsilon=0.2, loss_type="grpo", scale_rewards="group", num_iterations=1,
        learning_rate=spec["learning_rate"], lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0,
        adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    clock = StepClock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        reward_funcs=score_all,
        args=options,
        train_dataset=Dataset.from_list([{"prompt": row["text"]} for row in spec["prompts"]]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    result = {
        "seconds": [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)],
        "tokens": [length * num_samples for length in lengths],
        "rewards": rewards,
        "accuracy": None,
    }
    if spec["eval_prompts"]:
        set_seed(spec["seed"])
        answered = sample_answers(trainer.model, tokenizer, spec)
        scores = [score(row["text"], ids) for row, ids in zip(spec["eval_prompts"], answered, strict=True)]
        result["accuracy"] = sum(scores) / len(scores)
    return result


def check_prompts(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> None:
    """TRL tokenizes texts; they must give the tokens that the other contestant trains on."""
    for row in rows:
        if tokenizer(row["text"])["input_ids"] != row["token_ids"]:
            raise ValueError(f"prompt {row['text']!r}: its text does not give the tokens {row['token_ids']}")


@torch.no_grad()
def sample_answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, spec: dict[str, Any]) -> list[list[int]]:
    """One sampled answer per held-out prompt, up to and with the end token."""
    tokenizer.padding_side = "left"
    answers: list[list[int]] = []
    texts = [row["text"] for row in spec["eval_prompts"]]
    for start in range(0, len(texts), EVALUATED_AT_ONCE):
        batch = tokenizer(texts[start : start + EVALUATED_AT_ONCE], return_tensors="pt", padding=True)
        output = model.generate(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=True, temperature=1.0,
            top_p=1.0, top_k=0, max_new_tokens=spec["max_new_tokens"],
        )  # fmt: skip
        for row in output[:, batch["input_ids"].shape[1] :].tolist():
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            answers.append(row[:end])
    return answers


def main() -> None:
    specification, destination = map(Path, sys.argv[1:])
    result = run(json.loads(specification.read_text()), destination.parent)
    temporary = destination.with_suffix(".tmp")
    temporary.write_text(json.dumps(result))
    os.replace(temporary, destination)


if __name__ == "__main__":
    main()
