"""A Python interpreter for models: `rollout.generate.function: megatron_rl.rollout.generate.python_tool:generate`.

Every call is a program of its own in a sandbox (`rewards.sandbox`); nothing is kept between two calls.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from megatron_rl.rewards.sandbox import ProgramStatus, SandboxLimits, run_program
from megatron_rl.rollout.generate.answer import Answer
from megatron_rl.rollout.generate.client import EngineClient
from megatron_rl.rollout.generate.tool_calls import ToolOptions, ToolOutput, answer_with_tool
from megatron_rl.types.rollout import Prompt, SamplingParams


@dataclass(frozen=True, kw_only=True)
class PythonOptions(ToolOptions):
    """`num_processes` programs run at once; the others wait."""

    timeout_s: float = 5.0
    memory_bytes: int = 1024**3
    output_bytes: int = 16 * 1024
    num_processes: int = 8
    threads: ThreadPoolExecutor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_processes < 1:
            raise ValueError("num_processes must be at least 1")
        self.limits()
        threads = ThreadPoolExecutor(self.num_processes, thread_name_prefix="python-tool")
        object.__setattr__(self, "threads", threads)

    def limits(self) -> SandboxLimits:
        return SandboxLimits(self.timeout_s, self.memory_bytes, self.output_bytes)


async def generate(client: EngineClient, prompt: Prompt, sampling: SamplingParams) -> Answer:
    """Turns with a Python interpreter; `sampling` is the client's already."""
    del sampling
    options: PythonOptions = client.options

    async def tool(source: str) -> ToolOutput:
        return await run_call(source, options)

    return await answer_with_tool(client, prompt, options, tool)


generate.options_type = PythonOptions  # type: ignore[attr-defined]


async def run_call(source: str, options: PythonOptions) -> ToolOutput:
    """What one program wrote; a program that was ended says so in a line of its own."""
    loop = asyncio.get_running_loop()
    result = await loop.run_in_executor(options.threads, run_program, source, "", options.limits())
    said = result.output
    if result.status not in (ProgramStatus.OK, ProgramStatus.FAILED):
        said += f"\n{result.status.value}" if said else result.status.value
    return ToolOutput(said, result.num_output_bytes, result.is_truncated, result.status is not ProgramStatus.OK)
