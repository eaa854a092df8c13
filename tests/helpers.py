"""What integration tests share: a small world of real processes. No mocks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from autorl_hpc.files.layout import ExperimentDir, Root, RunDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.view import RunView

PYTHON = [sys.executable, "-m", "autorl_hpc"]


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0, what: str = "") -> Any:
    """Waits until `condition` gives something true and returns it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"timed out after {timeout_s} s waiting for {what or condition}")


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


class Cluster:
    """A root folder, agents written by the test, and processes started as jobs start them."""

    def __init__(self, staged: Path, tmp: Path) -> None:
        self.root = Root(tmp / "root")
        self.root.path.mkdir()
        for part in ("store", "vault"):
            shutil.copytree(staged / part, self.root.path / part)
        self.share = tmp / "share"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.experiment = self.root.experiment("exp")
        self.code: Path | None = None

    def agent(self, name: str, script: str, **fields: Any) -> None:
        """An agent of the test's own, laid beside the frozen ones."""
        folder = self._frozen() / "templates" / "agents" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "agent.yaml").write_text(yaml.safe_dump({"name": name, "description": "test", **fields}))
        (folder / "start.sh").write_text(script)

    def _frozen(self) -> Path:
        """A copy of the package that the test may add agents to."""
        if self.code is None:
            from autorl_hpc.files.share import PACKAGE

            self.code = self.share
            for part in ("autorl_hpc", "tasks", "templates", "jobs"):
                shutil.copytree(PACKAGE.parent / part, self.code / part, ignore=shutil.ignore_patterns("__pycache__"))
        return self.code

    @property
    def env(self) -> dict[str, str]:
        env = {**os.environ, "AUTORL_ROOT": str(self.root.path)}
        if self.code is not None:
            env["PYTHONPATH"] = str(self.code)
        return env

    def run(self, *arguments: str, check: bool = True, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        done = subprocess.run(
            [*PYTHON, *arguments], env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if check:
            assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts a command in a session of its own."""
        role = arguments[1] if len(arguments) > 1 else arguments[0]
        with open(self.root.path / f"log-{len(self.processes)}-{role}.txt", "wb") as log:
            process = subprocess.Popen(
                [*PYTHON, *arguments],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def spec(self, agents: list[str], **changes: Any) -> Path:
        """Writes an experiment file."""
        value: dict[str, Any] = {
            "name": "exp",
            "matrix": {"task": "arithmetic", "agent": agents, "base_model": "autorl/tiny"},
            "budget": {"wall_clock": "2m"},
            "grader": {"device": "cpu", "stale_after_s": 3, "idle_exit_s": 60},
            "parallel": 2,
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
            "from autorl_hpc.launch.launcher import prepare; _, r = prepare(Path(sys.argv[1]), Root(Path(sys.argv[2])));"
            "print('\\n'.join(r.runs))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(self.spec(agents, **changes)), str(self.root.path)],
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    def grader(self) -> subprocess.Popen[bytes]:
        return self.start("job", "grader", str(self.experiment.path))

    def supervisor(self, run_id: str) -> subprocess.Popen[bytes]:
        return self.start("job", "agent", str(self.experiment.path), run_id)

    def run_dir(self, run_id: str) -> RunDir:
        return self.experiment.run(run_id)

    def workspace(self, run_id: str) -> Path:
        return self.root.path / "scratch" / "exp" / run_id

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

    def logs(self) -> str:
        """What every started process has said, for failing tests."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.root.path.glob("log-*.txt"))
        )

    def end(self) -> None:
        """Kills what is left: the started processes and everything that works on this root."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        marks = (str(self.root.path).encode(),)
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                try:
                    blob = Path(f"/proc/{name}/cmdline").read_bytes() + Path(f"/proc/{name}/environ").read_bytes()
                    if any(mark in blob for mark in marks):
                        os.kill(int(name), signal.SIGKILL)
                except (OSError, ProcessLookupError):
                    continue


def experiment_at(path: Path) -> ExperimentDir:
    """An experiment folder."""
    return ExperimentDir(path)
