"""One real SGLang server (tensor parallel 2, CPU) shared by all tests here: starting it costs half a minute."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_rl.config.rollout_sections import SglangSection
from megatron_rl.rollout.sglang.engine import SglangEngine
from megatron_rl.rollout.sglang.launch_args import EnginePlace, ServedModel
from megatron_rl.rollout.sglang.process import SglangServer
from megatron_rl.rollout.sglang.receiver_dir import create_receiver_dir
from megatron_rl.rollout.sglang.start import start_engine
from megatron_rl.types.routing import RoutingShape

TP_SIZE = 2
MAX_CONTEXT = 448
SECTION = SglangSection(
    tp_size=TP_SIZE,
    num_concurrent=32,
    start_timeout_s=300.0,
    request_timeout_s=120.0,
    server_args={"log_level_http": "warning"},
)


@dataclass(frozen=True)
class TinyModel:
    folder: Path
    reference: Qwen3MoeForCausalLM


@dataclass(frozen=True)
class Running:
    """A server with what is needed to talk to it."""

    engine: SglangEngine
    server: SglangServer
    receiver_dir: Path
    receiver_key: bytes

    @property
    def guardian_argv(self) -> list[str]:
        return Path(f"/proc/{self.server._process.pid}/cmdline").read_text().split("\0")

    @property
    def work_dir(self) -> Path:
        (path,) = [Path(word).parent for word in self.guardian_argv if word.endswith("keys.yaml")]
        return path

    @property
    def session(self) -> int:
        """The session id of the server's processes: the guardian's only child leads it."""
        guardian = self.server._process.pid
        (child,) = Path(f"/proc/{guardian}/task/{guardian}/children").read_text().split()
        return int(child)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Every size differs; the experts are wide enough that SGLang's CPU path pads nothing at TP 2."""
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=211,
        hidden_size=96,
        intermediate_size=160,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        num_experts=8,
        num_experts_per_tok=3,
        max_position_embeddings=512,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.15)
    folder = tmp_path_factory.mktemp("tiny_qwen3_moe")
    model.save_pretrained(folder)
    return TinyModel(folder, model)


LAST = {"test_weights_arrive.py": 1, "test_sync_in_flight.py": 2, "test_server_end.py": 3}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that change the shared server for good come last, in whatever order files are given."""
    items.sort(key=lambda item: LAST.get(item.path.name, 0))


@pytest.fixture(scope="session")
def loop():
    """One event loop for the session: the engine's connections belong to it."""
    with asyncio.Runner() as runner:
        yield runner.run


@contextmanager
def started(
    model: Path,
    directory: Path,
    section: SglangSection,
    loop,
    load_format: Literal["auto", "dummy"] = "auto",
    routing: RoutingShape | None = None,
) -> Iterator[Running]:
    """A server of the model folder with all its files in `directory`; stopped at the end."""
    receiver_key = secrets.token_bytes(32)
    create_receiver_dir(directory / "receivers", receiver_key)
    engine = start_engine(
        "shared",
        section,
        EnginePlace(cpu_cores=tuple(sorted(os.sched_getaffinity(0)))),
        ServedModel(sys.executable, str(model), "fp32", MAX_CONTEXT, load_format, routing),
        receiver_dir=directory / "receivers",
        log_path=directory / "server.log",
        on_progress=print,
    )
    try:
        yield Running(engine, engine.server, directory / "receivers", receiver_key)
    finally:
        loop(engine.close())


@pytest.fixture(scope="session")
def running(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory, loop):
    config = tiny_model.reference.config
    routing = RoutingShape(config.num_hidden_layers, config.num_experts_per_tok, config.num_experts)
    with started(tiny_model.folder, tmp_path_factory.mktemp("engine"), SECTION, loop, routing=routing) as server:
        yield server


@pytest.fixture
def engine(running: Running) -> SglangEngine:
    return running.engine
