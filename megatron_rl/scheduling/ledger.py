"""The account of tokens: each one that was sampled is under way, trained once, or counted under the reason why not."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.scheduling.work import Fate


class TokenLedger:
    """Counts of tokens by fate, and of samples and groups that did not get into a batch. A few integers, however long
    the run."""

    def __init__(self) -> None:
        self._tokens = dict.fromkeys(Fate, 0)
        self._samples = dict.fromkeys(Fate, 0)
        self.num_sampled = 0

    def sample(self, num_tokens: int) -> None:
        """Tokens came from an engine."""
        self.num_sampled += num_tokens
        self._tokens[Fate.UNDER_WAY] += num_tokens

    def settle(self, fate: Fate, num_tokens: int) -> None:
        """Tokens under way met their fate. Raises when there are not that many: one would be counted twice."""
        if num_tokens > self._tokens[Fate.UNDER_WAY]:
            under_way = self._tokens[Fate.UNDER_WAY]
            raise ValueError(f"{num_tokens} tokens cannot be {fate.value}: only {under_way} are under way")
        self._tokens[Fate.UNDER_WAY] -= num_tokens
        self._tokens[fate] += num_tokens

    def count_sample(self, fate: Fate) -> None:
        self._samples[fate] += 1

    @property
    def tokens(self) -> Mapping[Fate, int]:
        return self._tokens

    @property
    def samples(self) -> Mapping[Fate, int]:
        """Samples that ended, by fate (those of a batch under TRAINED)."""
        return self._samples
