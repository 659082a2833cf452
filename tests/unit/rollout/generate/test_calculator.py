"""A calculator that computes, refuses and never hangs."""

from __future__ import annotations

import asyncio

import pytest

from megatron_rl.rollout.generate.calculator import calculate, calculate_call


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12*34", 408), (" 2 + 3*4 ", 14), ("-(7//2)", -3), ("7/2", 3.5), ("2**-1", 0.5), ("2**10 % 7", 2), ("1.5e2", 150.0)],
)
def test_it_computes(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "not an expression"),
        ("__import__('os')", "not an expression"),
        ("x + 1", "not an expression"),
        ("True + 1", "not an expression"),
        ("1; 2", "not an expression"),
        ("9**9**9**9", "too large"),
        ("10**400 * 10**400 * 10**400 * 10**400", "too large"),
        ("(-8)**0.5", "not a number"),
        ("1/0", "division by zero"),
        ("1e308 * 10 ** 400", "too large"),
        ("(" * 200 + "1" + ")" * 200, "longer than 256 characters"),
    ],
)
def test_it_refuses(expression, reason):
    with pytest.raises(ValueError, match=reason):
        calculate(expression)
    output = asyncio.run(calculate_call(expression))
    assert output.has_failed and output.text.startswith("error: ")
