"""The reference of the KL: weights that wait beside the policy and are swapped into it for a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from megatron_rl.config.algorithm_sections import ReferenceSection

Chunks = Sequence[Mapping[str, torch.Tensor]]
"""Per virtual model chunk: Megatron's local names -> weights."""


class Reference:
    """One rank's part of the reference: a teacher (`load_teacher`), else the policy as RL began or as it was at the last
    refresh.
    """

    def __init__(self, section: ReferenceSection, load_teacher: Callable[[], Chunks] | None = None) -> None:
        self._section = section
        self._weights = [] if load_teacher is None else self._stored(load_teacher())
        self._is_teacher = load_teacher is not None
        self._num_steps = 0

    def begin_phase(self, policy: Chunks) -> None:
        """A phase of the run begins with these weights."""
        self._num_steps = 0
        if not self._is_teacher:
            self._weights = self._stored(policy)

    def end_step(self, policy: Chunks) -> None:
        """A training step ended with these weights; every `refresh_interval` steps they become the reference."""
        self._num_steps += 1
        interval = self._section.refresh_interval
        if interval is not None and self._num_steps % interval == 0:
            self._weights = self._stored(policy)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What `load_state_dict` needs, on this rank: the weights as `chunk/name` and the steps since the phase began. A
        teacher's weights are left to its folder.
        """
        state = {"num_steps": torch.tensor(self._num_steps)}
        if not self._is_teacher:
            state |= {f"{n}/{name}": tensor for n, chunk in enumerate(self._weights) for name, tensor in chunk.items()}
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on as the reference that gave `state`, which had the same layout; after `begin_phase`.

        Raises ValueError when the names are not those of this rank's weights.
        """
        own = self.state_dict()
        if odd := sorted(own.keys() ^ state.keys()):
            raise ValueError(f"reference: {odd[0]} is on one side only ({len(odd)} such names); was the layout another one?")
        self._num_steps = int(state["num_steps"])
        for name in own.keys() - {"num_steps"}:
            own[name].copy_(state[name])

    @contextmanager
    def swapped_into(self, live: Chunks) -> Iterator[None]:
        """The model computes with the reference's weights inside."""
        with swapped_weights(live, self._weights):
            yield

    def _stored(self, chunks: Chunks) -> list[dict[str, torch.Tensor]]:
        def keep(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to("cpu", copy=True) if self._section.storage == "cpu" else tensor.clone()

        return [{name: keep(tensor) for name, tensor in chunk.items()} for chunk in chunks]


@contextmanager
def swapped_weights(live: Chunks, other: Chunks) -> Iterator[None]:
    """The model computes with `other` inside; its own weights come back bit by bit. The optimizer sees nothing of it."""
    own = [{name: tensor.clone() for name, tensor in chunk.items()} for chunk in live]
    try:
        _copy_weights(other, live)
        yield
    finally:
        _copy_weights(own, live)


def _copy_weights(source: Chunks, target: Chunks) -> None:
    for source_chunk, target_chunk in zip(source, target, strict=True):
        for name, tensor in target_chunk.items():
            tensor.copy_(source_chunk[name])
