"""Processes and use of real agents behind the real keeper: ends, exit codes, CPU of those that nobody waits for, floods."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import needs
import pytest
from helpers import PATIENCE_S, wait_for

from autorl_hpc.files.processes import MARK_VARIABLE
from autorl_hpc.recorder.process_table import Processes, ProcessLimits, exit_code, exit_status
from autorl_hpc.recorder.usage import Gpus, Sweep, UsageSampler
from autorl_hpc.recorder.watch import Moment
from autorl_hpc.records.recorded import ProcessSeen, UsageSample
from autorl_hpc.supervise.agent_keeper import AgentProcess

KERNEL = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
BUSY = (
    "import os, time\nend = time.process_time() + {seconds}\nwhile time.process_time() < end: pass\nopen('done', 'w')\n"
    "while not os.path.exists('counted'): time.sleep(0.05)\n"
)
UNTIL_COUNTED = "\nwhile not os.path.exists('counted'): time.sleep(0.05)\ntime.sleep(0.5)"


class Watched:
    """An agent and the watches over its processes."""

    def __init__(self, folder: Path, argv: list[str], mark: str, limits: ProcessLimits | None) -> None:
        self.folder, self.mark = folder, mark
        self.begun = time.monotonic()
        (folder / "w").mkdir()
        env = {"PATH": os.environ["PATH"], MARK_VARIABLE: mark}
        self.agent = AgentProcess(argv, env, folder / "w", folder / "agent.log", mark, folder / "elapsed", 0.0)
        self.events = folder / "events.jsonl"
        self.processes = Processes(self.agent.keeper_pid, mark, folder / "processes.jsonl", self.events, limits)
        self.sweep, path = Sweep(folder / "w"), folder / "usage.jsonl"
        self.usage = UsageSampler(self.processes, self.sweep, Gpus({}), path)

    def now(self) -> Moment:
        return Moment(time.monotonic() - self.begun, "2030-01-01T00:00:00.000+00:00", 1)

    def watch(self, seconds: float = PATIENCE_S, every_s: float = 0.1) -> None:
        """Looks until the agent has ended, or some seconds are over."""
        deadline = time.monotonic() + seconds
        while self.agent.running() and time.monotonic() < deadline:
            self.processes.look(self.now())
            time.sleep(every_s)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Looks until something is so, or the agent has ended."""

        def look() -> bool:
            self.processes.look(self.now())
            return condition() or not self.agent.running()

        wait_for(look, what)

    def until_begun(self, *commands: str) -> None:
        """Looks until programs have been seen: on a busy machine nobody knows when."""
        self.until(lambda: set(commands) <= {s.command for s in self.seen()}, f"the begin of {commands}")

    def until_ended(self, *commands: str) -> None:
        """Looks until their ends have been seen."""
        self.until(lambda: set(commands) <= {s.command for s in self.seen() if s.what == "ended"}, f"end of {commands}")

    def let(self, *fifos: str) -> None:
        """Lets those go on that read from FIFOs."""
        for name in fifos:
            wait_for((self.folder / "w" / name).is_fifo, f"the FIFO {name}")
            (self.folder / "w" / name).write_text("\n")

    def close(self) -> list[ProcessSeen]:
        self.agent.stop(0.0)
        self.agent.finish()
        self.processes.close(self.now())
        self.usage.close(self.now())
        return self.seen()

    def seen(self) -> list[ProcessSeen]:
        path = self.folder / "processes.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [ProcessSeen.model_validate_json(line) for line in lines]

    def samples(self) -> list[UsageSample]:
        lines = (self.folder / "usage.jsonl").read_text().splitlines()
        return [UsageSample.model_validate_json(line) for line in lines]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[object]:
    made: list[Watched] = []

    def start(*argv: str, limits: ProcessLimits | None = None) -> Watched:
        made.append(Watched(tmp_path, list(argv), f"recorder-{os.getpid()}-{time.time_ns()}", limits))
        return made[-1]

    yield start
    for one in made:
        one.agent.stop(0.0)
        one.agent.finish()


Start = Callable[..., Watched]


def ended(seen: list[ProcessSeen], command: str) -> ProcessSeen:
    (found,) = [one for one in seen if one.what == "ended" and one.command == command]
    return found


def test_begin_end_and_exit_codes(watched: Start) -> None:
    script = (
        ": --api-key abcdef HF_TOKEN=uvwxyz \x1b[31m; mkfifo a b c d e; cat a & sh -c 'read x < b; exit 7' & "
        "sh -c 'read x < c; kill -9 $$' & (setsid sh -c 'read x < d; exit 3' &) & wait; read x < e; exit 5"
    )
    one = watched("bash", "-c", script)
    children = ("cat a", *(f"sh -c 'read x < {then}'" for then in ("b; exit 7", "c; kill -9 $$", "d; exit 3")))
    one.until_begun(*children)
    begun = time.monotonic()
    time.sleep(0.5)
    lived_s = time.monotonic() - begun
    one.let("a", "b", "c", "d")
    one.until_ended(*children)
    one.let("e")
    one.watch()
    seen = one.close()
    agent = [s for s in seen if s.what == "ended" and s.command.startswith("bash -c") and "exit 5" in s.command]
    assert 5 in {s.exit_code for s in agent}
    assert ended(seen, "cat a").exit_code == 0
    codes = {s.exit_code for s in seen if s.what == "ended" and s.command.startswith(("sh -c", "setsid"))}
    assert {7, -9, 3} <= codes, "an orphan's too, which the keeper adopts"
    read = ended(seen, "cat a")
    assert lived_s - 0.1 <= read.elapsed_s - read.began_s <= one.now().elapsed_s
    assert {s.what for s in seen} == {"began", "ended"}
    written = (one.folder / "processes.jsonl").read_text()
    assert "--api-key" in written and "\\\\x1b[31m" in written, "control characters are escaped"
    assert "abcdef" not in written and "uvwxyz" not in written


@needs.needs("kernel", KERNEL >= (6, 15), "pidfds tell of exits from Linux 6.15 on")
def test_a_pidfd_tells_how_a_collected_process_ended() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(9)
    pidfd = os.pidfd_open(pid)
    os.waitpid(pid, 0)
    assert exit_code(exit_status(pidfd)) == 9
    os.close(pidfd)
    own = os.pidfd_open(os.getpid())
    assert exit_status(own) is None
    os.close(own)


def test_without_pidfds_a_zombie_still_tells(watched: Start) -> None:
    """Older kernels: what its parent collects between two looks is null, never 0."""
    script = (
        "import os, subprocess\nfor name in 'abc': os.mkfifo(name)\n"
        "first = subprocess.Popen(['sh', '-c', 'read x < a; exit 4'])\nopen('b').read()\nfirst.wait()\n"
        "subprocess.run(['sh', '-c', 'read x < c; exit 6'])\n"
    )
    one = watched(sys.executable, "-c", script, limits=ProcessLimits(pidfds=0))
    for command, fifos in (("sh -c 'read x < a; exit 4'", "a"), ("sh -c 'read x < c; exit 6'", "bc")):
        one.let(*fifos[:-1])
        one.until_begun(command)
        one.let(fifos[-1])
        one.until_ended(command)
    one.watch()
    seen = one.close()
    assert ended(seen, "sh -c 'read x < a; exit 4'").exit_code == 4
    assert ended(seen, "sh -c 'read x < c; exit 6'").exit_code in (None, 6)


@pytest.mark.parametrize(
    "start",
    [
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN); subprocess.Popen([sys.executable, '-c', BUSY])" + UNTIL_COUNTED,
        "[subprocess.run([sys.executable, '-S', '-c', 'for i in range(1000000): pass']) for _ in range(12)]",
    ],
    ids=["nobody waits", "many short ones"],
)
def test_cpu_seconds_are_right_within_a_few_percent(start: str, watched: Start, tmp_path: Path) -> None:
    busy = BUSY.format(seconds=0.7)
    code = f"import os, signal, subprocess, sys, time\nBUSY = {busy!r}\n{start}\n"
    begun = os.times()
    one = watched(sys.executable, "-c", code)
    one.until((one.folder / "w" / "done").exists, "the work")  # or the end, where there is no such child
    one.processes.look(one.now())
    (one.folder / "w" / "counted").touch()  # what it used is known: it may end
    one.watch()
    one.close()
    one.agent._keeper.wait()
    spent = os.times()
    told = one.samples()[-1].cpu_s
    assert told is not None
    if "SIG_IGN" in start:
        assert 0.65 <= told <= 2.1, "0.7 s in the child, and Python's own start"
    else:
        # What the kernel says of all that ended here: the agent's, and the keeper's start and looks.
        kernel = spent.children_user + spent.children_system - begun.children_user - begun.children_system
        assert kernel - 1.2 <= told <= kernel * 1.02


def test_cpu_never_falls_and_memory_processes_and_disk_are_told(watched: Start) -> None:
    code = "import subprocess, time\nx = bytearray(200 * 2**20)\nopen('f', 'wb').write(bytes(5 * 2**20))\n"
    code += "import os\np = subprocess.Popen(['sleep', '600'])\nwhile not os.path.exists('over'): time.sleep(0.05)\np.kill()\np.wait()\n"
    one = watched(sys.executable, "-c", code)

    def looks() -> bool:
        one.processes.look(one.now())
        one.sweep.look(one.now())
        one.usage.look(one.now())
        samples = one.samples()
        return any(s.processes == 2 and (s.memory_bytes or 0) >= 200 * 2**20 for s in samples)

    wait_for(looks, "both processes and their memory in a sample")
    (one.folder / "w" / "over").touch()
    one.watch()
    one.close()
    samples = one.samples()
    assert max(s.processes or 0 for s in samples) == 2 and samples[-1].processes == 0
    most = max(s.memory_bytes or 0 for s in samples)
    assert 200 * 2**20 <= most <= 260 * 2**20
    assert 5 * 2**20 <= (samples[-1].disk_bytes or 0) <= 5.1 * 2**20
    cpu = [s.cpu_s or 0.0 for s in samples]
    assert cpu == sorted(cpu) and cpu[-1] > 0


def test_an_agent_that_kills_its_keeper_is_still_seen(watched: Start) -> None:
    """Its processes are known already, and those that start then are found by the mark."""
    code = (
        "import os, signal, subprocess, time\nos.mkfifo('a')\nopen('a').read()\n"
        "os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(0.3)\n"
        "subprocess.run(['sh', '-c', '(sleep 300.25 &) &'])\ntime.sleep(300)\n"
    )
    one = watched(sys.executable, "-c", code)
    one.until(lambda: any("mkfifo" in s.command for s in one.seen()), "the agent")
    one.let("a")

    def late_one() -> bool:
        one.processes.look(one.now())
        return any(s.command == "sleep 300.25" for s in one.seen())

    wait_for(late_one, "what began after the keeper's end")
    seen = one.close()
    assert ended(seen, "sleep 300.25").exit_code in (-signal.SIGKILL, None)


def test_short_processes_by_the_thousand_are_bounded(watched: Start) -> None:
    loop = "until [ -e {until} ]; do /bin/true; done"
    script = f"mkfifo a; ({loop.format(until='over')}) & {loop.format(until='flooded')}; cat a; touch over; wait"
    one = watched("bash", "-c", script, limits=ProcessLimits(burst=50, long_s=1.0))
    one.until(lambda: one.processes.left_out > 60, "many short ones")
    (one.folder / "w" / "flooded").touch()
    one.until_begun("cat a")
    one.let("a")
    one.watch(every_s=0.005)
    seen = one.close()
    assert len(seen) < 100 + one.now().elapsed_s, "the first fifty, one a second later on, and what lives for long"
    assert ended(seen, "cat a").exit_code == 0, "what lives for long is written whatever happens beside it"
    told = json.loads(one.events.read_text().splitlines()[-1])
    assert told["event"] == "recorder_left_out" and told["processes"] > 60


def test_a_fork_bomb_is_counted_and_not_followed(watched: Start) -> None:
    one = watched("bash", "-c", "for i in $(seq 100); do sleep 600 & done; wait", limits=ProcessLimits(followed=20))

    def running() -> int:
        one.processes.look(one.now())
        return one.processes.use.running if one.processes.use else 0

    wait_for(lambda: running() == 101, "all of them")
    assert len(one.processes.processes) == 20 and running() == 101
    one.close()
    assert json.loads(one.events.read_text().splitlines()[-1])["processes"] >= 81


@needs.needs("bwrap", shutil.which("bwrap") is not None, "no bwrap here")
def test_processes_in_a_namespace_of_their_own_are_seen_by_outer_numbers(watched: Start) -> None:
    one = watched(
        "bwrap", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--unshare-pid", "--die-with-parent",
        "sh", "-c", "until [ -p c ]; do sleep 0.05; done; sh -c 'read x < a; exit 6'; "
                    "(setsid sh -c 'read x < b; exit 8' &); read x < c",
    )  # fmt: skip
    for name in "abc":
        os.mkfifo(one.folder / "w" / name)
    for fifo, command in (("a", "sh -c 'read x < a; exit 6'"), ("b", "sh -c 'read x < b; exit 8'")):
        one.until_begun(command)
        if one.agent.running():
            one.let(fifo)
            one.until_ended(command)
    if one.agent.running():
        one.let("c")
    one.watch()
    seen = one.close()
    if not any(s.command == "sh -c 'read x < a; exit 6'" for s in seen):
        needs.skip("bwrap", "bwrap can't start here: " + (one.folder / "agent.log").read_text()[-200:])
    told = {s.exit_code for s in seen if s.what == "ended" and s.command.startswith(("sh -c 'read", "setsid"))}
    assert {6, 8} <= told if KERNEL >= (6, 15) else told


AS_OTHERS_DO = """
import ctypes, os
os.setgid(65534)
os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: a change of user has taken it away
where = pathlib.Path("/dev/null")
processes = table.Processes(os.getpid(), "none", where, where, table.ProcessLimits(pidfds=0))
now = watch.Moment(0.0, "", 1)
for hides in (0, 1):
    child = os.fork()
    if child == 0:
        if hides:
            ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
        os._exit(4)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    processes.look(now)
    print([table.exit_code(process.status) for process in processes.processes.values() if process.ended])
    os.waitpid(child, 0)
    processes.look(now)
"""


@needs.needs("root", os.geteuid() == 0, "only root can become somebody else; everybody else is that already")
def test_an_ordinary_user_learns_of_zombies_too_and_never_a_zero_that_is_none() -> None:
    code = (
        "import pathlib\nfrom autorl_hpc.recorder import process_table as table, watch\n" + AS_OTHERS_DO
    )  # imported before root's folders are closed to it
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stdout.split() == ["[4]", "[None]"]
