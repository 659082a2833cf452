"""The sections of rollouts: engines, schedules, what becomes of unfinished samples, rewards. See `config.sections`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class SamplingSection:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 512


@dataclass(frozen=True, slots=True)
class EmbeddedSection:
    """The in-process torch engine."""

    tp_size: int = 1
    num_slots: int = 128
    """Sequences that run at once in one engine."""
    max_context: int | None = None
    """KV slots per sequence; None: max_prompt_tokens + max_new_tokens."""
    dtype: Literal["fp32", "bf16"] | None = None
    """None: as `model.dtype`."""
    num_threads: int = 1


@dataclass(frozen=True, slots=True)
class SglangSection:
    """Real SGLang servers. `server_args` takes every SGLang server option by its Python name."""

    tp_size: int = 1
    ep_size: int = 1
    """Expert parallelism inside an engine: its ranks form `ep_size` groups, each holds its part of the experts."""
    attn_dp_size: int = 1
    """Data-parallel attention inside an engine. `reshard-plan` knows it; a run is refused while SGLang cannot update such
    engines."""
    num_nodes: int = 1
    """Nodes that one engine spans (--nnodes)."""
    urls: tuple[str, ...] = ()
    """Engines started elsewhere; when given, none is started here."""
    key_file: str | None = None
    """For `urls`: a file of mode 600 with api_key and admin_api_key."""
    receiver_dirs: tuple[str, ...] = ()
    """For `urls`: the directory (MEGATRON_RL_RECEIVER_DIR) of each engine's receivers, all with the same `key` file."""
    num_concurrent: int = 64
    """Requests that one engine runs at once."""
    follows_kv_use: bool = False
    """Let the number of requests follow the use of the KV cache, asked every second; `num_concurrent` is the most."""
    start_timeout_s: float = 300.0
    request_timeout_s: float = 600.0
    server_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PartialSection:
    """Samples that are not finished when the weights change (docs/rollout.md)."""

    kv: Literal["keep", "drop", "auto"] | None = None
    """Their KV cache: `keep` it with the old weights' entries, `drop` it and prefill again, `auto`: by how full it is and
    how fast the engine prefills. None: as `sync.pause_mode`, else drop."""
    phase_tokens: int | None = None
    """The most tokens that one sample gets under one version; None: no limit."""
    phase_s: float | None = None
    """How long a batch is waited for before it is cut with the groups that are complete, at least one. None: until full."""
    max_versions: int | None = None
    """A sample that more versions than this would sample is dropped, and counted; None: no limit."""


@dataclass(frozen=True, slots=True)
class DynamicSamplingSection:
    """Leave out groups that are all correct or all wrong (the unshaped metric), and generate others in their place."""

    enabled: bool = False
    max_oversample_factor: float = 4.0
    """A step filters at most this many batches less one; then it trains on what it has."""


@dataclass(frozen=True, slots=True)
class JudgeSection:
    """A reward behind HTTP (docs/rollout.md says what it is asked). `name` is what `data.sources[].reward` calls it."""

    name: str
    url: str
    timeout_s: float = 30.0
    """Of one try."""
    num_retries: int = 4
    """Tries after the first one, where the judge cannot be reached, is busy (429, 5xx) or answers nonsense."""
    backoff_s: float = 0.5
    """The pause before the first of them; each further one is twice as long."""
    deadline_s: float = 120.0
    """Of all tries for one answer, with the wait for a place; after that the answer's reward has failed."""
    num_concurrent: int = 32
    key_file: str | None = None
    """A file whose text is sent as a bearer token."""
    correct_above: float = 0.5
    """The reward above which an answer is correct, where the judge does not say so itself."""


@dataclass(frozen=True, slots=True)
class RewardPartSection:
    reward: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class RewardSumSection:
    """A weighted sum of rewards and judges under a name of its own. The first part says what is correct."""

    name: str
    parts: tuple[RewardPartSection, ...]


@dataclass(frozen=True, slots=True)
class RewardPoolSection:
    """Where rewards are computed. `num_workers` 0: in the controller, between two answers; fast rewards need no more."""

    num_workers: int = 0
    """Processes of their own. A reward that hangs or crashes there costs its one sample's reward."""
    timeout_s: float = 30.0
    memory_bytes: int = 8 * 1024**3
    """Address space of one worker."""
    cache_size: int = 0
    """Rewards remembered by prompt and text; 0: none."""
    judges: tuple[JudgeSection, ...] = ()
    sums: tuple[RewardSumSection, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateSection:
    """How a sample is made where one turn of the model is not enough: tools, environments (docs/rollout.md)."""

    function: str | None = None
    """`package.module:name` of an async function; None: one turn per sample."""
    allowed_packages: tuple[str, ...] = ("megatron_rl",)
    """Packages that `function` may come from."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the function takes."""


@dataclass(frozen=True, slots=True)
class RolloutSection:
    engine: Literal["embedded", "sglang"] = "embedded"
    num_engines: int = 1
    schedule: Literal["lockstep", "one_step_off", "asynchronous"] = "lockstep"
    """When engines generate beside training: never; the next batch, whole; always, under changing weights."""
    max_staleness: int | None = None
    """No token is trained that is older than this many versions. None: 0 in lockstep, 1 one_step_off (both more where
    `oversample` needs it), 2 asynchronous."""
    over_age: Literal["wait", "mask", "drop_sample", "drop_group"] = "wait"
    """What becomes of what would grow older: batches wait for it, its old tokens get no loss, it or its group is dropped."""
    oversample: float = 1.0
    """Groups under way over the groups of a batch (lockstep, one_step_off): the batch is cut when it is full, the rest
    goes on in the next step."""
    leftover: Literal["resume", "drop", "tail_rounds"] = "resume"
    """What becomes of the rest when a lockstep batch is cut (`oversample`): it goes on in the next step; it is dropped; it is
    dropped and its prompts are answered in rounds of their own (strictly on-policy)."""
    length_bias_alarm: float = 0.1
    """Warn when trained answers are shorter than sampled ones by more than this share (`length/trained_over_sampled`)."""
    partial: PartialSection = field(default_factory=PartialSection)
    dynamic_sampling: DynamicSamplingSection = field(default_factory=DynamicSamplingSection)
    generate: GenerateSection = field(default_factory=GenerateSection)
    rewards: RewardPoolSection = field(default_factory=RewardPoolSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    eval_sampling: SamplingSection | None = None
    """None: as `sampling`."""
    embedded: EmbeddedSection = field(default_factory=EmbeddedSection)
    sglang: SglangSection = field(default_factory=SglangSection)
