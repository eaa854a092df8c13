"""What the local jobs do around supervisors and graders: run an array with a throttle, keep a chain of graders, wait.

On Slurm the scheduler does these three; here they are a few lines each, so that both worlds run the same payload.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType

from autorl_hpc.files import queue as queues
from autorl_hpc.files import reading
from autorl_hpc.files.host import boot_id, host_name
from autorl_hpc.files.jobs import process_start
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.records import read_experiment

log = logging.getLogger("autorl_hpc.jobs")

POLL_S = 0.2
EXIT_RESUME = 75
CRASH_PAUSE_S = 1.0


@dataclass
class Stopping:
    """Passes TERM and INT on to the children, and remembers that they came."""

    asked: bool = False
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def install(self) -> None:
        """Installs the handlers."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts `python -m autorl_hpc job ...` as a child that ends with this process's TERM."""
        child = subprocess.Popen([sys.executable, "-m", "autorl_hpc", "job", *arguments], stdin=subprocess.DEVNULL)
        self.children.append(child)
        return child

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        for child in self.children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)


def run_array(experiment: ExperimentDir) -> int:
    """Runs every run's supervisor, at most `parallel` at once; starts one over that did not seal.

    The supervisor itself counts attempts and seals a run that has had too many.
    """
    stopping = Stopping()
    stopping.install()
    running: dict[str, subprocess.Popen[bytes]] = {}
    done: set[str] = set()
    not_before: dict[str, float] = {}
    while not stopping.asked:
        record = read_experiment(experiment)
        for run_id, child in list(running.items()):
            code = child.poll()
            if code is None:
                continue
            del running[run_id]
            stopping.children.remove(child)
            if code == 0:
                done.add(run_id)
            else:
                log.warning("the supervisor of %s ended with %s; starting it over", run_id, code)
                not_before[run_id] = time.monotonic() + CRASH_PAUSE_S
        finished = set(reading.list_names(experiment.finished))
        waiting = [r for r in record.runs if r not in running and r not in done | finished]
        if not waiting and not running:
            return 0
        for run_id in waiting:
            if len(running) >= record.spec.parallel:
                break
            if not_before.get(run_id, 0.0) <= time.monotonic() and not supervised(experiment.run(run_id)):
                running[run_id] = stopping.start("agent", str(experiment.path), run_id)
        time.sleep(POLL_S)
    for child in running.values():
        child.wait()
    return 130


def supervised(run: RunDir) -> bool:
    """Whether a supervisor of this run, left behind by an array that was killed, still lives on this host."""
    clock = reading.read_json_or_none(run.clock)
    if not isinstance(clock, dict) or clock.get("host") != host_name() or clock.get("boot_id") != boot_id():
        return False
    try:
        with open(f"/proc/{int(clock['pid'])}/cmdline", "rb") as file:
            return run.run_id.encode() in file.read().split(b"\0")
    except (OSError, ValueError, KeyError):
        return False


def run_chain(experiment: ExperimentDir, while_alive: Sequence[int]) -> int:
    """Keeps a grader: the next one starts when one died, or ended idle and work has come."""
    stopping = Stopping()
    stopping.install()
    left = read_experiment(experiment).grader.chain
    alive = watcher(while_alive)
    while not stopping.asked and left > 0:
        if _over(experiment):
            return 0
        if not queues.waiting(experiment.queue):
            if not alive():
                return 0
            time.sleep(POLL_S)
            continue
        child = stopping.start("grader", str(experiment.path))
        code = child.wait()
        stopping.children.remove(child)
        if code != 0:
            left -= 1
            log.warning("grader ended with %s; %d of the chain are left", code, left)
            time.sleep(CRASH_PAUSE_S)
    return 130 if stopping.asked else 1


def watcher(pids: Sequence[int]) -> Callable[[], bool]:
    """A function that says whether any of these processes, as they are now, is still alive."""
    starts = {pid: process_start(pid) for pid in pids}
    return lambda: any(start is not None and process_start(pid) == start for pid, start in starts.items())


def wait_for_end(experiment: ExperimentDir, after: Sequence[int]) -> None:
    """Waits until the experiment is over or all jobs that work on it have ended."""
    alive = watcher(after)
    while not _over(experiment) and alive():
        time.sleep(POLL_S)


def _over(experiment: ExperimentDir) -> bool:
    return set(read_experiment(experiment).runs) <= set(reading.list_names(experiment.finished))
