"""The budget in all its parts: what is left of each, the warnings on the way, and what ends the run when one is used up.

A part that ends the run does it in two steps: the driver answers no more, and after the last grace, in which submissions still
count, the agent gets its TERM. Submissions end nothing: when none is left, further ones are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autorl_hpc.records.exchange import BudgetWarning
from autorl_hpc.records.ledger import DriverUse
from autorl_hpc.states import EndedBy
from autorl_hpc.supervise.budget import BudgetClock

WARN_AT = (50, 80, 95)
"""Percent of each part."""

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
"""What the gateway calls the parts that it keeps."""


@dataclass(frozen=True)
class Part:
    """One part of the budget. `limit` None: it is counted and not limited."""

    name: str
    used: float
    limit: float | None

    @property
    def left(self) -> float | None:
        """Never negative."""
        return None if self.limit is None else max(0.0, self.limit - self.used)

    @property
    def percent(self) -> float:
        """Used, of the limit."""
        return 0.0 if self.limit is None else 100.0 * self.used / self.limit

    @property
    def text(self) -> str:
        """Used and limit, for people."""
        return f"{amount(self.name, self.used)} of {amount(self.name, self.limit or 0.0)}"


class Limits:
    """Judges the budget of one run.

    Args:
        use: what the driver has answered so far, over all attempts; None without a driver.
        exhausted: what the gateway says is used up; None: nothing.
        submissions: accepted contents so far.
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
        """All parts as they stand."""
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
        """Warnings that are new since the last look, of all attempts. Each is kept in the clock's file."""
        with self._lock:
            exhausted = EXHAUSTED.get(self._exhausted() or "")
            new = [warning for part in self.parts() if (warning := self._warning(part, part.name == exhausted))]
            progress = self.clock.progress
            out = next((warning for warning in new if warning.percent == 100 and warning.budget in ENDS), None)
            update: dict[str, Any] = {"warnings": (*progress.warnings, *new)}
            if out is not None and progress.out_of is None:
                # Time is out when it is, also where nobody looked then.
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
        """The part that was used up first."""
        return self.clock.progress.out_of

    @property
    def grace_left_s(self) -> float:
        """Of the last grace; all of it before anything is used up."""
        since = self.clock.progress.out_at_s
        spent_s = 0.0 if since is None else self.clock.elapsed_s - since
        return max(0.0, self.budget.last_grace_s - spent_s)

    @property
    def over(self) -> EndedBy | None:
        """What ends the run now: a part is used up, and so is the grace."""
        return self.out_of if self.out_of is not None and self.grace_left_s <= 0 else None

    @property
    def reason(self) -> str | None:
        """What was used up first, for people; None: nothing."""
        if self.out_of is None:
            return None
        return next(
            w.says for w in self.clock.progress.warnings if w.percent == 100 and ENDS.get(w.budget) == self.out_of
        )

    def told(self) -> dict[str, Any]:
        """What time.json and `/time` say."""
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
        """budget.log: a line for each warning; None: there is none."""
        progress = self.clock.progress
        if not progress.warnings:
            return None
        lines = [f"{_clock(warning.elapsed_s)} {warning.says}" for warning in progress.warnings]
        if progress.out_of is not None:
            lines.append(f"{_clock(progress.out_at_s or 0.0)} {last_words(self.budget.last_grace_s, self.has_driver)}")
        return "\n".join(lines) + "\n"

    @property
    def has_driver(self) -> bool:
        """Whether there is a driver that can be closed."""
        return self._use() is not None

    def _warning(self, part: Part, exhausted: bool) -> BudgetWarning | None:
        """The highest mark that this part has newly passed."""
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
    """What an agent is told when the last grace begins."""
    closed = "the driver answers no more; " if driver else ""
    return f"{closed}{grace_s:.0f} s are left to submit what there is, then everything is ended"


def _clock(elapsed_s: float) -> str:
    return f"[{int(elapsed_s // 3600):02d}:{int(elapsed_s // 60 % 60):02d}:{int(elapsed_s % 60):02d}]"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def amount(name: str, value: float) -> str:
    """So much of a part of the budget, for people."""
    if name == "wall_clock_s":
        return f"{value:.0f} s"
    if name == "cost_usd":
        return f"${value:.2f}" if value >= 1 else f"${value:.4f}"
    return f"{value:.2f}" if name == "gpu_hours" else f"{value:,.0f}"
