"""What confines programs on this host: each layer is tried by running a program behind it."""

from __future__ import annotations

import functools
import logging
import os
import socket
import tempfile
from pathlib import Path

from autorl_hpc.scoring.programs.confine import LAYERS
from autorl_hpc.scoring.programs.crew import HONEST, Crew
from autorl_hpc.scoring.programs.limits import Isolation, Limits, Program, Reason

log = logging.getLogger(__name__)

TRIES = 2
"""A layer that fails once is tried again: a node short of processes for a moment must not cost it for hours."""

_ATTEMPTS = """
import os, socket

def read(path):
    return open(path).read() == "secret"

def write(path):
    return open(path, "a").write("x") == 1

def connect(port):
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    return True

def fork():
    child = os.fork()
    if not child:
        os._exit(0)
    return os.waitpid(child, 0)[0] == child

def signal(pid):
    os.kill(pid, 0)
    return True

def attempt(name, *arguments):
    try:
        return globals()[name](*arguments)
    except BaseException:
        return False
"""


@functools.cache
def isolation() -> Isolation:
    """What works on this host: each layer alone, then all that do together. Found once in a process."""
    with Crew(Limits()) as crew:
        working = tuple(layer for layer in LAYERS if _works(crew, (layer,)))
        while working and not _works(crew, working):
            working = working[1:]
        found = Isolation(working, open_to(crew, working))
    log.info(
        "programs are confined by %s; open to: %s", found.name, ", ".join(sorted(found.open_to)) or "nothing tried"
    )
    return found


def open_to(crew: Crew, layers: tuple[str, ...]) -> frozenset[str]:
    """What a program can do behind these layers, by letting one try."""
    with (
        tempfile.TemporaryDirectory(prefix="autorl-probe-") as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        secret = Path(folder, "secret")
        secret.touch(mode=0o600)
        secret.write_text("secret", encoding="ascii")
        arguments: dict[str, list[object]] = {
            "read": [str(secret)],
            "write": [str(Path(folder, "written"))],
            "connect": [server.getsockname()[1]],
            "fork": [],
            "signal": [os.getpid()],
        }
        return frozenset(thing for thing, given in arguments.items() if not _fails(crew, layers, [thing, *given]))


def _works(crew: Crew, layers: tuple[str, ...]) -> bool:
    for _ in range(TRIES):
        reason, detail = crew.outcome(HONEST, layers)
        if reason == Reason.PASSED:
            return True
    log.info("no %s for programs: %s %s", "+".join(layers), reason, detail)
    return False


def _fails(crew: Crew, layers: tuple[str, ...], attempt: list[object]) -> bool:
    """Whether an attempt was made and came to nothing; if that can't be told, it may have succeeded."""
    test = f"def check(attempt):\n    assert not attempt(*{attempt!r})\n"
    reason, detail = crew.outcome(Program(_ATTEMPTS, test, "attempt"), layers)
    if reason not in (Reason.PASSED, Reason.WRONG):
        log.info("whether programs can %s can't be told: %s %s", attempt[0], reason, detail)
    return reason == Reason.PASSED
