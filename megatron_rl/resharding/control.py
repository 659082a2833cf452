"""The controller's side of a weight sync: one connection per engine rank, kept over all syncs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_rl.resharding.channel import Channel, ChannelError, PeerRefusedError, connect
from megatron_rl.types.resharding import ShardDigest

Address = tuple[str, int]
ParamTable = dict[str, tuple[tuple[int, ...], str]]


class ReceiverControl:
    """Asks the receiver of engine rank `target_rank`. Every question raises ChannelError in one line, within `timeout_s`."""

    def __init__(self, target_rank: int, address: Address, key: bytes, timeout_s: float) -> None:
        self.target_rank, self.address = target_rank, address
        self._key, self._timeout_s = key, timeout_s
        self._channel: Channel | None = None

    def describe(self) -> ParamTable:
        """Names, shapes and dtypes of what the receiver would write into."""
        params = self._ask({"kind": "describe"})["params"]
        return {name: (tuple(shape), dtype) for name, (shape, dtype) in params.items()}

    def begin(self, sync: str, version: int, sources: Sequence[int], *, is_staged: bool) -> None:
        """Say which version comes, from which trainer ranks, and whether it waits beside the parameters for `apply`."""
        question = {"kind": "begin", "sync": sync, "version": version, "sources": list(sources), "staged": is_staged}
        self._ask(question)

    def finish(self, sync: str) -> ShardDigest:
        """What the receiver has written. Raises ChannelError when a sender did not come to its end."""
        answer = self._ask({"kind": "finish", "sync": sync})
        digests = {int(source): digest for source, digest in answer["digests"].items()}
        return ShardDigest(target_rank=self.target_rank, num_elements=answer["num_elements"], digests=digests)

    def apply(self, sync: str) -> None:
        """Bring what was staged into the parameters; the engine must be paused."""
        self._ask({"kind": "apply", "sync": sync})

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """On the kept connection; on a new one when that has gone since the last question."""
        if self._channel is not None:
            try:
                return self._channel.ask(question)
            except PeerRefusedError:
                self.close()
                raise
            except ChannelError:
                self.close()
        self._channel = connect(*self.address, self._key, self._timeout_s)
        try:
            return self._channel.ask(question)
        except ChannelError:
            self.close()
            raise
