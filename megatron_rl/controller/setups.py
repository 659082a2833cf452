"""What travels to the actors: everything a trainer rank or an engine is built from, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.algorithm_sections import AlgorithmSection
from megatron_rl.config.sections import CriticSection, RolloutSection, SyncSection, TrainerSection
from megatron_rl.controller.model_setup import ModelSetup
from megatron_rl.types.layout import EngineLayout, ParallelLayout


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What every trainer rank is built from. `critic` None: the algorithm reads no values."""

    model: ModelSetup
    dtype: str
    section: TrainerSection
    critic: CriticSection | None
    algorithm: AlgorithmSection
    sync: SyncSection
    layout: ParallelLayout
    engine_layout: EngineLayout
    temperature: float
    seed: int
    start_timeout_s: float
    is_single_node: bool


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What an engine is built from. `key` opens the receivers; it is never logged.

    `start_id` tells this start's files from those of an earlier one in the same run directory.
    """

    model: ModelSetup
    section: RolloutSection
    stop_token_ids: tuple[int, ...]
    max_context: int
    dtype: str
    key: bytes
    run_directory: str
    start_id: str
    is_single_node: bool
    returns_routing: bool = False
    """Whether segments shall tell the experts of every token (`algorithm.router_replay` r3)."""
    is_colocated: bool = False

    def __repr__(self) -> str:
        return f"EngineSetup({self.section.engine}, {self.model.family_name})"
