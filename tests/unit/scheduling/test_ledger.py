"""The account of tokens."""

from __future__ import annotations

import pytest

from megatron_rl.scheduling.ledger import TokenLedger
from megatron_rl.scheduling.work import Fate


def test_a_token_has_one_fate():
    ledger = TokenLedger()
    ledger.sample(10)
    ledger.settle(Fate.TRAINED, 6)
    ledger.settle(Fate.MASKED_OVER_AGE, 3)
    assert ledger.tokens[Fate.UNDER_WAY] == 1
    with pytest.raises(ValueError, match="2 tokens cannot be filtered_failed: only 1 are under way"):
        ledger.settle(Fate.FILTERED_FAILED, 2)
    assert sum(ledger.tokens.values()) == ledger.num_sampled == 10
