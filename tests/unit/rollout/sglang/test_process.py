"""Server processes, with a small script in SGLang's place: it has children, logs its keys and may resist."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from megatron_rl.rollout.sglang import process as process_module
from megatron_rl.rollout.sglang.errors import EngineDeadError
from megatron_rl.rollout.sglang.guardian import processes_of_session
from megatron_rl.rollout.sglang.keys import make_keys
from megatron_rl.rollout.sglang.launch_args import ServerLaunch
from megatron_rl.rollout.sglang.process import SglangServer, free_port, make_work_dir

SERVER = textwrap.dedent(
    """
    import http.server, os, signal, subprocess, sys, time
    port, behaviour, secret = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    print("server of session", os.getsid(0), flush=True)
    print("my key is", secret, flush=True)
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    subprocess.Popen([sys.executable, "-S", "-c", child])
    if behaviour == "crash":
        print("Traceback: out of memory")
        sys.exit(7)
    if behaviour == "scatter":  # a session of its own, and one that is always just being forked
        subprocess.Popen([sys.executable, "-S", "-c", child, secret], start_new_session=True)
        end = time.monotonic() + 30  # even where it is never found
        chain = "\\n".join((
            "import os, time", f"while time.monotonic() < {end}:", "  time.sleep(0.03)", "  if os.fork(): os._exit(0)",
        ))
        subprocess.Popen([sys.executable, "-S", "-c", chain, secret])
    if behaviour == "resist":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(503 if behaviour == "never" else 200)
            self.end_headers()
        def log_message(self, *args):
            pass
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """
)


class Started:
    def __init__(self, tmp_path: Path, behaviour: str) -> None:
        keys, self.work_dir, self.port = make_keys(), make_work_dir(), free_port("127.0.0.1")
        self.secret, self.log_path = keys.admin, tmp_path / "logs" / "engine.log"
        script = tmp_path / "server.py"
        script.write_text(SERVER)
        argv = (sys.executable, "-S", str(script), str(self.port), behaviour, keys.admin)
        launch = ServerLaunch(argv, {"SOME_VARIABLE": "1"}, "127.0.0.1", self.port)
        self.server = SglangServer.start("toy", launch, keys, self.work_dir, self.log_path)

    @property
    def session(self) -> int:
        (line,) = [line for line in self.log_path.read_text().splitlines() if line.startswith("server of session")]
        return int(line.split()[-1])


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr(process_module, "STOP_GRACE_S", 1.0)
    started = []

    def start_one(behaviour: str) -> Started:
        started.append(Started(tmp_path, behaviour))
        return started[-1]

    yield start_one
    for one in started:
        one.server.stop()


def test_a_server_becomes_ready_and_stop_leaves_nothing(start):
    one = start("good")
    lines: list[str] = []
    assert one.server.wait_ready(20.0, lines.append) < 20.0
    one.server.raise_if_dead()
    assert len(processes_of_session(one.session)) == 2
    assert "my key is ***" in one.log_path.read_text() and one.secret not in one.log_path.read_text()
    one.server.stop()
    assert processes_of_session(one.session) == [] and not one.work_dir.exists()
    one.server.stop()  # again is fine


def test_a_server_that_resists_sigterm_is_killed_with_its_children(start):
    one = start("resist")
    one.server.wait_ready(20.0)
    begin = time.monotonic()
    one.server.stop()
    assert 1.0 <= time.monotonic() - begin < 8.0
    assert processes_of_session(one.session) == []


def test_no_descendant_outlives_the_server(start):
    one = start("scatter")
    one.server.wait_ready(20.0)

    def left() -> list[Path]:
        return [path for path in Path("/proc").glob("[0-9]*/cmdline") if one.secret.encode() in _read(path)]

    deadline = time.monotonic() + 10.0
    while len(left()) < 3 and time.monotonic() < deadline:  # the server and both of its children
        pass
    assert len(left()) >= 3
    one.server.stop()
    assert not left()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended while we looked
        return b""


def test_a_crash_is_one_line_with_the_end_of_the_log(start):
    one = start("crash")
    with pytest.raises(EngineDeadError, match=r"engine toy ended with exit code 7; see .*engine\.log: .*out of memory"):
        one.server.wait_ready(20.0)
    assert processes_of_session(one.session) == [] and not one.work_dir.exists()


def test_waiting_has_a_deadline(start):
    one = start("never")
    with pytest.raises(TimeoutError, match="engine toy: not serving after 1 s"):
        one.server.wait_ready(0.8)


def test_the_server_dies_with_its_owner(tmp_path):
    """The owner is killed with SIGKILL, so nothing in it can clean up."""
    owner = textwrap.dedent(
        f"""
        import pathlib, signal, sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_process import Started
        one = Started(pathlib.Path({str(tmp_path)!r}), "good")
        one.server.wait_ready(30.0)
        print(one.session, one.work_dir, flush=True)
        time.sleep(600)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        session, work_dir = process.stdout.readline().split()
        assert len(processes_of_session(int(session))) == 2
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 20.0
    while (Path(work_dir).exists() or processes_of_session(int(session))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(work_dir).exists() and not processes_of_session(int(session))
