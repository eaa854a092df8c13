"""Count the budget outside the agent: `BudgetClock`, `Waits` (time given back), `BudgetLimits` (warnings, what ends a run). The clock is the
sum of monotonic intervals; a gap of more than `SUSPENSION_S` counts only as far as the agent's keeper counted on meanwhile."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
PERSIST_S = 10.0  # a lost node costs at most this much; a killed supervisor nothing, as the keeper counts too
SUSPENSION_S = 3 * PERSIST_S


def read_clock(path: Path) -> Clock | None:
    """Return the clock as last written; None if there is none or it can't be read."""
    try:
        return parse_record(Clock, reading.read_json_or_none(path), path)
    except AutorlError:
        return None


@dataclass
class BudgetUsed:
    """What a run used in all its attempts, and its progress."""

    elapsed_s: float = 0.0
    given_back_s: float = 0.0
    suspended_s: float = 0.0
    gpu_s: float = 0.0
    progress: Progress = field(default_factory=Progress)


def noted(path: Path | None) -> float:
    """Return how long the agent has run by its keeper's note, in all attempts; 0 if there is none."""
    left = None if path is None else reading.read_json_or_none(path)
    found = left.get("elapsed_s") if isinstance(left, dict) else None
    return float(found) if isinstance(found, (int, float)) else 0.0


def used_so_far(path: Path, told_s: float, elapsed_files: Sequence[Path]) -> BudgetUsed:
    """Return what all earlier attempts used, by the latest of ledger (`told_s`), clock file (`path`) and keepers' files."""
    clock = read_clock(path)
    elapsed_s = told_s if clock is None else max(told_s, clock.elapsed_s)
    elapsed_s = max([elapsed_s, *map(noted, elapsed_files)])
    if clock is None:
        return BudgetUsed(elapsed_s)
    unseen_s = elapsed_s - clock.elapsed_s  # of the attempt that wrote the clock, as later ones rewrite it
    gpu_s = clock.gpu_s + clock.gpus * unseen_s
    return BudgetUsed(elapsed_s, clock.given_back_s, clock.suspended_s, gpu_s, clock.progress)


class BudgetClock:
    """Counts the budget of one attempt on top of the earlier ones (`used`). Thread-safe. `gpus`: of this attempt's job; `note`: file in
    which the agent's keeper notes how long the agent ran; `suspension_s`: a longer gap counts only as far as that file says."""

    def __init__(
        self,
        path: Path,
        budget: Budget,
        attempt: int,
        used: BudgetUsed | None = None,
        *,
        gpus: int = 0,
        note: Path | None = None,
        suspension_s: float = SUSPENSION_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.budget, self.attempt, self.gpus = path, budget, attempt, gpus
        self.suspension_s, self._note = suspension_s, note
        self._where = {"host": host_name(), "pid": os.getpid(), "boot_id": boot_id(), "job_id": job_id()}
        self._used = BudgetUsed() if used is None else dataclasses.replace(used)
        self._counter = 0
        self._now = now
        self._last: float | None = None
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="clock", daemon=True)

    def start(self) -> None:
        self.resume()
        self.persist()
        self._thread.start()

    def pause(self) -> None:
        self.tick()
        with self._lock:
            self._last = None

    def resume(self) -> None:
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
        now, last = self._now(), self._last
        # Read without the lock: whatever holds up a read must not hold up the counting.
        noted_s = noted(self._note) if last is not None and now - last > self.suspension_s else 0.0
        with self._lock:
            if self._last is None:  # paused or not started
                return
            gap = max(0.0, now - self._last)  # another thread may have counted it meanwhile
            lived = gap if gap <= self.suspension_s else min(gap, max(0.0, noted_s - self._used.elapsed_s))
            self._used.suspended_s += gap - lived
            self._used.elapsed_s += lived
            self._used.gpu_s += lived * self.gpus
            self._last += gap

    @property
    def used(self) -> BudgetUsed:
        """Return what was used so far; GPU time without what was given back."""
        self.tick()
        return dataclasses.replace(self._used)

    @property
    def elapsed_s(self) -> float:
        """Return the seconds used, without subtracting what was given back."""
        return self.used.elapsed_s

    @property
    def limit_s(self) -> float:
        """Return the seconds that the run may use, those given back for waiting on graders among them."""
        return self.budget.wall_clock_s + self._used.given_back_s

    @property
    def left_s(self) -> float:
        return max(0.0, self.limit_s - self.elapsed_s)

    def give_back(self, seconds: float) -> float:
        """Give back seconds that the run waited for graders, up to `given_back_at_most_s` in all; return how many."""
        with self._lock:
            used = self._used
            more = max(0.0, min(seconds, self.budget.given_back_at_most_s - used.given_back_s))
            used.given_back_s += more
            used.gpu_s = max(0.0, used.gpu_s - more * self.gpus)
            return more

    @property
    def progress(self) -> Progress:
        return self._used.progress

    def note(self, **update: Any) -> None:
        """Change fields of the progress. They are on disk after the next `persist`."""
        self._used.progress = self._used.progress.model_copy(update=update)

    def persist(self) -> None:
        """Write clock.json. A failure is logged, and the next write tries again."""
        with self._writing:  # one writer at a time, so that an older state never overwrites a newer one
            self._counter += 1
            with self._lock:
                used = dict(vars(self._used))
            about = {"attempt": self.attempt, "gpus": self.gpus, "counter": self._counter, **self._where}
            record = Clock(**used, **about)
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
    """Seconds that a run waits for graders. They count once, however many submissions wait: only while the oldest has been unclaimed for
    more than `free_s` and no grader works on any of this run. So an agent gains nothing by flooding the queue."""

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


# --- the GPUs of this job, which GPU-hours count whether used or not

# A step's variables come first: with `placement: step` the grader has one of the job's GPUs.
NAMED_BY = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
NO_DEVICE = frozenset({"", "-1", "none", "void", "NoDevFiles"})


def gpus_of_job(outer: Mapping[str, str] = os.environ, devices: str = "/dev") -> int:
    """Return the number of GPUs by the first variable that is set, in a Slurm job without one 0; without a scheduler, by the node's devices."""
    named = next((outer[name] for name in NAMED_BY if name in outer), "" if "SLURM_JOB_ID" in outer else None)
    if named is None:
        return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir(devices))
    count = 0
    for part in {part.strip() for part in named.split(",")}:
        span = re.fullmatch(r"(\d+)-(\d+)", part)
        count += part not in NO_DEVICE if span is None else int(span[2]) - int(span[1]) + 1
    return count


def gpu_models(driver: Path = Path("/proc/driver/nvidia/gpus")) -> str | None:
    """Return the models of this node's GPUs as their driver names them; None: it doesn't tell."""
    found = set()
    for told in driver.glob("*/information"):
        with suppress(OSError):
            found |= set(re.findall(r"^Model:\s*(.+?)\s*$", told.read_text(errors="replace"), re.MULTILINE))
    return ", ".join(sorted(found)) or None


# --- the limits: parts, warnings, and what ends the run. When a part is used up, the driver is closed. After the last grace, in which
# submissions still count, the agent gets TERM. Used-up submissions don't end the run; further ones are refused.

WARN_AT = (50, 80, 95)  # percent of a part at which the agent is warned
HOUR_S = 3600.0
# The name of each part in messages, and what ends a run that has used it up.
WORDS = {"wall_clock_s": "time", "gpu_hours": "GPU-hours", "tokens": "driver tokens", "cost_usd": "driver cost"}
WORDS["submissions"] = "submissions"
ENDS = {"wall_clock_s": EndedBy.BUDGET, "gpu_hours": EndedBy.GPU_HOURS}
ENDS |= {"tokens": EndedBy.TOKENS, "cost_usd": EndedBy.COST}
EXHAUSTED = {"tokens": "tokens", "cost": "cost_usd"}  # the gateway's names of used-up limits


@dataclass(frozen=True)
class Part:
    """One part of the budget, and its limit, if it has one."""

    name: str
    used: float
    limit: float | None

    @property
    def left(self) -> float | None:
        return None if self.limit is None else max(0.0, self.limit - self.used)

    @property
    def text(self) -> str:
        return f"{amount(self.name, self.used)} of {amount(self.name, self.limit or 0.0)}"


@dataclass
class BudgetLimits:
    """Compares a run's use with its budget. What the functions return:"""

    clock: BudgetClock
    use: Callable[[], DriverUse | None] = lambda: None  # what the driver has answered, over all attempts
    exhausted: Callable[[], str | None] = lambda: None  # the limit that the gateway reports as used up
    submissions: Callable[[], int] = lambda: 0  # the number of different contents accepted so far

    def __post_init__(self) -> None:
        self.budget = self.clock.budget
        self._lock = threading.Lock()

    def parts(self) -> list[Part]:
        budget, used, driver = self.budget, self.clock.used, self.use()
        found = [
            Part("wall_clock_s", used.elapsed_s, self.clock.limit_s),
            Part("gpu_hours", used.gpu_s / HOUR_S, budget.gpu_hours),
            Part("submissions", self.submissions(), budget.max_submissions),
        ]
        if driver is not None:
            found.append(Part("tokens", driver.tokens, budget.tokens))
            found.append(Part("cost_usd", driver.cost_usd or 0.0, budget.cost_usd))
        return found

    def look(self) -> list[BudgetWarning]:
        """Return the warnings that are new since the last look of any attempt, and store them in the clock's file."""
        with self._lock:
            exhausted = EXHAUSTED.get(self.exhausted() or "")
            new = [warning for part in self.parts() if (warning := self._warning(part, part.name == exhausted))]
            progress = self.clock.progress
            out = next((warning for warning in new if warning.percent == 100 and warning.budget in ENDS), None)
            update: dict[str, Any] = {"warnings": (*progress.warnings, *new)}
            if out is not None and progress.out_of is None:
                # The time limit counts as reached at its own moment, even if this look comes later.
                at_s = self.clock.limit_s if out.budget == "wall_clock_s" else out.elapsed_s
                update |= {"out_of": ENDS[out.budget], "out_at_s": at_s}
            if new:
                self.clock.note(**update)
        if new:
            self.clock.persist()
        return new

    @property
    def out_of(self) -> EndedBy | None:
        """Return which part was used up first."""
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
        ended = [w for w in self.clock.progress.warnings if w.percent == 100 and ENDS.get(w.budget) == self.out_of]
        return ended[0].says if ended and self.out_of is not None else None

    @property
    def has_driver(self) -> bool:
        return self.use() is not None

    def told(self) -> dict[str, Any]:
        """Return the content of time.json and `/time`."""
        used, progress, grace = self.clock.used, self.clock.progress, None
        if progress.out_of is not None:
            grace = {"out_of": str(progress.out_of), "left_s": round(self.grace_left_s, 1)}
        parts = {
            part.name: {"limit": part.limit, "used": round(part.used, 6), "left": part.left and round(part.left, 6)}
            for part in self.parts()
        }
        return {
            "left_s": round(self.clock.left_s, 1),
            "elapsed_s": round(used.elapsed_s, 1),
            "given_back_s": round(used.given_back_s, 1),
            "timeout_s": self.budget.wall_clock_s,
            "grace_s": self.budget.last_grace_s,
            "grace": grace,
            "budgets": parts,
            "warnings": [warning.says for warning in progress.warnings],
        }

    def log(self) -> str | None:
        """Return the text of budget.log, one line per warning; None if there was no warning."""
        progress = self.clock.progress
        said = [(warning.elapsed_s, warning.says) for warning in progress.warnings]
        if progress.out_of is not None:
            said.append((progress.out_at_s or 0.0, last_words(self.budget.last_grace_s, self.has_driver)))
        lines = [f"[{int(s // 3600):02d}:{int(s // 60 % 60):02d}:{int(s % 60):02d}] {says}\n" for s, says in said]
        return "".join(lines) or None

    def _warning(self, part: Part, exhausted: bool) -> BudgetWarning | None:
        percent = 100.0 * part.used / part.limit if part.limit is not None else 0.0
        passed = max((mark for mark in (*WARN_AT, 100) if exhausted or percent >= mark), default=0)
        told = max((w.percent for w in self.clock.progress.warnings if w.budget == part.name), default=0)
        if passed <= told:
            return None
        if passed < 100:
            says = f"{passed} % of the {WORDS[part.name]} used: {part.text}"
        elif part.name == "submissions":
            says = f"all submissions used: {part.text}; no other checkpoint is accepted"
        else:
            says = f"the {WORDS[part.name]} of the budget used up: {part.text}"
        return BudgetWarning(budget=part.name, percent=passed, elapsed_s=self.clock.elapsed_s, says=says)


def last_words(grace_s: float, driver: bool) -> str:
    closed = "the driver answers no more; " if driver else ""
    return f"{closed}{grace_s:.0f} s are left to submit what there is, then everything is ended"


def amount(name: str, value: float) -> str:
    if name == "wall_clock_s":
        return f"{value:.0f} s"
    if name == "cost_usd":
        return f"${value:.2f}" if value >= 1 else f"${value:.4f}"
    return f"{value:.2f}" if name == "gpu_hours" else f"{value:,.0f}"


def read_use(path: Path) -> DriverUse:
    """Return the use of the driver over all attempts, from the gateway's log; zeros if there is no log."""
    sums = add_up_calls(read_calls(path))
    return DriverUse.model_validate({name: getattr(sums, name) for name in DriverUse.model_fields})
