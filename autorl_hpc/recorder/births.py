"""Whether any process was born on this node since the last look: one number instead of a list of all."""

from __future__ import annotations

import os
import threading

_LOADAVG = "/proc/loadavg"


def last_number() -> bytes | None:
    """The process number that was given last in our PID namespace (proc(5), /proc/loadavg, fifth field); None: not told.

    It changes with each birth, of threads and in namespaces below ours too.
    """
    try:
        fd = os.open(_LOADAVG, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fields = os.read(fd, 256).split()
        finally:
            os.close(fd)
    except OSError:
        return None
    return fields[4] if len(fields) == 5 else None


def are_told() -> bool:
    """Whether that number really moves here, tried with a thread: some containers show a file of their own making."""
    before = last_number()
    thread = threading.Thread(target=_nothing)
    thread.start()
    thread.join()
    return before is not None and last_number() != before


def _nothing() -> None:
    pass
