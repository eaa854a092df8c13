"""benchmarks/bench recorder: what the recorder costs beside trees of several kinds and IDLE processes with the agent's mark."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.processes import MARK_VARIABLE
from autorl_hpc.recorder.code import Repository, object_id
from autorl_hpc.records.experiment import Budget
from autorl_hpc.supervise.budget import BudgetClock
from autorl_hpc.supervise.children import RecorderProcess

Show = Callable[[str, str], None]
RECORDER_S = 60
IDLE = 20
AT_WORK = 50
"""Shells that start a program every second."""

MARK = "bench"


def bench(show: Show, spread: Callable[[list[float]], str], cpu_s: Callable[[int], float]) -> None:
    """CPU of a recorder over a minute, its start apart; `settled`: from a write to its commit, five times."""
    many, folders = int(os.environ.get("BENCH_FILES", "1000000")), int(os.environ.get("BENCH_FOLDERS", "10000"))

    def nothing(workspace: Path) -> None:
        pass

    def outside(workspace: Path) -> None:
        _many_files(workspace / "output" / "rollouts", many)

    def inside(workspace: Path) -> None:
        _many_files(workspace / "code" / "rollouts", many)

    def spread_outside(workspace: Path) -> None:
        _many_folders(workspace / "output" / "rollouts", many, folders)

    def spread_inside(workspace: Path) -> None:
        _many_folders(workspace / "code" / "rollouts", many, folders)

    def large(workspace: Path) -> None:
        for place in ("output", "code"):
            with open(workspace / place / "sparse.bin", "wb") as file:
                file.truncate(50 << 30)

    def logs(workspace: Path) -> None:
        script = f"import time\nwhile True: print('x' * 200, flush=True, file=open({str(workspace / 'code/log')!r}, 'a')); time.sleep(.05)"
        _start(children, [sys.executable, "-c", script])

    def at_work(workspace: Path) -> None:
        _start(children, ["sh", "-c", "while true; do sleep 1; done"], AT_WORK)

    children: list[subprocess.Popen[bytes]] = []
    kinds = {
        "200 files": nothing,
        f"and {many} files elsewhere in the workspace": outside,
        f"and {many} files below code/": inside,
        f"and {many} files in {folders} folders elsewhere in the workspace": spread_outside,
        f"and {many} files in {folders} folders below code/": spread_inside,
        "and 50 GiB in a file in code/ and outside": large,
        "and a log in code/ that grows": logs,
        f"and {AT_WORK} processes at work": at_work,
    }
    only = os.environ.get("BENCH_ONLY", "")
    for name, prepare in kinds.items():
        if only not in name:
            continue
        with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
            try:
                _start(children, ["sleep", "3600"], IDLE)
                _one_recorder(Path(folder), name, prepare, show, spread, cpu_s)
            finally:
                _end(children)


def _start(children: list[subprocess.Popen[bytes]], argv: list[str], count: int = 1) -> None:
    """Processes of an agent, each with a group of its own."""
    env = {**os.environ, MARK_VARIABLE: MARK}
    children += [subprocess.Popen(argv, env=env, start_new_session=True) for _ in range(count)]


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    while children:
        child = children.pop()
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _many_files(folder: Path, count: int) -> None:
    """`count` small files, all in one folder."""
    folder.mkdir(parents=True)
    fd = os.open(folder, os.O_RDONLY)
    for number in range(count):
        file = os.open(f"{number}.dat", os.O_WRONLY | os.O_CREAT, dir_fd=fd)
        os.write(file, b"x")
        os.close(file)
    os.close(fd)


def _many_folders(folder: Path, count: int, folders: int) -> None:
    """`count` small files in as many folders, a hundred folders in a folder."""
    for number in range(folders):
        here = count // folders + (number < count % folders)
        _many_files(folder / f"part{number // 100}" / f"step{number}", here)


def _one_recorder(
    folder: Path,
    name: str,
    prepare: Callable[[Path], None],
    show: Show,
    spread: Callable[[list[float]], str],
    cpu_s: Callable[[int], float],
) -> None:
    run, workspace = RunDir(folder / "run"), folder / "workspace"
    run.path.mkdir()
    for number in range(200):
        path = workspace / "code" / f"part{number % 10}" / f"{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n" * 200)
    (workspace / "output").mkdir()
    prepare(workspace)
    budget = Budget.model_validate({"wall_clock": "1h"})
    clock = BudgetClock(run.clock, budget, 1)
    clock.start()
    recording = RecorderProcess(run, workspace, clock, os.getpid(), MARK)
    recording.start()
    lines, pid = run.recorded("revisions"), None
    while pid is None or not (lines.exists() and lines.stat().st_size):
        time.sleep(0.05)
        pid = _recorder(run)
    first_s = cpu_s(pid)
    time.sleep(RECORDER_S)
    used_s = cpu_s(pid) - first_s
    settled, repository = [], Repository(run.code_git)
    for number in range(5):
        text = f"y = {number}\n".encode()
        (workspace / "code" / "part0" / "0.py").write_bytes(text)
        begun = time.monotonic()
        while repository.files(repository.head() or "")[b"code/part0/0.py"][1] != object_id("blob", text):
            time.sleep(0.02)
        settled.append(time.monotonic() - begun)
        time.sleep(3.3)
    begun = time.monotonic()
    recording.ask(1)()
    asked_s = time.monotonic() - begun
    recording.end()
    clock.stop()
    share = f"{100 * used_s / RECORDER_S:.2f} % of a core over {RECORDER_S} s"
    show(
        f"recorder, {name}",
        f"{share}; start and first look {first_s:.2f} s of CPU; a submission's answer {asked_s:.3f} s",
    )
    show("  settled", spread(settled))


def _recorder(run: RunDir) -> int | None:
    """The recorder's process id, once it has begun."""
    for line in run.events.read_text().splitlines() if run.events.exists() else ():
        if (event := json.loads(line))["event"] == "recorder_started":
            return int(event["pid"])
    return None
