"""The embedded engine: the scheduler on a thread of its own, behind the `GenerationEngine` protocol.

One worker thread owns KV cache and scheduler and reads the weights. Requests, pauses, weight updates and scores reach
it as commands in a queue that it empties between two steps: only one thread writes the state, and the event loop of the
caller is never blocked.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.rollout.embedded.decoder import Decoder
from megatron_rl.rollout.embedded.generation import Generation
from megatron_rl.rollout.embedded.kv_cache import KVCache
from megatron_rl.rollout.embedded.scheduler import Scheduler
from megatron_rl.rollout.embedded.scoring import score_sequences
from megatron_rl.rollout.embedded.weights import ShardedWeights
from megatron_rl.types.protocols import EngineDirtyError
from megatron_rl.types.rollout import EngineLoad, GenerationRequest, PolicyVersion, RolloutSegment

PAUSE_MODES = ("abort", "retract", "in_place")
CLOSE_TIMEOUT_S = 60.0

Result = TypeVar("Result")


class EngineClosedError(RuntimeError):
    """The engine was closed before the request was answered."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the start. `busy_slot_s` / `capacity_slot_s`: the share of the slots in use while there was work."""

    num_running: int
    num_waiting: int
    num_tokens_generated: int
    busy_slot_s: float
    capacity_slot_s: float


class EmbeddedEngine:
    """A `GenerationEngine` in this process. The weights are zero, version 0, until somebody fills `weights.shards`.
    With `returns_routing`, segments tell the experts of every token.

    Write to the shards only while the engine is paused (or before the first request).
    """

    def __init__(
        self,
        dims: ModelDims,
        tp: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        num_slots: int,
        max_context: int,
        stop_token_ids: tuple[int, ...],
        vocab_multiple: int = 64,
        returns_routing: bool = False,
    ) -> None:
        self.weights = ShardedWeights(dims, tp, dtype, device, vocab_multiple)
        self._dims, self._max_context = dims, max_context
        routing = dims.routing if returns_routing else None
        self._decoder = Decoder(self.weights, max_context, records_experts=returns_routing)
        self._cache = KVCache(dims, tp, num_slots, max_context, dtype, self.weights.device)
        self._scheduler = Scheduler(self._decoder, self._cache, num_slots, stop_token_ids, routing)
        self._released: frozenset[str] = frozenset()
        self._paused = self._dirty = self._updating = False
        self._closed = False
        self._close_lock = threading.Lock()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="embedded-engine", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerationRequest) -> tuple[RolloutSegment, ...]:
        """See `GenerationEngine`. Waits while paused. Raises ValueError for a request that cannot be served.

        When the caller is cancelled, the request leaves its slot.
        """
        check_request(request, self._dims.vocab_size, self._max_context)
        generation = Generation(request)
        self._post(lambda: self._scheduler.add(generation))
        try:
            return await asyncio.wrap_future(generation.future)
        except asyncio.CancelledError:
            if not self._closed:
                self._post(lambda: self._scheduler.drop(generation))
            raise

    async def abort(self, request_ids: Sequence[str]) -> None:
        """These requests are answered with what they have; ids that do not run are ignored."""
        await self._call(lambda: self._scheduler.abort(frozenset(request_ids)))

    async def pause(self, mode: str) -> None:
        """See `GenerationEngine`. When it returns, no step runs and the weights may be written.

        `abort` answers running and waiting requests with what they have. `retract` keeps them and recomputes their KV
        after `resume`. `in_place` keeps them with their KV, which goes stale when the weights change.
        """
        if mode not in PAUSE_MODES:
            raise ValueError(f"pause mode '{mode}' is unknown; expected one of {', '.join(PAUSE_MODES)}")
        await self._call(lambda: self._pause(mode))

    async def resume(self) -> None:
        await self._call(self._resume)

    async def load_weights(self, update: Mapping[str, Any]) -> PolicyVersion:
        """`{"phase": "begin"}`; the shards are written; `{"phase": "commit", "version": n}` or `{"phase": "abandon"}`.

        Raises RuntimeError when the engine is not paused, or a commit has no begin.
        """
        return await self._call(lambda: self._load_weights(update))

    async def release_memory(self, parts: Sequence[str]) -> None:
        """Give the memory of `kv_cache`, `weights` or `cuda_graph` (it has none) up. Raises RuntimeError unless paused
        with nothing running; without weights it is dirty until the next commit."""
        await self._call(lambda: self._release(frozenset(parts)))

    async def resume_memory(self, parts: Sequence[str]) -> None:
        """Take memory again: zeros. Raises RuntimeError for a part that was not released."""
        await self._call(lambda: self._take_memory(frozenset(parts)))

    async def memory_bytes(self) -> dict[str, int]:
        """What each part holds now."""
        return await self._call(
            lambda: {"kv_cache": self._cache.data.nbytes, "weights": self.weights.num_bytes, "cuda_graph": 0}
        )

    async def policy_version(self) -> PolicyVersion:
        return self._scheduler.version

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[np.ndarray]:
        """Log-prob (float32) of each token given those before it; 0 for the first. Also while paused."""
        longest = max((len(ids) for ids in token_ids), default=0)
        if longest > self._max_context:
            raise ValueError(f"score: a sequence has {longest} tokens, max_context is {self._max_context}; raise max_context")
        return await self._call(lambda: self._score(token_ids, temperature))

    async def load(self) -> EngineLoad:
        """How busy it is. Every slot has its KV, so nothing is ever preempted."""
        scheduler = self._scheduler
        return await self._call(
            lambda: EngineLoad(
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                kv_fraction=scheduler.kv_fraction,
                num_preempted=0,
                num_prefill_tokens=scheduler.num_prefill_tokens,
                prefill_s=scheduler.prefill_s,
            )
        )

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_tokens_generated=scheduler.num_tokens_generated,
            busy_slot_s=scheduler.busy_slot_s,
            capacity_slot_s=scheduler.capacity_slot_s,
        )

    def close(self) -> None:
        """Stop the thread; pending requests fail with EngineClosedError. Idempotent."""
        with self._close_lock:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"embedded engine: the step in progress did not end within {CLOSE_TIMEOUT_S:.0f} s")

    # Caller's side of the queue.

    def _post(self, command: Callable[[], None]) -> None:
        with self._close_lock:
            if self._closed:
                raise EngineClosedError("embedded engine is closed")
            self._commands.put(command)

    async def _call(self, function: Callable[[], Result]) -> Result:
        """Run on the worker between two steps; its result or exception comes back."""
        future: Future[Result] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 (whatever it is, it belongs to the caller)
                future.set_exception(error)

        self._post(command)
        return await asyncio.wrap_future(future)

    # Worker's side: everything below runs on its thread.

    @torch.inference_mode()
    def _work(self) -> None:
        while True:
            can_step = self._scheduler.has_work and not self._paused
            try:
                command = self._commands.get(block=not can_step)
            except queue.Empty:
                self._step()
                continue
            if command is None:
                break
            command()
        self._scheduler.fail(EngineClosedError("embedded engine was closed while the request was pending"))

    def _step(self) -> None:
        try:
            self._scheduler.step()
        except Exception as error:  # noqa: BLE001 (every pending request gets it; none may hang)
            self._scheduler.fail(error)

    def _pause(self, mode: str) -> None:
        self._paused = True
        self._decoder.forget_weights()
        if mode == "abort":
            self._scheduler.abort_all()
        elif mode == "retract":
            self._scheduler.retract()

    def _release(self, parts: frozenset[str]) -> None:
        if not self._paused or self._scheduler.num_running:
            running = self._scheduler.num_running
            raise RuntimeError(f"embedded engine: memory is released while {running} requests run; pause it first")
        if "kv_cache" in parts:
            self._cache.release()
        if "weights" in parts:
            self._dirty = True
            self._decoder.detach_weights()
            self.weights.release()
        self._released |= parts

    def _take_memory(self, parts: frozenset[str]) -> None:
        if missing := sorted(parts - self._released):
            raise RuntimeError(f"embedded engine: {missing[0]} was not released")
        if "kv_cache" in parts:
            self._cache.resume()
        if "weights" in parts:
            self.weights.resume()
            self._decoder.attach_weights()
        self._released -= parts

    def _resume(self) -> None:
        if self._released:
            raise RuntimeError(f"embedded engine: {min(self._released)} is released; resume its memory first")
        if self._dirty:
            raise EngineDirtyError("embedded engine: the weights are not one whole version; finish an update first")
        self._decoder.forget_weights()
        self._paused = False

    def _load_weights(self, update: Mapping[str, Any]) -> PolicyVersion:
        phase = update.get("phase")
        if not self._paused:
            raise RuntimeError(f"load_weights: phase '{phase}' needs a paused engine; call pause first")
        if phase == "begin":
            self._dirty = self._updating = True
        elif phase in ("commit", "abandon") and not self._updating:
            raise RuntimeError(f"load_weights: phase '{phase}' without a begin")
        elif phase == "commit":
            self._decoder.forget_weights()
            self._scheduler.set_version(PolicyVersion(int(update["version"])))
            self._dirty = self._updating = False
        elif phase == "abandon":
            self._updating = False
        else:
            raise ValueError(f"load_weights: phase '{phase}' is unknown; expected begin, commit or abandon")
        return self._scheduler.version

    def _score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[np.ndarray]:
        if self._dirty:
            raise EngineDirtyError("embedded engine: the weights are not one whole version; nothing to score with")
        return score_sequences(self._decoder, token_ids, temperature)


def check_request(request: GenerationRequest, vocab_size: int, max_context: int) -> None:
    """Raises ValueError with one line when the engine cannot serve the request."""
    name, ids, sampling = request.request_id, request.token_ids, request.sampling
    if not ids:
        raise ValueError(f"request '{name}': the prompt is empty")
    if len(ids) >= max_context:
        raise ValueError(
            f"request '{name}': the prompt has {len(ids)} tokens, max_context {max_context} leaves no room; raise it"
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"request '{name}': token ids must lie in [0, {vocab_size}), got {min(ids)}..{max(ids)}")
    if sampling.max_new_tokens < 1:
        raise ValueError(f"request '{name}': max_new_tokens is {sampling.max_new_tokens}, expected at least 1")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise ValueError(
            f"request '{name}': temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k};"
            " expected temperature >= 0, 0 < top_p <= 1, top_k >= 0"
        )
