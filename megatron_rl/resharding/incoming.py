"""One weight update as an engine rank sees it: who must send, who writes now, who has ended."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence

CLOSE_TIMEOUT_S = 30.0


class IncomingUpdate:
    """What arrived for one sync so far. `sync` differs in every attempt, `version` is what the weights become.

    `is_staged`: slices land beside the parameters, which keep serving until `apply`.
    """

    def __init__(self, sync: str, version: int, sources: Sequence[int], is_staged: bool) -> None:
        self.sync, self.version, self.sources, self.is_staged = sync, version, frozenset(sources), is_staged
        self.digests: dict[int, str] = {}
        self.algorithms: dict[int, str] = {}
        self.num_elements = 0
        self._broken: str | None = None
        self._writing: dict[int, Callable[[], None]] = {}
        self._is_closed = False
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def writing(self, source: int, interrupt: Callable[[], None]) -> Iterator[None]:
        """The time in which a source's slices are written; `interrupt` makes it end early.

        Raises ValueError when the rank may not write (again) here. Whatever ends it by an exception breaks the update.
        """
        with self._changed:
            if self._is_closed:
                raise ValueError(f"version {self.version}: another sync has begun")
            if source not in self.sources or source in self._writing or source in self.digests:
                raise ValueError(f"source {source} may not open here; expected once each: {sorted(self.sources)}")
            self._writing[source] = interrupt
        try:
            yield
        except BaseException as error:
            self.break_with(f"source {source}: {error}")
            raise
        finally:
            with self._changed:
                del self._writing[source]
                self._changed.notify_all()

    def end(self, source: int, algorithm: str, digest: str, num_elements: int) -> None:
        with self._changed:
            self.digests[source], self.algorithms[source] = digest, algorithm
            self.num_elements += num_elements

    def break_with(self, reason: str) -> None:
        with self._changed:
            self._broken = self._broken or reason

    def require_whole(self) -> None:
        """Raises ValueError when a source has not ended, or one failed."""
        if self._broken is not None:
            raise ValueError(f"version {self.version} is incomplete: {self._broken}")
        self.require(self.sources)

    def require(self, sources: Collection[int]) -> None:
        """Raises ValueError when one of these has not ended."""
        missing = sorted(set(sources) - set(self.digests))
        if missing:
            raise ValueError(f"version {self.version} is incomplete: no end from sources {missing}")

    def close(self) -> None:
        """Interrupt whoever writes and wait for them: after this nobody writes for this sync."""
        with self._changed:
            self._is_closed = True
            for interrupt in self._writing.values():
                interrupt()
            if not self._changed.wait_for(lambda: not self._writing, CLOSE_TIMEOUT_S):
                raise ValueError(f"version {self.version}: sources {sorted(self._writing)} do not stop writing")
