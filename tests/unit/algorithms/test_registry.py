from __future__ import annotations

from typing import get_args, get_type_hints

from megatron_rl.algorithms.aggregation import MODES
from megatron_rl.algorithms.corrections import DEFAULT_BOUNDS
from megatron_rl.algorithms.kl import ESTIMATORS
from megatron_rl.algorithms.registry import ADVANTAGES, LOSSES
from megatron_rl.config.algorithm_sections import AlgorithmSection, CorrectionSection, KlSection


def choices(section: type, key: str) -> set[str]:
    return set(get_args(get_type_hints(section)[key]))


def test_every_choice_of_the_configuration_is_implemented_and_none_is_hidden() -> None:
    assert choices(AlgorithmSection, "loss") == set(LOSSES)
    assert choices(AlgorithmSection, "advantage") == set(ADVANTAGES) | {"gae"}
    assert choices(AlgorithmSection, "aggregation") == set(MODES)
    assert choices(CorrectionSection, "kind") == set(DEFAULT_BOUNDS) | {"none"}
    assert choices(KlSection, "estimator") <= set(ESTIMATORS)
