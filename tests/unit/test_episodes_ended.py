"""Workers of episodes and their children end with the pool, and with the process that has it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import counting_environment
import pytest
from counting_environment import goal, play, warm
from helpers import alive, wait_for

from autorl_hpc.rollouts.pool import Pool
from autorl_hpc.rollouts.source import Source

source = counting_environment.source


def children_of(pid: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(name))
            except OSError:
                continue
    return found


def test_closing_ends_workers_and_their_children(source: Source) -> None:
    pool = Pool(source, 2)
    warm(source, pool)
    sleeper = "(globals().__setitem__('p', subprocess.Popen(['sleep', '600'])), Step(str(p.pid), False, 0))[1]"
    episodes = play(source, [goal(0, n=2, trouble=sleeper, at=1), goal(1, n=2)], pool=pool)
    pids = [*pool.pids, int(episodes[0].transcript.turns[0].observation)]
    assert len(pids) == 3 and all(alive(pid) for pid in pids)
    pool.close()
    wait_for(lambda: not any(alive(pid) for pid in pids), "the workers' end")


def test_closing_does_not_wait_for_a_hanging_call(source: Source) -> None:
    pool = Pool(source, 1)
    pool.begin(0, goal(0, trouble="time.sleep(600)", at=0), 0)
    (pid,) = wait_for(lambda: pool.pids, "a worker")
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 60 and not alive(pid)


@pytest.fixture
def parent(source: Source) -> Iterator[subprocess.Popen[str]]:
    """A process whose two workers hang in a call that heeds no signal but SIGKILL."""
    script = f"""
        import sys, time
        from pathlib import Path
        from autorl_hpc.rollouts.pool import Pool
        from autorl_hpc.rollouts.source import Source
        pool = Pool(Source(Path({str(source.file)!r}), "Environment", Path("/")), 2)
        hang = "(signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)), time.sleep(600))"
        for slot in range(2):
            pool.begin(slot, {{"id": str(slot), "n": 1, "at": 0, "trouble": hang}}, 0)
        while len(pool.pids) < 2:
            time.sleep(0.01)
        time.sleep(1.5)
        print("up", flush=True)
        time.sleep(600)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_no_worker_outlives_its_parent(parent: subprocess.Popen[str], number: int) -> None:
    assert parent.stdout is not None and parent.stdout.readline() == "up\n"
    workers = children_of(parent.pid)
    assert len(workers) == 2
    parent.send_signal(number)
    wait_for(lambda: not any(alive(pid) for pid in workers), "the workers' end")
