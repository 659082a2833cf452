"""What a case says about its parameters: in its fields, in its name (`gspo_3e-4_4e-4_seqmean`) and in the words of `peer`.

Cases spell one thing in several ways (`clip 0.2/0.28`, `clip_ratio_low=0.2 clip_ratio_high=0.28`, `..._0.2_0.28`). What
none of them states is left to the mapping, which may offer several readings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

NUMBER = r"-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
MODES = ("seq-mean-token-sum-norm", "seq-mean-token-sum", "seq-mean-token-mean", "token-mean", "token-sum")
TRL_MODES = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "vespo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
"""TRL's `loss_type` names the aggregation."""


class Unmapped(Exception):
    """No function of ours is known for a case: a failure."""


class Excepted(Exception):
    """A case that is not to be reproduced, with the reason."""


@dataclass(frozen=True)
class CaseText:
    name: str
    case: dict[str, Any]

    @cached_property
    def peer(self) -> str:
        """Every sentence of the case."""
        return " ; ".join(value for value in self.case.values() if isinstance(value, str)).lower()

    @cached_property
    def whole(self) -> str:
        return f"{self.name.lower()} ; {self.peer}"

    def has(self, pattern: str) -> bool:
        return re.search(pattern, self.whole) is not None

    def number(self, *keys: str) -> float | None:
        """The number that follows one of `keys` (patterns): a field of that name, then the sentences, then the name."""
        for key in keys:
            if isinstance(value := self.case.get(key), (int, float)) and not isinstance(value, bool):
                return float(value)
        for text in (self.peer, self.name.lower()):
            for key in keys:
                if (match := re.search(rf"(?<![a-z]){key}['\"]?\s*[=:_ ]?\s*({NUMBER})", text)) is not None:
                    return float(match.group(1))
        return None

    def required(self, *keys: str) -> float:
        value = self.number(*keys)
        if value is None:
            raise Unmapped(f"no number after {' or '.join(keys)}")
        return value

    @cached_property
    def numbers(self) -> list[float]:
        """Numbers that stand alone in the name, in order."""
        return [float(x) for x in re.split(r"[_|,]", self.name) if re.fullmatch(NUMBER, x)]

    def pair(self, *keys: str) -> tuple[float, float] | None:
        """`clip 0.2/0.28`, `[0.5, 5]`, `0.5_5` after one of `keys`."""
        for key in keys:
            if (match := re.search(rf"{key}\s*[=:_ ]?\s*\[?({NUMBER})\s*[/,_]\s*({NUMBER})", self.whole)) is not None:
                return float(match.group(1)), float(match.group(2))
        return None

    def clips(self, *defaults: tuple[float, float]) -> list[tuple[float, float]]:
        """(low, high) as the case states them, else `defaults`."""
        low = self.number("clip_ratio_low", "ratio_clip_min", "epsilon_low", "eps_clip_low")
        high = self.number("clip_ratio_high", "ratio_clip_max", "epsilon_high", "eps_clip_high")
        both = self.number("clip_ratio", "epsilon", "eps_clip")
        if low is not None or high is not None:
            low = both if low is None else low
            high = both if high is None else high
            return [(_first(low, high), _first(high, low))]
        stated = self.pair("log-clip", "eps_clip", "clip", "eps", "ppo_clip")
        if stated is not None:
            return [(abs(stated[0]), stated[1])]
        if len(self.numbers) >= 2:
            return [(self.numbers[0], self.numbers[1])]
        if self.numbers:
            return [(self.numbers[0], self.numbers[0])]
        both = self.number("clip") if both is None else both
        return list(defaults) if both is None else [(both, both)]

    def modes(self, *defaults: str) -> list[str]:
        """The aggregation as the case states it, else `defaults`."""
        for text in (self.name.lower(), self.peer):
            for mode in MODES:
                if mode in text:
                    return [mode]
        if "seqmean" in self.name or self.has(r"seq-mean|token_level_loss=false|sequence-level loss"):
            return ["seq-mean-token-mean"]
        if "tokenmean" in self.name or self.has(r"token-level loss|token_level_loss=true|token-level"):
            return ["token-mean"]
        if (loss_type := re.search(r"loss_type=(\w+)", self.peer)) is not None and loss_type.group(1) in TRL_MODES:
            return [TRL_MODES[loss_type.group(1)]]
        return list(defaults)


def _first(value: float | None, other: float | None) -> float:
    chosen = other if value is None else value
    assert chosen is not None
    return chosen
