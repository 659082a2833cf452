"""Dotted paths: what loads, and the one line for what does not."""

from __future__ import annotations

import pytest

from megatron_rl.config.rollout_sections import GenerateSection
from megatron_rl.rollout.generate.client import GenerateError
from megatron_rl.rollout.generate.function import load_function
from megatron_rl.rollout.generate.tool_calls import ToolOptions

CALCULATOR = "megatron_rl.rollout.generate.calculator:generate"


def test_an_allowed_function_loads_with_its_options():
    assert load_function(GenerateSection(), None) is None
    function = load_function(GenerateSection(function=CALCULATOR, options={"max_calls": 3}), None)
    assert function.options == ToolOptions(max_calls=3)
    plain = GenerateSection(function=f"{__name__}:plain", allowed_packages=("tests.unit",), options={"a": 1})
    assert load_function(plain, None).options == {"a": 1}


async def plain(client, prompt, sampling):
    raise NotImplementedError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"function": "calculator"}, "expected package.module:name, got 'calculator'"),
        ({"function": "os.path:join"}, r"os.path:join is in none of rollout.generate.allowed_packages \(megatron_rl\)"),
        ({"function": "megatron_rl_evil.tool:generate"}, "is in none of"),
        ({"function": "megatron_rl.nothing:generate"}, "cannot import megatron_rl.nothing: No module named"),
        ({"function": CALCULATOR.replace(":generate", ":run")}, "megatron_rl.rollout.generate.calculator has no such name"),
        ({"function": CALCULATOR.replace(":generate", ":calculate")}, "calculate is no async def"),
        ({"function": CALCULATOR, "options": {"max_call": 3}}, "unexpected keyword argument 'max_call'; it takes call_open,"),
        ({"function": CALCULATOR, "options": {"call_open": ""}}, "call_open and call_close must not be empty"),
    ],
)
def test_what_does_not_load_is_one_line(options, message):
    with pytest.raises(GenerateError, match=message) as caught:
        load_function(GenerateSection(**options), None)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("rollout.generate.")
