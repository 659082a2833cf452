"""The typed sections of an experiment. Frozen, no heavy import, no behaviour: loading, checking, deriving live beside
(so do the sections of the objective, of rollouts and of a layout: `config.algorithm_sections`,
`config.rollout_sections`, `config.layout_section`).

`None` means "derive it" (see `config.resolve`) or "off", as each docstring says. Counts are `num_*`; units stand in
names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_rl.config.algorithm_sections import AlgorithmSection
from megatron_rl.config.layout_section import LayoutSection
from megatron_rl.config.rollout_sections import RolloutSection


@dataclass(frozen=True, slots=True)
class RunSection:
    """What runs, for how long and where the run directory is.

    A training step takes `prompts_per_step` prompts with `samples_per_prompt` answers each and makes
    `minibatches_per_step` optimizer steps (`trainer`) of them, `inner_epochs` times over.
    """

    name: str = "run"
    directory: str = "runs/{name}"
    seed: int = 1
    num_steps: int = 100
    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    eval_interval: int = 10
    """Evaluate every n steps, and before the first and after the last; 0 is off."""
    num_eval_prompts: int = 512
    num_logged_samples: int = 4
    deadline_s: float = 1800.0
    """The longest a single phase (generate, train, sync) may take before the run stops with an error."""
    overwrite: bool = False
    """Start anew in a run directory that already has metrics; otherwise that is refused."""


@dataclass(frozen=True, slots=True)
class ModelSection:
    """Which model. Either `path` (a Hugging Face folder) or `dims` (a random start, keys of the family's HF config)."""

    family: str | None = None
    """A name in `model_families.registry`; None: from `path`'s config.json."""
    path: str | None = None
    dims: Mapping[str, Any] = field(default_factory=dict)
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Compute dtype of the trainer; with bf16 the optimizer keeps fp32 master weights."""
    vocab_multiple: int = 1
    """Trainer vocabulary padding: to a multiple of this times TP."""


@dataclass(frozen=True, slots=True)
class ExampleSection:
    """One solved question, shown to the model before the real one."""

    user: str
    assistant: str


@dataclass(frozen=True, slots=True)
class TokenizerSection:
    """`characters`: a one-token-per-character tokenizer for small models; `hf`: reads `path` (default: the model's)."""

    kind: Literal["characters", "hf"] = "hf"
    path: str | None = None
    alphabet: str | None = None
    """The characters; None: printable ASCII."""
    chat_template: Literal["none", "model"] = "none"
    """`model`: apply the tokenizer's own chat template; `none`: the text as it is."""
    system_prompt: str | None = None
    examples: tuple[ExampleSection, ...] = ()
    """Turns between the system prompt and every question (one-shot, few-shot); with chat_template `model`."""


@dataclass(frozen=True, slots=True)
class SourceSection:
    """One source of prompts. `weight` is its share of the mixture."""

    name: str
    kind: Literal["reasoning_gym", "jsonl", "parquet"]
    weight: float = 1.0
    task: str | None = None
    """reasoning_gym: the dataset name."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """reasoning_gym: the dataset's parameters."""
    path: str | None = None
    """jsonl, parquet: the file."""
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    prompt_regex: str | None = None
    """Keep only what this pattern's first group matches of the question (searched, dot matches newlines); None: all."""
    prompt_template: str = "{prompt}"
    size: int = 100_000
    """reasoning_gym: how many entries the generated set has."""
    reward: str | None = None
    """A name in `rewards.registry`; None: the source's own (reasoning_gym scorer; math_verify for files)."""


@dataclass(frozen=True, slots=True)
class CurriculumSection:
    """Which prompts are trained, by how often each was solved so far: p(1-p) says how much a sample can teach."""

    enabled: bool = False
    num_candidates: int = 4
    """Candidates per trained prompt; 1: all are trained, in their order."""
    order: Literal["mixed", "easy_to_hard"] = "mixed"
    """`easy_to_hard`: prompts lie in `num_bins` bins by pass rate; the easiest is open first, then one more at a time."""
    num_bins: int = 5
    draws_per_bin: int = 20
    """Draws (about one per training step) until the next bin opens."""
    adapt_samples: bool = False
    """Spread the samples of a step over its prompts in proportion to p(1-p), at least two each."""


@dataclass(frozen=True, slots=True)
class DataSection:
    """Prompts. Training and evaluation prompts are disjoint by normalised text."""

    sources: tuple[SourceSection, ...] = ()
    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)
    curriculum: CurriculumSection = field(default_factory=CurriculumSection)
    max_prompt_tokens: int = 512
    seed: int = 1


@dataclass(frozen=True, slots=True)
class OptimizerSection:
    kind: Literal["adam"] = "adam"
    learning_rate: float = 1e-6
    min_learning_rate: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    num_warmup_steps: int = 0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_grad: float = 1.0
    distributed: bool = True
    """Megatron's distributed optimizer (shards optimizer state over data-parallel ranks)."""


@dataclass(frozen=True, slots=True)
class WarmStartSection:
    """A supervised warm start on the sources' reference answers before RL; `num_steps` 0 is off."""

    num_steps: int = 0
    batch_size: int = 64
    learning_rate: float = 1e-3
    num_warmup_steps: int = 20


@dataclass(frozen=True, slots=True)
class MegatronSection:
    """Fields of Megatron's own dataclasses, by their names, on top of what we derive. Known names: config/tables/."""

    transformer: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainerSection:
    layout: LayoutSection = field(default_factory=LayoutSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    warm_start: WarmStartSection = field(default_factory=WarmStartSection)
    minibatches_per_step: int = 1
    inner_epochs: int = 1
    max_tokens_per_microbatch: int = 8192
    shared_prompts: Literal["auto", "on", "off"] = "auto"
    """Compute the prompt of a group once per microbatch. `auto`: prompts of at least 32 tokens, where the layout allows."""
    logprob_chunk_tokens: int = 1024
    """Tokens per chunk when log-probs are made from logits; bounds the fp32 [chunk, V] memory."""
    layer_spec: Literal["auto", "local", "transformer_engine"] = "auto"
    fused_optimizer: Literal["auto", "torch", "apex"] = "auto"
    recompute: Literal["none", "selective", "full"] = "none"
    moe_aux_loss_coefficient: float = 0.0
    moe_expert_bias_update_rate: float = 0.0
    num_threads: int = 1
    megatron: MegatronSection = field(default_factory=MegatronSection)


@dataclass(frozen=True, slots=True)
class ValuePretrainingSection:
    """Steps of the critic alone, on rollouts of the policy as it is before RL; `num_steps` 0 is off.

    Targets are Monte-Carlo returns (lambda 1). It ends after `num_steps`, or before that when the values explain
    `explained_variance` of the variance of returns that they were not trained on yet.
    """

    num_steps: int = 0
    explained_variance: float | None = None
    """None: no early end."""
    optimizer: OptimizerSection | None = None
    """None: as `critic.optimizer`, at a constant rate."""


@dataclass(frozen=True, slots=True)
class CriticSection:
    """The value model of algorithms that need values (advantage gae); unused by others.

    It has the policy's decoder with a scalar head.
    """

    layout: LayoutSection | None = None
    """Ranks of its own, beside the trainer's; None: it takes turns with the policy on the trainer's ranks, in their layout."""

    path: str | None = None
    """A reward model's Hugging Face folder (the policy's architecture with `score.weight`); None: the policy's weights at
    the beginning of RL and a head of zeros."""
    optimizer: OptimizerSection = field(default_factory=lambda: OptimizerSection(learning_rate=2e-6))
    value_clip: float | None = 0.5
    """How far a value may move from the one before the step; None: off."""
    inner_epochs: int | None = None
    """Passes over the batch of a step; None: as `trainer.inner_epochs`."""
    pretraining: ValuePretrainingSection = field(default_factory=ValuePretrainingSection)


@dataclass(frozen=True, slots=True)
class SyncSection:
    """Weight sync from trainer to engines."""

    transport: Literal["auto", "p2p", "socket", "ipc", "disk"] = "auto"
    """`p2p`: over the network, by NCCL from GPU to GPU, else by `socket`; `socket`: without NCCL, from host memory or
    through it; `ipc`: trainer and engine rank share a machine and hand memory over; `disk`: through `directory`; `auto`: per
    pair of ranks `ipc` where it can be, else `p2p`."""
    directory: str | None = None
    """disk: a folder on a file system that trainers and engines share."""
    staging: Literal["none", "host"] = "none"
    """`none`: slices land in the weights of paused engines; a failed sync leaves them paused. `host`: they land in host
    memory beside weights that keep serving, and are swapped in when all have arrived."""
    full_sync_interval: int = 1
    """Over p2p or socket: every n-th version is sent whole, those between as lossless deltas (and whole wherever an engine rank
    does not hold the version before); 1: always whole. Trainer ranks keep what they sent, 2 bytes per weight."""
    bucket_bytes: int = 16 * 1024 * 1024
    timeout_s: float = 300.0
    relay: bool = False
    """Trainers send every slice to one engine only, engines pass it on around a ring: for many engines, where sending
    decides (`reshard-plan --relay` compares)."""
    pause_mode: Literal["retract", "in_place", "abort"] | None = None
    """What becomes of running samples: `retract` drops their KV cache, `in_place` keeps it, `abort` hands them back to the
    controller, which may resume them on another engine. None: by `rollout.partial.kv`."""
    probe_interval: int = 20
    """After the first and every n-th sync a fixed batch is scored by trainer and engines and compared; 0: never."""
    probe_tolerance: float = 0.1
    """The largest mean difference in log-prob per token that a probe accepts."""


Placement = Literal["disaggregated", "colocated"]


@dataclass(frozen=True, slots=True)
class ClusterSection:
    """Where processes run. `trainer_python` / `engine_python` None: this interpreter."""

    placement: Placement | None = None
    """`disaggregated`: trainers and engines have bundles of their own. `colocated`: they share bundles and GPUs and take
    turns; each gives its memory up while the other works. None: `colocated` with 8 to 64 trainer GPUs, equally many engine
    GPUs and schedule lockstep, else `disaggregated`."""
    ray_address: str | None = None
    """None: RAY_ADDRESS if set, else a local Ray."""
    trainer_python: str | None = None
    engine_python: str | None = None
    gpus_per_trainer_rank: float = 0.0
    gpus_per_engine_rank: float = 0.0
    """Colocated: the trainer's GPUs, so the same number."""
    start_timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class CheckpointSection:
    interval: int = 0
    """Save training state every n steps; 0: never."""
    export_hf_at_end: bool = False


@dataclass(frozen=True, slots=True)
class TelemetrySection:
    tensorboard: bool = True
    progress: Literal["auto", "live", "plain", "off"] = "auto"


@dataclass(frozen=True, slots=True)
class ExperimentConfig:
    """A whole experiment. Only `cli` and `controller`'s entry see all of it; everything else gets its section."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    critic: CriticSection = field(default_factory=CriticSection)
    sync: SyncSection = field(default_factory=SyncSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    telemetry: TelemetrySection = field(default_factory=TelemetrySection)
