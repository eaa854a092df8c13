"""`status`: show the state of experiments and their jobs from ledgers, clocks, heartbeats and the scheduler."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.job_table import JobTable, ListedJob, names_of, read_seen, read_submitted
from autorl_hpc.errors import AutorlError
from autorl_hpc.files import queue as queues
from autorl_hpc.files import reading
from autorl_hpc.files.frozen_records import alive_jobs, process_start, read_run
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.ledger import Ledger, heads_of
from autorl_hpc.files.processes import host_name
from autorl_hpc.files.queue import read_troubles, run_of
from autorl_hpc.files.run_view import RunView
from autorl_hpc.files.store import read_endpoint
from autorl_hpc.records.cluster import SeenJob
from autorl_hpc.records.exchange import RunHead, Trouble
from autorl_hpc.report.find import experiments_in, runs_of
from autorl_hpc.report.format import UNKNOWN, clean
from autorl_hpc.report.run_folder import worst_found
from autorl_hpc.report.scores import noise_of_queries
from autorl_hpc.states import JobState, RunState

# --- jobs of an experiment: local processes, or what the scheduler reports

LOOK_S = 10.0
"""Seconds between queries of the scheduler; the watcher queries as often."""

ORDINARY = {None, "Priority", "Resources", "Dependency", "JobArrayTaskLimit", "BeginTime", "None", "Prolog", "Cleaning"}
"""Slurm's reasons for waiting that need no action."""


@dataclass(frozen=True)
class JobsNow:
    """The living jobs of an experiment.

    Attributes:
        roles: of the jobs that may still write something.
        text: the jobs in words.
        trouble: why they are unknown, or what needs a person's attention.
        by_run: job number and state of each run's array task, if it has one.
        step: graders run inside the agents' jobs.
        grader_ids: numbers of the living graders' jobs; None: this machine.
    """

    roles: list[str] = field(default_factory=list)
    text: str = "none running"
    trouble: str | None = None
    by_run: dict[str, str] = field(default_factory=dict)
    step: bool = False
    grader_ids: frozenset[str] | None = None

    def may_live(self, heartbeat: Mapping[str, object]) -> bool:
        """Return whether the grader of a heartbeat may be alive; a killed one leaves its heartbeat behind."""
        if self.grader_ids is not None and not self.step:
            return heartbeat.get("job_id") in self.grader_ids
        if self.grader_ids is not None:  # the number of an array task differs from the array's: alive while any job is
            return bool(self.roles)
        pid = heartbeat.get("pid")
        return heartbeat.get("host") != host_name() or (isinstance(pid, int) and process_start(pid) is not None)


class Jobs:
    """Query the jobs of experiments; answers are cached for LOOK_S."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[float, list[SeenJob], str | None]] = {}

    def of(self, experiment: ExperimentDir) -> JobsNow:
        """Return the present jobs of an experiment."""
        here = [job.role for job in alive_jobs(experiment)]
        try:
            submitted = read_submitted(experiment)
        except (AutorlError, OSError) as error:
            return JobsNow(here, _listed(here), str(error).splitlines()[0])
        if submitted is None or not submitted.submitted:
            return JobsNow(here, _listed(here))
        seen, trouble = self._ask(experiment, list(names_of(submitted)))
        alive = JobTable.of(submitted, seen).alive()
        roles = list(dict.fromkeys([*here, *(task.submitted.role for task in alive)]))
        by_run = {task.run_id: f"{task.seen.job_id} {task.seen.state}" for task in alive if task.run_id and task.seen}
        ids = frozenset(t.seen.job_id for t in alive if t.seen and t.submitted.role.startswith("grader-"))
        step = not any(job.role.startswith("grader-") for job in submitted.submitted)
        return JobsNow(roles, _told(alive), trouble or _stuck(alive), by_run, step, ids)

    def _ask(self, experiment: ExperimentDir, names: list[str]) -> tuple[list[SeenJob], str | None]:
        now = time.monotonic()
        last = self._seen.get(experiment.path)
        if last is not None and now - last[0] < LOOK_S:
            return last[1], last[2]
        try:
            told, trouble = slurm.jobs(names), None
        except slurm.SchedulerError as error:
            seen = read_seen(experiment)
            told, trouble = list(seen.jobs), f"as the watcher saw it last; {error.what}"
        self._seen[experiment.path] = (now, told, trouble)
        return told, trouble


def _listed(roles: list[str]) -> str:
    return ", ".join(roles) or "none running"


def _told(alive: list[ListedJob]) -> str:
    """Return jobs in words: `agents 3 running, 5 waiting; grader-0 1 running, 2 waiting`."""
    count: dict[str, Counter[str]] = {}
    for task in alive:
        count.setdefault(task.submitted.role, Counter())[str(task.state)] += 1
    parts = [f"{role} {', '.join(f'{n} {state}' for state, n in states.items())}" for role, states in count.items()]
    return "; ".join(parts) or "none left"


def _stuck(alive: list[ListedJob]) -> str | None:
    """Return what waits for a person or forever, or None."""
    reasons: Counter[str] = Counter()
    for task in alive:
        reason = None if task.seen is None else task.seen.reason
        if task.state is JobState.HELD or (task.state is JobState.WAITING and reason not in ORDINARY):
            reasons[f"{task.submitted.role}: {reason or 'held'}"] += 1
    return "; ".join(f"{reason} ({number} jobs)" for reason, number in reasons.items()) or None


# --- queue entries that fail and wait: shown with their run; those of base models above the table

BASELINE = "b"
"""First letter of the names of base models' entries."""


def with_trouble(row: dict[str, Any], troubles: Sequence[Trouble]) -> dict[str, Any]:
    """Return a run's row with fault and reason of its most often failed entry, unless the run has a fault of its own."""
    own = [each for each in troubles if not each.entry.startswith(BASELINE) and run_of(each.entry) == row["run_id"]]
    if not own or row["fault"] is not None:
        return row
    worst = max(own, key=lambda each: each.failures)
    return {
        **row,
        "fault": str(worst.fault),
        "reason": f"{_times(worst.failures)}, tried again: {_first(worst.problem)}",
    }


def of_no_run(troubles: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each base model that can't be scored."""
    for each in troubles:
        if each["entry"].startswith(BASELINE):
            yield f"{each['entry']}: {each['fault']}: {_times(each['failures'])}, tried again: {_first(each['problem'])}"


def _times(failures: int) -> str:
    return "failed once" if failures == 1 else f"failed {failures} times"


def _first(problem: str) -> str:
    return problem.split("\n", 1)[0]


REFRESH_S = 1.0
GAP = 2
"""Spaces between columns."""

LEAST_RUN_COLUMN = 16
"""If the run column would be narrower, the columns of submission counts are left out."""

ORDER = ("running", "closing", "interrupted", "damaged", "queued", "finished")
"""Order in which runs are shown if not all fit."""

COLOURS = {"finished": "green", "running": "cyan", "closing": "blue", "interrupted": "yellow", "damaged": "red"}
_HASH = re.compile(r"-[0-9a-f]{8}$")


class StatusWatch:
    """Cache each ledger, so that a refresh opens only new entries, and remember when counters last changed."""

    def __init__(self) -> None:
        self.ledgers: dict[Path, Ledger] = {}
        self.jobs = Jobs()

    def run(self, run: RunDir) -> dict[str, Any]:
        """Return one row: the present state of a run."""
        ledger = self.ledgers.setdefault(run.path, Ledger(run))
        row: dict[str, Any] = {"run_id": run.run_id, "state": str(RunState.QUEUED), "fault": None, "reason": None}
        try:
            science = read_run(run).science
            view = RunView.of(ledger.read())
        except (AutorlError, OSError) as error:
            return {
                **row,
                "state": str(RunState.DAMAGED),
                "reason": error.what if isinstance(error, AutorlError) else str(error),
            }
        clock = reading.read_json_or_none(run.clock)
        elapsed = float(clock["elapsed_s"]) if isinstance(clock, dict) and "elapsed_s" in clock else 0.0
        given = float(clock.get("given_back_s", 0)) if isinstance(clock, dict) else 0.0
        best = view.best()
        best_score = view.score_of(best) if best else None
        known = view.fingerprint_of(best) if best else None
        noise = noise_of_queries(view)
        last = next((linked.entry.at for linked in reversed(ledger.entries)), None)
        row.update(
            task=science.task,
            agent=science.agent,
            seed=science.seed,
            state=str(view.state),
            attempt=view.attempt,
            budget_s=science.budget.wall_clock_s,
            left_s=max(0.0, science.budget.wall_clock_s + given - elapsed),
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
            last_entry_at=last,
            entries=len(ledger.entries),
            head=ledger.head(),
        )
        ending = view.closed or view.sealed
        if ending is not None:
            reason = ending.reason or (view.sealed.reason if view.sealed else None)
            row.update(fault=ending.fault and str(ending.fault), reason=reason)
        elif view.ended and view.state is RunState.INTERRUPTED:
            row.update(reason=view.ended[-1].reason)
        return row

    def experiment(self, experiment: ExperimentDir) -> dict[str, Any]:
        """Return the facts of one experiment: runs, graders, queue and jobs."""
        run_ids, damage = runs_of(experiment)
        jobs = self.jobs.of(experiment)
        troubles = read_troubles(experiment.troubles)
        graders = [
            value
            for name in reading.list_names(experiment.graders)
            if isinstance(value := reading.read_json_or_none(experiment.graders / name), dict)
        ]
        rows = [
            with_trouble({**self.run(experiment.run(run_id)), "job": jobs.by_run.get(run_id)}, troubles)
            for run_id in run_ids
        ]
        over = damage is None and set(run_ids) <= set(reading.list_names(experiment.finished))
        return {
            "experiment": str(experiment.path),
            "damage": damage,
            "runs": rows,
            "troubles": [trouble.model_dump(mode="json") for trouble in troubles],
            "graders": [g for g in graders if g.get("state") != "ended" and jobs.may_live(g)],
            "graders_in_agents_jobs": jobs.step,
            "drivers": _drivers(experiment),
            "queue": queues.waiting(experiment.queue),
            "jobs": jobs.roles,
            "jobs_text": jobs.text,
            "jobs_trouble": jobs.trouble,
            "over": over,
            "head": _head(experiment, rows) if over else None,
        }


def _drivers(experiment: ExperimentDir) -> list[dict[str, Any]]:
    """Return the served drivers as last reported by their jobs, by name."""
    names = [name for name in reading.list_names(experiment.drivers) if name.endswith(".json")]
    found = [read_endpoint(experiment.drivers / name) for name in names]
    return [each.model_dump(mode="json") for each in found if each is not None]


def _head(experiment: ExperimentDir, rows: list[dict[str, Any]]) -> str | None:
    """Return the head over all chains; None if one is damaged."""
    if any(row.get("head") is None for row in rows):
        return None
    heads = (RunHead(run_id=row["run_id"], entries=row["entries"], head=row["head"]) for row in rows)
    return heads_of(experiment, heads).head


def collect(paths: Sequence[Path], watch: StatusWatch | None = None) -> list[dict[str, Any]]:
    """Return the facts of all experiments in `paths`."""
    keeper = watch or StatusWatch()
    return [keeper.experiment(experiment) for experiment in experiments_in(paths)]


def render(facts: list[dict[str, Any]], *, fit: bool = False) -> Screen:
    """Return the facts as a rich renderable. `fit`: limit it to the terminal's height, active runs first."""
    return Screen([Block(experiment) for experiment in facts], fit)


@dataclass(frozen=True)
class Block:
    """One experiment on the screen: head, table of runs, faults."""

    facts: dict[str, Any]

    def head(self) -> list[Any]:
        """Return its folder, the summary, and what needs a person's attention."""
        from rich.text import Text

        runs, jobs = self.facts["runs"], self.facts["jobs"]
        lacks_grader = bool(
            jobs
            and not self.facts.get("graders_in_agents_jobs")
            and not any(role.startswith("grader-") for role in jobs)
            and (self.facts["queue"] or any(row["state"] != "finished" for row in runs))
        )
        done = f"{sum(row['state'] == 'finished' for row in runs)} of {len(runs)} runs finished"
        beating = [] if lacks_grader else self.facts["graders"]
        graders = ", ".join(f"{g.get('state')} ({g.get('scored', 0)} scored)" for g in beating) or "none"
        drivers = "".join(f"; driver {d['name']}: {d['state']}" for d in self.facts.get("drivers", []))
        summary = (
            f"{done}; queue {len(self.facts['queue'])}; graders: {graders}; jobs: {self.facts['jobs_text']}{drivers}"
        )
        lines = [Text(self.facts["experiment"], style="bold"), Text(clean(summary) or "")]
        if self.facts["jobs_trouble"]:
            lines.append(Text(f"look at: {clean(self.facts['jobs_trouble'])}", style="yellow"))
        for driver in self.facts.get("drivers", []):
            if driver["state"] in ("failed", "starting") and driver["problem"]:
                lines.append(Text(f"driver {driver['name']}: {clean(driver['problem'], 300)}", style="yellow"))
        if self.facts.get("head"):
            lines.append(Text(f"head {self.facts['head']}", style="dim"))
        if self.facts["damage"]:
            lines.append(Text(f"damaged: {clean(self.facts['damage'])}", style="red"))
        elif not jobs and not self.facts["over"]:
            lines.append(Text("no job is running: `autorl-hpc launch` with the same file goes on", style="yellow"))
        elif lacks_grader:
            lines.append(Text("no grader is left: `autorl-hpc launch` with the same file starts one", style="yellow"))
        return [*lines, *(Text(clean(words, 300) or "", style="yellow") for words in of_no_run(self.facts["troubles"]))]

    def body(self, width: int, room: int | None = None) -> Iterator[Any]:
        """Yield the runs and their faults, in at most `room` lines."""
        from rich.text import Text

        rows = self.facts["runs"]
        cut = room is not None and room < self.need()
        if cut:
            rows = sorted(rows, key=lambda row: ORDER.index(row["state"]))
        faults = [row for row in rows if _fault(row)]
        count, told = len(rows), len(faults)
        if room is not None and cut:
            spare = max(0, room - 2)  # the table's header and the last line
            told = min(told, max(spare // 3, spare - count))
            count = min(count, spare - told)
        columns = _columns(rows, width)
        labels = _labels(rows, _left_for_runs(columns, width))
        if count:
            yield _table(columns, labels, rows[:count], width)
        for row in faults[:told]:
            line = f"  {labels[row['run_id']]}: {_fault(row)}"
            yield Text(line, style="dim", no_wrap=room is not None, overflow="ellipsis")
        if cut and room:
            yield Text(_not_shown(rows[count:], len(faults) - told), style="dim", no_wrap=True, overflow="ellipsis")

    def need(self) -> int:
        """Return the number of lines of the whole body."""
        rows = self.facts["runs"]
        return len(rows) + bool(rows) + sum(bool(_fault(row)) for row in rows)


@dataclass(frozen=True)
class Screen:
    """Experiments below one another, as wide as the terminal; with `fit`, not higher than it."""

    blocks: list[Block]
    fit: bool = False

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        width = options.max_width
        rooms: dict[int, int | None] = dict.fromkeys(range(len(self.blocks)))
        if self.fit:
            heads = [1 + sum(len(line.wrap(console, width)) for line in block.head()) for block in self.blocks]
            rooms = self._rooms(console.size.height - 1, heads)
        for place, room in rooms.items():
            yield from self.blocks[place].head()
            yield from self.blocks[place].body(width, room)
            yield Text("")
        if len(rooms) < len(self.blocks):
            yield Text(f"and {len(self.blocks) - len(rooms)} more experiments", style="dim")

    def _rooms(self, height: int, heads: list[int]) -> dict[int, int | None]:
        """Return the lines of each shown body, by place; short bodies get all of theirs."""
        shown: list[int] = []
        for place in sorted(range(len(heads)), key=lambda i: bool(self.blocks[i].facts["over"])):
            if not shown or sum(heads[i] for i in shown) + heads[place] < height:
                shown.append(place)
        left = max(0, height - sum(heads[i] for i in shown) - (len(shown) < len(heads)))
        rooms: dict[int, int | None] = {}
        for number, place in enumerate(sorted(shown, key=lambda i: self.blocks[i].need())):
            share = min(self.blocks[place].need(), left // (len(shown) - number))
            rooms[place] = share
            left -= share
        return dict(sorted(rooms.items()))


Column = tuple[str, list[str]]
"""A column's name and its cells."""


def _columns(rows: list[dict[str, Any]], width: int) -> list[Column]:
    """Return every column but the first; their cells are never cut."""
    columns = [
        ("state", [str(row["state"]) for row in rows]),
        ("left", [_time(row) for row in rows]),
        ("subs", [str(row["accepted"]) if row.get("accepted") else "" for row in rows]),
        ("wait", [str(row["waiting"]) if row.get("waiting") else "" for row in rows]),
        ("best", [_score(row.get("best_feedback")) for row in rows]),
        ("report", [_report(row) for row in rows]),
    ]
    if _left_for_runs(columns, width) < LEAST_RUN_COLUMN:
        columns = [column for column in columns if column[0] not in ("subs", "wait")]
    return columns


def _wide(column: Column) -> int:
    return max(len(cell) for cell in (column[0], *column[1]))


def _left_for_runs(columns: list[Column], width: int) -> int:
    return width - sum(_wide(column) + GAP for column in columns)


def _table(columns: list[Column], labels: dict[str, str], rows: list[dict[str, Any]], width: int) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    names = max(len("run"), *(len(labels[row["run_id"]]) for row in rows))
    table.add_column("run", no_wrap=True, width=min(names, max(3, _left_for_runs(columns, width))))
    for column in columns:
        side: Any = "left" if column[0] == "state" else "right"
        table.add_column(column[0], justify=side, no_wrap=True, width=_wide(column))
    for number, row in enumerate(rows):
        state, *cells = (column[1][number] for column in columns)
        table.add_row(Text(labels[row["run_id"]]), Text(state, style=COLOURS.get(state, "")), *map(Text, cells))
    return table


def _labels(rows: list[dict[str, Any]], room: int) -> dict[str, str]:
    """Return the texts of the run column: run_ids, or if these don't fit the parts that differ."""
    run_ids = [row["run_id"] for row in rows]
    if all(len(run_id) <= room for run_id in run_ids):
        return {run_id: run_id for run_id in run_ids}
    names = {run_id: _HASH.sub("", run_id) for run_id in run_ids}
    count = Counter(names.values())  # above 1: only the hash differs
    labels = {run_id: run_id if count[name] > 1 else name for run_id, name in names.items()}
    for common in _common(rows):
        if any(len(label) > room for label in labels.values()):
            labels = {run_id: label.removeprefix(common) for run_id, label in labels.items()}
    shown = {run_id: _shortened(label, room) for run_id, label in labels.items()}
    if len(set(shown.values())) < len(shown):  # cutting made labels equal: append the hash
        shown = {run_id: f"{labels[run_id][: max(1, room - 9)]}…{run_id[-8:]}" for run_id in shown}
    return shown


def _common(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield prefixes that all run_ids share and that may be dropped: the task's name, then the agent's."""
    for key in ("task", "agent"):
        named = {row[key] for row in rows if key in row}
        if len(rows) < 2 or len(named) != 1:
            return
        yield f"{named.pop()}-"


def _shortened(label: str, room: int) -> str:
    """Keep both ends of a label: the agent is at the front, the seed at the end."""
    if len(label) <= room:
        return label
    back = max(1, room // 2 - 1)
    return f"{label[: max(1, room - back - 1)]}…{label[-back:]}"


def _not_shown(rows: list[dict[str, Any]], faults: int) -> str:
    """Return `and 3 queued and 12 finished runs`."""
    states = Counter(row["state"] for row in rows)
    parts = [f"{faults} more fault{'s' if faults > 1 else ''}"] if faults else []
    parts += [f"{states[state]} {state}" for state in ORDER if states[state]]
    return f"and {' and '.join(parts)}" + (f" run{'s' if len(rows) > 1 else ''}" if rows else "")


def _fault(row: dict[str, Any]) -> str:
    """Return what needs attention: a fault, a flag of the best checkpoint, held-out items in the workspace."""
    fault = ": ".join(part for part in (row["fault"], row["reason"]) if part)
    found = ", ".join(f"{items} {split} items" for split, items in row.get("contaminated", {}).items())
    parts = [fault, *row.get("flags", []), f"contamination: {found}" if found else ""]
    return clean("; ".join(part for part in parts if part), 300) or ""


def _time(row: dict[str, Any]) -> str:
    if row["state"] not in ("running", "interrupted") or row.get("left_s") is None:
        return ""
    seconds = int(row["left_s"])
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _score(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _report(row: dict[str, Any]) -> str:
    """Return the selected checkpoint's score; none for a run that kept the base model, as in the reports."""
    kept = row.get("report") is not None and row.get("selected") is None
    return UNKNOWN if kept else _score(row.get("report"))


def show(facts: list[dict[str, Any]]) -> None:
    """Print the facts once."""
    from rich.console import Console

    Console().print(render(facts))


def watch(paths: Sequence[Path]) -> None:
    """Refresh until every experiment is over, or no job is left that could continue. ctrl-C ends only the watching."""
    from rich.console import Console
    from rich.live import Live

    keeper = StatusWatch()
    console = Console()
    facts = collect(paths, keeper)
    if not console.is_terminal:
        while not _settled(facts):
            time.sleep(REFRESH_S)
            facts = collect(paths, keeper)
        console.print(render(facts))
        return
    with Live(render(facts, fit=True), console=console, refresh_per_second=4) as live:
        while not _settled(facts):
            time.sleep(REFRESH_S)
            facts = collect(paths, keeper)
            live.update(render(facts, fit=True))
        live.update(render(facts))  # the last, complete table stays in the terminal's history


def _settled(facts: list[dict[str, Any]]) -> bool:
    return all(experiment["over"] or not experiment["jobs"] for experiment in facts)
