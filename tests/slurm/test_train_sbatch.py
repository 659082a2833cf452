"""slurm/train.sbatch on a real two-node Slurm cluster, with a tiny Ray program where `megatron-rl` would run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import REPOSITORY, SlurmCluster

SCRIPT = str(REPOSITORY / "slurm" / "train.sbatch")
TINY_PROGRAM = str(Path(__file__).with_name("tiny_ray_program.py"))
VENV = str(Path(sys.executable).parent.parent)


@pytest.fixture(scope="module")
def cluster():
    # One CPU a node, fewer than this machine has: Ray must take what Slurm gives and not what it sees.
    with SlurmCluster(num_nodes=2, cpus_per_node=1, gpus_per_node=8) as running:
        yield running


def shell_scripts() -> list[Path]:
    folders = [REPOSITORY / "slurm", Path(__file__).parent]
    return sorted(path for folder in folders for path in folder.iterdir() if path.suffix in (".sbatch", ".sh"))


@pytest.mark.parametrize("path", shell_scripts(), ids=lambda path: path.name)
def test_scripts_are_shellcheck_clean(path):
    checked = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("path", sorted((REPOSITORY / "slurm").glob("*.sbatch")), ids=lambda path: path.name)
def test_no_directive_stands_where_slurm_ignores_it(path):
    lines = path.read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line.strip() and not line.startswith("#"))
    assert any(line.startswith("#SBATCH") for line in lines[:first_command])
    assert not any(line.startswith("#SBATCH") for line in lines[first_command:])


@pytest.mark.parametrize("options", [[], ["--nodes=1"], ["--gpus-per-node=8"], ["--gpus-per-node=h100:4"]])
def test_slurm_accepts_the_script(cluster, options):
    result = cluster.run(["sbatch", "--test-only", *options, SCRIPT, "experiment.yaml"])
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("options", [["--nodes=3"], ["--gpus-per-node=9"], ["--gpus-per-node=a100:1"], ["--partition=x"]])
def test_slurm_refuses_what_the_cluster_lacks(cluster, options):
    assert cluster.run(["sbatch", "--test-only", *options, SCRIPT, "experiment.yaml"]).returncode != 0


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "train.sbatch: usage: sbatch"),
        (["a.yaml"], {"MEGATRON_RL": "no-such-program"}, "train.sbatch: no-such-program not found on node1"),
        (["a.yaml"], {"RAY_HEAD_ADDRESS": "127.0.0.1"}, "where no other node reaches it; set RAY_HEAD_ADDRESS"),
    ],
)
def test_a_job_that_cannot_run_ends_at_once_with_one_line(cluster, arguments, environment, message):
    settings = {"MEGATRON_RL": TINY_PROGRAM, "MEGATRON_RL_VENV": VENV} | environment
    result = cluster.wait(cluster.submit([SCRIPT, *arguments], **settings), timeout_s=60)
    assert result.exit_code == 1
    assert message in result.output
    assert len(result.output.splitlines()) == 1


def test_two_nodes_form_one_ray_cluster_that_stops_in_order(cluster):
    job = cluster.submit([SCRIPT, "experiment.yaml", "wait=1", "exit=7"], MEGATRON_RL=TINY_PROGRAM, MEGATRON_RL_VENV=VENV)
    cluster.wait_for_output(job, "tiny program: experiment.yaml on node1,node2 with 2 CPUs", timeout_s=120)
    assert any("gcs_server" in line for line in cluster.processes())
    # Without the job's token nobody may talk to its Ray.
    address = f"10.77.0.11:{20000 + job}"
    stranger = cluster.run([f"{VENV}/bin/ray", "status", "--address", address], PATH=f"{VENV}/bin:{os.environ['PATH']}")
    assert stranger.returncode != 0
    assert "InvalidAuthToken" in stranger.stdout

    cluster.run(["scancel", "--batch", "--signal=TERM", str(job)])
    result = cluster.wait(job, timeout_s=60)
    assert result.exit_code == 7, result.output
    order = ["2 Ray nodes: node1, node2", "TERM received", "tiny program: stopped in order", "ended with exit code 7"]
    positions = [result.output.find(line) for line in order]
    assert -1 not in positions and positions == sorted(positions), result.output
    left = [line for line in cluster.processes() if "ray" in line]
    assert not left
