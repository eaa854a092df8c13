"""Ending every process of an agent, also those that left its process group by setsid. Standard library only.

The keeper and the supervisor are child subreapers (prctl), so an orphan of the agent becomes their child and can be found
by walking /proc from them. Processes that got away all the same are found by a mark in their environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from autorl_hpc.files.processes import descendants, marked
from autorl_hpc.files.share import PACKAGE

OWN: set[int] = set()
"""Children of the supervisor that are the suite's: they are not ended with the agent."""

_STARTING = threading.Lock()
"""Held while one of them is there and not yet noted."""

KILL_ROUNDS = 200
ROUND_PAUSE_S = 0.02


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def _asked_to_end(pids: set[int]) -> set[int]:
    """Those that TERM is for: where some live in a sandbox with process numbers of its own, not what stands around it, whose
    end would be theirs at once."""
    inside = {pid for pid in pids if (space := _pid_namespace(pid)) and space != _pid_namespace(os.getpid())}
    return inside or pids


def _pid_namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def start_own(
    module: str, env: Mapping[str, str], *, stderr: IO[bytes] | None = None, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts a module of the suite's as a child, in a session of its own, with pipes to its input and output.

    Another thread may be ending an agent at this moment: it looks before, or when the child is noted.
    """
    with _STARTING:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            env={**env, "PYTHONPATH": str(PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
            pass_fds=pass_fds,
        )
        OWN.add(process.pid)
    return process


def reap() -> None:
    """Collects children that have ended, so that they don't stay as zombies."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def end_all(
    root: int, mark: str, *, spare: frozenset[int] = frozenset(), grace_s: float = 0.0, collect: bool = False
) -> set[int]:
    """Ends all descendants of `root` and all marked processes; returns those that could not be ended.

    First TERM and `grace_s` seconds; then STOP until no new process appears, which a fork bomb can't outrun; then KILL.
    """

    def targets() -> set[int]:
        if collect:
            reap()
        with _STARTING:
            return (descendants(root) | marked(mark)) - spare - OWN - {root, os.getpid()}

    if grace_s > 0:
        _send(_asked_to_end(targets()), signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and targets():
            time.sleep(0.05)
    for _ in range(KILL_ROUNDS):
        stopped: set[int] = set()
        while new := targets() - stopped:
            _send(new, signal.SIGSTOP)
            stopped |= new
        if not stopped:
            return set()
        _send(stopped, signal.SIGKILL)
        time.sleep(ROUND_PAUSE_S)
    return targets()
