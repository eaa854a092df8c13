"""Run the recorder (`python -m autorl_hpc.recorder`): the threads that run its watches, and its protocol with the supervisor.

One JSON line in, the job; then lines `{"elapsed_s": ..., "ping": n}`, `{"elapsed_s": ..., "ask": n, "submission_id": k}`
(commit the code now) and `{"stop": true}`. JSON lines out: `begun`; `pong` n; `answer` n with `revision`; `ended` with the
last `revision`. It ends when its standard input ends, and like the keeper it ignores TERM and similar signals.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autorl_hpc.files.ledger import now_text
from autorl_hpc.files.processes import deny_inspection, die_with_parent
from autorl_hpc.files.queue import append_event
from autorl_hpc.recorder.code import Ask, Revisions
from autorl_hpc.recorder.observed import Observed
from autorl_hpc.recorder.process_table import Processes
from autorl_hpc.recorder.traces.follow import Traces
from autorl_hpc.recorder.trainings import OutputStamps, Points, Trainings
from autorl_hpc.recorder.usage import Gpus, Sweep, UsageSampler
from autorl_hpc.recorder.watch import Moment, RecorderJob, Watch
from autorl_hpc.records.base import printable

# --- threads: one for each watch, so that a watch that fails or hangs stops no other

log = logging.getLogger("autorl_hpc.recorder")
REST_FACTOR, LONGEST_REST_S = 20.0, 30.0
"""Each look is followed by a pause of this many times its length, so that no watch takes more than a twentieth of a core or of a
file server's time, whatever a workspace holds."""

SLOWEST_S = 60.0  # longest pause after failures; a full disk may have room again
TROUBLE_EVERY_S = 60.0
HANGS_S = 60.0  # A look that takes this long is reported


class Elapsed:
    """Seconds of budget used: the supervisor's value of `at_s` (monotonic clock, which all processes of a host share) plus our
    own clock since then, without gaps of more than `suspension_s` between two ticks. Thread-safe."""

    def __init__(
        self, elapsed_s: float, at_s: float, suspension_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._elapsed_s, self._suspension_s, self._now = elapsed_s, suspension_s, now
        self._last = min(at_s, now())
        self._lock = threading.Lock()

    def tick(self) -> float:
        """Add the time since the last tick. Return the sum in seconds."""
        with self._lock:
            now = self._now()
            gap, self._last = now - self._last, now
            if gap <= self._suspension_s:
                self._elapsed_s += gap
            return self._elapsed_s

    def set(self, elapsed_s: float) -> None:
        """Set the supervisor's value, which is authoritative; the clock never goes back."""
        with self._lock:
            self._elapsed_s, self._last = max(self._elapsed_s, elapsed_s), self._now()


class Looker(threading.Thread):
    """Thread that looks at one watch until `end`, and then closes it. `make` is retried like a look if it fails. Failures are
    written as `recorder_trouble` events, one a minute."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Watch],
        elapsed: Elapsed,
        attempt: int,
        events: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.watch: Watch | None = None
        self.closed_well = False
        self._make, self._elapsed, self._attempt = make, elapsed, attempt
        self._events, self._clock = events, clock
        self._wake, self._ending = threading.Event(), threading.Event()
        self._begun_s: float | None = None
        self._failures = self._unsaid = 0
        self._next_said_s = -math.inf

    def wake(self) -> None:
        self._wake.set()

    def end(self) -> None:
        """Close the watch after the current look."""
        self._ending.set()
        self._wake.set()

    def run(self) -> None:
        while True:  # at least once: an agent may end before this process has started
            pause_s = self.look_once()
            if self._ending.is_set() or (self._wake.wait(pause_s) and self._ending.is_set()):
                break
            self._wake.clear()
        if self.watch is None:
            return
        try:
            self.watch.close(self._moment())
            self.closed_well = True
        except Exception as error:
            self._say(f"{type(error).__name__}: {error}")

    def hangs(self, limit_s: float = HANGS_S) -> None:
        begun_s = self._begun_s
        if begun_s is not None and (took_s := self._clock() - begun_s) > limit_s:
            self._say(f"a look has been going on for {took_s:.0f} s")

    def look_once(self) -> float:
        """Look once. Return the seconds until the next look."""
        self._begun_s = begun_s = self._clock()
        try:
            if self.watch is None:
                self.watch = self._make()
            self.watch.look(self._moment())
            self._failures = 0
            return max(self.watch.every_s, min(LONGEST_REST_S, REST_FACTOR * (self._clock() - begun_s)))
        except Exception as error:
            self._failures += 1
            self._say(f"{type(error).__name__}: {error}")
            least_s = 1.0 if self.watch is None else max(1.0, self.watch.every_s)
            return min(SLOWEST_S, least_s * 2.0 ** min(self._failures, 10))
        finally:
            self._begun_s = None

    def _say(self, message: str) -> None:
        log.warning("%s: %s", self.name, message)
        if self._clock() < self._next_said_s:
            self._unsaid += 1
            return
        said = {"message": printable(message)[:500], "unsaid_before": self._unsaid}
        self._next_said_s, self._unsaid = self._clock() + TROUBLE_EVERY_S, 0
        append_event(self._events, "recorder_trouble", watch=self.name, **said)

    def _moment(self) -> Moment:
        return Moment(round(self._elapsed.tick(), 3), now_text(), self._attempt)


def watches(
    job: RecorderJob, asks: queue.SimpleQueue[Ask], environment: Mapping[str, str]
) -> dict[str, Callable[[], Watch]]:
    """Return, by name, functions that create the watches. `environment`: of the job; it tells which GPUs are the agent's."""
    run = job.run
    processes = Processes(job.keeper_pid, job.mark, run.recorded("processes"), run.events)
    sweep, gpus, points = Sweep(job.workspace, run.events), Gpus(environment), Points(run.recorded("training"))
    return {
        "revisions": lambda: Revisions(job, asks),
        "output": lambda: OutputStamps(run.agent_log, run.agent_times),
        "usage": lambda: UsageSampler(processes, sweep, gpus, run.recorded("usage")),
        "processes": lambda: processes,
        "gpus": lambda: gpus,
        "workspace": lambda: sweep,
        "trainings": lambda: Trainings(run.agent_log, sweep, points, run.events),
        "traces": lambda: Traces(run, sweep, job.trace_format),
        "observed": lambda: Observed(job.workspace, run.recorded("observed"), run.events, points),
    }


OOM_SCORE = "500"  # if memory runs out, the kernel kills the recorder before the agent or its supervisor
TICK_S = 1.0
HANG_LOOK_S = 10.0
CLOSE_S = 3.0  # for closing all watches together
DEAF_TO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


def main() -> int:
    """Record one attempt to its end. Return the exit code."""
    _step_back()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s recorder %(levelname)s %(message)s")
    lines = _lines(sys.stdin.fileno())
    job = RecorderJob.model_validate_json(next(line for line in lines if line))
    elapsed = Elapsed(job.elapsed_s, job.told_at_s, job.suspension_s)
    asks: queue.SimpleQueue[Ask] = queue.SimpleQueue()
    made, events = watches(job, asks, os.environ), job.run.events
    lookers = {name: Looker(name, make, elapsed, job.attempt, events) for name, make in made.items()}
    for looker in lookers.values():
        looker.start()
    _say({"begun": True})
    _serve(lines, elapsed, asks, lookers)
    _say({"ended": True, "revision": _close(lookers)})
    sys.stdout.flush()
    os._exit(0)  # a thread that hangs in a file must not keep the process alive


def _step_back() -> None:
    for number in DEAF_TO:  # a handler, because children would inherit SIG_IGN
        signal.signal(number, lambda *_: None)
    # A stopped recorder continues when its supervisor is gone, and then sees the end of its standard input.
    die_with_parent(signal.SIGCONT)
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(OOM_SCORE)
    except OSError:
        pass
    deny_inspection()


def _serve(
    lines: Iterator[bytes | None], elapsed: Elapsed, asks: queue.SimpleQueue[Ask], lookers: dict[str, Looker]
) -> None:
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
        elapsed.set(value["elapsed_s"])
        if "ping" in value:
            _say({"pong": value["ping"]})
        if "ask" in value:
            answer = functools.partial(lambda number, found: _say({"answer": number, "revision": found}), value["ask"])
            asks.put(Ask(value["submission_id"], answer))
            lookers["revisions"].wake()


def _close(lookers: dict[str, Looker]) -> str | None:
    for looker in lookers.values():
        looker.end()
    deadline = time.monotonic() + CLOSE_S
    for looker in lookers.values():
        looker.join(max(0.0, deadline - time.monotonic()))
    last = lookers["revisions"]
    return last.watch.head if last.closed_well and isinstance(last.watch, Revisions) else None


def _lines(fd: int) -> Iterator[bytes | None]:
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
    with _OUT:
        try:
            os.write(sys.stdout.fileno(), json.dumps(value).encode() + b"\n")
        except OSError:
            pass
