"""A run on a Ray cluster that was there before: RAY_ADDRESS is used, and Ray's own listing shows the ranks as actors."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import running

pytestmark = [pytest.mark.e2e, pytest.mark.ray]
RAY = str(Path(sys.executable).with_name("ray"))


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture
def head():
    """A Ray head with its dashboard, as `ray start` makes one; gives its environment and the dashboard's address."""
    port, dashboard = free_ports(2)
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # a head on its own has nobody to drain to
    }
    command = [
        RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=4",
        "--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        deadline = 60
        check = [RAY, "health-check", "--address", f"127.0.0.1:{port}"]
        for _ in range(deadline):
            if subprocess.run(check, env={**os.environ, **environment}, capture_output=True, timeout=30).returncode == 0:
                break
        yield {**environment, "RAY_ADDRESS": f"127.0.0.1:{port}"}, f"http://127.0.0.1:{dashboard}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=45)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)


def test_the_ranks_are_actors_in_rays_own_listing(head, tmp_path):
    environment, dashboard = head
    overrides = ("run.num_steps=1000", "run.eval_interval=0", "trainer.warm_start.num_steps=0", "telemetry.progress=plain")
    with running(tmp_path / "run", "configs/quickstart.yaml", *overrides, env=environment) as run:
        run.wait_for("step 1/", 150)
        listing = subprocess.run(
            [RAY, "list", "actors", "--address", dashboard, "--format", "json", "--filter", "state=ALIVE"],
            env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        names = {row["name"]: row["class_name"] for row in json.loads(listing.stdout)}
        assert names == {
            "trainer-0": "TrainerActor", "trainer-1": "TrainerActor",
            "engine-0": "EngineActor", "engine-1": "EngineActor",
        }  # fmt: skip
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait(60) == 130, run.output[-3000:]
