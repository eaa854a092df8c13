"""Count the budget outside the agent: `BudgetClock`, `Waits` (time given back), `BudgetLimits` (warnings, what ends a run).

The clock is the sum of monotonic intervals. Queue time doesn't count, because no supervisor ticks then. A gap between two
ticks of more than three intervals is a suspension (a stopped job, a frozen node) and doesn't count either.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.processes import boot_id, host_name, job_id
from autorl_hpc.files.safe_open import add_up_calls, read_calls
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.entries import DriverUse
from autorl_hpc.records.exchange import BudgetWarning, Clock, Progress
from autorl_hpc.records.experiment import Budget
from autorl_hpc.states import EndedBy

log = logging.getLogger("autorl_hpc.supervisor")

TICK_S = 0.5
PERSIST_S = 10.0
"""A lost node costs at most this much of the clock. A killed supervisor costs nothing, because the keeper counts too."""

SUSPENSION_S = 3 * PERSIST_S


def read_clock(path: Path) -> Clock | None:
    """Return the clock as last written; None if there is none or it can't be read."""
    value = reading.read_json_or_none(path)
    if value is None:
        return None
    try:
        return parse_record(Clock, value, path)
    except AutorlError:
        return None


@dataclass(frozen=True)
class BudgetUsed:
    """What all earlier attempts of a run used, and their progress."""

    elapsed_s: float = 0.0
    given_back_s: float = 0.0
    suspended_s: float = 0.0
    gpu_s: float = 0.0
    progress: Progress = field(default_factory=Progress)


class BudgetClock:
    """Counts the budget of one attempt on top of the earlier ones. Thread-safe.

    Args:
        gpus: GPUs of this attempt's job.
        gpu_s: GPU-seconds of earlier attempts.
        progress: of earlier attempts. Code that changes it must call `persist`.
        now: returns monotonic seconds.
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
    def after(cls, used: BudgetUsed, path: Path, budget: Budget, attempt: int, gpus: int = 0) -> BudgetClock:
        """Return the clock of an attempt that follows earlier ones."""
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
        """Start counting."""
        self.resume()
        self.persist()
        self._thread.start()

    def pause(self) -> None:
        """Stop counting until `resume`, because no agent runs."""
        self.tick()
        with self._lock:
            self._last = None

    def resume(self) -> None:
        """Resume counting."""
        with self._lock:
            self._last = self._now()

    def stop(self, *, persist: bool = True) -> None:
        """Stop counting for good. Write the clock a last time unless a newer attempt owns the file."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.pause()
        if persist:
            self.persist()

    def tick(self) -> None:
        """Add the interval since the last tick."""
        with self._lock:
            if self._last is None:  # paused or not started
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
        """Return the seconds used, without subtracting what was given back."""
        self.tick()
        return self._elapsed_s

    @property
    def given_back_s(self) -> float:
        """Return the seconds given back for waiting on graders."""
        return self._given_back_s

    @property
    def gpu_s(self) -> float:
        """Return the GPU-seconds used, minus what was given back."""
        self.tick()
        return self._gpu_s

    @property
    def left_s(self) -> float:
        """Return the seconds left; never negative."""
        return max(0.0, self.budget.wall_clock_s + self._given_back_s - self.elapsed_s)

    def give_back(self, seconds: float) -> float:
        """Give back seconds that the run waited for graders, up to `given_back_at_most_s` in all; return how many."""
        with self._lock:
            more = max(0.0, min(seconds, self.budget.given_back_at_most_s - self._given_back_s))
            self._given_back_s += more
            self._gpu_s = max(0.0, self._gpu_s - more * self.gpus)
            return more

    def persist(self) -> None:
        """Write clock.json. A failure is logged and the next write tries again, while the agent works on."""
        with self._writing:  # one writer at a time, so that an older state never overwrites a newer one
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
    """Seconds that a run waits for graders, by this process's own clock. Waiting counts once, however many submissions
    wait: only while the oldest has been unclaimed for more than `free_s` and no grader works on any submission of this
    run. So an agent gains nothing by flooding the queue."""

    free_s: float
    since: dict[str, float] = field(default_factory=dict)
    now: Callable[[], float] = time.monotonic
    _last: float | None = None

    def look(self, pending: set[str], claimed: set[str]) -> float:
        """Return the seconds to give back for the time since the last look."""
        now = self.now()
        passed = 0.0 if self._last is None else now - self._last
        self._last = now
        if passed > SUSPENSION_S:  # a suspension: the clock doesn't count this time, so there is nothing to give back
            self.since = {name: since + passed for name, since in self.since.items()}
            passed = 0.0
        self.since = {name: self.since.get(name, now) for name in pending}
        if not pending or pending & claimed:
            return 0.0
        return max(0.0, min(passed, now - min(self.since.values()) - self.free_s))


# --- the limits: parts, warnings, and what ends the run.
# When a part is used up, the driver is closed. After the last grace, in which submissions still count, the agent gets TERM.
# Using up the submissions doesn't end the run; further ones are refused.

WARN_AT = (50, 80, 95)
"""Percent of a part at which the agent is warned."""

HOUR_S = 3600.0

ENDS = {
    "wall_clock_s": EndedBy.BUDGET,
    "gpu_hours": EndedBy.GPU_HOURS,
    "tokens": EndedBy.TOKENS,
    "cost_usd": EndedBy.COST,
}
WORDS = {
    "wall_clock_s": "time",
    "gpu_hours": "GPU-hours",
    "tokens": "driver tokens",
    "cost_usd": "driver cost",
    "submissions": "submissions",
}
EXHAUSTED = {"tokens": "tokens", "cost": "cost_usd"}
"""From the gateway's name of a used-up limit to the part's name here."""


@dataclass(frozen=True)
class Part:
    """One part of the budget. If `limit` is None it is counted but not limited."""

    name: str
    used: float
    limit: float | None

    @property
    def left(self) -> float | None:
        """Return what is left, never negative; None if there is no limit."""
        return None if self.limit is None else max(0.0, self.limit - self.used)

    @property
    def percent(self) -> float:
        """Return the percentage used; 0 if there is no limit."""
        return 0.0 if self.limit is None else 100.0 * self.used / self.limit

    @property
    def text(self) -> str:
        """Return used and limit as text for people."""
        return f"{amount(self.name, self.used)} of {amount(self.name, self.limit or 0.0)}"


class BudgetLimits:
    """Compares a run's use with its budget.

    Args:
        use: returns what the driver has answered so far, over all attempts; None without a driver.
        exhausted: returns the limit that the gateway reports as used up; None if none.
        submissions: returns the number of different contents accepted so far.
    """

    def __init__(
        self,
        clock: BudgetClock,
        use: Callable[[], DriverUse | None] = lambda: None,
        exhausted: Callable[[], str | None] = lambda: None,
        submissions: Callable[[], int] = lambda: 0,
    ) -> None:
        self.clock = clock
        self.budget = clock.budget
        self._use = use
        self._exhausted = exhausted
        self._submissions = submissions
        self._lock = threading.Lock()

    def parts(self) -> list[Part]:
        """Return all parts with their current use."""
        budget, clock, use = self.budget, self.clock, self._use()
        found = [
            Part("wall_clock_s", clock.elapsed_s, self._time_limit_s),
            Part("gpu_hours", clock.gpu_s / HOUR_S, budget.gpu_hours),
            Part("submissions", self._submissions(), budget.max_submissions),
        ]
        if use is not None:
            found += [Part("tokens", use.tokens, budget.tokens), Part("cost_usd", use.cost_usd or 0.0, budget.cost_usd)]
        return found

    def look(self) -> list[BudgetWarning]:
        """Return the warnings that are new since the last look of any attempt, and store them in the clock's file."""
        with self._lock:
            exhausted = EXHAUSTED.get(self._exhausted() or "")
            new = [warning for part in self.parts() if (warning := self._warning(part, part.name == exhausted))]
            progress = self.clock.progress
            out = next((warning for warning in new if warning.percent == 100 and warning.budget in ENDS), None)
            update: dict[str, Any] = {"warnings": (*progress.warnings, *new)}
            if out is not None and progress.out_of is None:
                # The time limit counts as reached at its own moment, even if this look comes later.
                at_s = self._time_limit_s if out.budget == "wall_clock_s" else out.elapsed_s
                update |= {"out_of": ENDS[out.budget], "out_at_s": at_s}
            if new:
                self.clock.progress = progress.model_copy(update=update)
        if new:
            self.clock.persist()
        return new

    @property
    def _time_limit_s(self) -> float:
        return self.budget.wall_clock_s + self.clock.given_back_s

    @property
    def out_of(self) -> EndedBy | None:
        """Return which part was used up first; None if none is."""
        return self.clock.progress.out_of

    @property
    def grace_left_s(self) -> float:
        """Return the seconds left of the last grace; all of it before a part is used up."""
        since = self.clock.progress.out_at_s
        spent_s = 0.0 if since is None else self.clock.elapsed_s - since
        return max(0.0, self.budget.last_grace_s - spent_s)

    @property
    def over(self) -> EndedBy | None:
        """Return what ends the run now: a part is used up, and so is the grace; None if the run goes on."""
        return self.out_of if self.out_of is not None and self.grace_left_s <= 0 else None

    @property
    def reason(self) -> str | None:
        """Return, as text for people, what was used up first; None if nothing was."""
        if self.out_of is None:
            return None
        return next(
            w.says for w in self.clock.progress.warnings if w.percent == 100 and ENDS.get(w.budget) == self.out_of
        )

    def told(self) -> dict[str, Any]:
        """Return the content of time.json and `/time`."""
        clock, progress = self.clock, self.clock.progress
        grace = None
        if progress.out_of is not None:
            grace = {"out_of": str(progress.out_of), "left_s": round(self.grace_left_s, 1)}
        return {
            "left_s": round(clock.left_s, 1),
            "elapsed_s": round(clock.elapsed_s, 1),
            "given_back_s": round(clock.given_back_s, 1),
            "timeout_s": self.budget.wall_clock_s,
            "grace_s": self.budget.last_grace_s,
            "grace": grace,
            "budgets": {
                part.name: {"limit": part.limit, "used": round(part.used, 6), "left": _rounded(part.left)}
                for part in self.parts()
            },
            "warnings": [warning.says for warning in progress.warnings],
        }

    def log(self) -> str | None:
        """Return the text of budget.log, one line per warning; None if there was no warning."""
        progress = self.clock.progress
        if not progress.warnings:
            return None
        lines = [f"{_clock(warning.elapsed_s)} {warning.says}" for warning in progress.warnings]
        if progress.out_of is not None:
            lines.append(f"{_clock(progress.out_at_s or 0.0)} {last_words(self.budget.last_grace_s, self.has_driver)}")
        return "\n".join(lines) + "\n"

    @property
    def has_driver(self) -> bool:
        """Return whether the run has a driver."""
        return self._use() is not None

    def _warning(self, part: Part, exhausted: bool) -> BudgetWarning | None:
        """Return a warning for the highest mark that this part has newly passed; None if there is none."""
        if part.limit is None and not exhausted:
            return None
        percent = 100.0 if exhausted else part.percent
        passed = max((mark for mark in (*WARN_AT, 100) if percent >= mark), default=0)
        told = max((w.percent for w in self.clock.progress.warnings if w.budget == part.name), default=0)
        if passed <= told:
            return None
        return BudgetWarning(
            budget=part.name, percent=passed, elapsed_s=self.clock.elapsed_s, says=self._says(part, passed)
        )

    def _says(self, part: Part, percent: int) -> str:
        what = WORDS[part.name]
        if percent < 100:
            return f"{percent} % of the {what} used: {part.text}"
        if part.name == "submissions":
            return f"all submissions used: {part.text}; no other checkpoint is accepted"
        return f"the {what} of the budget used up: {part.text}"


def last_words(grace_s: float, driver: bool) -> str:
    """Return the message to the agent when the last grace begins."""
    closed = "the driver answers no more; " if driver else ""
    return f"{closed}{grace_s:.0f} s are left to submit what there is, then everything is ended"


def _clock(elapsed_s: float) -> str:
    return f"[{int(elapsed_s // 3600):02d}:{int(elapsed_s // 60 % 60):02d}:{int(elapsed_s % 60):02d}]"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def amount(name: str, value: float) -> str:
    """Format an amount of a part of the budget for people."""
    if name == "wall_clock_s":
        return f"{value:.0f} s"
    if name == "cost_usd":
        return f"${value:.2f}" if value >= 1 else f"${value:.4f}"
    return f"{value:.2f}" if name == "gpu_hours" else f"{value:,.0f}"


# --- use of the driver, from the gateway's log


def read_use(path: Path) -> DriverUse:
    """Return the sums over driver.jsonl of all attempts; zeros if there is no log."""
    sums = add_up_calls(read_calls(path))
    return DriverUse(
        tokens_in=sums.tokens_in,
        tokens_out=sums.tokens_out,
        tokens_cached=sums.tokens_cached,
        cost_usd=sums.cost_usd,
        calls=sums.calls,
        refused=sums.refused,
    )
