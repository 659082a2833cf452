"""A calculator for models: `rollout.generate.function: megatron_rl.rollout.generate.calculator:generate`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from megatron_rl.rollout.generate.answer import Answer
from megatron_rl.rollout.generate.client import EngineClient
from megatron_rl.rollout.generate.tool_calls import ToolOptions, ToolOutput, answer_with_tool
from megatron_rl.types.rollout import Prompt, SamplingParams

MAX_CHARACTERS = 256
MAX_BITS = 4096
"""Of any number on the way: a power tower must not stop the run."""
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


async def generate(client: EngineClient, prompt: Prompt, sampling: SamplingParams) -> Answer:
    """Turns with a calculator; `sampling` is the client's already."""
    del sampling
    return await answer_with_tool(client, prompt, client.options, calculate_call)


generate.options_type = ToolOptions  # type: ignore[attr-defined]


async def calculate_call(call: str) -> ToolOutput:
    try:
        said, has_failed = str(calculate(call)), False
    except ValueError as error:
        said, has_failed = f"error: {error}", True
    return ToolOutput(said, len(said.encode()), has_failed=has_failed)


def calculate(expression: str) -> int | float:
    """The value of + - * / // % ** and brackets over numbers. Raises ValueError for anything else, and for what is too
    large."""
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        value = _evaluate(tree.body)
    except (SyntaxError, RecursionError):
        raise ValueError("not an expression") from None
    except ArithmeticError as error:
        raise ValueError(str(error)) from None
    return value


def _evaluate(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _checked(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_evaluate(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow) and isinstance(left, int) and left.bit_length() * abs(right) > MAX_BITS:
            raise ValueError("too large")
        return _checked(_BINARY[type(node.op)](left, right))
    raise ValueError("not an expression")


def _checked(value: Any) -> int | float:
    if type(value) not in (int, float):  # a root of a negative number is complex
        raise ValueError("not a number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("too large")
    return value
