"""The controller's side of a weight sync: one connection per engine rank, kept over all syncs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_rl.resharding.channel import Address, Channel, ChannelError, PeerRefusedError, connect
from megatron_rl.resharding.hops import Hop
from megatron_rl.types.resharding import ShardDigest

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

    def relay(self, sync: str, version: int, hop: Hop, address: Address, bucket_bytes: int) -> ShardDigest:
        """Let this engine rank pass boxes on to its neighbour at `address`; what arrived there, as both ends saw it."""
        question = {
            "kind": "relay", "sync": sync, "version": version, "who": f"engine rank {hop.source_rank}", "number": hop.number,
            "needs": hop.needs, "target": hop.target_rank, "to": address, "names": hop.table.names,
            "bucket_bytes": bucket_bytes, "timeout_s": self._timeout_s,
        }  # fmt: skip
        digest = self._ask(question, hop.table.rows_N5.tobytes())["digest"]
        return ShardDigest(hop.target_rank, hop.table.num_elements, {hop.number: digest})

    def apply(self, sync: str) -> None:
        """Bring what was staged into the parameters; the engine must be paused."""
        self._ask({"kind": "apply", "sync": sync})

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def _ask(self, question: dict[str, Any], payload: bytes = b"") -> dict[str, Any]:
        """On the kept connection; on a new one when that has gone since the last question."""
        if self._channel is not None:
            try:
                return self._channel.ask(question, payload)
            except PeerRefusedError:
                self.close()
                raise
            except ChannelError:
                self.close()
        self._channel = connect(*self.address, self._key, self._timeout_s)
        try:
            return self._channel.ask(question, payload)
        except ChannelError:
            self.close()
            raise
