"""Who holds the memory of shared GPUs: trainers and engines take turns, in one order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

ENGINE_PARTS = ("kv_cache", "weights", "cuda_graph")
TRAINER_STATES = ("parameters", "gradients", "optimizer")
"""What each side holds on a GPU."""


class Move(StrEnum):
    """What is done to trainers and engines, in the order of one turn."""

    RELEASE_ENGINES = "release_engines"
    """Engines give up everything; nothing of theirs runs."""
    ONLOAD_TRAINERS = "onload_trainers"
    """Trainers take everything."""
    TRAIN = "train"
    OFFLOAD_OPTIMIZER = "offload_optimizer"
    """Trainers give gradients and optimizer up: what is left of them is what a sync sends."""
    RESUME_WEIGHTS = "resume_weights"
    """Engines take memory for weights, to be filled."""
    SYNC = "sync"
    OFFLOAD_PARAMETERS = "offload_parameters"
    RESUME_CACHE = "resume_cache"
    """Engines take KV cache and graphs."""


_NEXT: dict[Move, frozenset[Move]] = {
    Move.RELEASE_ENGINES: frozenset({Move.ONLOAD_TRAINERS}),
    Move.ONLOAD_TRAINERS: frozenset({Move.TRAIN, Move.OFFLOAD_OPTIMIZER}),
    Move.TRAIN: frozenset({Move.TRAIN, Move.OFFLOAD_OPTIMIZER}),
    Move.OFFLOAD_OPTIMIZER: frozenset({Move.RESUME_WEIGHTS}),
    Move.RESUME_WEIGHTS: frozenset({Move.SYNC}),
    Move.SYNC: frozenset({Move.OFFLOAD_PARAMETERS}),
    Move.OFFLOAD_PARAMETERS: frozenset({Move.RESUME_CACHE}),
    Move.RESUME_CACHE: frozenset({Move.RELEASE_ENGINES}),
}
"""What may follow. Training is any number of steps, none too: the first sync comes before the first step."""


class ColocationError(RuntimeError):
    """A move out of order, or memory taken from an engine that samples; the message is one line."""


class Colocation:
    """The order of moves of one run. It begins with engines that hold their memory and trainers that hold none."""

    def __init__(self) -> None:
        self._last, self._running = Move.RESUME_CACHE, False

    @property
    def are_trainers_up(self) -> bool:
        """Whether the trainers hold everything that training needs."""
        return self._last in (Move.ONLOAD_TRAINERS, Move.TRAIN)

    @property
    def awaits_sync(self) -> bool:
        """Whether both sides hold weights, and nothing else: a sync is next, also after one that failed."""
        return self._last is Move.RESUME_WEIGHTS

    @contextmanager
    def move(self, move: Move, num_running: int = 0) -> Iterator[None]:
        """The time that a move takes. One that fails has not happened: only the same one may follow.

        `num_running`: requests that the engines sample now. Raises ColocationError for a move out of order, while another
        one runs, and for a release with a request running, which would end an engine.
        """
        if self._running:
            raise ColocationError(f"'{move}' while another move runs, after '{self._last}'")
        if move not in _NEXT[self._last]:
            expected = " or ".join(f"'{after}'" for after in Move if after in _NEXT[self._last])
            raise ColocationError(f"'{move}' after '{self._last}'; expected {expected}")
        if move is Move.RELEASE_ENGINES and num_running:
            raise ColocationError(f"'{move}' with {num_running} requests running; pause the engines first")
        self._running = True
        try:
            yield
            self._last = move
        finally:
            self._running = False
