"""Continuous batching: waiting requests enter free slots, all running ones decode together, finished ones leave.

The state of the slots is numpy on the host; the device holds weights and the KV cache. A step moves two small arrays to
the device and two back, and touches no sequence one by one unless it enters or leaves.

Shape suffixes: S slots, C context, N running sequences (slots 0..N-1), M sequences of a prefill, U distinct prompts,
Y layers and K experts per token of recorded routing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection

import numpy as np
import torch

from megatron_rl.rollout.embedded.decoder import Decoder, PromptSlots
from megatron_rl.rollout.embedded.generation import Generation
from megatron_rl.rollout.embedded.kv_cache import KVCache
from megatron_rl.rollout.embedded.sampling import SamplingRows, counter_uniforms, sample_tokens
from megatron_rl.types.rollout import FinishReason, PolicyVersion
from megatron_rl.types.routing import RoutingShape

PREFILL_TOKENS = 4096
"""Most padded tokens of one prefill (a single longer prompt goes alone); bounds its memory and the wait for a pause."""
MAX_PADDING_RATIO = 2.0
"""A prefill takes no further prompt when it would compute more than this times its true tokens."""
ADMISSION_FRACTION = 8
"""Waiting requests enter when num_slots / this slots are free: a prefill costs about as much as a decode step."""


class SlotPool:
    """Host arrays of what runs, one row per slot; `routing` is the shape of the experts to record, None: none."""

    def __init__(self, num_slots: int, max_context: int, routing: RoutingShape | None = None) -> None:
        self.generations: list[Generation] = []  # slot -> generation; its length is N
        self.tokens_SC = np.zeros((num_slots, max_context), np.int64)
        self.logprobs_SC = np.zeros((num_slots, max_context), np.float32)
        self.lengths_S = np.zeros(num_slots, np.int64)  # prompt and generated, the last one not yet in the KV cache
        self.limits_S = np.zeros(num_slots, np.int64)
        self.seeds_S = np.zeros(num_slots, np.uint64)
        self.temperatures_S = np.zeros(num_slots, np.float32)
        self.top_ps_S = np.zeros(num_slots, np.float32)
        self.top_ks_S = np.zeros(num_slots, np.int64)
        self.stops_SX = np.full((num_slots, 1), -1, np.int64)  # padded with -1, which no token equals
        self.experts_SCYK: np.ndarray | None = None
        if routing is not None:
            whole = routing.empty(num_slots * max_context)
            self.experts_SCYK = whole.reshape(num_slots, max_context, *whole.shape[1:])

    def enter(self, generation: Generation, stop_token_ids: tuple[int, ...]) -> None:
        slot, sampling = len(self.generations), generation.request.sampling
        self.generations.append(generation)
        length, prompt = len(generation.token_ids), generation.num_prompt_tokens
        self.tokens_SC[slot, :length] = generation.token_ids
        self.logprobs_SC[slot, prompt:length] = generation.logprobs
        if self.experts_SCYK is not None and generation.experts is not None:
            self.experts_SCYK[slot, : length - 1] = generation.experts
        self.lengths_S[slot] = length
        self.limits_S[slot] = min(prompt + sampling.max_new_tokens, self.tokens_SC.shape[1])
        self.seeds_S[slot] = generation.request.seed % 2**64
        self.temperatures_S[slot], self.top_ps_S[slot] = sampling.temperature, sampling.top_p
        self.top_ks_S[slot] = sampling.top_k
        stops = (*stop_token_ids, *sampling.stop_token_ids)
        if len(stops) > self.stops_SX.shape[1]:
            wider = np.full((len(self.stops_SX), len(stops)), -1, np.int64)
            wider[:, : self.stops_SX.shape[1]] = self.stops_SX
            self.stops_SX = wider
        self.stops_SX[slot] = -1
        self.stops_SX[slot, : len(stops)] = stops

    def leave(self, slot: int) -> Generation:
        """Take the generation out with its tokens; the last slot's row moves into the hole."""
        generation, last = self.generations[slot], len(self.generations) - 1
        self.store(slot)
        self.generations[slot] = self.generations[last]
        self.generations.pop()
        for rows in self._rows():
            rows[slot] = rows[last]
        return generation

    def store(self, slot: int) -> None:
        """Write a slot's tokens back to its generation."""
        generation, length = self.generations[slot], self.lengths_S[slot]
        generation.token_ids = tuple(self.tokens_SC[slot, :length].tolist())
        generation.logprobs = self.logprobs_SC[slot, generation.num_prompt_tokens : length].copy()
        if self.experts_SCYK is not None:
            generation.experts = self.experts_SCYK[slot, : length - 1].copy()

    def _rows(self) -> tuple[np.ndarray, ...]:
        rows = (
            self.tokens_SC, self.logprobs_SC, self.lengths_S, self.limits_S, self.seeds_S,
            self.temperatures_S, self.top_ps_S, self.top_ks_S, self.stops_SX,
        )  # fmt: skip
        return rows if self.experts_SCYK is None else (*rows, self.experts_SCYK)


class Scheduler:
    """Owns waiting and running generations. Not thread-safe: one thread calls everything."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        num_slots: int,
        stop_token_ids: tuple[int, ...],
        routing: RoutingShape | None = None,
    ) -> None:
        self._decoder, self._cache = decoder, cache
        self._device = cache.data.device
        self._routing = routing
        self._pool = SlotPool(num_slots, decoder.max_context, routing)
        self._num_slots, self._stop_token_ids = num_slots, stop_token_ids
        self._waiting: deque[Generation] = deque()
        self.version = PolicyVersion(0)
        self.num_tokens_generated = 0
        self.busy_slot_s = 0.0
        self.capacity_slot_s = 0.0
        self.num_prefill_tokens = 0
        self.prefill_s = 0.0

    @property
    def kv_fraction(self) -> float:
        """The share of all KV positions that hold a token of something that runs."""
        return float(self._pool.lengths_S[: self.num_running].sum()) / self._pool.tokens_SC.size

    @property
    def num_running(self) -> int:
        return len(self._pool.generations)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._pool.generations or self._waiting)

    def add(self, generation: Generation) -> None:
        self._waiting.append(generation)

    def step(self) -> None:
        """Prefill one batch of waiting requests, or decode one token of every running one."""
        started = time.perf_counter()
        batch = self._next_prefill()
        num_busy = self.num_running + len(batch)
        if batch:
            self._prefill(batch)
        elif self.num_running:
            self._decode()
        elapsed = time.perf_counter() - started
        if batch:
            self.prefill_s += elapsed
        self.busy_slot_s += elapsed * num_busy
        self.capacity_slot_s += elapsed * self._num_slots

    def set_version(self, version: PolicyVersion) -> None:
        """From now on `version` samples. Running generations begin a new segment with their next token."""
        self.version = version
        for slot, generation in enumerate(self._pool.generations):
            generation.enter_version(version, int(self._pool.lengths_S[slot]) - generation.num_prompt_tokens)

    def retract(self) -> None:
        """Running generations go back to the front of the queue, with their tokens and without their KV."""
        running = [self._pool.leave(slot) for slot in reversed(range(self.num_running))]
        self._waiting.extendleft(running)

    def abort_all(self) -> None:
        """Answer everything, running and waiting, with what it has."""
        self.retract()
        while self._waiting:
            self._waiting.popleft().finish(FinishReason.ABORT, self.version)

    def abort(self, request_ids: Collection[str]) -> None:
        """Answer these requests, running or waiting, with what they have; others are not here any more."""
        for generation in [*self._pool.generations, *self._waiting]:
            if generation.request.request_id in request_ids:
                self.drop(generation)
                generation.finish(FinishReason.ABORT, self.version)

    def fail(self, error: BaseException) -> None:
        """Answer everything with `error` and forget the KV, which may hold what caused it."""
        self.retract()
        while self._waiting:
            future = self._waiting.popleft().future
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._cache.clear()

    def drop(self, generation: Generation) -> None:
        """Forget a generation that nobody waits for any more; one that has finished is not here."""
        if generation in self._waiting:
            self._waiting.remove(generation)
        elif generation in self._pool.generations:
            self._leave(self._pool.generations.index(generation))

    def _next_prefill(self) -> list[Generation]:
        """The waiting generations that enter now: none until enough slots are free to be worth a prefill."""
        free = self._num_slots - self.num_running
        worthwhile = min(self.num_waiting, max(self._num_slots // ADMISSION_FRACTION, 1))
        if not self._waiting or free < worthwhile:
            return []
        candidates = [self._waiting[index].token_ids for index in range(min(free, self.num_waiting))]
        return [self._waiting.popleft() for _ in range(plan_prefill(candidates))]

    def _prefill(self, batch: list[Generation]) -> None:
        first = self.num_running
        row_of: dict[tuple[int, ...], int] = {}
        rows_M = []
        for generation in batch:
            rows_M.append(row_of.setdefault(generation.token_ids, len(row_of)))
            generation.enter_version(self.version, generation.num_generated)
            self._pool.enter(generation, self._stop_token_ids)
        lengths_U = np.array([len(token_ids) for token_ids in row_of], np.int64)
        ids_UL = np.zeros((len(row_of), int(lengths_U.max())), np.int64)
        self.num_prefill_tokens += int(lengths_U.sum())
        for token_ids, row in row_of.items():
            ids_UL[row, : len(token_ids)] = token_ids
        rows = self._to_device(np.array(rows_M, np.int64))
        slots = self._to_device(np.arange(first, first + len(batch)))
        hidden_ULH = self._decoder.prefill(self._to_device(ids_UL), PromptSlots(self._cache, rows, slots))
        if self._routing is not None:
            self._keep_prompt_experts(batch, rows_M, ids_UL.shape, first)
        last_UH = hidden_ULH[torch.arange(len(row_of), device=self._device), self._to_device(lengths_U - 1)]
        self._sample(self._decoder.logits(last_UH).index_select(0, rows), first)

    def _decode(self) -> None:
        count, pool = self.num_running, self._pool
        positions_N = pool.lengths_S[:count] - 1
        inputs = self._to_device(np.stack((pool.tokens_SC[np.arange(count), positions_N], positions_N)))
        hidden_NH = self._decoder.decode(inputs[0], inputs[1], int(positions_N.max()) + 1, self._cache)
        if self._routing is not None:
            assert pool.experts_SCYK is not None
            moe_layers = slice(self._routing.first_moe_layer, None)
            pool.experts_SCYK[np.arange(count), positions_N, moe_layers] = self._decoder.last_experts().cpu().numpy()
        self._sample(self._decoder.logits(hidden_NH), 0)

    def _keep_prompt_experts(self, batch: list[Generation], rows_M: list[int], shape: tuple[int, ...], first: int) -> None:
        """What an earlier version chose for a token that it sampled stays: only the others take this prefill's choice."""
        assert self._routing is not None and self._pool.experts_SCYK is not None
        experts = self._decoder.last_experts().cpu().numpy()
        experts_ULYK = experts.reshape(*shape, *experts.shape[1:])
        for slot, (generation, row) in enumerate(zip(batch, rows_M, strict=True), start=first):
            known, length = 0 if generation.experts is None else len(generation.experts), len(generation.token_ids)
            self._pool.experts_SCYK[slot, known:length, self._routing.first_moe_layer :] = experts_ULYK[row, known:length]

    def _sample(self, logits: torch.Tensor, first: int) -> None:
        """Append a token to the slots from `first` on; those that are done leave. Raises FloatingPointError on NaN."""
        pool, slots = self._pool, np.arange(first, self.num_running)
        lengths = pool.lengths_S[slots]
        rows = SamplingRows(pool.temperatures_S[slots], pool.top_ps_S[slots], pool.top_ks_S[slots])
        sampled, sampled_logprobs = sample_tokens(logits, counter_uniforms(pool.seeds_S[slots], lengths), rows)
        tokens, logprobs = sampled.cpu().numpy(), sampled_logprobs.cpu().numpy()
        if not np.isfinite(logprobs).all():
            request = pool.generations[first + int(np.flatnonzero(~np.isfinite(logprobs))[0])].request
            raise FloatingPointError(
                f"embedded engine: logits of request '{request.request_id}' are not finite; check the weights"
            )
        pool.tokens_SC[slots, lengths] = tokens
        pool.logprobs_SC[slots, lengths] = logprobs
        pool.lengths_S[slots] = lengths + 1
        self.num_tokens_generated += len(slots)
        stopped = (pool.stops_SX[slots] == tokens[:, None]).any(axis=1)
        done = stopped | (lengths + 1 >= pool.limits_S[slots])
        for index in np.flatnonzero(done)[::-1]:  # from the back: a hole is filled by a row that stays
            reason = FinishReason.STOP if stopped[index] else FinishReason.LENGTH
            self._leave(first + int(index)).finish(reason, self.version)

    def _leave(self, slot: int) -> Generation:
        last = self.num_running - 1
        if slot != last:
            self._cache.move(last, slot, int(self._pool.lengths_S[last]))
        return self._pool.leave(slot)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def plan_prefill(prompts: list[tuple[int, ...]]) -> int:
    """How many of the first prompts to prefill together: at least one, within the token and padding bounds.

    Equal prompts are computed once and so count once.
    """
    distinct: set[tuple[int, ...]] = set()
    longest = num_tokens = 0
    for count, prompt in enumerate(prompts):
        if prompt in distinct:
            continue
        longest, num_tokens = max(longest, len(prompt)), num_tokens + len(prompt)
        padded = longest * (len(distinct) + 1)
        if distinct and (padded > PREFILL_TOKENS or padded > MAX_PADDING_RATIO * num_tokens):
            return count
        distinct.add(prompt)
    return len(prompts)
