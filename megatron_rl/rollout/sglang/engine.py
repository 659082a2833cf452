"""A real SGLang server as a `GenerationEngine`."""

from __future__ import annotations

import asyncio
import base64
import pickle
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.rollout.sglang import replies
from megatron_rl.rollout.sglang.client import EngineClient
from megatron_rl.rollout.sglang.errors import EngineReplyError
from megatron_rl.rollout.sglang.keys import EngineKeys, read_key_file
from megatron_rl.rollout.sglang.launch_args import CUSTOM_LOADER
from megatron_rl.rollout.sglang.process import SglangServer
from megatron_rl.rollout.sglang.receiver_dir import forget_receivers, raise_reported_error, read_addresses
from megatron_rl.types.protocols import EngineDirtyError
from megatron_rl.types.rollout import EngineLoad, GenerationRequest, PolicyVersion, RolloutSegment
from megatron_rl.types.routing import RoutingShape

CONTROL_TIMEOUT_S = 120.0
"""The longest that pause, begin, commit or end may take."""
NO_TENSORS = base64.b64encode(pickle.dumps([])).decode()
"""SGLang's endpoint takes pickles; this constant, an empty list, is the only one we send."""


class SglangEngine:
    """One engine (all its tensor-parallel ranks) behind one URL.

    `server` is the process when we started it, None when it runs elsewhere. `receiver_dir` (made by
    `create_receiver_dir`) is where its receivers publish their addresses. With `routing`, segments tell the experts of every
    token.

    A weight update is `load_weights` with `{"phase": "begin", "pause_mode": ...}`, the transfer through the receivers,
    then `{"phase": "commit", "version": n}` or `{"phase": "abandon"}`. From begin until a commit the engine is dirty:
    it stays paused and `resume` raises.
    """

    def __init__(
        self,
        name: str,
        url: str,
        keys: EngineKeys,
        *,
        tp_size: int,
        request_timeout_s: float,
        server: SglangServer | None = None,
        receiver_dir: Path | None = None,
        routing: RoutingShape | None = None,
    ) -> None:
        self.name = name
        self.server = server
        self._tp_size = tp_size
        self._request_timeout_s = request_timeout_s
        self._receiver_dir = receiver_dir
        self._routing = routing
        self._client = EngineClient(name, url, keys, self._raise_if_dead)
        self._is_paused = False
        self._is_dirty = False
        self._is_session_open = False
        self._released: frozenset[str] = frozenset()
        self._pause_mode = "retract"
        self._weights = secrets.token_hex(8)
        """Changes with every update, and is no other client's: `in_place` leaves prefixes of old weights in the cache."""

    @classmethod
    def attach(cls, url: str, key_file: Path, **options: Any) -> SglangEngine:
        """An engine that was started elsewhere. Raises as `read_key_file` does."""
        return cls(url, url, read_key_file(key_file), **options)

    async def generate(self, request: GenerationRequest) -> tuple[RolloutSegment, ...]:
        """Sample until stop, length or abort; while the engine is paused the request waits in it.

        With any stop token, the end-of-sequence ids of the model folder stop as well. Raises EngineDeadError,
        EngineReplyError, TimeoutError, or ValueError for top-p or top-k (see `replies`).
        """
        body = replies.build_generate_body(request, weights=self._weights, return_routing=self._routing is not None)
        reply = await self._client.post("/generate", body, self._request_timeout_s)
        return replies.to_segments(self.name, reply, self._routing)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """These requests are answered with what they have; ids that do not run are ignored. Of one that waits to be
        prefilled again SGLang no longer tells what it had sampled since it was last returned."""
        await asyncio.gather(*(self._control("/abort_request", replies.build_abort_body(name)) for name in request_ids))

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-prob (float32, temperature 1) of each token given those before it; 0 for the first."""
        return list(await asyncio.gather(*(self._score_one(sequence) for sequence in token_ids)))

    async def pause(self, mode: str) -> None:
        """See `GenerationEngine.pause`. `in_place` keeps the KV cache of the old weights; the other modes drop it."""
        if mode not in ("abort", "retract", "in_place"):
            raise ValueError(f"pause mode {mode!r}: expected abort, retract or in_place")
        await self._control("/pause_generation", {"mode": mode})
        self._is_paused = True
        self._pause_mode = mode

    async def resume(self) -> None:
        if self._released:
            raise RuntimeError(f"engine {self.name}: {min(self._released)} is released; resume its memory first")
        if self._is_dirty:
            raise EngineDirtyError(f"engine {self.name}: the last weight update was not committed; sync again first")
        await self._control("/continue_generation", {})
        self._is_paused = False

    async def load_weights(self, update: Mapping[str, Any]) -> PolicyVersion:
        phase = update["phase"]
        if phase == "begin":
            await self._begin(update.get("pause_mode", self._pause_mode))
        elif phase == "commit":
            await self._commit(PolicyVersion(update["version"]))
        elif phase == "abandon":
            await self._end_session()
        else:
            raise ValueError(f"weight update phase {phase!r}: expected begin, commit or abandon")
        return await self.policy_version()

    async def release_memory(self, parts: Sequence[str]) -> None:
        """Give the device memory of `kv_cache`, `weights` or `cuda_graph` up; without weights it is dirty until the next
        commit. Raises RuntimeError unless it is paused with nothing running: SGLang would end itself."""
        num_running = (await self.load()).num_running
        if not self._is_paused or num_running:
            raise RuntimeError(f"engine {self.name}: memory is released while {num_running} requests run; pause it first")
        if "weights" in parts:
            self._is_dirty = True
        # After an abort the scheduler may still look at its last batch; a retraction, in order before the release, ends that.
        await self._control("/pause_generation", {"mode": "retract"})
        await self._control("/release_memory_occupation", {"tags": list(parts)})
        self._released |= frozenset(parts)

    async def resume_memory(self, parts: Sequence[str]) -> None:
        """Take device memory again, at the addresses it had, with no values in it. Raises RuntimeError for a part that was
        not released: SGLang would end itself."""
        if missing := sorted(frozenset(parts) - self._released):
            raise RuntimeError(f"engine {self.name}: {missing[0]} was not released")
        await self._control("/resume_memory_occupation", {"tags": list(parts)})
        self._released -= frozenset(parts)

    async def memory_bytes(self) -> dict[str, int]:
        """What each part takes, as the server measured it at its start, of all its ranks; 0: released."""
        reply = await self._client.get("/v1/loads?include=memory", CONTROL_TIMEOUT_S)
        sizes = replies.to_memory(self.name, reply)
        return {part: 0 if part in self._released else num * self._tp_size for part, num in sizes.items()}

    async def policy_version(self) -> PolicyVersion:
        info = await self._client.get("/model_info", CONTROL_TIMEOUT_S)
        return replies.to_version(self.name, info.get("weight_version"))

    async def load(self) -> EngineLoad:
        """How busy its scheduler is. A paused one says no more; what `retract` has stopped waits by then."""
        reply = await self._client.get("/v1/loads?include=core,queues", CONTROL_TIMEOUT_S)
        load = replies.to_load(self.name, reply)
        if self._is_paused and self._pause_mode == "retract":
            return replace(load, num_running=0, num_waiting=load.num_waiting + load.num_running)
        return load

    async def open_receivers(self) -> tuple[tuple[str, int], ...]:
        """Start one receiver in each tensor-parallel rank, if there is none; (host, port) in rank order.

        Raises EngineReplyError with the line of a rank that failed.
        """
        directory = self._receivers()
        forget_receivers(directory)
        await self._begin_session()
        await self._call_loader(flush_cache=False)
        await self._end_session()
        return await asyncio.to_thread(read_addresses, self.name, directory, self._tp_size)

    async def close(self) -> None:
        """Close our connections, and end the server if we started it."""
        await self._client.close()
        if self.server is not None:
            await asyncio.to_thread(self.server.stop)

    async def _score_one(self, token_ids: Sequence[int]) -> np.ndarray:
        reply = await self._client.post("/generate", replies.build_score_body(token_ids), self._request_timeout_s)
        return np.array(replies.to_scores(self.name, token_ids, reply), dtype=np.float32)

    async def _begin(self, pause_mode: str) -> None:
        if not self._is_paused:
            await self.pause(pause_mode)
        self._is_dirty = True
        self._weights = secrets.token_hex(8)
        await self._begin_session()
        await self._call_loader(flush_cache=False)  # no step of the device reads weights any more
        raise_reported_error(self.name, self._receivers())

    async def _commit(self, version: PolicyVersion) -> None:
        if not self._is_session_open:
            raise EngineDirtyError(f"engine {self.name}: commit of version {version} without a begin")
        # Requests that keep their KV cache forbid the flush.
        await self._call_loader(flush_cache=self._pause_mode != "in_place", weight_version=str(version))
        raise_reported_error(self.name, self._receivers())
        await self._end_session()
        self._is_dirty = False

    async def _begin_session(self) -> None:
        await self._end_session()  # of an update that failed on the way
        await self._control("/begin_weight_update", {"selector": "target"})
        self._is_session_open = True

    async def _end_session(self) -> None:
        if self._is_session_open:
            await self._control("/end_weight_update", {})
            self._is_session_open = False

    async def _call_loader(self, **options: Any) -> None:
        body = {
            "serialized_named_tensors": [NO_TENSORS] * self._tp_size,
            "load_format": CUSTOM_LOADER,
            "selector": "target",
            **options,
        }
        await self._control("/update_weights_from_tensor", body)

    async def _control(self, path: str, body: Mapping[str, Any]) -> None:
        reply = await self._client.post(path, body, CONTROL_TIMEOUT_S, admin=True)
        if isinstance(reply, Mapping) and reply.get("success") is False:
            raise EngineReplyError(f"engine {self.name}: {path} failed: {reply.get('message')}")

    def _receivers(self) -> Path:
        if self._receiver_dir is None:
            raise ValueError(f"engine {self.name}: no receiver directory, so it cannot take weights")
        return self._receiver_dir

    def _raise_if_dead(self) -> None:
        if self.server is not None:
            self.server.raise_if_dead()
