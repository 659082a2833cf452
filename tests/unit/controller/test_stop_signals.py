"""SIGINT and SIGTERM become a cancellation of the run."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from megatron_rl.controller.stop_signals import Interrupted, cancelled_by_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_and_the_cleanup_runs(number):
    cleaned = []

    async def work():
        with cancelled_by_signals():
            try:
                os.kill(os.getpid(), number)
                await asyncio.sleep(30)
            finally:
                await asyncio.sleep(0)
                cleaned.append(True)

    with pytest.raises(Interrupted, match=number.name):
        asyncio.run(work())
    assert cleaned == [True]


def test_a_cancellation_from_elsewhere_stays_one():
    async def work():
        with cancelled_by_signals():
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(work())
