"""From a resolved configuration to a finished run: builds every part, starts the processes, always stops them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_rl.algorithms.algorithm import build_algorithm
from megatron_rl.checkpoint.hf_export import merge_export
from megatron_rl.config.resolve import dump_yaml
from megatron_rl.config.rollout_sections import SamplingSection
from megatron_rl.config.sections import ExperimentConfig, RolloutSection
from megatron_rl.controller.actor_factory import ActorFactory
from megatron_rl.controller.batcher import Batcher
from megatron_rl.controller.layouts import RunLayouts, engine_layout, trainer_layout
from megatron_rl.controller.loop import PhaseTimeoutError, Trainers, TrainingLoop
from megatron_rl.controller.model_setup import DTYPES, ModelSetup, reference_model
from megatron_rl.controller.placement import BundlePlan, plan_bundles
from megatron_rl.controller.probe import WeightProbe
from megatron_rl.controller.processes import give_up_gpus, open_cluster, stop_all
from megatron_rl.controller.remote import CriticGroup, RankGroup, ReferenceGroup, RemoteEngine, RoleGroups, TrainerGroup
from megatron_rl.controller.run_directory import RunDirectory
from megatron_rl.controller.schedule import build_producer
from megatron_rl.controller.scoring import Scoring
from megatron_rl.controller.setups import EngineSetup, WorkerSetup
from megatron_rl.controller.stop_signals import cancelled_by_signals
from megatron_rl.controller.turns import ColocatedTrainers, Turns
from megatron_rl.controller.weight_sync import WeightSync
from megatron_rl.data.bundle import DataBundle, build_data, sft_pairs
from megatron_rl.data.curriculum_sampler import CurriculumSampler
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.resharding.channel import Address
from megatron_rl.resharding.plan import ReshardPlan, build_reshard_plan
from megatron_rl.rollout.collector import Collector
from megatron_rl.rollout.generate.function import load_function
from megatron_rl.scheduling.curriculum import Curriculum
from megatron_rl.telemetry.build import build_telemetry
from megatron_rl.telemetry.telemetry import Telemetry
from megatron_rl.types.layout import ParallelLayout
from megatron_rl.types.rollout import SamplingParams

logger = logging.getLogger(__name__)
NUM_PROBE_PROMPTS = 4


class UnservedError(ValueError):
    """A setting that is valid but that this version cannot run; the message is one line."""


class Experiment:
    """One run. `execute` builds, trains and cleans up; it raises what stopped it, after everything is down."""

    def __init__(self, config: ExperimentConfig, model: ModelSetup, tokenizer: Tokenizer) -> None:
        self._config, self._model, self._tokenizer = config, model, tokenizer
        self._algorithm = build_algorithm(config.algorithm)
        self._critic = config.critic if "values" in self._algorithm.needs else None
        check_engine_is_served(config.rollout)
        self._function = load_function(config.rollout.generate, tokenizer)
        critic = None if self._critic is None else self._critic.layout
        reference = config.algorithm.reference.layout if "ref_logprobs" in self._algorithm.needs else None
        self._layouts = RunLayouts(
            trainer_layout(config.trainer.layout),
            None if critic is None else trainer_layout(critic),
            None if reference is None else trainer_layout(reference),
            engine_layout(config.rollout),
        )
        self._key = receiver_key(config.rollout)
        self.directory = RunDirectory(config.run.directory)

    async def execute(self) -> None:
        """Run to the end, or until a signal; leaves no process behind either way."""
        config = self._config
        with cancelled_by_signals() as arm_signals:
            data = build_data(config.data, config.run.num_eval_prompts, self._tokenizer)
            self.directory.create(dump_yaml(config), overwrite=config.run.overwrite)
            await self._run(data, arm_signals)

    async def _run(self, data: DataBundle, arm_signals: Callable[[], None]) -> None:
        config = self._config
        score = Scoring(config.rollout.rewards, data.reward_names, self._tokenizer.decode)
        layouts = self._layouts
        plan = plan_bundles(
            config.cluster,
            layouts.num_trainer_ranks,
            config.rollout.num_engines,
            layouts.engine.tp,
            nodes_per_engine=engine_nodes(config.rollout),
        )
        logger.info("starting %d processes", len(plan.bundles))
        cluster = await open_cluster(config.cluster, plan)
        arm_signals()  # Ray has put a handler of its own over ours
        telemetry = build_telemetry(config.telemetry, self.directory.path, config.run.num_steps, sys.stderr)
        engines: list[RemoteEngine] = []
        try:
            actors = ActorFactory(cluster, config.cluster, layouts, self._worker_setup(cluster.is_single_node))
            trainers = actors.trainers(self._key)
            critic = None if layouts.critic is None else actors.critic(layouts.critic)
            reference = None
            if layouts.reference is not None:
                model = reference_model(config.algorithm.reference, self._model)
                reference = actors.reference(layouts.reference, model)
            engines += actors.engines(self._engine_setup(cluster.is_single_node))
            groups = [group for group in (trainers, critic, reference) if group is not None]
            shares_prompts, addresses = await self._start(groups, engines, cluster.plan)
            for kind, layout in (("critic", layouts.critic), ("reference", layouts.reference)):
                if layout is not None:
                    logger.info("%d %s ranks (%s)", layout.world_size, kind, _sizes(layout))
            logger.info(
                "%d trainer ranks (%s), %d engines x TP %d", layouts.trainer.world_size, _sizes(layouts.trainer),
                len(engines), layouts.engine.tp,
            )  # fmt: skip
            sync = config.sync
            probe = WeightProbe(probe_tokens(data), sync.probe_interval, sync.probe_tolerance)
            turns = self._turns(trainers, engines, telemetry) if self._is_colocated else None
            weight_sync = WeightSync(self._reshard_plan(), trainers, engines, addresses, self._key, sync, probe, turns)
            batcher = Batcher(
                self._algorithm, config.trainer, layouts.trainer, config.run, layouts.critic, layouts.reference,
                shares_prompts=shares_prompts,
            )  # fmt: skip
            roles: Trainers = trainers
            if len(groups) > 1:
                roles = self._role_groups(trainers, critic, reference)
            if turns is not None:
                roles = ColocatedTrainers(roles, turns)
            await self._training_loop(data, score, engines, roles, batcher, weight_sync, telemetry).execute()
            if config.checkpoint.export_hf_at_end:
                if turns is not None:
                    await turns.to_trainers()
                await self._export(trainers, "final")
        finally:
            await score.close()
            await stop_all(engines)
            cluster.close()
            telemetry.close()

    async def _start(
        self, groups: Sequence[RankGroup], engines: Sequence[RemoteEngine], plan: BundlePlan
    ) -> tuple[bool, list[Address]]:
        """Start everything: (whether all ranks can share prompts, the receivers' addresses by engine). Side by side, or
        where both share GPUs the engines when the trainers have given theirs up."""
        limit_s = self._config.cluster.start_timeout_s
        scope = asyncio.timeout(limit_s)
        devices: list[list[str | None]] = [[] for _ in engines]
        try:
            async with scope:
                starting = asyncio.gather(*(group.start() for group in groups))
                if self._is_colocated:
                    await starting
                    devices = await give_up_gpus(groups, plan)
                shares_prompts, starts = await asyncio.gather(
                    starting, asyncio.gather(*(engine.start(gpus) for engine, gpus in zip(engines, devices, strict=True)))
                )
        except TimeoutError:
            if not scope.expired():
                raise
            raise PhaseTimeoutError(f"phase start: not done within cluster.start_timeout_s={limit_s:.0f}") from None
        return all(shares_prompts), [address for start in starts for address in start]

    @property
    def _is_colocated(self) -> bool:
        return self._config.cluster.placement == "colocated"

    def _turns(self, trainers: TrainerGroup, engines: Sequence[RemoteEngine], telemetry: Telemetry) -> Turns:
        sync = self._config.sync
        return Turns(
            trainers,
            engines,
            pause_mode=sync.pause_mode or "retract",
            timeout_s=sync.timeout_s,
            span=telemetry.span,
            record=telemetry.record,
        )

    def _training_loop(
        self,
        data: DataBundle,
        score: Scoring,
        engines: Sequence[RemoteEngine],
        trainers: Trainers,
        batcher: Batcher,
        weight_sync: WeightSync,
        telemetry: Telemetry,
    ) -> TrainingLoop:
        config = self._config
        capacities = self._capacities()
        section = config.data.curriculum
        curriculum = CurriculumSampler(data.train_sampler, Curriculum(config.data.seed), section) if section.enabled else None
        producer = build_producer(
            config.run, config.rollout, config.sync, engines, capacities, score,
            self._sampling(config.rollout.sampling), (curriculum or data.train_sampler).next,
            self._function, None if curriculum is None else curriculum.curriculum, section.adapt_samples,
        )  # fmt: skip
        assert config.rollout.eval_sampling is not None
        return TrainingLoop(
            config.run,
            config.trainer,
            self._critic,
            self._sampling(config.rollout.sampling),
            self._sampling(config.rollout.eval_sampling),
            data=data,
            pairs_of=lambda prompts: sft_pairs(prompts, self._tokenizer),
            decode=self._tokenizer.decode,
            producer=producer,
            collector=Collector(engines, capacities, score, config.run.seed, self._function),
            batcher=batcher,
            trainers=trainers,
            weight_sync=weight_sync,
            telemetry=telemetry,
            directory=self.directory,
            length_bias_alarm=config.rollout.length_bias_alarm,
            curriculum=curriculum,
        )

    def _role_groups(
        self, trainers: TrainerGroup, critic: CriticGroup | None, reference: ReferenceGroup | None
    ) -> RoleGroups:
        """The policy's ranks together with those of the other roles, which get its weights through a folder."""
        config = self._config

        async def load_policy(group: CriticGroup | ReferenceGroup) -> None:
            folder = await self._export(trainers, "for_other_ranks")
            try:
                await group.load_policy(str(folder))
            finally:
                await asyncio.to_thread(shutil.rmtree, folder)

        return RoleGroups(
            trainers,
            critic,
            reference,
            load_policy,
            critic_starts_anew=config.critic.path is None and config.trainer.warm_start.num_steps > 0,
            is_teacher=config.algorithm.reference.path is not None,
            refresh_interval=config.algorithm.reference.refresh_interval,
        )

    def _worker_setup(self, is_single_node: bool) -> WorkerSetup:
        config = self._config
        return WorkerSetup(
            model=self._model,
            dtype=config.model.dtype,
            section=config.trainer,
            critic=self._critic,
            algorithm=config.algorithm,
            sync=config.sync,
            layout=self._layouts.trainer,
            engine_layout=self._layouts.engine,
            temperature=config.rollout.sampling.temperature,
            seed=config.run.seed,
            start_timeout_s=config.cluster.start_timeout_s,
            is_single_node=is_single_node,
        )

    def _engine_setup(self, is_single_node: bool) -> EngineSetup:
        config = self._config
        dtype = config.rollout.embedded.dtype if config.rollout.engine == "embedded" else config.model.dtype
        return EngineSetup(
            model=self._model,
            section=config.rollout,
            stop_token_ids=(self._tokenizer.eos_id,),
            max_context=_longest(config),
            dtype=dtype or config.model.dtype,
            key=self._key,
            run_directory=str(self.directory.path.resolve()),
            start_id=secrets.token_hex(4),
            is_single_node=is_single_node,
            returns_routing=config.algorithm.router_replay == "r3",
            is_colocated=self._is_colocated,
        )

    def _reshard_plan(self) -> ReshardPlan:
        return build_reshard_plan(
            self._model.family_name,
            self._model.dims,
            self._layouts.trainer,
            self._layouts.engine,
            trainer_vocab_multiple=self._model.vocab_multiple,
            relay=self._config.sync.relay,
        )

    def _capacities(self) -> list[int]:
        rollout = self._config.rollout
        slots = rollout.embedded.num_slots if rollout.engine == "embedded" else rollout.sglang.num_concurrent
        return [slots] * rollout.num_engines

    def _sampling(self, section: SamplingSection) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=section.max_new_tokens,
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            stop_token_ids=(self._tokenizer.eos_id,),
        )

    async def _export(self, trainers: TrainerGroup, name: str) -> Path:
        folder = self.directory.path / "checkpoints" / name
        parts = str(folder) + ".parts"
        await trainers.export_parts(parts)
        dtype = DTYPES[self._config.model.dtype]
        await asyncio.to_thread(merge_export, parts, folder, self._model.family, self._model.dims, dtype)
        self._tokenizer.save(folder)
        logger.info("exported %s", folder)
        return folder


def check_engine_is_served(section: RolloutSection) -> None:
    """Raises UnservedError for data-parallel attention: SGLang asserts dp_size == 1 in every weight update."""
    if section.engine == "sglang" and section.sglang.attn_dp_size > 1:
        raise UnservedError(
            f"rollout.sglang.attn_dp_size={section.sglang.attn_dp_size}: SGLang updates no weights under data-parallel "
            "attention; set it to 1"
        )


def probe_tokens(data: DataBundle) -> list[tuple[int, ...]]:
    """What probes score: the first prompts of the evaluation."""
    return [prompt.token_ids for prompt in data.eval_prompts[:NUM_PROBE_PROMPTS]]


def receiver_key(section: RolloutSection) -> bytes:
    """The key of this run's receivers: a new one, or that of engines which were started elsewhere."""
    if section.engine == "sglang" and section.sglang.urls:
        return (Path(section.sglang.receiver_dirs[0]) / "key").read_bytes()
    return secrets.token_bytes(32)


def engine_nodes(section: RolloutSection) -> int:
    """How many nodes each engine that we start spans."""
    return section.sglang.num_nodes if section.engine == "sglang" and not section.sglang.urls else 1


def _longest(config: ExperimentConfig) -> int:
    eval_sampling = config.rollout.eval_sampling or config.rollout.sampling
    longest = max(config.rollout.sampling.max_new_tokens, eval_sampling.max_new_tokens)
    return config.rollout.embedded.max_context or config.data.max_prompt_tokens + longest


def _sizes(layout: ParallelLayout) -> str:
    names = ("tp", "pp", "virtual_pp", "cp", "ep", "etp", "dp")
    return " ".join(f"{name}{getattr(layout, name)}" for name in names if getattr(layout, name) > 1) or "single"
