from __future__ import annotations

from typing import get_args, get_type_hints

import numpy as np
import pytest

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


def test_whitening_can_be_left_out() -> None:
    rewards, counts = [np.array([1.0, 4.0]), np.array([2.0])], [np.array([3, 1]), np.array([2])]
    raw = ADVANTAGES["reinforce_pp"](rewards, None, AlgorithmSection(advantage="reinforce_pp", whiten_advantages=False))
    assert [values.tolist() for values in raw] == [[1, 4], [2]]
    white = np.concatenate(ADVANTAGES["reinforce_pp"](rewards, counts, AlgorithmSection(advantage="reinforce_pp")))
    assert np.average(white, weights=np.concatenate(counts)) == pytest.approx(0, abs=1e-12)
