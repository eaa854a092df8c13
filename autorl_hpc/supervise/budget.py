"""The budget's clock, kept outside the agent: the sum of monotonic intervals over all attempts.

Queue time doesn't count, since no supervisor ticks then. A gap between two ticks of more than three intervals is a
suspension (a stopped job, a frozen node) and doesn't count either.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.host import boot_id, host_name, job_id
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.exchange import Clock, Progress
from autorl_hpc.records.experiment import Budget

log = logging.getLogger("autorl_hpc.supervisor")

TICK_S = 0.5
PERSIST_S = 10.0
"""How much of the clock a lost node can cost; a killed supervisor loses nothing, see the keeper."""

SUSPENSION_S = 3 * PERSIST_S


def read_clock(path: Path) -> Clock | None:
    """The clock as last written, None where there is none that can be read."""
    value = reading.read_json_or_none(path)
    if value is None:
        return None
    try:
        return parse_record(Clock, value, path)
    except AutorlError:
        return None


@dataclass(frozen=True)
class Used:
    """What all earlier attempts of a run used up, and how far they came."""

    elapsed_s: float = 0.0
    given_back_s: float = 0.0
    suspended_s: float = 0.0
    gpu_s: float = 0.0
    progress: Progress = field(default_factory=Progress)


class BudgetClock:
    """Counts the budget of one attempt on top of the earlier ones. Thread-safe.

    Args:
        gpus: of this attempt's job.
        gpu_s: GPU-seconds of earlier attempts.
        progress: of earlier attempts. Whoever changes it persists the clock.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        path: Path,
        budget: Budget,
        attempt: int,
        *,
        elapsed_s: float,
        given_back_s: float,
        suspended_s: float,
        gpus: int = 0,
        gpu_s: float = 0.0,
        progress: Progress | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.budget = budget
        self.attempt = attempt
        self._elapsed_s = elapsed_s
        self._given_back_s = given_back_s
        self._suspended_s = suspended_s
        self.gpus = gpus
        self._gpu_s = gpu_s
        self.progress = progress or Progress()
        self._counter = 0
        self._now = now
        self._last: float | None = None
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="clock", daemon=True)

    @classmethod
    def after(cls, used: Used, path: Path, budget: Budget, attempt: int, gpus: int = 0) -> BudgetClock:
        """The clock of an attempt that follows others."""
        return cls(
            path,
            budget,
            attempt,
            elapsed_s=used.elapsed_s,
            given_back_s=used.given_back_s,
            suspended_s=used.suspended_s,
            gpus=gpus,
            gpu_s=used.gpu_s,
            progress=used.progress,
        )

    def start(self) -> None:
        """Starts counting."""
        self.resume()
        self.persist()
        self._thread.start()

    def pause(self) -> None:
        """Counts nothing until `resume`: no agent runs."""
        self.tick()
        with self._lock:
            self._last = None

    def resume(self) -> None:
        """Counts again."""
        with self._lock:
            self._last = self._now()

    def stop(self, *, persist: bool = True) -> None:
        """Stops counting for good and, unless a newer attempt owns the file, writes the clock a last time."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.pause()
        if persist:
            self.persist()

    def tick(self) -> None:
        """Adds the interval since the last tick."""
        with self._lock:
            if self._last is None:  # not started, or stopped
                return
            now = self._now()
            gap = now - self._last
            if gap > SUSPENSION_S:
                self._suspended_s += gap
            else:
                self._elapsed_s += gap
                self._gpu_s += gap * self.gpus
            self._last = now

    @property
    def elapsed_s(self) -> float:
        """Budget used, what was given back not taken off."""
        self.tick()
        return self._elapsed_s

    @property
    def given_back_s(self) -> float:
        """Time given back for waiting on graders."""
        return self._given_back_s

    @property
    def gpu_s(self) -> float:
        """GPU-seconds used, less what was given back."""
        self.tick()
        return self._gpu_s

    @property
    def left_s(self) -> float:
        """Budget left; never negative."""
        return max(0.0, self.budget.wall_clock_s + self._given_back_s - self.elapsed_s)

    def give_back(self, seconds: float) -> float:
        """Gives time back that the run waited for graders, up to the cap and half of the budget; returns how much."""
        with self._lock:
            more = max(0.0, min(seconds, self.budget.given_back_at_most_s - self._given_back_s))
            self._given_back_s += more
            self._gpu_s = max(0.0, self._gpu_s - more * self.gpus)
            return more

    def persist(self) -> None:
        """Writes clock.json. A failure is logged and tried again at the next time: the agent goes on."""
        with self._writing:  # of two threads, the one that looked first writes first
            with self._lock:
                self._counter += 1
                record = Clock(
                    attempt=self.attempt,
                    elapsed_s=self._elapsed_s,
                    given_back_s=self._given_back_s,
                    suspended_s=self._suspended_s,
                    gpus=self.gpus,
                    gpu_s=self._gpu_s,
                    progress=self.progress,
                    counter=self._counter,
                    host=host_name(),
                    pid=os.getpid(),
                    boot_id=boot_id(),
                    job_id=job_id(),
                )
            try:
                atomic.write_bytes(self.path, record.canonical() + b"\n")
            except OSError as error:
                log.warning("clock not written: %s", error)

    def _loop(self) -> None:
        last_persist = time.monotonic()
        while not self._stop.wait(TICK_S):
            self.tick()
            if time.monotonic() - last_persist >= PERSIST_S:
                last_persist = time.monotonic()
                self.persist()


@dataclass
class Waits:
    """Time that a run waits for graders, by this process's own clock.

    It passes once, however many submissions wait: while the oldest has been unclaimed for longer than the free part and
    no grader works on any submission of this run. So an agent that floods the queue gains nothing by it.
    """

    free_s: float
    since: dict[str, float] = field(default_factory=dict)
    now: Callable[[], float] = time.monotonic
    _last: float | None = None

    def look(self, pending: set[str], claimed: set[str]) -> float:
        """Seconds to give back for the time since the last look."""
        now = self.now()
        passed = 0.0 if self._last is None else now - self._last
        self._last = now
        if passed > SUSPENSION_S:  # the clock doesn't count this time, so there is nothing to give back for it
            self.since = {name: since + passed for name, since in self.since.items()}
            passed = 0.0
        self.since = {name: self.since.get(name, now) for name in pending}
        if not pending or pending & claimed:
            return 0.0
        return max(0.0, min(passed, now - min(self.since.values()) - self.free_s))
