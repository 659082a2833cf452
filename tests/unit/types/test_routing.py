from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.types.routing import RoutingShape, unknown_expert


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.uint16), (512, np.uint16)])
def test_the_smallest_type_that_tells_unknown_from_every_expert(num_experts: int, dtype: type) -> None:
    shape = RoutingShape(num_layers=3, top_k=2, num_experts=num_experts)
    empty = shape.empty(5)
    assert empty.shape == (5, 3, 2) and empty.dtype == dtype
    assert (empty == unknown_expert(empty.dtype)).all() and unknown_expert(empty.dtype) >= num_experts
