"""The loop as an ordinary user: an account without rights, as on a university cluster, submits, watches and cancels."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import needs
import pytest
from helpers import SLURM_PATIENCE_S, SUBMITS_ONE
from slurm_world import LAST_BREATH_S, LONG, SLEEPS, World

if TYPE_CHECKING:
    from conftest import Sandbox

pytestmark = pytest.mark.slurm

USER = "autorl-tester"


def _may_enter(path: Path) -> bool:
    """Whether everybody can read this folder and pass through all above it."""
    return all(os.stat(part).st_mode & 0o001 for part in (path, *path.parents)) and bool(os.stat(path).st_mode & 0o004)


class UserWorld(World):
    """A world that belongs to USER, whose commands run as USER."""

    def __init__(self, staged: Path, tmp: Path, sandbox: Sandbox, python: Path) -> None:
        self.python = python
        self.handed_over = False
        super().__init__(staged, tmp, sandbox, python=str(python))
        self.tmp = tmp

    def hand_over(self) -> None:
        """From now on all of it is USER's."""
        subprocess.run(["chown", "-R", f"{USER}:", str(self.tmp)], check=True)
        self.handed_over = True

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        if not self.handed_over:
            return super().run(*arguments, check=check)
        done = subprocess.run(
            [str(self.python), "-m", "autorl_hpc", *arguments],
            env={**self.env, "HOME": str(self.tmp), "USER": USER, "LOGNAME": USER},
            cwd=self.root.path,
            user=USER,
            group=USER,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=SLURM_PATIENCE_S,
            check=False,
        )
        assert not check or done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """A Python that every user may run, with the packages of this one."""
    if os.geteuid() != 0:
        needs.skip("root", "making a user needs root")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    candidates = [Path(sys.executable).resolve(), Path("/usr/bin") / version, Path("/usr/local/bin") / version]
    base = next((path for path in candidates if path.exists() and _may_enter(path.resolve().parent)), None)
    if base is None:
        needs.skip("python", f"no {version} here that an ordinary user may run")
    folder = Path(tempfile.mkdtemp(prefix="autorl-user-"))
    try:
        folder.chmod(0o755)
        subprocess.run([str(base), "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
        places = [Path(p) for p in sys.path if p.endswith("site-packages")]
        for number, place in enumerate(places):
            if not _may_enter(place):  # as links to the same files: gigabytes in a second
                copy = folder / f"packages-{number}"
                if subprocess.run(["cp", "-al", str(place), str(copy)], capture_output=True, check=False).returncode:
                    needs.skip("python", f"{place} is closed to other users and can't be linked elsewhere")
                places[number] = copy
        (folder / "venv" / "lib" / version / "site-packages" / "shared.pth").write_text("\n".join(map(str, places)))
        yield folder / "venv" / "bin" / "python"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def user_world(staged: Path, slurm: Sandbox, python: Path) -> Iterator[UserWorld]:
    try:
        pwd.getpwnam(USER)
    except KeyError:
        subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/bash", USER], check=True, capture_output=True)
    folder = Path(tempfile.mkdtemp(prefix="autorl-user-"))
    folder.chmod(0o755)
    made: UserWorld | None = None
    try:
        made = UserWorld(staged, folder, slurm, python)
        yield made
    finally:
        if made is not None:
            made.end()
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(["userdel", USER], check=False, capture_output=True)


def _processes() -> str:
    return subprocess.run(["pgrep", "-u", USER], capture_output=True, text=True, check=False).stdout


def _owners(world: World) -> set[Any]:
    return {path.owner() for path in world.experiment.path.rglob("*")}


@pytest.mark.soak
def test_the_loop_and_a_cancel_as_a_user(user_world: UserWorld, slurm: Sandbox) -> None:
    here = user_world
    here.agent("one", SUBMITS_ONE + "id -un\n")
    here.agent("sleeps", SLEEPS)
    here.spec(["one", "null"])
    here.hand_over()
    here.launch(["one", "null"])
    here.wait_over()
    here.assert_whole()
    assert _owners(here) == {USER}
    assert here.run_dir(here.runs[0]).agent_log.read_text().splitlines()[-1] == USER
    status = here.run("status", str(here.experiment.path)).stdout
    assert "2 of 2 runs finished" in status and "look at" not in status

    grader = {"watch_every_s": 1}
    spec = here.spec(
        ["sleeps"], name="second", matrix={"task": "mini"}, cluster="test", grader=grader, budget={"wall_clock": LONG}
    )
    shutil.chown(spec, USER, USER)
    here.run("launch", str(spec))
    here.experiment = here.root.experiment("second")
    here.wait_agent(here.runs[0])
    here.run("cancel", str(here.experiment.path))
    assert here.alive_jobs() == []
    here.assert_whole()
    here.until(lambda: not _processes(), f"the last process of {USER} to be gone", patience_s=LAST_BREATH_S)
