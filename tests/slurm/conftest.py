"""A real Slurm on this machine (bin/slurm-sandbox), as fixtures: one for the session, and a way to start more."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
from helpers import SLURM_PATIENCE_S
from slurm_world import World

SCRIPT = Path(__file__).resolve().parents[2] / "bin" / "slurm-sandbox"
NOT_HERE = 77
HARMLESS = ("squeue", "sinfo", "sacct", "scancel")
"""Clients that may be called twice; so may `scontrol show`."""


class Sandbox:
    """One sandbox below a folder, and a client of it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.dir = folder
        self.options = options
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_"))}
        self.env = {**clean, "SLURM_CONF": str(folder / "etc" / "slurm.conf")}

    def script(self, command: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(SCRIPT), command, "--dir", str(self.dir), *options],
            capture_output=True,
            text=True,
            timeout=SLURM_PATIENCE_S,
            check=False,
        )

    def up(self) -> None:
        """Starts it, or what of it is missing; the test skips by name where that can't be."""
        done = self.script("up", *self.options)
        if done.returncode == NOT_HERE:
            needs.skip("slurm", f"no Slurm sandbox here: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stdout + done.stderr

    def down(self, *options: str) -> None:
        done = self.script("down", *options)
        assert done.returncode == 0, done.stdout + done.stderr

    def client(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A Slurm client's answer. What a slow Slurm did not answer in time is asked again where that is harmless."""
        deadline = time.monotonic() + SLURM_PATIENCE_S
        while True:
            done = subprocess.run(
                command, env=self.env, capture_output=True, text=True, timeout=SLURM_PATIENCE_S, check=False
            )
            harmless = command[0] in HARMLESS or "show" in command[1:3]
            slow = check and harmless and done.returncode != 0 and "timed out" in done.stderr
            if not slow or time.monotonic() > deadline:
                break
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def sbatch(self, script: str, *options: str) -> str:
        """The id of a job that runs these lines of sh."""
        return self.client("sbatch", "--parsable", f"--chdir={self.dir}", *options, f"--wrap={script}").stdout.strip()

    def state(self, job: str) -> str:
        """The job's state by scontrol, which knows ended jobs for five minutes, with or without accounting."""
        answer = self.client("scontrol", "--oneliner", "show", "job", job).stdout
        return next(word for word in answer.split() if word.startswith("JobState=")).partition("=")[2]

    def wait(self, job: str, *states: str) -> str:
        """Waits until the job is in one of the states."""
        return self.until(lambda: self.state(job), lambda state: state in states)

    @staticmethod
    def until(look: Callable[[], str], good: Callable[[str], bool]) -> str:
        """What `look` sees once it is good."""
        deadline = time.monotonic() + SLURM_PATIENCE_S
        while not good(seen := look()):
            assert time.monotonic() < deadline, f"after {SLURM_PATIENCE_S} s still: {seen[:200]}"
            time.sleep(0.1)
        return seen

    def pid(self, daemon: str) -> int:
        """Of munged, slurmctld, slurmdbd, mariadbd, slurmd.gpu01 ..."""
        return int((self.dir / "pid" / f"{daemon}.pid").read_text())

    def processes(self) -> list[str]:
        """Living processes that name the folder, in the command line or the environment."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes()
                text = command + b"\0" + (process / "environ").read_bytes()
            except OSError:
                continue
            if str(self.dir).encode() in text:
                found.append(f"{process.name} {command.decode(errors='replace')}")
        return found

    def cgroups(self) -> list[Path]:
        done = self.client("sh", "-c", f"printf %s '{self.dir}' | cksum | cut -d' ' -f1")
        return list(Path("/sys/fs/cgroup").glob(f"**/slurm-sandbox-{done.stdout.strip()}"))


@pytest.fixture(scope="session")
def new_sandbox() -> Iterator[Callable[..., Sandbox]]:
    """Makes sandboxes, not started, in folders that everybody may enter; all of them go at the end."""
    made: list[Sandbox] = []

    def new(*options: str) -> Sandbox:
        folder = Path(tempfile.mkdtemp(prefix="slurm-test-"))
        folder.chmod(0o755)
        made.append(Sandbox(folder, *options))
        return made[-1]

    try:
        yield new
    finally:
        for sandbox in made:
            if os.geteuid() == 0:
                sandbox.script("down", "--wipe")
            shutil.rmtree(sandbox.dir, ignore_errors=True)


@pytest.fixture(scope="session")
def slurm(new_sandbox: Callable[..., Sandbox]) -> Sandbox:
    """A running sandbox without accounting, shared by the session's tests: 4 GPU nodes, 2 CPU nodes, arrays of 10."""
    sandbox = new_sandbox("--max-array", "10")
    sandbox.up()
    return sandbox


@pytest.fixture(scope="session")
def slurm_accounting(new_sandbox: Callable[..., Sandbox]) -> Sandbox:
    """A running small sandbox with accounting."""
    sandbox = new_sandbox("--accounting", "--gpu-nodes", "2", "--cpu-nodes", "1")
    sandbox.up()
    return sandbox


@pytest.fixture
def world(staged: Path, tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Makes worlds, and clears them away."""
    made: list[World] = []

    def make(sandbox: Sandbox, **profile: Any) -> World:
        folder = tmp_path / f"world-{len(made)}"
        folder.mkdir()
        made.append(World(staged, folder, sandbox, **profile))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.end()
