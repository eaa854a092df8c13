"""What integration tests share: a small world of real processes. No mocks."""

from __future__ import annotations

import compileall
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import warm
import yaml

from autorl_hpc.errors import Exit
from autorl_hpc.files import reading
from autorl_hpc.files.layout import Root, RunDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.run_view import RunView

PYTHON = [sys.executable, "-m", "autorl_hpc"]

VARIANTS = """
variants() {  # variants FIRST COUNT: output/v<n> from the base model, each with another lowest bit of one weight flipped
python3 - "$1" "$2" <<'END'
import os, shutil, struct, sys
first, count = int(sys.argv[1]), int(sys.argv[2])
for n in range(first, first + count):
    out = f"output/v{n}"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(os.environ["MODEL_PATH"], out)
    path = out + "/model.safetensors"
    os.chmod(path, 0o644)
    with open(path, "r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        file.seek(8 + length + 4 * n)
        byte = file.read(1)[0]
        file.seek(8 + length + 4 * n)
        file.write(bytes([byte ^ 1]))
END
}
"""
"""A shell function for agents of tests: checkpoints of distinct content in no time."""

SUBMITS_ONE = '#!/usr/bin/env bash\nset -e\ncd "$WORKSPACE"\n' + VARIANTS + "variants 0 1\n./submit output/v0\n"
"""An agent that submits one checkpoint and ends when it is accepted."""


def _start_s() -> float:
    """Measure a cold start of the command line on this machine, as busy as it is; once, pytest's workers are told."""
    if START not in os.environ:
        began = time.monotonic()
        subprocess.run([*PYTHON, "job", "agent", "/nowhere", "none"], capture_output=True, check=False)
        os.environ[START] = f"{time.monotonic() - began:.2f}"
    return float(os.environ[START])


START = "PYTEST_CLI_START_S"
STARTS = 300
"""Cold starts that a test's longest wait may take: a whole run, beside other tests."""

PATIENCE_S = min(600.0, max(180.0, STARTS * _start_s()))
"""How long tests wait for what has to come. Only a failing test waits so long; a busy machine may need a good part of it."""

SLURM_PATIENCE_S = PATIENCE_S + 420.0
"""The same where Slurm's own clocks come on top, or the installation of its packages."""

GRACE_S = 10.0
"""How long a wait lasts at least where all processes have ended."""

LONG_ENOUGH = "1h"
"""A budget that no agent of a test uses up on however slow a machine, unless that is what the test is of."""


def wait_for(
    condition: Callable[[], Any], what: str = "", *, patience_s: float = PATIENCE_S, process: Any = None
) -> Any:
    """Waits until `condition` gives something true and returns it.

    Fails at once, with the logs' last lines, when it can't come true any more: `process` has ended, or, without one, a process
    of the test's cluster has ended by a defect, or all of them have ended.

    Args:
        process: a started process, or a function that tells whether what is waited for goes on.
    """
    looked = began = time.monotonic()
    deadline = began + patience_s
    while time.monotonic() < deadline:
        over = None if process is None else _over(process)
        if over is None and process is None and time.monotonic() > looked + 1:
            looked = time.monotonic()
            over = _all_over(looked - began)
        value = condition()  # after the look: its last words count
        if value:
            return value
        if over:
            raise AssertionError(f"{over}; it was waited for {what or condition}\n{_logs()}")
        time.sleep(0.05)
    raise AssertionError(f"timed out after {patience_s:.0f} s waiting for {what or condition}\n{_logs()}")


def _over(process: Any) -> str | None:
    """Say how a process has ended; None while it goes on."""
    if callable(process):
        return None if process() else "it does not go on"
    return None if process.poll() is None else f"process {process.pid} has ended with {process.returncode}"


def _all_over(waited_s: float) -> str | None:
    """Say why nothing can be expected of the clusters' processes any more; None while something can."""
    codes = [process.poll() for cluster in Cluster.open for process in cluster.processes]
    if Exit.INTERNAL in codes:
        return "a process has ended by a defect"
    if waited_s < GRACE_S or not codes or None in codes or _children():
        return None
    if any(cluster.scheduled or cluster.processes_here() for cluster in Cluster.open):
        return None
    return "all processes have ended"


def _children() -> list[int]:
    """Living children of this process that a test may have started by itself."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return [pid for pid in found if alive(pid) and b"warm.py" not in command_of(pid)]


def _logs() -> str:
    return "\n".join(cluster.logs() for cluster in Cluster.open)


def free_listener() -> socket.socket:
    """A listener on the loopback, at a port that the kernel would not give to whoever asks for any, and that no other test is
    likely to draw at the same time."""
    while True:
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", random.randrange(20000, 29000)))


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def command_of(pid: int) -> bytes:
    """The command line of a process, its words separated by NUL; nothing of one that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


class Cluster:
    """A root folder, agents written by the test, and processes started as jobs start them."""

    open: ClassVar[list[Cluster]] = []
    """Those of the test that runs, and of its module."""

    scheduled: ClassVar[bool] = False
    """Whether a scheduler starts processes of its own accord: then nothing is over while none is here."""

    def __init__(self, staged: Path, tmp: Path) -> None:
        self.root = Root(tmp / "root")
        self.root.path.mkdir()
        for part in ("store", "vault"):
            shutil.copytree(staged / part, self.root.path / part)
        self.share = tmp / "share"
        self.processes: list[Any] = []
        self.experiment = self.root.experiment("exp")
        self.code: Path | None = None
        Cluster.open.append(self)

    def agent(self, name: str, script: str, **fields: Any) -> None:
        """An agent of the test's own, laid beside the frozen ones."""
        folder = self._frozen() / "templates" / "agents" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "agent.yaml").write_text(yaml.safe_dump({"name": name, "description": "test", **fields}))
        (folder / "start.sh").write_text(script)

    def mini_task(
        self, items: int = 4, *, temperature: float = 0.0, max_new_tokens: int = 4, any_number: bool = False
    ) -> None:
        """A task `mini`: the first items of arithmetic, so that a scoring takes a tenth of a second; staged.

        Args:
            any_number: the last number counts, marked or not; with 16 tokens the base model then solves about a quarter of the items.
        """
        folder = self._frozen() / "tasks" / "mini"
        data = folder / "data"
        value = yaml.safe_load((self._frozen() / "tasks" / "arithmetic" / "task.yaml").read_text())
        value["name"] = "mini"
        value["recipes"][0]["sampling"] = {"temperature": temperature, "max_new_tokens": max_new_tokens}
        if any_number:
            value["recipes"][0] |= {"scorer": "gsm8k", "scorer_version": "4"}
        train = self.root.task_store("arithmetic")
        for name in value["train_files"]:
            (data / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(train / name, data / name)
        for split in ("feedback", "report"):
            lines = (self.root.task_vault("arithmetic") / split / "items.jsonl").read_bytes().splitlines(keepends=True)
            (data / split).mkdir(exist_ok=True)
            (data / split / "items.jsonl").write_bytes(b"".join(lines[:items]))
            digest = hashlib.sha256(b"".join(lines[:items])).hexdigest()
            value["splits"][split] = {"n": items, "sha256": digest}
        (folder / "task.yaml").write_text(yaml.safe_dump(value))
        (folder / "description.md").write_text("A few word problems.\n")
        (folder / "prepare.py").write_text(
            "import shutil\nfrom pathlib import Path\n\n\ndef prepare(source, out):\n"
            "    shutil.copytree(Path(__file__).parent / 'data', out, dirs_exist_ok=True)\n"
        )
        self.run("stage", "mini", "--root", str(self.root.path))

    def _frozen(self) -> Path:
        if self.code is None:
            from autorl_hpc.files.layout import PACKAGE

            self.code = self.share
            # With what is compiled: the suite's processes write none, and each of them would compile all that it imports.
            compileall.compile_dir(PACKAGE, quiet=2)
            # Without what another test's Python is just compiling: those files are gone before they are copied.
            half = shutil.ignore_patterns("*.pyc.*")
            for part in ("autorl_hpc", "tasks", "templates", "jobs"):
                shutil.copytree(PACKAGE.parent / part, self.code / part, ignore=half)
        return self.code

    @property
    def env(self) -> dict[str, str]:
        env = {**os.environ, "AUTORL_ROOT": str(self.root.path)}
        if self.code is not None:
            env["PYTHONPATH"] = str(self.code)
        return env

    def run(self, *arguments: str, check: bool = True, cold: bool = False) -> subprocess.CompletedProcess[str]:
        return self._finish(*PYTHON[1:], *arguments, check=check, cold=cold)

    def _finish(self, *arguments: str, check: bool = True, cold: bool = False) -> subprocess.CompletedProcess[str]:
        done = warm.run(arguments, self.env, self.root.path, PATIENCE_S, cold=cold, code=self.code)
        if check:
            assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *arguments: str, cold: bool = False) -> Any:
        """Starts a command in a session of its own; unless `cold`, as a fork of a process that has imported all of it."""
        role = arguments[1] if len(arguments) > 1 else arguments[0]
        return self.begin(role, *PYTHON[1:], *arguments, cold=cold)

    def begin(self, role: str, *arguments: str, cold: bool = False) -> Any:
        """Starts a Python in a session of its own; `role` is in the name of its log."""
        with open(self.root.path / f"log-{len(self.processes)}-{role}.txt", "wb") as log:
            # Not in a checkout: `python -m` looks for the package there first.
            process = warm.begin(arguments, self.env, self.root.path, log, log, cold=cold, code=self.code)
        self.processes.append(process)
        return process

    def spec(self, agents: list[str], **changes: Any) -> Path:
        value: dict[str, Any] = {
            "name": "exp",
            "matrix": {"task": "arithmetic", "agent": agents, "base_model": "autorl/tiny"},
            "budget": {"wall_clock": LONG_ENOUGH},
            # Idle for longer than a slow agent leaves a grader without work.
            "grader": {"device": "cpu", "stale_after_s": 3, "idle_exit_s": 300},
            "parallel": 2,
            "sandbox": {
                "level": "none"
            },  # most agents here attack the machinery itself; test_confinement.py has the others
        }
        for key, change in changes.items():
            if isinstance(change, dict) and isinstance(value.get(key), dict):
                value[key] = {**value[key], **change}
            else:
                value[key] = change
        path = self.root.path / "exp.yaml"
        path.write_text(yaml.safe_dump(value))
        return path

    def prepare(self, agents: list[str], **changes: Any) -> list[str]:
        """Makes the experiment's folder without starting a job; returns the run ids."""
        script = (
            "import sys; from pathlib import Path; from autorl_hpc.files.layout import Root;"
            "from autorl_hpc.launch.plan import prepare; _, r = prepare(Path(sys.argv[1]), Root(Path(sys.argv[2])));"
            "print('\\n'.join(r.runs))"
        )
        return self._finish("-c", script, str(self.spec(agents, **changes)), str(self.root.path)).stdout.split()

    def sealed_run(self, script: str = SUBMITS_ONE, agent: dict[str, Any] | None = None, **changes: Any) -> str:
        """Prepares an experiment of one run and lets its agent work to the end; returns the run id.

        Args:
            agent: further fields of its agent.yaml.
        """
        self.agent("one", script, **(agent or {}))
        (run_id,) = self.prepare(["one"], **changes)
        assert self.supervisor(run_id).wait(PATIENCE_S) == 0, self.logs()
        assert self.view(run_id).sealed is not None
        return run_id

    def heartbeats(self) -> list[dict[str, Any]]:
        paths = sorted(self.experiment.graders.glob("[!.]*.json"))
        values = [reading.read_json_or_none(path) for path in paths]
        return [value for value in values if isinstance(value, dict)]

    def processes_here(self) -> list[int]:
        """Living processes that work on this root, by their command line or environment."""
        mark = str(self.root.path).encode()
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid() and alive(int(name)):
                try:
                    blob = Path(f"/proc/{name}/cmdline").read_bytes() + Path(f"/proc/{name}/environ").read_bytes()
                except OSError:
                    continue
                if mark in blob:
                    found.append(int(name))
        return found

    def grader(self, cold: bool = False) -> Any:
        return self.start("job", "grader", str(self.experiment.path), cold=cold)

    def supervisor(self, run_id: str, cold: bool = False) -> Any:
        return self.start("job", "agent", str(self.experiment.path), run_id, cold=cold)

    def run_dir(self, run_id: str) -> RunDir:
        return self.experiment.run(run_id)

    def workspace(self, run_id: str) -> Path:
        return self.root.path / "scratch" / self.experiment.path.name / run_id

    def view(self, run_id: str) -> RunView:
        return RunView.of(Ledger(self.run_dir(run_id)).read())

    def finished(self, run_ids: list[str]) -> bool:
        return set(run_ids) <= set(os.listdir(self.experiment.finished))

    def answers(self, run_id: str) -> list[dict[str, Any]]:
        folder = self.workspace(run_id) / "results"
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
        return [
            json.loads((folder / name).read_text())
            for name in names
            if name.endswith(".json") and not name.startswith(".")
        ]

    def logs_of(self, role: str) -> str:
        paths = sorted(self.root.path.glob(f"log-*-{role}.txt"))
        return "".join(path.read_text(errors="replace") for path in paths)

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.root.path.glob("log-*.txt"))
        )

    def end(self) -> None:
        """Kills what is left: the started processes and everything that works on this root."""
        if self in Cluster.open:
            Cluster.open.remove(self)
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for pid in self.processes_here():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
