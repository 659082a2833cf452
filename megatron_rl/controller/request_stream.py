"""Requests to an engine in another process, in batches: one call carries many requests there and many answers back.

A call between processes costs about as much as a decode step of a small model. One call per sample would bind generation
to it; here the number of calls follows the engine's steps, however many samples run. Neither side knows Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from megatron_rl.types.rollout import GenerationRequest, RolloutSegment

Segments = tuple[RolloutSegment, ...]
Answer = tuple[str, Segments | Exception]
"""The request's id, and its segments or the error that ended it."""
Exchange = Callable[[Sequence[GenerationRequest], Sequence[str], bool], Awaitable[Sequence[Answer]]]
"""`RequestDesk.exchange`, wherever it is."""

ABORT_AGAIN_S = 0.2
"""After how long a request that was ended and has not answered is ended again: it may still have been on its way."""
COALESCE_S = 0.002
"""How long an answer waits for others that end at the same time: a decode step or less."""


class RequestDesk:
    """The engine's side: runs what it is given and hands out what has ended, each answer once."""

    def __init__(
        self,
        generate: Callable[[GenerationRequest], Awaitable[Segments]],
        abort: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        self._generate, self._abort = generate, abort
        self._running: dict[str, asyncio.Task[None]] = {}
        self._ended: list[Answer] = []
        self._has_ended = asyncio.Event()

    async def exchange(self, requests: Sequence[GenerationRequest], cancelled: Sequence[str], wait: bool) -> list[Answer]:
        """Start `requests`, end `cancelled` (nobody waits for them any more), and return what has ended since the last
        call; with `wait`, at least one answer as long as anything runs."""
        for request_id in cancelled:
            if task := self._running.pop(request_id, None):
                task.cancel()
                self._has_ended.set()  # a caller must not wait for what will never end
        for request in requests:
            if request.request_id in self._running:
                raise ValueError(f"request '{request.request_id}' runs already; ids must be unique")
            self._running[request.request_id] = asyncio.create_task(self._run(request))
        if not wait:
            return []
        while not self._ended and self._running:
            self._has_ended.clear()
            await self._has_ended.wait()
            await asyncio.sleep(COALESCE_S)
        ended, self._ended = self._ended, []
        return ended

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Have these requests answer with what they have; returns when they did."""
        tasks = {name: task for name in request_ids if (task := self._running.get(name))}
        while tasks:
            await self._abort(list(tasks))
            await asyncio.wait(tasks.values(), timeout=ABORT_AGAIN_S)
            tasks = {name: task for name, task in tasks.items() if not task.done()}

    async def _run(self, request: GenerationRequest) -> None:
        answer: Segments | Exception
        try:
            answer = await self._generate(request)
        except Exception as error:  # noqa: BLE001 (it belongs to whoever asked, and is raised there)
            answer = error
        if self._running.pop(request.request_id, None) is not None:
            self._ended.append((request.request_id, answer))
            self._has_ended.set()


class RequestStream:
    """The caller's side of one engine: `generate` for each request, and one exchange on its way as long as any waits.

    Everything asked for in one turn of the event loop travels together.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._waiting: dict[str, asyncio.Future[Segments]] = {}
        self._requests: list[GenerationRequest] = []
        self._cancelled: list[str] = []
        self._pump: asyncio.Task[None] | None = None
        self._flush: asyncio.Task[None] | None = None

    async def generate(self, request: GenerationRequest) -> Segments:
        """See `GenerationEngine`. Raises what the engine raised, or what broke the exchange (for all that wait)."""
        future: asyncio.Future[Segments] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future
        self._requests.append(request)
        self._wake()
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.pop(request.request_id, None) is not None:
                self._cancelled.append(request.request_id)
                self._wake()
            raise

    def withdraw(self, request_ids: Sequence[str]) -> list[str]:
        """Those that have not left yet are answered with nothing; the names of the others, which only the engine can end."""
        unsent = {request.request_id for request in self._requests}.intersection(request_ids)
        self._requests = [request for request in self._requests if request.request_id not in unsent]
        for name in unsent:
            self._resolve(name, ())
        return [name for name in request_ids if name not in unsent]

    def _wake(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._guarded(self._run()))
        elif self._flush is None or self._flush.done():
            self._flush = asyncio.create_task(self._guarded(self._send_only()))

    async def _run(self) -> None:
        """Exchange until nobody waits. Callers resumed by an answer ask for more before the next exchange leaves."""
        while self._waiting or self._cancelled:
            await asyncio.sleep(0)
            for request_id, answer in await self._exchange(*self._take(), bool(self._waiting)):
                self._resolve(request_id, answer)
            await asyncio.sleep(0)

    async def _send_only(self) -> None:
        """What is asked while an exchange waits at the engine goes beside it."""
        await asyncio.sleep(0)
        while self._requests or self._cancelled:
            await self._exchange(*self._take(), False)

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 (everyone who waits gets it)
            waiting, self._waiting = self._waiting, {}
            for future in waiting.values():
                if not future.done():
                    future.set_exception(error)

    def _take(self) -> tuple[list[GenerationRequest], list[str]]:
        taken = self._requests, self._cancelled
        self._requests, self._cancelled = [], []
        known = {request.request_id for request in taken[0]}
        return [r for r in taken[0] if r.request_id in self._waiting], [c for c in taken[1] if c not in known]

    def _resolve(self, request_id: str, answer: Segments | Exception) -> None:
        future = self._waiting.pop(request_id, None)
        if future is None or future.done():
            return  # cancelled meanwhile
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
