"""The Python tool: output, exceptions, limits."""

from __future__ import annotations

import asyncio

import pytest

from megatron_rl.rollout.generate.python_tool import PythonOptions, run_call


def call(source, **options):
    return asyncio.run(run_call(source, PythonOptions(**options)))


def test_it_says_what_the_program_wrote():
    output = call("print(12*34)", timeout_s=20.0)
    assert (output.text, output.num_bytes, output.is_truncated, output.has_failed) == ("408\n", 4, False, False)
    assert call("1/0", timeout_s=20.0).has_failed


def test_it_says_why_a_program_was_ended_and_cuts_a_megabyte():
    output = call("print(1, flush=True)\nwhile True: pass", timeout_s=2.0)
    assert output.text == "1\n\ntimeout" and output.has_failed
    output = call("print('x' * (1 << 20))", timeout_s=20.0, output_bytes=100)
    assert len(output.text) == 100 and output.is_truncated and output.num_bytes == (1 << 20) + 1


def test_programs_run_side_by_side_and_not_more():
    async def go():
        options = PythonOptions(timeout_s=20.0, num_processes=2)
        return await asyncio.gather(*(run_call(f"print({n})", options) for n in range(4)))

    assert [output.text for output in asyncio.run(go())] == ["0\n", "1\n", "2\n", "3\n"]
    with pytest.raises(ValueError, match="num_processes must be at least 1"):
        PythonOptions(num_processes=0)
