"""Checks that only reject. Each takes the sections that it relates and yields (key path, reason); none derives a value.

Elsewhere: the objective (`algorithm_checks`), single numbers (`ranges`), the options of Megatron and SGLang
(`known_options`), and what needs the model's dimensions (`layout.checks`).
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.algorithm_checks import check_algorithm, check_overlong_fits
from megatron_rl.config.colocation import check_colocation
from megatron_rl.config.generate_path import is_allowed, split_path
from megatron_rl.config.known_options import check_known_options
from megatron_rl.config.provenance import Problem
from megatron_rl.config.ranges import check_ranges
from megatron_rl.config.resolve import derive_etp, derive_max_staleness
from megatron_rl.config.rollout_sections import GenerateSection, RewardPoolSection
from megatron_rl.config.sections import (
    AlgorithmSection,
    CriticSection,
    CurriculumSection,
    DataSection,
    ExperimentConfig,
    LayoutSection,
    ModelSection,
    OptimizerSection,
    RolloutSection,
    RunSection,
    SyncSection,
    TrainerSection,
)


def check_experiment(config: ExperimentConfig) -> list[Problem]:
    """Every problem of an experiment that can be seen without its model, most basic first; empty: none."""
    problems = [*check_ranges(config), *check_known_options(config.trainer.megatron, config.rollout.sglang)]
    problems += check_model(config.model, config.data)
    problems += check_data(config.data)
    problems += check_layout_sizes(config.trainer.layout, "trainer.layout")
    if config.critic.layout is not None:
        problems += check_layout_sizes(config.critic.layout, "critic.layout")
    if config.algorithm.reference.layout is not None:
        problems += check_layout_sizes(config.algorithm.reference.layout, "algorithm.reference.layout")
    problems += check_curriculum(config.run, config.data.curriculum)
    problems += check_batch(config.run, config.trainer)
    problems += check_algorithm(config.algorithm, config.run.samples_per_prompt)
    problems += check_overlong_fits(config.algorithm, config.rollout.sampling.max_new_tokens)
    problems += check_rollout(config.rollout, config.data)
    problems += check_rewards(config.rollout.rewards)
    problems += check_generate(config.rollout.generate)
    problems += check_schedule(config.run, config.rollout, config.sync)
    problems += check_optimizer(config.trainer.optimizer, "trainer.optimizer")
    problems += check_critic(config.critic, config.algorithm)
    problems += check_sync(config.sync)
    problems += check_shared_prompts(config.trainer)
    if config.cluster.placement == "colocated":
        problems += check_colocation(config)
    return problems


def check_model(model: ModelSection, data: DataSection) -> Iterator[Problem]:
    if model.path is None and not model.dims:
        yield "model", "no model: set model.path (a Hugging Face folder) or model.dims (a random start)"
    if model.path is not None and model.dims:
        yield "model.dims", "model.path is set too; keep one (dims: null removes the ones below)"
    if model.dims and model.family is None:
        yield "model.family", "a random start needs the family that its dims belong to"
    tokenizer = data.tokenizer
    if tokenizer.kind == "hf" and tokenizer.path is None and model.path is None:
        yield "data.tokenizer.path", "kind hf without model.path needs the folder of a tokenizer (or kind: characters)"
    if tokenizer.kind == "characters":
        if tokenizer.path is not None:
            yield "data.tokenizer.path", "kind characters reads no folder; remove it or set kind: hf"
        if tokenizer.chat_template == "model":
            yield "data.tokenizer.chat_template", "kind characters has no template of its own; expected none"
    elif tokenizer.alphabet is not None:
        yield "data.tokenizer.alphabet", "only kind characters has an alphabet"


def check_data(data: DataSection) -> Iterator[Problem]:
    if not data.sources:
        yield "data.sources", "no prompts: expected at least one source"
    seen: set[str] = set()
    for index, source in enumerate(data.sources):
        path = f"data.sources.{index}"
        if source.name in seen:
            yield f"{path}.name", f"{source.name!r} is the name of another source; names must differ"
        seen.add(source.name)
        if source.weight <= 0:
            yield f"{path}.weight", f"expected a value above 0, got {source.weight:g}; remove the source instead"
        if source.size < 1:
            yield f"{path}.size", f"expected a value at least 1, got {source.size}"
        needed, foreign = ("task", "path") if source.kind == "reasoning_gym" else ("path", "task")
        if getattr(source, needed) is None:
            yield f"{path}.{needed}", f"kind {source.kind} needs {needed}"
        if getattr(source, foreign) is not None:
            yield f"{path}.{foreign}", f"kind {source.kind} takes no {foreign}; expected {needed}"
        if source.params and source.kind != "reasoning_gym":
            yield f"{path}.params", f"kind {source.kind} takes no params"
        if "{prompt}" not in source.prompt_template:
            yield f"{path}.prompt_template", "expected a text that contains {prompt}"


def check_curriculum(run: RunSection, curriculum: CurriculumSection) -> Iterator[Problem]:
    if not curriculum.enabled and curriculum != CurriculumSection():
        yield "data.curriculum.enabled", "expected true, or no other key of data.curriculum"
    if curriculum.adapt_samples and run.samples_per_prompt < 3:
        reason = f"nothing to spread: every prompt keeps two of its {run.samples_per_prompt} samples; expected false"
        yield "data.curriculum.adapt_samples", reason


def check_layout_sizes(layout: LayoutSection, key: str) -> Iterator[Problem]:
    """World size = tp * cp * dp * pp, and also etp * ep * expert_dp * pp."""
    etp = derive_etp(layout)
    dense, expert = layout.tp * layout.cp * layout.pp, etp * layout.ep * layout.pp
    path = f"{key}.num_ranks"
    if dense < 1 or expert < 1:
        return  # a size below 1 is refused by its range
    if layout.num_ranks % dense:
        sizes = f"tp {layout.tp} x cp {layout.cp} x pp {layout.pp} = {dense}"
        yield path, f"expected a multiple of {sizes}, got {layout.num_ranks}"
    elif layout.dp is not None and layout.dp * dense != layout.num_ranks:
        right = layout.num_ranks // dense
        yield f"{key}.dp", f"expected num_ranks / (tp * cp * pp) = {right}, got {layout.dp}; leave it out"
    elif layout.num_ranks % expert:
        sizes = f"etp {etp} x ep {layout.ep} x pp {layout.pp} = {expert}"
        yield path, f"expected a multiple of {sizes}, got {layout.num_ranks}"
    if layout.virtual_pp > 1 and layout.pp == 1:
        yield f"{key}.virtual_pp", f"expected 1 with pp 1 (nothing to interleave), got {layout.virtual_pp}"


def check_batch(run: RunSection, trainer: TrainerSection) -> Iterator[Problem]:
    num_samples = run.prompts_per_step * run.samples_per_prompt
    if num_samples % trainer.minibatches_per_step:
        total = f"run.prompts_per_step {run.prompts_per_step} x run.samples_per_prompt {run.samples_per_prompt}"
        reason = f"expected a divisor of {total} = {num_samples}, got {trainer.minibatches_per_step}"
        yield "trainer.minibatches_per_step", reason


def check_rollout(rollout: RolloutSection, data: DataSection) -> Iterator[Problem]:
    why = "the engine's sampling mask is not replayed in the trainer's normalisation, so log-probs would not match"
    if rollout.sampling.top_p < 1:
        yield "rollout.sampling.top_p", f"expected 1.0, got {rollout.sampling.top_p:g}: {why}"
    if rollout.sampling.top_k > 0:
        yield "rollout.sampling.top_k", f"expected 0 (off), got {rollout.sampling.top_k}: {why}"
    max_new_tokens = max(s.max_new_tokens for s in (rollout.sampling, rollout.eval_sampling) if s is not None)
    needed, context = data.max_prompt_tokens + max_new_tokens, rollout.embedded.max_context
    if context is not None and context < needed:
        reason = f"expected at least data.max_prompt_tokens + max_new_tokens = {needed}, got {context}"
        yield "rollout.embedded.max_context", reason
    sglang = rollout.sglang
    if sglang.tp_size % sglang.num_nodes:
        yield "rollout.sglang.num_nodes", f"expected a divisor of tp_size {sglang.tp_size}, got {sglang.num_nodes}"
    if sglang.urls and len(sglang.urls) != rollout.num_engines:
        reason = f"expected one per engine of rollout.sglang.urls ({len(sglang.urls)}), got {rollout.num_engines}"
        yield "rollout.num_engines", reason
    if sglang.urls and sglang.key_file is None:
        yield "rollout.sglang.key_file", "engines given by URL need the file with their api_key and admin_api_key"
    if len(sglang.receiver_dirs) != len(sglang.urls):
        reason = f"expected one per engine of rollout.sglang.urls ({len(sglang.urls)}), got {len(sglang.receiver_dirs)}"
        yield "rollout.sglang.receiver_dirs", reason


def check_rewards(rewards: RewardPoolSection) -> Iterator[Problem]:
    """Judges and sums. Whether a part exists is known to whoever loads it."""
    key = "rollout.rewards"
    seen: set[str] = set()
    for kind in ("judges", "sums"):
        for index, section in enumerate(getattr(rewards, kind)):
            if section.name in seen:
                yield f"{key}.{kind}.{index}.name", f"{section.name!r} is the name of another one; names must differ"
            seen.add(section.name)
    for index, judge in enumerate(rewards.judges):
        path = f"{key}.judges.{index}"
        if not judge.url.startswith(("http://", "https://")):
            yield f"{path}.url", f"expected http:// or https://, got {judge.url!r}"
        for name in ("timeout_s", "deadline_s", "num_concurrent"):
            if getattr(judge, name) <= 0:
                yield f"{path}.{name}", f"expected a value above 0, got {getattr(judge, name):g}"
        for name in ("num_retries", "backoff_s"):
            if getattr(judge, name) < 0:
                yield f"{path}.{name}", f"expected a value at least 0, got {getattr(judge, name):g}"
    sums = {section.name for section in rewards.sums}
    for index, section in enumerate(rewards.sums):
        path = f"{key}.sums.{index}.parts"
        names = [part.reward for part in section.parts]
        if not names or len(set(names)) < len(names):
            yield path, "expected at least one part, each reward once"
        elif nested := sums & set(names):
            yield path, f"{min(nested)!r} is a sum itself; name its parts"


def check_generate(generate: GenerateSection) -> Iterator[Problem]:
    path, key = generate.function, "rollout.generate.function"
    if path is None:
        if generate.options:
            yield "rollout.generate.options", "nothing reads them without rollout.generate.function"
    elif split_path(path) is None:
        yield key, f"expected package.module:name, got {path!r}"
    elif not is_allowed(path, generate.allowed_packages):
        allowed = ", ".join(generate.allowed_packages)
        yield key, f"{path} is in none of rollout.generate.allowed_packages ({allowed}); add its package there"


def check_schedule(run: RunSection, rollout: RolloutSection, sync: SyncSection) -> Iterator[Problem]:
    """What rollouts may do beside training."""
    cap, kind = derive_max_staleness(rollout), rollout.schedule
    if kind == "one_step_off" and cap < 1:
        yield "rollout.max_staleness", f"expected at least 1 with schedule one_step_off, got {cap}"
    num_batches = cap if kind == "one_step_off" else cap + 1
    if kind == "asynchronous" and rollout.oversample != 1:
        reason = f"expected 1 with schedule asynchronous (max_staleness says how much runs), got {rollout.oversample:g}"
        yield "rollout.oversample", reason
    elif rollout.oversample > max(num_batches, 1) and rollout.leftover == "resume":
        reason = f"expected at most {num_batches} with max_staleness {cap}, got {rollout.oversample:g}: the rest grows too old"
        yield "rollout.oversample", reason
    if rollout.partial.phase_s is not None and not cap and rollout.leftover == "resume":
        yield "rollout.max_staleness", "expected at least 1 with rollout.partial.phase_s: what is left is trained a step later"
    if rollout.leftover != "resume" and kind != "lockstep":
        yield "rollout.leftover", f"expected resume with schedule {kind}: only batches of lockstep are cut"
    allowed = {"keep": ("in_place",), "drop": ("retract", "abort"), "auto": (), None: ("retract", "in_place", "abort")}
    if sync.pause_mode is not None and sync.pause_mode not in allowed[rollout.partial.kv]:
        expected = " or ".join((*allowed[rollout.partial.kv], "nothing"))
        yield "sync.pause_mode", f"expected {expected} with rollout.partial.kv {rollout.partial.kv}, got {sync.pause_mode}"
    if rollout.dynamic_sampling.enabled and run.samples_per_prompt < 2:
        reason = "expected at least 2 with rollout.dynamic_sampling: a single sample is always all correct or all wrong"
        yield "run.samples_per_prompt", reason


def check_optimizer(optimizer: OptimizerSection, path: str) -> Iterator[Problem]:
    if optimizer.schedule != "constant" and optimizer.min_learning_rate > optimizer.learning_rate:
        reason = f"expected at most learning_rate {optimizer.learning_rate:g}, got {optimizer.min_learning_rate:g}"
        yield f"{path}.min_learning_rate", reason


def check_critic(critic: CriticSection, algorithm: AlgorithmSection) -> Iterator[Problem]:
    yield from check_optimizer(critic.optimizer, "critic.optimizer")
    if critic.pretraining.optimizer is not None:
        yield from check_optimizer(critic.pretraining.optimizer, "critic.pretraining.optimizer")
    if critic.path is not None and algorithm.advantage != "gae":
        reason = f"advantage {algorithm.advantage} has no critic; remove it or set algorithm.advantage=gae"
        yield "critic.path", reason
    if critic.layout is not None and algorithm.kl.coefficient and algorithm.kl.placement == "reward":
        reason = "a critic on ranks of its own does not see the policy's KL in the reward; expected null (the trainer's ranks)"
        yield "critic.layout", f"{reason} or algorithm.kl.placement=loss"


def check_sync(sync: SyncSection) -> Iterator[Problem]:
    if sync.transport == "disk" and sync.directory is None:
        yield "sync.directory", "transport disk needs a folder that trainers and engines share"
    if sync.transport != "disk" and sync.directory is not None:
        yield "sync.directory", f"transport {sync.transport} writes no files; remove it or set sync.transport: disk"
    if sync.full_sync_interval > 1 and sync.transport not in ("auto", "p2p", "socket"):
        reason = f"deltas travel over p2p, transport is {sync.transport}; expected 1, got {sync.full_sync_interval}"
        yield "sync.full_sync_interval", reason


def check_shared_prompts(trainer: TrainerSection) -> Iterator[Problem]:
    if trainer.shared_prompts != "on":
        return
    if trainer.layout.cp > 1:
        yield "trainer.shared_prompts", f"on does not go with trainer.layout.cp={trainer.layout.cp}; expected auto or off"
    if trainer.layer_spec == "transformer_engine":
        reason = "on does not go with trainer.layer_spec=transformer_engine; expected auto or off, or layer_spec local"
        yield "trainer.shared_prompts", reason
