"""The loop on scripted parts: what is called, in which order, and what is recorded."""

from __future__ import annotations

import asyncio
import json
import math
from types import MappingProxyType

import numpy as np
import pytest

from megatron_rl.algorithms.algorithm import build_algorithm
from megatron_rl.config.algorithm_sections import AlgorithmSection
from megatron_rl.config.rollout_sections import SamplingSection
from megatron_rl.config.sections import (
    CriticSection,
    OptimizerSection,
    RolloutSection,
    RunSection,
    SyncSection,
    TelemetrySection,
    TrainerSection,
    ValuePretrainingSection,
    WarmStartSection,
)
from megatron_rl.controller.batcher import Batcher, share_of
from megatron_rl.controller.loop import PhaseTimeoutError, TrainingLoop
from megatron_rl.controller.run_directory import RunDirectory, RunDirectoryError
from megatron_rl.controller.schedule import build_producer
from megatron_rl.data.bundle import DataBundle, SftPair
from megatron_rl.data.sampler import PromptSampler
from megatron_rl.rollout.collector import Collector
from megatron_rl.rollout.generate.answer import Transcript
from megatron_rl.rollout.generate.function import GenerateFunction
from megatron_rl.scheduling.length_bias import LengthBias
from megatron_rl.telemetry.build import build_telemetry
from megatron_rl.types.layout import ParallelLayout
from megatron_rl.types.rollout import (
    EngineLoad,
    FinishReason,
    PolicyVersion,
    Prompt,
    RewardResult,
    RolloutSegment,
    SamplingParams,
)


class Recorder:
    """Trainers, weight sync and one engine in one: records the order of calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.version = -1
        self.batches = []
        self.num_value_steps = 0

    async def begin_phase(self, section, num_optimizer_steps):
        self.calls.append(f"begin_phase lr={section.learning_rate:g} steps={num_optimizer_steps}")

    async def train_step(self, batch, version):
        self.calls.append(f"train v{version} {len(batch.policy.minibatches)} minibatches")
        self.batches.append(batch.policy)
        return dict.fromkeys(
            ["loss/policy", "loss/clip_fraction", "loss/entropy", "loss/kl_to_rollout", "rollout/logprob_gap", "grad_norm"],
            0.25,
        ) | {"learning_rate": 1e-3}

    async def sft_step(self, batch):
        self.calls.append(f"sft {batch.num_samples}")
        return {"loss/supervised": 1.0, "grad_norm": 1.0, "learning_rate": 1e-3}

    async def begin_critic_phase(self, section, num_optimizer_steps):
        self.calls.append(f"begin_critic_phase lr={section.learning_rate:g} {section.schedule} steps={num_optimizer_steps}")

    async def value_step(self, batch):
        self.calls.append(f"values {batch.policy.num_samples}")
        self.num_value_steps += 1
        return {"loss/value": 1.0, "loss/explained_variance": 0.2 * self.num_value_steps}

    async def publish(self, pause_mode=None):
        self.version += 1
        self.calls.append(f"publish v{self.version}")
        return PolicyVersion(self.version)

    async def pause(self, mode):
        raise AssertionError("lockstep has nothing to pause")

    async def load(self):
        return EngineLoad(0, 0, 0.0, 0, 0, 0.0)

    async def generate(self, request):
        length = request.seed % 5 + 1
        await asyncio.sleep(0)
        return (RolloutSegment((7,) * length, (-1.0,) * length, PolicyVersion(self.version), FinishReason.STOP),)


def build_loop(
    tmp_path, recorder, *, skip=False, score=None, critic=None, max_staleness=0, rollout=MappingProxyType({}), function=None,
    max_new_tokens=8, **run_options,
):  # fmt: skip
    run = RunSection(
        num_steps=3, prompts_per_step=4, samples_per_prompt=2, eval_interval=2, num_eval_prompts=3, **run_options
    )
    trainer = TrainerSection(warm_start=WarmStartSection(num_steps=2, batch_size=5), minibatches_per_step=2)
    prompts = [Prompt(f"p{i}", f"q{i}", (1, 2, 3), str(i), "s") for i in range(9)]
    data = DataBundle(
        train_sampler=PromptSampler([prompts], [1.0], 1),
        warm_start_sampler=PromptSampler([prompts], [1.0], 2),
        eval_prompts=tuple(prompts[:3]),
        reward_names={"s": "exact_match"},
        num_train_prompts={"s": 9},
    )
    plain = score or (lambda prompt, ids, ended: RewardResult(float(len(ids) % 2), len(ids) % 2 == 1))

    async def score_async(*args):
        return plain(*args)

    directory = RunDirectory(tmp_path / "run")
    directory.create("run: {}\n", overwrite=False)
    algorithm = build_algorithm(AlgorithmSection(skip_zero_variance_groups=skip))
    telemetry = build_telemetry(TelemetrySection(progress="off"), directory.path, run.num_steps, None)
    return TrainingLoop(
        run, trainer, critic, SamplingParams(8), SamplingParams(8), data=data,
        pairs_of=lambda ps: [SftPair(p.token_ids, (4, 5)) for p in ps], decode=lambda ids: "x" * len(ids),
        producer=build_producer(
            run,
            RolloutSection(max_staleness=max_staleness, sampling=SamplingSection(max_new_tokens=max_new_tokens), **rollout),
            SyncSection(pause_mode="retract"), [recorder], [4], score_async, SamplingParams(max_new_tokens),
            data.train_sampler.next, function,
        ),
        collector=Collector([recorder], [4], score_async, seed=1),
        batcher=Batcher(algorithm, trainer, ParallelLayout(dp=2), run),
        trainers=recorder, weight_sync=recorder, telemetry=telemetry, directory=directory,
    )  # fmt: skip


def test_the_order_of_a_run(tmp_path):
    recorder = Recorder()
    loop = build_loop(tmp_path, recorder)
    asyncio.run(loop.execute())
    assert recorder.calls == [
        "begin_phase lr=0.001 steps=2", "sft 5", "sft 5",
        "begin_phase lr=1e-06 steps=6", "publish v0",
        "train v0 2 minibatches", "publish v1",
        "train v1 2 minibatches", "publish v2",
        "train v2 2 minibatches", "publish v3",
    ]  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["policy_version"] for row in rows] == [0, 1, 2, 3]
    assert [("eval/accuracy" in row) for row in rows] == [True, False, True, True]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(row["time/step_s"] >= row["time/generate_s"] for row in rows[1:])


@pytest.mark.parametrize(("threshold", "num_expected"), [(None, 5), (0.55, 3)])
def test_value_pretraining_runs_before_rl_until_it_is_good_enough(tmp_path, caplog, threshold, num_expected):
    recorder = Recorder()
    critic = CriticSection(
        optimizer=OptimizerSection(learning_rate=3e-4, schedule="linear"),
        inner_epochs=3,
        pretraining=ValuePretrainingSection(num_steps=5, explained_variance=threshold),
    )
    with caplog.at_level("INFO"):
        asyncio.run(build_loop(tmp_path, recorder, critic=critic).execute())
    first = recorder.calls.index("publish v0") + 1
    assert recorder.calls[first : first + num_expected + 3] == [
        "begin_critic_phase lr=0.0003 constant steps=30", *["values 8"] * num_expected,
        "begin_critic_phase lr=0.0003 linear steps=18", "train v0 2 minibatches",
    ]  # fmt: skip
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert row["value_pretraining/num_steps"] == num_expected
    assert row["value_pretraining/explained_variance"] == pytest.approx(0.2 * num_expected)
    assert "value pretraining 3/5: value loss 1.0000, explained variance 0.600" in caplog.text


def test_samples_carry_the_version_that_sampled_them(tmp_path):
    recorder = Recorder()
    asyncio.run(build_loop(tmp_path, recorder).execute())
    for version, batch in enumerate(recorder.batches):
        for minibatch in batch.minibatches:
            for rank in minibatch.microbatches:
                for microbatch in rank:
                    assert set(microbatch.versions_T[microbatch.loss_mask_T]) <= {version}


def ages_of(recorder):
    """Per trained batch, the ages of its tokens in versions."""
    packed = [[b for m in batch.minibatches for rank in m.microbatches for b in rank] for batch in recorder.batches]
    return [{trained - int(v) for b in parts for v in b.versions_T[b.loss_mask_T]} for trained, parts in enumerate(packed)]


class Slow(Recorder):
    """Training that takes as long as a few samples."""

    async def train_step(self, batch, version):
        for _ in range(20):
            await asyncio.sleep(0)
        return await super().train_step(batch, version)


def test_the_schedules_share_one_loop(tmp_path):
    one_off, free = Slow(), Slow()
    asyncio.run(build_loop(tmp_path / "a", one_off, max_staleness=1, rollout={"schedule": "one_step_off"}).execute())
    assert ages_of(one_off) == [{0}, {1}, {1}]
    asyncio.run(build_loop(tmp_path / "b", free, max_staleness=2, rollout={"schedule": "asynchronous"}).execute())
    assert all(max(ages) <= 2 for ages in ages_of(free)) and any(max(ages) > 0 for ages in ages_of(free))
    for recorder in (one_off, free):
        assert [call for call in recorder.calls if call[0] in "pt"] == [
            "publish v0", "train v0 2 minibatches", "publish v1", "train v1 2 minibatches", "publish v2",
            "train v2 2 minibatches", "publish v3",
        ]  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "a" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/staleness_max"] for row in rows[1:]] == [0, 1, 1]
    assert all(row["tokens/trained"] > 0 for row in rows[1:])


def test_a_step_without_variance_trains_nothing_and_still_reports(tmp_path):
    recorder = Recorder()
    loop = build_loop(tmp_path, recorder, skip=True, score=lambda prompt, ids, ended: RewardResult(1.0, True))
    asyncio.run(loop.execute())
    assert not recorder.batches
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["loss/policy"] == 0.0 and row["grad_norm"] == 0.0 for row in rows[1:])


def test_a_phase_has_a_deadline(tmp_path):
    class Stuck(Recorder):
        async def train_step(self, batch, version):
            await asyncio.Event().wait()

    with pytest.raises(PhaseTimeoutError, match=r"phase train: not done within run.deadline_s=1"):
        asyncio.run(build_loop(tmp_path, Stuck(), deadline_s=1.0).execute())


def test_a_bias_to_short_answers_is_said_once_when_it_begins(tmp_path, caplog):
    loop = build_loop(tmp_path, Recorder())
    with caplog.at_level("WARNING"):
        alarms = [loop._check_lengths(LengthBias(ratio, 0.1)) for ratio in (1.0, 0.85, 0.8, 0.95, 0.6)]
    assert alarms == [False, True, True, False, True]
    assert [record.getMessage()[:25] for record in caplog.records] == ["trained answers have 0.85", "trained answers have 0.60"]


def test_what_a_tool_said_reaches_the_trainer_without_a_loss(tmp_path):
    async def talk(client, prompt, sampling):
        transcript = Transcript(prompt)
        transcript.add(await client.generate(transcript.token_ids, max_new_tokens=3))
        transcript.insert([50, 51])
        transcript.add(await client.generate(transcript.token_ids))
        return transcript.answer(True, {"num_turns": client.num_turns})

    recorder = Recorder()
    function = GenerateFunction("tests:talk", talk, None, {})
    asyncio.run(build_loop(tmp_path, recorder, function=function, max_new_tokens=16).execute())
    parts = [b for batch in recorder.batches for m in batch.minibatches for rank in m.microbatches for b in rank]
    for part in parts:
        said = np.isin(part.token_ids_T, (50, 51))
        assert said.any() and not part.loss_mask_T[said].any() and (part.versions_T[said] == -1).all()
        assert (part.loss_mask_T == (part.token_ids_T == 7)).all()
        assert (part.token_arrays["rollout_logprobs"] == np.where(part.loss_mask_T, -1.0, 0.0)).all()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["generate/num_turns"] == 2 and row["tokens/masked_by_function"] == 0 for row in rows[1:])
    assert sum(row["tokens/trained"] for row in rows[1:]) == sum(int(part.loss_mask_T.sum()) for part in parts)


def test_a_share_keeps_the_global_denominators(tmp_path):
    recorder = Recorder()
    asyncio.run(build_loop(tmp_path, recorder).execute())
    batch = recorder.batches[0]
    shares = [share_of(batch, rank) for rank in range(2)]
    for number, minibatch in enumerate(batch.minibatches):
        parts = [share.minibatches[number] for share in shares]
        assert all(part.denominators == minibatch.denominators for part in parts)
        assert [part.microbatches[0] for part in parts] == list(minibatch.microbatches)
        total = sum(int(m.loss_mask_T.sum()) for part in parts for m in part.microbatches[0])
        assert total == minibatch.denominators.num_tokens


def test_a_run_directory_is_not_overwritten_unasked(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create("a: 1\n", overwrite=False)
    directory.create("a: 2\n", overwrite=False)  # no metrics yet: nothing is lost
    directory.metrics_file.write_text("{}\n")
    with pytest.raises(RunDirectoryError, match=r"run.overwrite=true"):
        directory.create("a: 3\n", overwrite=False)
    directory.create("a: 4\n", overwrite=True)
    assert not directory.metrics_file.exists()
    assert (directory.path / "resolved.yaml").read_text() == "a: 4\n"
    assert not list(directory.path.glob("*.tmp"))
