"""What the local jobs do around supervisors and graders: run an array with a throttle, keep a chain of graders, wait.

On Slurm the scheduler does these three; here they are a few lines each, so that both worlds run the same payload.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable, Sequence

from autorl_hpc.drivers.users import Users
from autorl_hpc.files import queue as queues
from autorl_hpc.files import reading
from autorl_hpc.files.jobs import alive_jobs, process_start
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.records import read_experiment
from autorl_hpc.launch.children import POLL_S, Stopping
from autorl_hpc.states import EXIT_RESUME, EXIT_TROUBLE

log = logging.getLogger("autorl_hpc.jobs")

CRASH_PAUSE_S = 1.0
TROUBLE_PAUSE_S = 10.0
MAX_CRASH_PAUSE_S = 60.0
IDLE_PAUSE_S = 5.0
"""Between two looks whether a driver is wanted again."""
CRASHES_BEFORE_LEAVING = 10
"""Supervisors of one run that may fail before an array leaves it alone; with the pauses between them, five minutes."""


def run_array(experiment: ExperimentDir) -> int:
    """Runs every run's supervisor, at most `parallel` at once; starts one over that did not seal.

    The supervisor itself counts attempts and seals a run that has had too many. One that fails before it can begin an
    attempt (a full disk, a damaged run.json) is tried less and less often, then left for the next launch.
    """
    stopping = Stopping()
    stopping.install()
    running: dict[str, subprocess.Popen[bytes]] = {}
    done: set[str] = set()
    not_before: dict[str, float] = {}
    crashes: dict[str, int] = {}
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
                continue
            crashes[run_id] = 0 if code == EXIT_RESUME else crashes.get(run_id, 0) + 1
            if crashes[run_id] >= CRASHES_BEFORE_LEAVING:
                log.error("%d supervisors of %s failed, the last with %s: leaving it", crashes[run_id], run_id, code)
                done.add(run_id)
                continue
            pause_s = min(MAX_CRASH_PAUSE_S, CRASH_PAUSE_S * 2 ** max(0, crashes[run_id] - 1))
            log.warning("the supervisor of %s ended with %s; starting it over in %.0f s", run_id, code, pause_s)
            not_before[run_id] = time.monotonic() + pause_s
        finished = set(reading.list_names(experiment.finished))
        waiting = [r for r in record.runs if r not in running and r not in done | finished]
        if not waiting and not running:
            return 0
        ready = [run_id for run_id in waiting if not_before.get(run_id, 0.0) <= time.monotonic()]
        if ready and len(running) < record.spec.parallel:
            # One left behind by an array that was killed is waited for.
            left_behind = set(supervisors(experiment)) - set(running)
            free = record.spec.parallel - len(running) - len(left_behind)
            for run_id in [run_id for run_id in ready if run_id not in left_behind][: max(0, free)]:
                running[run_id] = stopping.start("agent", str(experiment.path), run_id)
        time.sleep(POLL_S)
    for child in running.values():
        child.wait()
    return 130


def processes(experiment: ExperimentDir) -> dict[int, list[str]]:
    """The arguments after `job` of every process on this host that works on this experiment, by process id.

    They are found by their command lines, so also when what started them was killed.
    """
    path = os.fsencode(experiment.path.resolve())
    found: dict[int, list[str]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
            except OSError:
                continue
            if path in words and b"job" in words and b"autorl_hpc" in words:
                found[int(name)] = [os.fsdecode(word) for word in words[words.index(b"job") + 1 :] if word]
    return found


def supervisors(experiment: ExperimentDir) -> dict[str, int]:
    """The process id of every run's supervisor that lives on this host."""
    rows = processes(experiment)
    return {words[-1]: pid for pid, words in rows.items() if len(words) == 3 and words[0] == "agent"}


def run_chain(experiment: ExperimentDir, while_alive: Sequence[int]) -> int:
    """Keeps a grader: the next one starts when one died, or ended idle and work has come."""
    stopping = Stopping()
    stopping.install()
    left = read_experiment(experiment).grader.chain
    first = watcher(while_alive)

    def alive() -> bool:  # an array that a later launch started counts too
        return first() or any(job.role == "agents" for job in alive_jobs(experiment))

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
        if code == EXIT_TROUBLE and alive():  # agents still run: what is staged or repaired meanwhile may be scored
            log.warning("grader can't score anything here; the next one in %.0f s", TROUBLE_PAUSE_S)
            stopping.sleep(TROUBLE_PAUSE_S)
        elif code != 0:
            left -= 1
            log.warning("grader ended with %s; %d of the chain are left", code, left)
            time.sleep(CRASH_PAUSE_S)
    return 130 if stopping.asked else 1


def keep_driver(experiment: ExperimentDir, name: str, while_alive: Sequence[int]) -> int:
    """Keeps a driver's job while agents may still call it: the next one starts when one died or gave up."""
    stopping = Stopping()
    stopping.install()
    first = watcher(while_alive)
    failures = 0

    def alive() -> bool:
        return first() or any(job.role == "agents" for job in alive_jobs(experiment))

    users = Users(experiment, name)
    while not stopping.asked and alive() and not _over(experiment):
        if not users.open():  # a later launch may bring runs
            stopping.sleep(IDLE_PAUSE_S)
            continue
        code = stopping.start("driver", str(experiment.path), name).wait()
        stopping.children.clear()
        failures = failures + 1 if code else 0
        if code:
            log.warning("the driver %s ended with %s", name, code)
        stopping.sleep(min(MAX_CRASH_PAUSE_S, CRASH_PAUSE_S * 2 ** min(failures, 10)))
    return 130 if stopping.asked else 0


def watcher(pids: Sequence[int]) -> Callable[[], bool]:
    """A function that says whether any of these processes, as they are now, is still alive."""
    starts = {pid: process_start(pid) for pid in pids}
    return lambda: any(start is not None and process_start(pid) == start for pid, start in starts.items())


def wait_for_end(experiment: ExperimentDir, after: Sequence[int]) -> None:
    """Waits until the experiment is over or all jobs that work on it have ended."""
    first = watcher(after)

    def alive() -> bool:  # so do jobs that a later launch started
        return first() or any(job.role != "report" for job in alive_jobs(experiment))

    while not _over(experiment) and alive():
        time.sleep(POLL_S)


def _over(experiment: ExperimentDir) -> bool:
    return set(read_experiment(experiment).runs) <= set(reading.list_names(experiment.finished))
