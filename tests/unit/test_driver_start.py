"""How a driver's server is started, and what is told of one that doesn't come up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from helpers import alive, wait_for

from autorl_hpc.drivers import serve
from autorl_hpc.drivers.serve import Server
from autorl_hpc.records.driver import DriverSpec
from autorl_hpc.sandbox.sandbox_plan import TORCH_PORTS, handed_out

KEY = "key-0123456789"
OUTER = {"PATH": "/bin", "PYTHONPATH": "/frozen:/site", "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/home/x"}


def spec(*args: str) -> DriverSpec:
    return DriverSpec(kind="vllm", model="m", args=args)


def test_the_servers_variables() -> None:
    env = serve.environment(OUTER, KEY, "/frozen", 20_001)
    assert env["PYTHONPATH"] == "/site" and env["HOME"] == "/home/x"
    assert "PYTHONDONTWRITEBYTECODE" not in env, "vLLM's own code may be compiled once and for all"
    assert (env["VLLM_PORT"], env["VLLM_HOST_IP"]) == ("20001", "127.0.0.1")
    assert env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert (
        serve.environment({**OUTER, "VLLM_USE_FLASHINFER_SAMPLER": "1"}, KEY, "/")["VLLM_USE_FLASHINFER_SAMPLER"] == "1"
    )


def test_ports_are_none_that_landlock_leaves_open_as_long_as_there_are_others() -> None:
    ports = {serve.free_port(serve.LOOPBACK) for _ in range(40)}
    assert not {port for port in ports if port in handed_out() or port in TORCH_PORTS}
    others = {serve.free_port(serve.LOOPBACK, range(15_000, 61_000)) for _ in range(40)}
    assert not {port for port in others if 15_000 <= port < 61_000}
    assert serve.free_port(serve.LOOPBACK, range(65_536))


def test_its_own_processes_meet_where_agents_cant_go() -> None:
    assert serve.inner_port(spec()) not in handed_out()
    assert serve.inner_port(spec("--data-parallel-size=2")) is None


def started(folder: Path, program: str) -> Server:
    return Server([sys.executable, "-c", program], {}, folder / "log", 1, "m", KEY, folder)


def test_the_cause_is_told_and_not_what_follows_from_it(tmp_path: Path) -> None:
    said = "(EngineCore pid=7) ValueError: no room\\n  File x\\nRuntimeError: Engine core initialization failed. See root cause above.\\nbye key-0123456789"
    server = started(tmp_path, f"print('{said}')")
    server.process.wait()
    assert server.last_words() == "(EngineCore pid=7) ValueError: no room"
    assert server.last_line() == "bye ***"


def test_it_ends_with_its_job(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from autorl_hpc.drivers.serve import Server;"
        "s = Server([sys.executable, '-c', 'import time; time.sleep(900)'], {}, Path(sys.argv[1]) / 'log', 1, 'm', 'k', Path(sys.argv[1]));"
        "print(s.process.pid, flush=True); time.sleep(900)"
    )
    job = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert job.stdout is not None
    pid = int(job.stdout.readline())
    job.kill()
    job.wait()
    wait_for(lambda: not alive(pid), "the server's end")


def test_it_stops_with_children_in_sessions_of_their_own(tmp_path: Path) -> None:
    """Catches a server's process that left its session, and keeps the GPU."""
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(900)'], start_new_session=True)"
    server = started(tmp_path, f"{child}; print(p.pid, flush=True); time.sleep(900)")
    pid = int(wait_for(lambda: (tmp_path / "log").read_text().strip(), "its child"))
    server.stop()
    wait_for(lambda: not alive(pid), "the child's end")
