"""A warm interpreter that forks a checker for each program. It has never run a line of a program or a test.

The package starts one for each worker, with a socket as descriptors 0 and 1. A byte on it announces a program; the checker
reads the rest itself and writes the outcome, while this process only waits for it.
"""

from __future__ import annotations

import collections  # noqa: F401  these are what programs import most: once here, not in each of them
import functools  # noqa: F401
import gc
import hashlib  # noqa: F401
import heapq  # noqa: F401
import itertools  # noqa: F401
import math  # noqa: F401
import os
import random  # noqa: F401
import re  # noqa: F401
import resource
import signal
import string  # noqa: F401
import sys
import typing  # noqa: F401

from autorl_hpc.scoring.programs import frames, linux
from autorl_hpc.scoring.programs.checker import check_one

NEXT = b"\1"
"""Stands before each program."""


def main() -> None:
    """Serves until the other end of the socket is closed."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path[:] = [entry for entry in sys.path if not os.path.isdir(os.path.join(entry, "autorl_hpc"))]
    gc.freeze()
    while os.read(0, 1) == NEXT:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                check_one()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status:
            frames.write(1, {"reason": "lost", "detail": f"its checker ended with {os.waitstatus_to_exitcode(status)}"})
            return  # with what is left of that program on the socket
