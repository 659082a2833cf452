"""Which values of a single number make sense: one greppable table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.provenance import Problem


@dataclass(frozen=True, slots=True)
class Range:
    """low <= value <= high; an open end excludes its bound. None is always inside: it means "derive" or "off"."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float | None) -> bool:
        if value is None:
            return True
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        lower = f"above {self.low:g}" if self.open_low else f"at least {self.low:g}"
        if math.isinf(self.high):
            return f"a value {lower}"
        return f"a value {lower} and {'below' if self.open_high else 'at most'} {self.high:g}"


COUNT = Range(1)
COUNT_OR_OFF = Range(0)
POSITIVE = Range(0, open_low=True)
NOT_NEGATIVE = Range(0)
SHARE = Range(0, 1)
DECAY = Range(0, 1, open_high=True)


def _layout_ranges(path: str) -> dict[str, Range]:
    return {f"{path}.{axis}": COUNT for axis in ("tp", "pp", "virtual_pp", "cp", "ep", "etp", "dp", "num_ranks")}


def _optimizer_ranges(path: str) -> dict[str, Range]:
    return {
        f"{path}.learning_rate": NOT_NEGATIVE,
        f"{path}.min_learning_rate": NOT_NEGATIVE,
        f"{path}.num_warmup_steps": COUNT_OR_OFF,
        f"{path}.weight_decay": NOT_NEGATIVE,
        f"{path}.beta1": DECAY,
        f"{path}.beta2": DECAY,
        f"{path}.epsilon": POSITIVE,
        f"{path}.clip_grad": NOT_NEGATIVE,
    }


RANGES: Mapping[str, Range] = {
    "run.num_steps": COUNT_OR_OFF,
    "run.prompts_per_step": COUNT,
    "run.samples_per_prompt": COUNT,
    "run.eval_interval": COUNT_OR_OFF,
    "run.num_eval_prompts": COUNT_OR_OFF,
    "run.num_logged_samples": COUNT_OR_OFF,
    "run.deadline_s": POSITIVE,
    "model.vocab_multiple": COUNT,
    "data.max_prompt_tokens": COUNT,
    "data.curriculum.num_candidates": COUNT,
    "data.curriculum.num_bins": COUNT,
    "data.curriculum.draws_per_bin": COUNT,
    "algorithm.advantage_epsilon": NOT_NEGATIVE,
    "algorithm.advantage_ddof": SHARE,
    "algorithm.clip_low": NOT_NEGATIVE,
    "algorithm.clip_high": NOT_NEGATIVE,
    "algorithm.dual_clip": Range(1, open_low=True),
    "algorithm.aggregation_constant": POSITIVE,
    "algorithm.entropy_coefficient": NOT_NEGATIVE,
    "algorithm.kl.coefficient": NOT_NEGATIVE,
    **_layout_ranges("algorithm.reference.layout"),
    "algorithm.correction.low": NOT_NEGATIVE,
    "algorithm.correction.high": POSITIVE,
    "algorithm.correction.max_version_age": COUNT_OR_OFF,
    "algorithm.gamma": SHARE,
    "algorithm.lambda_actor": SHARE,
    "algorithm.lambda_critic": SHARE,
    "algorithm.lambda_alpha": POSITIVE,
    "algorithm.positive_nll_coefficient": NOT_NEGATIVE,
    "algorithm.max_ratio": Range(1),
    "algorithm.tau_positive": POSITIVE,
    "algorithm.tau_negative": POSITIVE,
    "algorithm.covariance.fraction": Range(0, 1, open_low=True),
    "algorithm.covariance.kl_coefficient": NOT_NEGATIVE,
    "algorithm.vespo.k_positive": POSITIVE,
    "algorithm.vespo.lambda_positive": POSITIVE,
    "algorithm.vespo.k_negative": POSITIVE,
    "algorithm.vespo.lambda_negative": POSITIVE,
    "algorithm.reference.refresh_interval": COUNT,
    "algorithm.overlong_punishment.max_tokens": COUNT,
    "algorithm.overlong_punishment.coefficient": NOT_NEGATIVE,
    "algorithm.replay.num_groups": COUNT_OR_OFF,
    "algorithm.replay.num_steps": COUNT,
    "algorithm.replay.alpha": NOT_NEGATIVE,
    "algorithm.replay.beta": SHARE,
    "rollout.num_engines": COUNT,
    "rollout.max_staleness": COUNT_OR_OFF,
    "rollout.oversample": COUNT,
    "rollout.length_bias_alarm": Range(0, 1, open_low=True),
    "rollout.partial.phase_tokens": COUNT,
    "rollout.partial.phase_s": POSITIVE,
    "rollout.partial.max_versions": COUNT,
    "rollout.dynamic_sampling.max_oversample_factor": COUNT,
    "rollout.rewards.num_workers": COUNT_OR_OFF,
    "rollout.rewards.timeout_s": POSITIVE,
    "rollout.rewards.memory_bytes": COUNT,
    "rollout.rewards.cache_size": COUNT_OR_OFF,
    "rollout.sampling.temperature": POSITIVE,
    "rollout.sampling.top_p": Range(0, 1, open_low=True),
    "rollout.sampling.top_k": COUNT_OR_OFF,
    "rollout.sampling.max_new_tokens": COUNT,
    "rollout.eval_sampling.temperature": NOT_NEGATIVE,
    "rollout.eval_sampling.top_p": Range(0, 1, open_low=True),
    "rollout.eval_sampling.top_k": COUNT_OR_OFF,
    "rollout.eval_sampling.max_new_tokens": COUNT,
    "rollout.embedded.tp_size": COUNT,
    "rollout.embedded.num_slots": COUNT,
    "rollout.embedded.max_context": COUNT,
    "rollout.embedded.num_threads": COUNT,
    "rollout.sglang.tp_size": COUNT,
    "rollout.sglang.ep_size": COUNT,
    "rollout.sglang.attn_dp_size": COUNT,
    "rollout.sglang.num_nodes": COUNT,
    "rollout.sglang.num_concurrent": COUNT,
    "rollout.sglang.start_timeout_s": POSITIVE,
    "rollout.sglang.request_timeout_s": POSITIVE,
    **_layout_ranges("trainer.layout"),
    **_optimizer_ranges("trainer.optimizer"),
    "trainer.warm_start.num_steps": COUNT_OR_OFF,
    "trainer.warm_start.batch_size": COUNT,
    "trainer.warm_start.learning_rate": NOT_NEGATIVE,
    "trainer.warm_start.num_warmup_steps": COUNT_OR_OFF,
    "trainer.minibatches_per_step": COUNT,
    "trainer.inner_epochs": COUNT,
    "trainer.max_tokens_per_microbatch": COUNT,
    "trainer.logprob_chunk_tokens": COUNT,
    "trainer.moe_aux_loss_coefficient": NOT_NEGATIVE,
    "trainer.moe_expert_bias_update_rate": NOT_NEGATIVE,
    "trainer.num_threads": COUNT,
    **_layout_ranges("critic.layout"),
    **_optimizer_ranges("critic.optimizer"),
    "critic.value_clip": POSITIVE,
    "critic.inner_epochs": COUNT,
    "critic.pretraining.num_steps": COUNT_OR_OFF,
    "critic.pretraining.explained_variance": Range(0, 1, open_low=True, open_high=True),
    **_optimizer_ranges("critic.pretraining.optimizer"),
    "sync.bucket_bytes": COUNT,
    "sync.full_sync_interval": COUNT,
    "sync.timeout_s": POSITIVE,
    "sync.probe_interval": COUNT_OR_OFF,
    "sync.probe_tolerance": POSITIVE,
    "cluster.gpus_per_trainer_rank": NOT_NEGATIVE,
    "cluster.gpus_per_engine_rank": NOT_NEGATIVE,
    "cluster.start_timeout_s": POSITIVE,
    "checkpoint.interval": COUNT_OR_OFF,
}


def value_at(section: Any, key_path: str) -> Any:
    """The value of a dotted path of attributes; None where an optional section on the way is None."""
    for name in key_path.split("."):
        section = None if section is None else getattr(section, name)
    return section


def check_ranges(config: Any) -> Iterator[Problem]:
    """One problem per number outside its range."""
    for key_path, allowed in RANGES.items():
        value = value_at(config, key_path)
        if value not in allowed:
            yield key_path, f"expected {allowed}, got {value:g}"
