"""`resolve` fills what follows and changes nothing that was given; the batch equation adds up."""

from __future__ import annotations

from megatron_rl.config.algorithm_sections import AlgorithmSection, OverlongSection
from megatron_rl.config.resolve import batch_equation, resolve
from megatron_rl.config.rollout_sections import EmbeddedSection, PartialSection, SamplingSection
from megatron_rl.config.sections import (
    DataSection,
    ExperimentConfig,
    LayoutSection,
    ModelSection,
    RolloutSection,
    RunSection,
    SyncSection,
    TrainerSection,
)


def test_derived_values() -> None:
    config = ExperimentConfig(
        run=RunSection(name="sums", directory="out/{name}/{x}"),
        model=ModelSection(path="some/folder", dtype="bf16"),
        data=DataSection(max_prompt_tokens=100),
        algorithm=AlgorithmSection(
            aggregation="seq-mean-token-sum-norm", overlong_punishment=OverlongSection(buffer_tokens=4)
        ),
        rollout=RolloutSection(
            sampling=SamplingSection(max_new_tokens=20), eval_sampling=SamplingSection(max_new_tokens=30)
        ),
        trainer=TrainerSection(layout=LayoutSection(tp=2, cp=3, pp=2, num_ranks=60)),
    )
    resolved = resolve(config)
    assert resolved.run.directory == "out/sums/{x}"
    assert resolved.data.tokenizer.path == "some/folder"
    assert resolved.algorithm.aggregation_constant == 20.0
    assert resolved.algorithm.overlong_punishment.max_tokens == 20
    assert (resolved.rollout.embedded.max_context, resolved.rollout.embedded.dtype) == (130, "bf16")
    assert resolved.rollout.eval_sampling == SamplingSection(max_new_tokens=30)
    assert (resolved.trainer.layout.dp, resolved.trainer.layout.etp) == (5, 2)
    assert resolve(resolved) == resolved


def test_schedules_derive_the_least_staleness_that_serves_them() -> None:
    for options, expected in (
        ({}, 0),
        ({"oversample": 1.5}, 1),
        ({"schedule": "one_step_off"}, 1),
        ({"schedule": "one_step_off", "oversample": 1.5}, 2),
        ({"schedule": "asynchronous"}, 2),
        ({"schedule": "asynchronous", "max_staleness": 5}, 5),
    ):
        assert resolve(ExperimentConfig(rollout=RolloutSection(**options))).rollout.max_staleness == expected


def test_the_kv_cache_follows_either_key() -> None:
    for kv, mode, expected in (
        (None, None, ("drop", "retract")),
        (None, "in_place", ("keep", "in_place")),
        (None, "abort", ("drop", "abort")),
        ("keep", None, ("keep", "in_place")),
        ("auto", None, ("auto", None)),
    ):
        config = ExperimentConfig(rollout=RolloutSection(partial=PartialSection(kv=kv)), sync=SyncSection(pause_mode=mode))
        resolved = resolve(config)
        assert (resolved.rollout.partial.kv, resolved.sync.pause_mode) == expected
        assert resolve(resolved) == resolved


def test_given_values_stay() -> None:
    config = ExperimentConfig(
        algorithm=AlgorithmSection(aggregation="seq-mean-token-sum-norm", aggregation_constant=3.0),
        rollout=RolloutSection(embedded=EmbeddedSection(max_context=4000, dtype="fp32")),
        trainer=TrainerSection(layout=LayoutSection(etp=2, dp=4, num_ranks=4)),
    )
    resolved = resolve(config)
    assert resolved.algorithm == config.algorithm
    assert resolved.rollout.embedded == config.rollout.embedded
    assert resolved.trainer.layout == config.trainer.layout
    assert resolved.rollout.eval_sampling == config.rollout.sampling


def test_batch_equation() -> None:
    config = ExperimentConfig(
        run=RunSection(prompts_per_step=24, samples_per_prompt=5),
        data=DataSection(max_prompt_tokens=100),
        rollout=RolloutSection(sampling=SamplingSection(max_new_tokens=20)),
        trainer=TrainerSection(
            layout=LayoutSection(tp=2, pp=2, num_ranks=12, virtual_pp=2),
            minibatches_per_step=4,
            inner_epochs=3,
            max_tokens_per_microbatch=500,
        ),
    )
    assert batch_equation(config).splitlines() == [
        "24 prompts x 5 samples = 120 samples per step",
        "-> 4 minibatches of 30 samples, 3 inner epochs = 12 optimizer steps",
        "-> about 10 samples per data-parallel rank (dp 3, 12 ranks = tp 2 x cp 1 x pp 2 x dp 3)",
        "-> microbatches of at most 500 tokens: 3 per rank if every sequence has all of its 120 tokens, else fewer,"
        " a multiple of pp 2",
    ]


def test_experts_that_are_not_spread_are_split_over_tp() -> None:
    """Megatron reduces no gradient over expert copies inside a TP group, so copies there must not arise."""
    for tp, ep, expected in ((2, 1, 2), (2, 2, 1), (1, 1, 1), (4, 2, 1)):
        layout = LayoutSection(tp=tp, ep=ep, num_ranks=4)
        config = resolve(ExperimentConfig(trainer=TrainerSection(layout=layout)))
        assert config.trainer.layout.etp == expected
