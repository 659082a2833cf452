import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rewards.length import soft_overlong_punishment

# TRL and OpenRLHF agree on these (DAPO eq. 13 with L_max 20480 and L_cache 4096), and on the second row.
PAPER = {1: 0.0, 100: 0.0, 16383: 0.0, 16384: 0.0, 16385: -0.000244140625, 18432: -0.5, 20479: -0.999755859375}
PAPER |= {20480: -1.0, 20481: -1.0, 24000: -1.0}
SHORT = {80: 0.0, 82: -0.1, 84: -0.2, 86: -0.3, 88: -0.4, 90: -0.5, 92: -0.6, 94: -0.7, 96: -0.8, 98: -0.9, 100: -1.0}
SHORT |= {102: -1.0, 104: -1.0}


@pytest.mark.parametrize(
    ("max_length", "cache_length", "expected"), [(20480, 4096, PAPER), (100, 20, SHORT)], ids=["paper", "short"]
)
def test_it_equals_the_published_numbers(max_length, cache_length, expected):
    punished = {length: soft_overlong_punishment(length, max_length, cache_length) for length in expected}
    assert punished == pytest.approx(expected, abs=1e-12)


def test_added_to_a_correct_answer_it_gives_the_shaped_reward():
    shaped = {length: 1.0 + soft_overlong_punishment(length, 20480, 4096) for length in (16384, 16385, 18432, 20479)}
    assert shaped == pytest.approx({16384: 1.0, 16385: 0.999755859375, 18432: 0.5, 20479: 0.000244140625}, abs=1e-12)


@given(st.integers(0, 300), st.integers(1, 100), st.integers(0, 100))
def test_it_falls_from_0_to_minus_1_and_no_further(length, cache_length, free_length):
    max_length = free_length + cache_length
    here = soft_overlong_punishment(length, max_length, cache_length)
    assert -1.0 <= soft_overlong_punishment(length + 1, max_length, cache_length) <= here <= 0.0


@pytest.mark.parametrize("cache_length", [0, -1, 101])
def test_an_impossible_cache_length_is_refused(cache_length):
    with pytest.raises(ValueError, match=r"cache_length must be in 1..max_length"):
        soft_overlong_punishment(5, 100, cache_length)
