"""The recorder: `python -m autorl_hpc.recorder`. A process beside the supervisor, which starts it and can do without it.

Protocol: one JSON line in, the job; then lines `{"elapsed_s": ..., "ping": n}`, `{"elapsed_s": ..., "ask": n, "submission_id": k}`
(the state of the code now, please) and `{"stop": true}`. JSON lines out: `begun`; `pong` n; `answer` n with `revision`; `ended`
with the last `revision`. It ends with its standard input, and takes no notice of TERM and its like, as the keeper.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import logging
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from autorl_hpc.files.host import deny_inspection
from autorl_hpc.recorder.job import Job
from autorl_hpc.recorder.looking import Elapsed, Looker, Troubles
from autorl_hpc.recorder.observers import observers
from autorl_hpc.recorder.revisions import Ask, Revisions
from autorl_hpc.recorder.traces.follow import Traces
from autorl_hpc.recorder.watch import Watch

OOM_SCORE = "500"
"""Where memory runs out, the recorder goes before the agent or its supervisor."""

TICK_S = 1.0
HANG_LOOK_S = 10.0
COLLECT_EVERY = 20_000
"""Objects more than there were, before some are looked for that only hold each other."""

CLOSE_S = 3.0
"""For all watches together, at the end."""

PR_SET_PDEATHSIG = 1
DEAF_TO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


def watches(job: Job, asks: queue.SimpleQueue[Ask]) -> dict[str, Callable[[], Watch]]:
    """What is watched, by name: each entry makes its watch, in the thread that looks at it. Add one line for another."""
    return {
        "revisions": lambda: Revisions(job, asks),
        **observers(job.run, job.workspace, job.agent_log, job.keeper_pid, job.mark, os.environ),
        "traces": lambda: Traces(job.run, job.workspace, job.agent_log, job.trace_format),
    }


def main() -> int:
    """Records one attempt to its end."""
    _step_back()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s recorder %(levelname)s %(message)s")
    lines = _lines(sys.stdin.fileno())
    job = Job.told(next(line for line in lines if line))
    elapsed, troubles = Elapsed(job.elapsed_s, job.told_at_s, job.suspension_s), Troubles(job.run.events)
    asks: queue.SimpleQueue[Ask] = queue.SimpleQueue()
    lookers = {
        name: Looker(name, make, elapsed, job.attempt, troubles, place)
        for place, (name, make) in enumerate(watches(job, asks).items())
    }
    _collect_less()
    for looker in lookers.values():
        looker.start()
    _say({"begun": True})
    _serve(lines, elapsed, asks, lookers)
    _say({"ended": True, "revision": _close(lookers)})
    sys.stdout.flush()
    os._exit(0)  # a thread that hangs in a file must not keep the process


def _step_back() -> None:
    """Makes this process one that stands in nobody's way and can't be stopped by what is meant for others."""
    for number in DEAF_TO:  # a handler and not SIG_IGN, which children would inherit
        signal.signal(number, lambda *_: None)
    try:
        # A recorder that was stopped goes on when its supervisor is gone, and then sees the end of its standard input.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(OOM_SCORE)
    except (OSError, AttributeError):
        pass
    deny_inspection()


def _collect_less() -> None:
    """A look makes thousands of objects and drops them without a cycle: to search among all modules for some costs and finds none."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY)


def _serve(
    lines: Iterator[bytes | None], elapsed: Elapsed, asks: queue.SimpleQueue[Ask], lookers: dict[str, Looker]
) -> None:
    """Answers the supervisor until it says stop or is gone."""
    next_look_s, supervisor = 0.0, os.getppid()
    for line in lines:
        elapsed.tick()
        if os.getppid() != supervisor:
            return
        if time.monotonic() >= next_look_s:
            next_look_s = time.monotonic() + HANG_LOOK_S
            for looker in lookers.values():
                looker.hangs()
        if line is None:
            continue
        value: dict[str, Any] = json.loads(line)
        if "stop" in value:
            return
        elapsed.told(value["elapsed_s"])
        if "ping" in value:
            _say({"pong": value["ping"]})
        if "ask" in value:
            asks.put(Ask(value["submission_id"], functools.partial(_answer, value["ask"])))
            lookers["revisions"].wake()


def _answer(number: int, revision: str | None) -> None:
    _say({"answer": number, "revision": revision})


def _close(lookers: dict[str, Looker]) -> str | None:
    """Closes all watches, of those that hang only the hope; the last state of the code, None if it was not kept."""
    for looker in lookers.values():
        looker.end()
    deadline = time.monotonic() + CLOSE_S
    for looker in lookers.values():
        looker.join(max(0.0, deadline - time.monotonic()))
    last = lookers["revisions"]
    return last.watch.head if last.closed_well and isinstance(last.watch, Revisions) else None


def _lines(fd: int) -> Iterator[bytes | None]:
    """The lines that come in, and None each TICK_S without one, until the end."""
    buffer = b""
    while True:
        if not select.select([fd], [], [], TICK_S)[0]:
            yield None
            continue
        data = os.read(fd, 1 << 16)
        if not data:
            return
        *whole, buffer = (buffer + data).split(b"\n")
        yield from whole


_OUT = threading.Lock()


def _say(value: dict[str, Any]) -> None:
    """One line to the supervisor; if that is gone, nobody is told."""
    with _OUT:
        try:
            os.write(sys.stdout.fileno(), json.dumps(value).encode() + b"\n")
        except OSError:
            pass
