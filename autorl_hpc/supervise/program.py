"""Which version of its program an agent runs: asked at the start of an attempt, in the agent's sandbox, before the budget's clock.

For the record alone. A program that says nothing, or too late, is no error: the run goes on, and its version is null.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autorl_hpc.agents import Agent
from autorl_hpc.agents.checks import VERSION
from autorl_hpc.files.events import append_event
from autorl_hpc.files.host import become_subreaper
from autorl_hpc.supervise.processes import end_all

EVENT = "agent_version"

LIMIT_S = 60.0
"""openhands takes 9 s of CPU to say its version; programs of hundreds of megabytes are read from a file server here, not later."""

LOOK_S = 0.05
MOST_BYTES = 4096
"""Far less than a pipe holds, so that nobody need read while the program runs."""

ASK = f"""set -o pipefail
home=$(mktemp -d) || exit 1
trap 'rm -rf "$home"' EXIT
HOME=$home "$@" 2>&1 </dev/null | head -c {MOST_BYTES}"""
"""With an empty home: what an agent left in its own in an earlier attempt is not asked."""


def note_version(
    events: Path,
    agent: Agent,
    attempt: int,
    argv: Callable[[Sequence[str]], list[str]],
    env: Mapping[str, str],
    mark: str,
    stop: Callable[[], bool],
) -> None:
    """Writes what the agent's program says of its version into the run's events; nothing for an agent without a program.

    Args:
        argv: a command as it runs in the sandbox.
        env: of the agent, with its mark, without secrets.
        stop: whether the attempt is to end.
    """
    program = agent.file.program
    if not program:
        return
    # What the agent can write must not be imported: PYTHONPATH leads into its workspace.
    bare = {name: value for name, value in env.items() if name != "PYTHONPATH" and name not in agent.file.secrets}
    said = _ask(argv(["bash", "-c", ASK, "version", *program]), bare, mark, stop)
    found = VERSION.search(said)
    version = found.group()[:80] if found else None
    append_event(events, EVENT, attempt=attempt, agent=agent.name, program=program[0], version=version)


def _ask(command: Sequence[str], env: Mapping[str, str], mark: str, stop: Callable[[], bool]) -> str:
    """What it says, if it ends well and in time; nothing of it is left behind."""
    become_subreaper()
    try:
        process = subprocess.Popen(
            command,
            env=dict(env),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return ""
    assert process.stdout is not None
    with process.stdout as out:
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < deadline and not stop():
            time.sleep(LOOK_S)
        code = process.poll()
        if code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        end_all(os.getpid(), mark)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        if code != 0:
            return ""
        os.set_blocking(out.fileno(), False)
        try:
            return (os.read(out.fileno(), MOST_BYTES)).decode(errors="replace")
        except BlockingIOError:
            return ""
