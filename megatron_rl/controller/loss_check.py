"""Does an objective give the same loss and gradient in every layout? Real ranks, a tiny model of the run's family.

Each launch is a world of processes that talk over gloo on the CPU; inside it every layout builds the model anew with the
same weights, takes one optimizer step on the same synthetic minibatch, and reports loss and gradient norm. fp32, so that
what differs is the objective's doing and not the rounding of bf16.
"""

from __future__ import annotations

import multiprocessing as mp
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from megatron_rl.config.algorithm_sections import AlgorithmSection
from megatron_rl.types.layout import ParallelLayout

TOLERANCE, CP_GRADIENT_TOLERANCE = 1e-5, 1e-4
"""Relative, in fp32: of loss and gradient norm; ring attention adds up in another order."""


class LossCheckError(RuntimeError):
    """A rank failed or did not answer in time; the message ends with its traceback."""


@dataclass(frozen=True, slots=True)
class CheckCase:
    """One layout: how many microbatches each data-parallel rank makes and in which order the samples are packed."""

    name: str
    layout: ParallelLayout
    num_microbatches: int = 2
    is_reversed: bool = False


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`loss_gap` and `gradient_gap` are relative to the first case."""

    case: CheckCase
    loss: float
    grad_norm: float
    loss_gap: float = 0.0
    gradient_gap: float = 0.0

    @property
    def is_equal(self) -> bool:
        gradient_tolerance = CP_GRADIENT_TOLERANCE if self.case.layout.cp > 1 else TOLERANCE
        return self.loss_gap <= TOLERANCE and self.gradient_gap <= gradient_tolerance


CASES: tuple[CheckCase, ...] = (
    CheckCase("1 rank", ParallelLayout()),
    CheckCase("1 rank, one microbatch", ParallelLayout(), num_microbatches=1),
    CheckCase("1 rank, a microbatch per answer", ParallelLayout(), num_microbatches=12),
    CheckCase("1 rank, reversed order", ParallelLayout(), num_microbatches=3, is_reversed=True),
    CheckCase("DP 2", ParallelLayout(dp=2), num_microbatches=3),
    CheckCase("TP 2", ParallelLayout(tp=2, etp=2)),
    CheckCase("CP 2", ParallelLayout(cp=2)),
    CheckCase("PP 2", ParallelLayout(pp=2), num_microbatches=4),
)


def check_layouts(
    section: AlgorithmSection, family: str, *, seed: int, report: Callable[[str], None], timeout_s: float = 300.0
) -> list[CheckResult]:
    """Every case of `CASES`, compared with the first. `report` gets a line before each launch and a line per case.

    Raises LossCheckError when a rank fails, or when a launch takes longer than `timeout_s`.
    """
    results: list[CheckResult] = []
    for world_size in sorted({case.layout.world_size for case in CASES}):
        cases = [case for case in CASES if case.layout.world_size == world_size]
        report(f"starting {world_size} rank{'s' if world_size > 1 else ''} for {len(cases)} layouts")
        for case, (loss, grad_norm) in zip(cases, _launch(section, family, cases, world_size, seed, timeout_s), strict=True):
            first = results[0] if results else CheckResult(case, loss, grad_norm)
            gaps = _gap(loss, first.loss, scale=max(abs(first.loss), first.grad_norm)), _gap(grad_norm, first.grad_norm)
            results.append(CheckResult(case, loss, grad_norm, *gaps))
            report(f"{case.name}: loss {loss:.8g}, gradient norm {grad_norm:.8g}")
    return results


def _gap(value: float, reference: float, scale: float | None = None) -> float:
    """The difference relative to `scale`: a policy loss may be 0 by cancellation, so a loss is held against the larger of
    itself and the gradient norm.
    """
    scale = abs(reference) if scale is None else scale
    return abs(value - reference) / max(scale, 1e-12)


def _launch(
    section: AlgorithmSection, family: str, cases: Sequence[CheckCase], world_size: int, seed: int, timeout_s: float
) -> Iterator[tuple[float, float]]:
    """(loss, gradient norm) of each case, as rank 0 reports them, when they come."""
    context = mp.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            plain = [(case.layout, case.num_microbatches, case.is_reversed) for case in cases]
            arguments = (theirs, section, family, plain, rank, world_size, port, seed, timeout_s)
            processes.append(context.Process(target=_rank_process, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        yield from _results(pipes, len(cases), time.monotonic() + timeout_s)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _results(pipes: Sequence[Connection], num_cases: int, deadline: float) -> Iterator[tuple[float, float]]:
    """Rank 0's results one by one. The first failure of any rank is raised at once: the others may wait for that rank."""
    missing = dict.fromkeys(range(len(pipes)), num_cases)
    while missing:
        ready = wait([pipes[rank] for rank in missing], timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            raise LossCheckError(f"ranks {sorted(missing)} did not answer in time")
        for rank in [rank for rank in missing if pipes[rank] in ready]:
            try:
                is_done, answer = pipes[rank].recv()
            except EOFError:
                raise LossCheckError(f"rank {rank} died without an answer") from None
            if not is_done:
                raise LossCheckError(f"rank {rank} failed:\n{answer}")
            missing[rank] -= 1
            if missing[rank] == 0:
                del missing[rank]
            if rank == 0:
                yield answer


def _rank_process(pipe: Connection, *arguments: Any) -> None:
    """The body of one rank's process: (True, result) per case, or (False, traceback), goes through `pipe`.

    Megatron is imported here alone: the parent needs none of it.
    """
    warnings.simplefilter("ignore")  # Megatron warns about every absent GPU package
    from megatron_rl.controller.loss_check_rank import run_rank

    try:
        for result in run_rank(*arguments):
            pipe.send((True, result))
    except BaseException:  # whatever it was, the person must see it; the parent ends the other ranks
        pipe.send((False, traceback.format_exc()))
        raise
