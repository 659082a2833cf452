"""A real Slurm cluster on one machine: slurmctld, munged and one slurmd per node, each node in namespaces of its own.

Needs root and the Debian packages slurm-wlm, munge and iproute2. Nodes are node1, node2, ... at 10.77.0.11, ...; they
share the file system except /tmp and /dev/shm. Closing the cluster, or the end of this process, ends all of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setpriv")
REPOSITORY = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of a batch job: the exit code of its script and everything that it wrote."""

    exit_code: int
    output: str


class SlurmCluster:
    """Use as a context manager. `root` holds configuration, logs and spool, `shared` what jobs write.

    Both are removed at the end.
    """

    def __init__(self, num_nodes: int = 2, cpus_per_node: int = 2, gpus_per_node: int = 8) -> None:
        """CPUs and GPUs are what Slurm is told; the machine may have fewer."""
        self.num_nodes = num_nodes
        self._cpus_per_node = cpus_per_node
        self._gpus_per_node = gpus_per_node
        self._process: subprocess.Popen[bytes] | None = None
        self._init_pid = 0

    def __enter__(self) -> SlurmCluster:
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing or os.geteuid() != 0:
            need = f"lacks {', '.join(missing)}" if missing else "must be root"
            raise RuntimeError(f"an emulated Slurm cluster {need}; as root: apt-get install slurm-wlm munge iproute2")
        # Not under /tmp, which every node has its own of; and short, because of the sockets in it.
        self.root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/var/tmp"))
        self.shared = self.root / "shared"
        try:
            self._write_files()
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the cluster and remove its files."""
        if self._process is not None:
            self._process.kill()  # its child, the first process of the namespace, is killed with it, and so all others
            self._process.wait()
            self._process = None
        shutil.rmtree(self.root, ignore_errors=True)

    def run(self, command: Sequence[str], timeout_s: float = 30.0, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command where Slurm's clients work, in the shared folder; stdout and stderr come together."""
        enter = ["nsenter", f"--target={self._init_pid}", "--mount", "--uts", "--ipc", "--net", "--pid"]
        shell = ["bash", "-c", 'cd "$1" && shift && exec "$@"', "bash", str(self.shared), *command]
        return subprocess.run(
            enter + shell,
            env=os.environ | {"SLURM_CONF": str(self.root / "slurm.conf")} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def submit(self, command: Sequence[str], **environment: str) -> int:
        """`sbatch COMMAND`; returns the job id. Raises `RuntimeError` when Slurm refuses it."""
        output = f"--output={self.shared}/%j.log"
        result = self.run(["sbatch", "--parsable", output, *command], **environment)
        if result.returncode != 0:
            raise RuntimeError(f"sbatch refused the job: {result.stdout}")
        return int(result.stdout.split()[-1])

    def output(self, job_id: int) -> str:
        """What the job has written so far."""
        log = self.shared / f"{job_id}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def wait_for_output(self, job_id: int, text: str, timeout_s: float) -> None:
        """Wait until the job has written `text`. Raises `TimeoutError` with what it wrote instead."""
        self._poll(lambda: text in self.output(job_id), timeout_s, f"job {job_id} wrote no {text!r}", job_id)

    def wait(self, job_id: int, timeout_s: float) -> JobResult:
        """Wait until the job has left the queue. Raises `TimeoutError` with what it wrote so far."""

        def state() -> dict[str, str]:
            shown = self.run(["scontrol", "show", "job", "--oneliner", str(job_id)]).stdout
            return dict(field.split("=", 1) for field in shown.split() if "=" in field)

        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self._poll(lambda: state().get("JobState") in ended, timeout_s, f"job {job_id} did not end", job_id)
        exit_code, _, signal_number = state()["ExitCode"].partition(":")
        return JobResult(int(exit_code) or 128 * (signal_number != "0") + int(signal_number), self.output(job_id))

    def processes(self) -> list[str]:
        """The command lines of all processes on the nodes, Slurm's own and this query left out."""
        shown = self.run(["ps", "-eo", "args", "--no-headers"]).stdout.splitlines()
        own = ("ps -eo", "slurm", ": slurm", "munged", "unshare", "bash", "/bin/bash", "[", "setpriv")
        return [line for line in shown if not line.startswith(own)]

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        files = sorted((self.root / "log").iterdir()) if self.root.exists() else []
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)

    def _poll(self, condition, timeout_s: float, problem: str, job_id: int | None = None) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                detail = self.logs() if job_id is None else self.output(job_id)
                raise TimeoutError(f"{problem} within {timeout_s} s\n{detail[-6000:]}")
            time.sleep(0.1)

    def _start(self) -> None:
        boot = Path(__file__).with_name("boot_cluster.sh")
        with (self.root / "log" / "boot.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork"]
                + ["--kill-child", "--mount-proc", "bash", str(boot)]
                + [str(self.root), str(REPOSITORY), str(self.num_nodes)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self._poll(lambda: children.exists() and children.read_text().split(), START_TIMEOUT_S, "no namespace appeared")
        self._init_pid = int(children.read_text().split()[0])
        self._poll(self._all_idle, START_TIMEOUT_S, "the Slurm nodes did not become idle")

    def _all_idle(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the emulated Slurm cluster ended at once\n{self.logs()}")
        shown = self.run(["sinfo", "--noheader", "--Node", "--format=%N %T"])
        return shown.returncode == 0 and shown.stdout.split().count("idle") == self.num_nodes

    def _write_files(self) -> None:
        for folder in ("etc", "log", "state", "spool", "nodes", "shared", "devices", "pids"):
            (self.root / folder).mkdir()
        self.root.chmod(0o755)
        for index in range(1, self.num_nodes + 1):
            (self.root / "spool" / f"node{index}").mkdir()
        (self.root / "munge.key").write_bytes(os.urandom(128))
        (self.root / "munge.key").chmod(0o400)
        names = [f"node{index}" for index in range(1, self.num_nodes + 1)]
        hosts = ["127.0.0.1 localhost", "10.77.0.1 controller"]
        hosts += [f"10.77.0.{11 + index} {name}" for index, name in enumerate(names)]
        (self.root / "etc" / "hosts").write_text("\n".join(hosts) + "\n")
        (self.root / "etc" / "resolv.conf").write_text("# no name server\n")
        (self.root / "etc" / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
        for index in range(self._gpus_per_node):
            (self.root / "devices" / f"nvidia{index}").symlink_to("/dev/null")
        devices = f"{self.root}/devices/nvidia[0-{self._gpus_per_node - 1}]"
        gres = f"Name=gpu Type=h100 File={devices}\n" if self._gpus_per_node else ""
        (self.root / "gres.conf").write_text(gres)
        (self.root / "slurm.conf").write_text(self._slurm_conf())

    def _slurm_conf(self) -> str:
        root = self.root
        nodes = f"node[1-{self.num_nodes}]"
        gres = f"Gres=gpu:h100:{self._gpus_per_node} " if self._gpus_per_node else ""
        return f"""\
ClusterName=emulated
SlurmctldHost=controller(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/pids/slurmctld
SlurmdPidFile={root}/pids/%n
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
PropagateResourceLimits=NONE
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=8
KillWait=5
MessageTimeout=10
UnkillableStepTimeout=120
DefMemPerCPU=1000
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
NodeName=node[1-{self.num_nodes}] NodeAddr=10.77.0.[11-{10 + self.num_nodes}] CPUs={self._cpus_per_node} \
RealMemory=64000 {gres}State=UNKNOWN
PartitionName=main Nodes={nodes} Default=YES MaxTime=60 State=UP
"""
