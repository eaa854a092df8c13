"""`status`: show the state of experiments and their jobs from ledgers, clocks, heartbeats and the scheduler."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.job_table import JobTable, ListedJob, names_of, read_seen, read_submitted
from autorl_hpc.errors import AutorlError, visible
from autorl_hpc.files import queue as queues
from autorl_hpc.files import reading
from autorl_hpc.files.frozen_records import alive_jobs, process_start, read_run
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.ledger import Ledger, heads_of
from autorl_hpc.files.processes import host_name
from autorl_hpc.files.queue import read_troubles, run_of
from autorl_hpc.files.redact import masked
from autorl_hpc.files.run_view import RunView
from autorl_hpc.files.store import read_endpoint
from autorl_hpc.records.cluster import SeenJob
from autorl_hpc.records.entries import Sealed
from autorl_hpc.records.exchange import RunHead, Trouble
from autorl_hpc.report.find import experiments_in, runs_of
from autorl_hpc.report.format import UNKNOWN, between, clean, duration
from autorl_hpc.report.hidden_items import hidden_of
from autorl_hpc.report.run_folder import worst_found
from autorl_hpc.report.run_page import ending, sentence
from autorl_hpc.report.run_story.failures import INFRASTRUCTURE
from autorl_hpc.report.run_story.logs import AgentLog, last_error, read_observed
from autorl_hpc.report.run_summary import digest
from autorl_hpc.report.scores import noise_of_queries
from autorl_hpc.report.summary import RunSummary
from autorl_hpc.states import JobState, RunState

# --- jobs of an experiment: local processes, or what the scheduler reports

LOOK_S = 10.0  # seconds between queries of the scheduler; the watcher queries as often
# slurm's reasons for waiting that need no action
ORDINARY = {None, "Priority", "Resources", "Dependency", "JobArrayTaskLimit", "BeginTime", "None", "Prolog", "Cleaning"}


@dataclass(frozen=True)
class JobsNow:
    """The living jobs of an experiment."""

    roles: list[str]  # of the jobs that may still write something
    text: str  # the jobs in words
    trouble: str | None = None  # why they are unknown, or what needs a person's attention
    by_run: dict[str, str] = field(default_factory=dict)  # job number and state of each run's array task, if it has one
    step: bool = False  # graders run inside the agents' jobs
    grader_ids: frozenset[str] | None = None  # numbers of the living graders' jobs; None: this machine
    graders_wait: bool = False  # the graders' jobs all wait to start

    def may_live(self, heartbeat: Mapping[str, object]) -> bool:
        """Return whether the grader of a heartbeat may be alive; a killed one leaves its heartbeat behind."""
        if self.grader_ids is None:
            pid = heartbeat.get("pid")
            return heartbeat.get("host") != host_name() or (isinstance(pid, int) and process_start(pid) is not None)
        # in a step, the number of an array task differs from the array's: alive while any job is
        return bool(self.roles) if self.step else heartbeat.get("job_id") in self.grader_ids


def _told(alive: list[ListedJob]) -> str:
    """Return jobs in words: `agents 3 running, 5 waiting; grader-0 1 running, 2 waiting`."""
    count: dict[str, Counter[str]] = {}
    for task in alive:
        count.setdefault(task.submitted.role, Counter())[str(task.state)] += 1
    parts = [f"{role} {', '.join(f'{n} {state}' for state, n in states.items())}" for role, states in count.items()]
    return "; ".join(parts) or "none left"


def _stuck(alive: list[ListedJob]) -> str | None:
    reasons: Counter[str] = Counter()
    for task in alive:
        reason = None if task.seen is None else task.seen.reason
        if task.state is JobState.HELD or (task.state is JobState.WAITING and reason not in ORDINARY):
            reasons[f"{task.submitted.role}: {reason or 'held'}"] += 1
    return "; ".join(f"{reason} ({number} jobs)" for reason, number in reasons.items()) or None


# --- facts, as `status --json` prints them

Row = dict[str, Any]
Facts = dict[str, Any]
NO_GRADER = "no grader is left: `autorl-hpc launch` with the same file starts one"
SILENT_S = 300.0  # many times the period of a heartbeat, and more than two clocks differ by
BASELINE = "b"  # first letter of the names of base models' queue entries


class StatusWatch:
    """Cache each ledger, so that a refresh opens only new entries, and the scheduler's answers for LOOK_S."""

    def __init__(self) -> None:
        self.ledgers: dict[Path, Ledger] = {}
        self._seen: dict[Path, tuple[float, list[SeenJob], str | None]] = {}
        self._ends: dict[Path, str] = {}
        self._digests: dict[Path, tuple[str | None, RunSummary]] = {}

    def jobs(self, experiment: ExperimentDir, *, ask: bool = True) -> JobsNow:
        """Return the present jobs of an experiment but this process's own, which is about to end; without `ask` as the watcher saw
        them last."""
        here = [job.role for job in alive_jobs(experiment) if job.pid not in (os.getpid(), os.getppid())]
        text = ", ".join(here) or "none running"
        try:
            submitted = read_submitted(experiment)
        except (AutorlError, OSError) as error:
            return JobsNow(here, text, str(error).splitlines()[0])
        if submitted is None or not submitted.submitted:
            return JobsNow(here, text)
        asked_s, seen, trouble = self._seen.get(experiment.path, (-math.inf, [], None))
        if time.monotonic() - asked_s >= LOOK_S:
            try:
                seen, trouble = (slurm.jobs(names_of(submitted)) if ask else list(read_seen(experiment).jobs)), None
            except slurm.SchedulerError as error:
                seen, trouble = list(read_seen(experiment).jobs), f"as the watcher saw it last; {error.what}"
            self._seen[experiment.path] = (time.monotonic(), seen, trouble)
        every = JobTable.of(submitted, seen).alive()
        alive = [task for task in every if task.seen is None or task.seen.job_id != slurm.own_id()]
        roles = list(dict.fromkeys([*here, *(task.submitted.role for task in alive)]))
        by_run = {task.run_id: f"{task.seen.job_id} {task.seen.state}" for task in alive if task.run_id and task.seen}
        ids = frozenset(t.seen.job_id for t in alive if t.seen and t.submitted.role.startswith("grader-"))
        step = not any(job.role.startswith("grader-") for job in submitted.submitted)
        running = (t for t in every if t.state is JobState.RUNNING and t.submitted.role.startswith("grader-"))
        waits = bool(ids) and not any(running)  # the next of a chain starts when this job has ended
        return JobsNow(roles, _told(alive), trouble or _stuck(alive), by_run, step, ids, waits)

    def run(self, run: RunDir) -> Row:
        """Return one row: the present state of a run."""
        ledger = self.ledgers.setdefault(run.path, Ledger(run))
        row: Row = {"run_id": run.run_id, "state": str(RunState.QUEUED), "fault": None, "reason": None}
        try:
            science = read_run(run).science
            view = RunView.of(ledger.read())
        except (AutorlError, OSError) as error:
            what = error.what if isinstance(error, AutorlError) else str(error)
            return {**row, "state": str(RunState.DAMAGED), "reason": what}
        clock = reading.read_json_or_none(run.clock)
        clock = clock if isinstance(clock, dict) else {}
        left_s = science.budget.wall_clock_s + float(clock.get("given_back_s", 0)) - float(clock.get("elapsed_s", 0))
        best = view.best()
        best_score = view.score_of(best) if best else None
        known = view.fingerprint_of(best) if best else None
        noise = noise_of_queries(view)
        row.update(
            task=science.task,
            agent=science.agent,
            seed=science.seed,
            state=str(view.state),
            attempt=view.attempt,
            budget_s=science.budget.wall_clock_s,
            left_s=max(0.0, left_s),
            accepted=len(view.accepted()),
            waiting=len(view.unscored()),
            refused=len(view.refused()),
            best_feedback=best_score.evaluation.score if best_score else None,
            luck=noise.expected_maximum if noise else None,
            flags=list(known.flags) if known else [],
            contaminated={str(found.split): found.items for found in worst_found(view.contaminations)},
            sandbox=None if view.sandbox is None else str(view.sandbox[0]),
            network=None if view.sandbox is None else str(view.sandbox[1]),
            selected=view.closed.selected if view.closed else None,
            report=view.closed.report.score if view.closed and view.closed.report else None,
            last_entry_at=ledger.entries[-1].entry.at if ledger.entries else None,
            entries=len(ledger.entries),
            head=ledger.head(),
        )
        last, sealed = view.closed or view.sealed, view.sealed
        if last is not None:
            row.update(fault=last.fault and str(last.fault), reason=last.reason or (sealed.reason if sealed else None))
            if sealed is not None and not row["accepted"] and last.fault not in INFRASTRUCTURE:
                row.update(exit_code=sealed.exit_code, ended=self._ended(run, view, sealed))
        elif view.ended and view.state is RunState.INTERRUPTED:
            row.update(reason=view.ended[-1].reason)
        return row

    def _ended(self, run: RunDir, view: RunView, sealed: Sealed) -> str:
        """Return how an agent without a submission ended, with its last error if it failed."""
        if run.path not in self._ends:
            error = None
            log = AgentLog(run.agent_log, run.agent_times, SCANNED_BYTES)
            if sealed.exit_code and (found := last_error(log, read_observed(run).records)):
                error = hidden_of(view.contaminations).said(masked(found.text))
            told = ending(sealed.ended_by, sealed.exit_code, sealed.elapsed_s, error)
            reason = None if "exited with code" in (sealed.reason or "") else sealed.reason
            self._ends[run.path] = "; ".join(filter(None, (told, reason, "nothing submitted")))
        return self._ends[run.path]

    def one(self, run: RunDir) -> Facts:
        """Return the facts of one run: its row, its sentence, its submissions, and where its logs and its page are."""
        experiment = ExperimentDir(run.path.parent)
        jobs, row = self.jobs(experiment), self.run(run)
        known = self._digests.get(run.path)
        if known is None or known[0] != row.get("head"):
            known = self._digests[run.path] = row.get("head"), digest(run)
        summary = known[1]
        return {
            **row,
            "job": jobs.by_run.get(run.run_id),
            "jobs": jobs.roles,
            "over": run.run_id in reading.list_names(experiment.finished),
            "sentence": sentence(summary),
            "submissions": [
                {
                    **{"submission_id": p.submission_id, "elapsed_s": p.elapsed_s, "status": str(p.status)},
                    **{"score": p.score, "low": p.low, "high": p.high, "path": p.model_path},
                    "says": p.reason or p.note or None,
                }
                for p in summary.trajectory
            ],
            "notes": list(summary.notes),
            "log": str(run.agent_log),
            "page": str(run.report / "run.html"),
        }

    def experiment(self, experiment: ExperimentDir) -> Facts:
        """Return the facts of one experiment: runs, graders, queue and jobs."""
        run_ids, damage = runs_of(experiment)
        jobs = self.jobs(experiment)
        troubles = read_troubles(experiment.troubles)
        endpoints = [read_endpoint(path) for path in _files(experiment.drivers) if path.suffix == ".json"]
        rows = [
            _with_trouble({**self.run(experiment.run(run_id)), "job": jobs.by_run.get(run_id)}, troubles)
            for run_id in run_ids
        ]
        over = damage is None and set(run_ids) <= set(reading.list_names(experiment.finished))
        waiting = queues.waiting(experiment.queue)
        graders = _graders(experiment, jobs)
        return {
            "experiment": str(experiment.path),
            "damage": damage,
            "runs": rows,
            "troubles": [trouble.model_dump(mode="json") for trouble in troubles],
            "graders": graders,
            "nobody_grades": None if over or damage else _nobody_grades(experiment, jobs, graders, len(waiting)),
            "graders_in_agents_jobs": jobs.step,
            "drivers": [each.model_dump(mode="json") for each in endpoints if each is not None],
            "queue": waiting,
            "jobs": jobs.roles,
            "jobs_text": jobs.text,
            "jobs_trouble": jobs.trouble,
            "over": over,
            "head": _head(experiment, rows) if over else None,
        }


def _nobody_grades(
    experiment: ExperimentDir, jobs: JobsNow, graders: Sequence[Mapping[str, Any]], waiting: int
) -> str | None:
    """Return in words that nobody scores what waits, and why; None if somebody does, or nothing waits or will."""
    works = [grader for grader in graders if grader.get("state") != "restarting"]
    silent_s = [_silent_s(experiment, grader) for grader in works]
    if not jobs.step and not any(role.startswith("grader-") for role in jobs.roles):
        why = f"{NO_GRADER} (entries that wait: {waiting})" if jobs.roles or waiting else None
    elif waiting and jobs.graders_wait:
        why = f"{waiting} entries wait for graders whose jobs have not started"
    elif waiting and silent_s and min(silent_s) > SILENT_S:
        why = f"no grader gave a sign of life for {min(silent_s) / 60:.0f} min; its job kills and starts it again if it runs itself"
    else:
        why = str(graders[0].get("problem")) if waiting and graders and not works else None
    return None if why is None else f"NOBODY GRADES: {why}"


def _silent_s(experiment: ExperimentDir, grader: Mapping[str, Any]) -> float:
    """Return the age of a heartbeat by the file server's time and ours, which is good enough for a warning."""
    try:
        return time.time() - (experiment.graders / f"{grader.get('grader')}.json").stat().st_mtime
    except OSError:
        return 0.0


def nobody_grades(experiment: ExperimentDir, *, ask: bool = False) -> str | None:
    """Return in words that nobody scores what waits in an experiment; without `ask` by its files alone."""
    waiting = len(queues.waiting(experiment.queue))
    if not waiting or set(runs_of(experiment)[0]) <= set(reading.list_names(experiment.finished)):
        return None
    jobs = StatusWatch().jobs(experiment, ask=ask)
    return _nobody_grades(experiment, jobs, _graders(experiment, jobs), waiting)


def _graders(experiment: ExperimentDir, jobs: JobsNow) -> list[dict[str, Any]]:
    """Return the heartbeats of graders that may be alive."""
    beats = [reading.read_json_or_none(path) for path in _files(experiment.graders)]
    return [g for g in beats if isinstance(g, dict) and g.get("state") != "ended" and jobs.may_live(g)]


def _files(folder: Path) -> list[Path]:
    return [folder / name for name in reading.list_names(folder)]


def _with_trouble(row: Row, troubles: Sequence[Trouble]) -> Row:
    """Return a run's row with fault and reason of its most often failed entry, unless the run has a fault of its own."""
    own = [each for each in troubles if not each.entry.startswith(BASELINE) and run_of(each.entry) == row["run_id"]]
    if not own or row["fault"] is not None:
        return row
    worst = max(own, key=lambda each: each.failures)
    return {**row, "fault": str(worst.fault), "reason": _failed(worst.failures, worst.problem)}


def _failed(failures: int, problem: str) -> str:
    times = "once" if failures == 1 else f"{failures} times"
    return f"failed {times}, tried again: {problem.partition(chr(10))[0]}"


def _head(experiment: ExperimentDir, rows: list[Row]) -> str | None:
    if any(row.get("head") is None for row in rows):
        return None
    heads = (RunHead(run_id=row["run_id"], entries=row["entries"], head=row["head"]) for row in rows)
    return heads_of(experiment, heads).head


def collect(paths: Sequence[Path], watch: StatusWatch | None = None) -> list[Facts]:
    """Return the facts of all experiments in `paths`, and of the runs that are named themselves."""
    keeper = watch or StatusWatch()
    runs = [RunDir(path.absolute()) for path in paths if RunDir(path).record.is_file()]
    experiments = experiments_in([path for path in paths if not RunDir(path).record.is_file()])
    return [*map(keeper.experiment, experiments), *map(keeper.one, runs)]


# --- on the terminal

REFRESH_S = 1.0
GAP = 2  # spaces between columns
SCANNED_BYTES = 1 << 20  # of an agent's log, for its last error
LEAST_BODY = 4  # lines for an experiment's runs, if there are any more experiments
# order in which runs are shown if not all fit; those that need attention come first in each
ORDER = ("running", "closing", "interrupted", "damaged", "queued", "finished")
COLOURS = {"finished": "green", "running": "cyan", "closing": "blue", "interrupted": "yellow", "damaged": "red"}


@dataclass(frozen=True)
class Screen:
    """Experiments below one another, as wide as the terminal; with `fit`, not higher than it, those that go on first."""

    facts: list[Facts]
    fit: bool = False

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        left, room = console.size.height - 1, None
        facts = sorted(self.facts, key=lambda one: bool(one["over"])) if self.fit else self.facts
        for place, one in enumerate(facts):
            if "sentence" in one:
                yield from _of_run(one, not self.fit)
                continue
            head = _head_lines(one)
            if self.fit:
                left -= sum(len(line.wrap(console, options.max_width)) for line in head) + 2
                room = max(left // (len(facts) - place), LEAST_BODY)
                if place and left < LEAST_BODY:
                    yield Text(f"and {len(facts) - place} more experiments", style="dim")
                    return
            body = list(_body(one["runs"], options.max_width, room))
            left -= len(body)
            yield from [*head, *body, Text("")]


def _head_lines(facts: Facts) -> list[Any]:
    from rich.text import Text

    runs, jobs, drivers, over = facts["runs"], facts["jobs"], facts["drivers"], facts["over"]
    finished = sum(row["state"] == "finished" for row in runs)
    beating = [] if facts["nobody_grades"] and NO_GRADER in facts["nobody_grades"] else facts["graders"]
    graders = ", ".join(f"{g.get('state')} ({g.get('scored', 0)} scored)" for g in beating) or "none"
    parts = [f"{finished} of {len(runs)} runs finished", f"queue {len(facts['queue'])}", f"graders: {graders}"]
    parts += [f"jobs: {facts['jobs_text']}", *(f"driver {d['name']}: {d['state']}" for d in drivers)]
    lines = [Text(visible(facts["experiment"]), style="bold"), Text(clean("; ".join(parts)) or "")]
    if facts["nobody_grades"] and jobs:  # without any job, launch is asked for anyway
        lines.insert(1, Text(clean(facts["nobody_grades"], 300) or "", style="bold red"))
    if facts["head"]:
        lines.append(Text(f"head {facts['head']}", style="dim"))
    if facts["damage"]:
        lines.append(Text(f"damaged: {clean(facts['damage'])}", style="red"))
    yellow = [f"look at: {clean(facts['jobs_trouble'])}"] if facts["jobs_trouble"] else []
    for driver in drivers:
        if driver["state"] in ("failed", "starting") and driver["problem"]:
            yellow.append(f"driver {driver['name']}: {clean(driver['problem'], 300)}")
    if not facts["damage"] and not jobs and not over:
        yellow.append("no job is running: `autorl-hpc launch` with the same file goes on")
    for each in facts["troubles"]:
        if each["entry"].startswith(BASELINE):
            why = _failed(each["failures"], each["problem"])
            yellow.append(clean(f"{each['entry']}: {each['fault']}: {why}", 300) or "")
    return [*lines, *(Text(line, style="yellow") for line in yellow)]


def _of_run(facts: Facts, whole: bool) -> Iterator[Any]:
    """Yield what is known of one run; `whole`: its name is on one line, which the terminal wraps, so that it can be copied."""
    from rich.padding import Padding
    from rich.text import Text

    state, left = facts["state"], _time(facts)
    yield Text(visible(facts["run_id"]), style="bold", no_wrap=whole, overflow="ignore" if whole else "fold")
    yield Text(facts["sentence"])
    parts = [f"attempt {facts['attempt']}" if facts.get("attempt") else "", f"{left} left" if left else ""]
    parts += [f"{name} {facts[name]}" if facts.get(name) else "" for name in ("job", "sandbox")]
    yield Text.assemble((state, COLOURS.get(state, "")), "".join(f", {part}" for part in parts if part))
    for one in facts["submissions"]:
        score = f"{one['score']:.1f} {between(one['low'], one['high'])}".strip() if one["score"] is not None else ""
        words = (duration(one["elapsed_s"]), one["status"], score, one["path"], one["says"])
        told = "  ".join(clean(word) or "" for word in words if word)
        yield Padding(Text(f"{one['submission_id']}  {told}"), (0, 0, 0, GAP), expand=False)
    yield from (Text(note, style="yellow") for note in facts["notes"])


def _body(rows: list[Row], width: int, room: int | None) -> Iterator[Any]:
    """Yield the runs, each with its faults, and what is hidden: in at most `room` lines. Where a name leaves no room for the figures,
    it has a line of its own: it is never cut."""
    from rich.padding import Padding
    from rich.text import Text

    cells = {row["run_id"]: _cells(row) for row in rows}
    widths = [max(map(len, column)) for column in zip(HEADS, *cells.values(), strict=True)]
    first = max([3, *map(len, cells)])
    apart = first + sum(GAP + wide for wide in widths) > width
    shown = rows
    if room is not None and 1 + sum(_lines_of(row, apart) for row in rows) > room:
        rows = sorted(rows, key=lambda row: (ORDER.index(row["state"]), not _fault(row)))
        ends = accumulate(_lines_of(row, apart) for row in rows)
        shown = rows[: sum(end <= room - 2 for end in ends)]  # but for the header and the last line
    for name, values in [("run", HEADS), *((row["run_id"], cells[row["run_id"]]) for row in shown)] if shown else ():
        state, *figures = (
            f"{value:{'>' if place else '<'}{wide}}"
            for place, (value, wide) in enumerate(zip(values, widths, strict=True))
        )
        style = "bold" if values is HEADS else COLOURS.get(values[0], "")
        if apart and values is not HEADS:
            yield Text(name, no_wrap=room is None, overflow="ignore" if room is None else "fold")
        label = "" if apart else f"{name:<{first}}"
        yield Text.assemble(label, " " * GAP, (state, style), *(" " * GAP + figure for figure in figures))
        if values is not HEADS and (fault := _fault(next(row for row in shown if row["run_id"] == name))):
            told = Text(fault, style="dim", no_wrap=room is not None, overflow="ellipsis")
            yield Padding(told, (0, 0, 0, GAP), expand=False)
    if hidden := Counter(row["state"] for row in rows[len(shown) :]):
        states = " and ".join(f"{hidden[state]} {state}" for state in ORDER if hidden[state])
        yield Text(f"and {states} run{'s' if hidden.total() > 1 else ''}", style="dim")


HEADS = ("state", "left", "subs", "wait", "best", "report")


def _cells(row: Row) -> tuple[str, ...]:
    counts = (str(row.get(name) or "") for name in ("accepted", "waiting"))
    best, report = ("" if (value := row.get(name)) is None else f"{value:.1f}" for name in ("best_feedback", "report"))
    kept = bool(report) and row.get("selected") is None  # the base model: no score of the run's, as in the reports
    return (row["state"], _time(row), *counts, best, UNKNOWN if kept else report)


def _lines_of(row: Row, apart: bool) -> int:
    return 1 + apart + bool(_fault(row))


def _fault(row: Row) -> str:
    """Return what needs attention: a fault, a flag of the best checkpoint, held-out items in the workspace."""
    fault = row.get("ended") or ": ".join(part for part in (row["fault"], row["reason"]) if part)
    found = ", ".join(f"{items} {split} items" for split, items in row.get("contaminated", {}).items())
    parts = [fault, *row.get("flags", []), f"contamination: {found}" if found else ""]
    return clean("; ".join(part for part in parts if part), 300) or ""


def _time(row: Row) -> str:
    if row["state"] not in ("running", "interrupted") or row.get("left_s") is None:
        return ""
    seconds = int(row["left_s"])
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def show(facts: list[Facts]) -> None:
    """Print the facts once, and of single runs where log and page are."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(Screen(facts), crop=False)  # the terminal wraps a long name, which can be copied then
    for path in (Path(one[name]) for one in facts for name in ("log", "page") if name in one):
        if path.is_file():
            console.print(Text(str(path), style="dim"), soft_wrap=True)


def watch(paths: Sequence[Path]) -> None:
    """Refresh until every experiment is over, or no job is left that could continue. ctrl-C ends only the watching."""
    from rich.console import Console
    from rich.live import Live

    def changing() -> Iterator[list[Facts]]:
        while True:
            facts = collect(paths, keeper)
            yield facts
            if all(one["over"] or not one["jobs"] for one in facts):
                return
            time.sleep(REFRESH_S)

    keeper, console = StatusWatch(), Console()
    last: list[Facts] = []
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:
            for last in changing():
                live.update(Screen(last, fit=True))
            live.update(Screen(last))  # the last, complete table stays in the terminal's history
    else:
        *_, last = changing()
        console.print(Screen(last))
