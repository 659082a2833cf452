"""Each relation between settings that cannot work is refused at its key, and what can work is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.checks import check_experiment, check_layout_sizes, check_schedule
from megatron_rl.config.construct import key_paths
from megatron_rl.config.errors import ConfigError
from megatron_rl.config.load import load_experiment
from megatron_rl.config.ranges import RANGES, value_at
from megatron_rl.config.rollout_sections import DynamicSamplingSection
from megatron_rl.config.sections import (
    ExperimentConfig,
    LayoutSection,
    RolloutSection,
    RunSection,
    SyncSection,
)

BODY = """\
model: {family: llama, path: some/folder}
data: {sources: [{name: sums, kind: reasoning_gym, task: chain_sum}]}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "exp.yaml"
    file.write_text(BODY)
    return file


def test_the_example_is_sound(path: Path) -> None:
    assert check_experiment(load_experiment(path).config) == []


@pytest.mark.parametrize(
    ("overrides", "key_path", "reason"),
    [
        ("sync.transport=disk", "sync.directory", "needs a folder"),
        ("sync.directory=x", "sync.directory", "transport auto writes no files"),
        ("sync={transport: ipc, full_sync_interval: 8}", "sync.full_sync_interval", "transport is ipc; expected 1, got 8"),
        ("sync.full_sync_interval=0", "sync.full_sync_interval", "at least 1, got 0"),
        ("sync.probe_tolerance=0", "sync.probe_tolerance", "above 0, got 0"),
        ("model.path=null", "model", "set model.path"),
        ("model.dims.hidden_size=3", "model.dims", "keep one"),
        ("model={path: null, family: null, dims: {a: 1}}", "model.family", "random start needs the family"),
        ("model={path: null, dims: {a: 1}}", "data.tokenizer.path", "folder of a tokenizer"),
        ("data.tokenizer={kind: characters, path: x}", "data.tokenizer.path", "reads no folder"),
        ("data.tokenizer={kind: characters, chat_template: model}", "data.tokenizer.chat_template", "expected none"),
        ("data.tokenizer.alphabet=abc", "data.tokenizer.alphabet", "only kind characters"),
        ("data.sources=[]", "data.sources", "at least one source"),
        ("data.sources.0.weight=0", "data.sources.0.weight", "expected a value above 0, got 0"),
        ("data.sources.0.size=0", "data.sources.0.size", "at least 1, got 0"),
        ("data.sources.0.task=null", "data.sources.0.task", "kind reasoning_gym needs task"),
        ("data.sources.0.path=x", "data.sources.0.path", "takes no path; expected task"),
        ("data.sources.0.prompt_template=hi", "data.sources.0.prompt_template", "contains {prompt}"),
        ("data.sources=[{name: a, kind: jsonl}]", "data.sources.0.path", "kind jsonl needs path"),
        ("data.sources=[{name: a, kind: jsonl, path: p, params: {a: 1}}]", "data.sources.0.params", "no params"),
        (
            "data.sources=[{name: a, kind: jsonl, path: p}, {name: a, kind: jsonl, path: q}]",
            "data.sources.1.name",
            "names must differ",
        ),
        ("trainer.layout={tp: 3, pp: 2, num_ranks: 8}", "trainer.layout.num_ranks", "tp 3 x cp 1 x pp 2 = 6, got 8"),
        ("trainer.layout={ep: 3, num_ranks: 4}", "trainer.layout.num_ranks", "etp 1 x ep 3 x pp 1 = 3, got 4"),
        ("trainer.layout={etp: 2, ep: 3, num_ranks: 9}", "trainer.layout.num_ranks", "etp 2 x ep 3 x pp 1 = 6, got 9"),
        ("trainer={shared_prompts: on, layout: {cp: 2, num_ranks: 2}}", "trainer.shared_prompts", "layout.cp=2; expected"),
        ("trainer={shared_prompts: on, layer_spec: transformer_engine}", "trainer.shared_prompts", "or layer_spec local"),
        ("trainer.layout={tp: 2, dp: 3, num_ranks: 4}", "trainer.layout.dp", "= 2, got 3"),
        ("trainer.layout.virtual_pp=2", "trainer.layout.virtual_pp", "expected 1 with pp 1"),
        ("trainer.minibatches_per_step=3", "trainer.minibatches_per_step", "expected a divisor of"),
        ("rollout.sampling.top_p=0.95", "rollout.sampling.top_p", "not replayed in the trainer's normalisation"),
        ("rollout.sampling.top_k=20", "rollout.sampling.top_k", "not replayed in the trainer's normalisation"),
        ("rollout.sampling.temperature=0", "rollout.sampling.temperature", "expected a value above 0, got 0"),
        ("rollout.embedded.max_context=1023", "rollout.embedded.max_context", "= 1024, got 1023"),
        ("rollout.sglang={tp_size: 3, num_nodes: 2}", "rollout.sglang.num_nodes", "a divisor of tp_size 3, got 2"),
        ("rollout.sglang={urls: [a, b], key_file: k}", "rollout.num_engines", "(2), got 1"),
        ("rollout.sglang={urls: [a]}", "rollout.sglang.key_file", "api_key"),
        ("rollout.max_staleness=-1", "rollout.max_staleness", "at least 0, got -1"),
        ("rollout={schedule: one_step_off, max_staleness: 0}", "rollout.max_staleness", "at least 1 with schedule one_step"),
        ("rollout={oversample: 2, max_staleness: 0}", "rollout.oversample", "at most 1 with max_staleness 0, got 2"),
        ("rollout={schedule: asynchronous, oversample: 2}", "rollout.oversample", "expected 1 with schedule asynchronous"),
        ("rollout.partial.phase_tokens=0", "rollout.partial.phase_tokens", "at least 1, got 0"),
        ("rollout={schedule: asynchronous, leftover: drop}", "rollout.leftover", "expected resume with schedule asynchronous"),
        ("rollout.length_bias_alarm=0", "rollout.length_bias_alarm", "above 0 and at most 1, got 0"),
        ("data.curriculum.order=easy_to_hard", "data.curriculum.enabled", "expected true, or no other key"),
        ("data.curriculum={enabled: true, num_bins: 0}", "data.curriculum.num_bins", "at least 1, got 0"),
        ("rollout.rewards.judges=[{name: a, url: x}]", "rollout.rewards.judges.0.url", "expected http:// or https://, got 'x'"),
        (
            "rollout.rewards.judges=[{name: a, url: 'http://x', timeout_s: 0}]",
            "rollout.rewards.judges.0.timeout_s",
            "expected a value above 0, got 0",
        ),
        (
            "rollout.rewards={judges: [{name: a, url: 'http://x'}], sums: [{name: a, parts: [{reward: b}]}]}",
            "rollout.rewards.sums.0.name",
            "'a' is the name of another one; names must differ",
        ),
        ("rollout.rewards.sums=[{name: a, parts: []}]", "rollout.rewards.sums.0.parts", "at least one part, each reward once"),
        (
            "rollout.rewards.sums=[{name: a, parts: [{reward: b}]}, {name: b, parts: [{reward: a}]}]",
            "rollout.rewards.sums.0.parts",
            "'b' is a sum itself; name its parts",
        ),
        ("rollout.partial.phase_s=5", "rollout.max_staleness", "expected at least 1 with rollout.partial.phase_s"),
        ("rollout.generate.function=tool", "rollout.generate.function", "expected package.module:name, got 'tool'"),
        ("rollout.generate.function=mine.tool:run", "rollout.generate.function", "is in none of rollout.generate.allowed_pack"),
        ("rollout.generate.options={a: 1}", "rollout.generate.options", "nothing reads them without"),
        ("rollout.schedule=async", "rollout.schedule", "expected one of lockstep, one_step_off, asynchronous"),
        ("algorithm.aggregation=token-mean", "algorithm.aggregation", "contradicts loss gspo: expected seq-mean-token"),
        ("algorithm={name: dapo, loss: ppo}", "algorithm.aggregation", "contradicts name dapo: expected token-mean"),
        ("algorithm.aggregation_constant=3", "algorithm.aggregation_constant", "seq-mean-token-sum-norm"),
        ("algorithm.clip_low=1.5", "algorithm.clip_low", "expected at most 1"),
        ("algorithm.clip_low=-0.1", "algorithm.clip_low", "at least 0, got -0.1"),
        ("algorithm={loss: reinforce, dual_clip: 3}", "algorithm.dual_clip", "expected null"),
        ("algorithm.dual_clip=1", "algorithm.dual_clip", "above 1, got 1"),
        ("algorithm.lambda_actor=1.01", "algorithm.lambda_actor", "at least 0 and at most 1, got 1.01"),
        ("algorithm.lambda_critic=-1", "algorithm.lambda_critic", "got -1"),
        ("algorithm.gamma=0.9", "algorithm.gamma", "has no discount"),
        ("run.samples_per_prompt=1", "run.samples_per_prompt", "expected at least 2, got 1"),
        ("algorithm.kl={coefficient: 0.1, estimator: k1}", "algorithm.kl.estimator", "gradient of mean zero"),
        ("algorithm.kl={coefficient: 0.1, placement: reward}", "algorithm.kl.placement", "expected loss"),
        ("algorithm.correction.high=2", "algorithm.correction.kind", "none takes no bounds"),
        ("algorithm.correction={kind: icepop, low: 5, high: 0.5}", "algorithm.correction.low", "below high 0.5, got 5"),
        ("algorithm={loss: aipo, correction: {kind: tis}}", "algorithm.correction.kind", "expected none, got tis"),
        ("critic.optimizer.learning_rate=-1", "critic.optimizer.learning_rate", "at least 0, got -1"),
        ("critic.value_clip=0", "critic.value_clip", "above 0, got 0"),
        ("critic.inner_epochs=0", "critic.inner_epochs", "at least 1, got 0"),
        ("critic.pretraining.explained_variance=1", "critic.pretraining.explained_variance", "below 1, got 1"),
        ("critic.pretraining.optimizer.beta1=1", "critic.pretraining.optimizer.beta1", "below 1, got 1"),
        ("critic.layout={tp: 2, num_ranks: 3}", "critic.layout.num_ranks", "a multiple of tp 2 x cp 1 x pp 1 = 2, got 3"),
        ("critic.layout={num_ranks: 2, dp: 1}", "critic.layout.dp", "= 2, got 1"),
        ("trainer.layout.ep=0", "trainer.layout.ep", "at least 1, got 0"),
        ("critic.layout.tp=0", "critic.layout.tp", "at least 1, got 0"),
        ("algorithm.whiten_advantages=false", "algorithm.whiten_advantages", "advantage grpo is not whitened"),
        ("critic.path=reward/model", "critic.path", "advantage grpo has no critic"),
        (
            "critic.optimizer={schedule: linear, learning_rate: 1e-6, min_learning_rate: 1e-5}",
            "critic.optimizer.min_learning_rate",
            "at most learning_rate 1e-06",
        ),
        ("algorithm.tau_positive=2", "algorithm.tau_positive", "only loss sapo reads it, not gspo"),
        ("algorithm.max_ratio=5", "algorithm.max_ratio", "only loss dppo_tv and dppo_kl"),
        ("algorithm.covariance.fraction=0.1", "algorithm.covariance", "only loss clip_cov and kl_cov"),
        ("algorithm.vespo.k_positive=1", "algorithm.vespo", "only loss vespo"),
        ("algorithm={loss: sapo, tau_negative: 0}", "algorithm.tau_negative", "expected a value above 0, got 0"),
        ("algorithm={loss: clip_cov, covariance: {low: 5, high: 1}}", "algorithm.covariance.low", "below high 1, got 5"),
        ("algorithm.reference.layout={num_ranks: 2}", "algorithm.reference.layout", "nothing reads the reference"),
        (
            "algorithm={kl: {coefficient: 0.1}, reference: {layout: {num_ranks: 2}, storage: cpu}}",
            "algorithm.reference.storage",
            "expected device",
        ),
        (
            "algorithm={kl: {coefficient: 0.1}, reference: {layout: {num_ranks: 3, tp: 2}}}",
            "algorithm.reference.layout.num_ranks",
            "expected a multiple of tp 2",
        ),
        ("algorithm.correction.denominator=remaining", "algorithm.correction.denominator", "none rejects nothing"),
        (
            "algorithm.correction={kind: tis, denominator: remaining}",
            "algorithm.correction.denominator",
            "tis rejects nothing; expected original, or one of icepop",
        ),
        (
            "algorithm.correction={kind: opsm, denominator: remaining}",
            "algorithm.correction.denominator",
            "opsm rejects anew at every optimizer step",
        ),
        ("algorithm.correction={kind: tv_mask, low: 0.1}", "algorithm.correction.low", "upper bound only"),
        ("algorithm.reference.refresh_interval=3", "algorithm.reference.refresh_interval", "nothing reads the reference"),
        ("algorithm.reference.path=x", "algorithm.reference.path", "kl.coefficient 0"),
        (
            "algorithm={kl: {coefficient: 0.1}, reference: {path: x, refresh_interval: 2}}",
            "algorithm.reference.refresh_interval",
            "a teacher is not replaced",
        ),
        ("algorithm.loss=none", "algorithm.kl.coefficient", "learns from the KL to the reference alone"),
        (
            "algorithm={loss: none, kl: {coefficient: 1}, skip_zero_variance_groups: true}",
            "algorithm.skip_zero_variance_groups",
            "every group teaches",
        ),
        ("algorithm.overlong_punishment.buffer_tokens=0", "algorithm.overlong_punishment.buffer_tokens", "needs a width"),
        (
            "algorithm.overlong_punishment={buffer_tokens: 9, max_tokens: 8}",
            "algorithm.overlong_punishment.buffer_tokens",
            "expected at most max_tokens 8, got 9",
        ),
        (
            "algorithm.overlong_punishment.buffer_tokens=513",
            "algorithm.overlong_punishment.buffer_tokens",
            "rollout.sampling.max_new_tokens 512, got 513",
        ),
        (
            "algorithm.overlong_punishment={buffer_tokens: 100, max_tokens: 612}",
            "algorithm.overlong_punishment.max_tokens",
            "reaches the ramp",
        ),
        ("algorithm.replay.num_groups=2", "algorithm.correction.kind", "sampled by older weights"),
        (
            "algorithm={advantage: gae, replay: {num_groups: 2}, correction: {kind: tis}}",
            "algorithm.replay.num_groups",
            "expected 0",
        ),
        ("algorithm={advantage: gae, loss: clip_cov}", "algorithm.advantage", "before advantages per token are made"),
        ("algorithm.replay.beta=1.5", "algorithm.replay.beta", "at most 1, got 1.5"),
        ("trainer.optimizer.beta2=1", "trainer.optimizer.beta2", "below 1, got 1"),
        (
            "trainer.optimizer={schedule: cosine, learning_rate: 1e-6, min_learning_rate: 1e-5}",
            "trainer.optimizer.min_learning_rate",
            "at most learning_rate 1e-06",
        ),
    ],
)
def test_refused(path: Path, overrides: str, key_path: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_experiment(path, [overrides])
    assert caught.value.key_path == key_path
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("kv", "mode", "reason"),
    [
        ("keep", "abort", "expected in_place or nothing with rollout.partial.kv keep, got abort"),
        ("drop", "in_place", "expected retract or abort or nothing"),
        ("auto", "retract", "expected nothing with rollout.partial.kv auto"),
    ],
)
def test_the_kv_cache_is_decided_once(path: Path, kv: str, mode: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"sync.pause_mode: {reason}"):
        load_experiment(path, [f"rollout.partial.kv={kv}", f"sync.pause_mode={mode}"])


def test_a_single_sample_has_no_signal_to_filter_by() -> None:
    run, rollout = RunSection(samples_per_prompt=1), RolloutSection(dynamic_sampling=DynamicSamplingSection(enabled=True))
    ((key_path, reason),) = check_schedule(run, rollout, SyncSection())
    assert key_path == "run.samples_per_prompt" and "always all correct or all wrong" in reason


@pytest.mark.parametrize(
    "overrides",
    [
        "algorithm={loss: cispo, aggregation: token-mean, clip_low: 10}",
        "algorithm={loss: gspo_token, aggregation: token-mean}",
        "algorithm={advantage: reinforce_pp, loss: ppo, kl: {coefficient: 0.1, estimator: k1, placement: reward}}",
        "algorithm={loss: none, kl: {coefficient: 1.0, estimator: unbiased}, reference: {path: teacher}}",
        "algorithm={loss: kl_cov, covariance: {fraction: 0.01}}",
        "algorithm.overlong_punishment.buffer_tokens=512",
        "algorithm={replay: {num_groups: 2}, correction: {kind: tis}}",
        "algorithm.correction={kind: icepop, denominator: remaining}",
        "algorithm.correction={kind: tis, max_version_age: 2, denominator: remaining}",
        "rollout.eval_sampling={top_p: 0.7, temperature: 0}",
        "rollout={oversample: 2.5}",
        "rollout={schedule: one_step_off, oversample: 1.5}",
        "sync={transport: disk, directory: shared/weights, staging: host}",
        "sync={full_sync_interval: 20, probe_interval: 0}",
        "trainer.optimizer.learning_rate=0",
        "trainer.layout={tp: 2, cp: 3, pp: 2, ep: 4, num_ranks: 24, virtual_pp: 2}",
    ],
)
def test_accepted(path: Path, overrides: str) -> None:
    assert not list(check_experiment(load_experiment(path, [overrides]).config))


def test_a_critic_on_ranks_of_its_own_takes_no_kl_in_the_reward(path: Path) -> None:
    own_ranks = "algorithm={name: ppo, advantage: gae, loss: ppo, aggregation: token-mean, kl: {coefficient: 0.1, %s}}"
    critic = "critic.layout={num_ranks: 2}"
    assert not check_experiment(load_experiment(path, [own_ranks % "placement: loss", critic]).config)
    with pytest.raises(ConfigError, match="does not see the policy's KL in the reward") as caught:
        load_experiment(path, [own_ranks % "estimator: k1, placement: reward", critic])
    assert caught.value.key_path == "critic.layout"


def test_every_range_names_a_number_that_exists() -> None:
    assert set(RANGES) <= set(key_paths(ExperimentConfig))
    config = ExperimentConfig()
    assert all(value_at(config, key_path) in allowed for key_path, allowed in RANGES.items())


def test_layout_sizes_agree_with_counting() -> None:
    rng = np.random.default_rng(7)
    for tp, cp, pp, ep, etp, num_ranks in rng.integers(1, 7, size=(400, 6)).tolist():
        layout = LayoutSection(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, num_ranks=num_ranks)
        fits = any(tp * cp * pp * dp == num_ranks for dp in range(1, 8))
        experts_fit = any(etp * ep * pp * dp == num_ranks for dp in range(1, 8))
        assert (list(check_layout_sizes(layout, "trainer.layout")) == []) == (fits and experts_fit), layout


def test_a_group_of_one_is_allowed_where_its_reward_counts(path: Path) -> None:
    overrides = ["run.samples_per_prompt=1", "algorithm.advantage_of_one=reward"]
    assert not check_experiment(load_experiment(path, overrides).config)
