"""`status`: what is going on in experiments, read from ledgers, clocks and heartbeats."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import queue as queues
from autorl_hpc.files import reading
from autorl_hpc.files.jobs import alive_jobs
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.records import read_experiment, read_run
from autorl_hpc.files.view import RunView
from autorl_hpc.states import RunState

REFRESH_S = 1.0


def experiments_in(paths: Sequence[Path]) -> list[ExperimentDir]:
    """The experiments in the given folders: experiments themselves, or folders of them.

    Raises:
        AutorlError: there is none.
    """
    found: list[ExperimentDir] = []
    for path in paths:
        names = reading.list_names(path)
        if "experiment.json" in names:
            found.append(ExperimentDir(path))
        else:
            found += [ExperimentDir(path / name) for name in names if (path / name / "experiment.json").is_file()]
    if not found:
        raise AutorlError(
            "no experiment is there",
            where=paths[0] if paths else None,
            next_step="give a folder such as runs/ or runs/quickstart; `autorl-hpc launch` makes one",
        )
    return found


class Watch:
    """Keeps what was read of each ledger, so that a refresh opens only new entries; and when counters last moved."""

    def __init__(self) -> None:
        self.ledgers: dict[Path, Ledger] = {}

    def run(self, run: RunDir) -> dict[str, Any]:
        """One row: a run as it stands."""
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
            report=view.closed.report.score if view.closed and view.closed.report else None,
            last_entry_at=last,
        )
        ending = view.closed or view.sealed
        if ending is not None:
            row.update(fault=ending.fault and str(ending.fault), reason=ending.reason)
        elif view.ended and view.state is RunState.INTERRUPTED:
            row.update(reason=view.ended[-1].reason)
        return row

    def experiment(self, experiment: ExperimentDir) -> dict[str, Any]:
        """One experiment with its runs, graders, queue and jobs."""
        record = read_experiment(experiment)
        graders = [
            value
            for name in reading.list_names(experiment.graders)
            if (value := reading.read_json_or_none(experiment.graders / name))
        ]
        return {
            "experiment": str(experiment.path),
            "runs": [self.run(experiment.run(run_id)) for run_id in record.runs],
            "graders": [g for g in graders if g.get("state") != "ended"],
            "queue": queues.waiting(experiment.queue),
            "jobs": [job.role for job in alive_jobs(experiment)],
            "over": set(record.runs) <= set(reading.list_names(experiment.finished)),
        }


def collect(paths: Sequence[Path], watch: Watch | None = None) -> list[dict[str, Any]]:
    """All experiments in `paths`."""
    keeper = watch or Watch()
    return [keeper.experiment(experiment) for experiment in experiments_in(paths)]


def render(facts: list[dict[str, Any]]) -> Any:
    """A rich renderable of the facts."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = []
    for experiment in facts:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("run", no_wrap=True, overflow="ellipsis", min_width=24)
        table.add_column("state", no_wrap=True, min_width=11)
        for name in ("left", "subs", "wait", "best", "report"):
            table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
        notes = []
        for row in experiment["runs"]:
            counts = [str(row[key]) if row.get(key) else "" for key in ("accepted", "waiting")]
            scores = [_score(row.get(key)) for key in ("best_feedback", "report")]
            table.add_row(row["run_id"], _coloured(row["state"]), _time(row), *counts, *scores)
            note = ": ".join(part for part in (row["fault"], row["reason"]) if part)
            if note:
                notes.append(Text(f"  {row['run_id'].rsplit('-', 1)[0]}: {note}"[:300], style="dim"))
        done = f"{sum(r['state'] == 'finished' for r in experiment['runs'])} of {len(experiment['runs'])} runs finished"
        graders = ", ".join(f"{g['state']} ({g['scored']} scored)" for g in experiment["graders"]) or "none"
        jobs = ", ".join(experiment["jobs"]) or "none running"
        parts += [
            Text(experiment["experiment"], style="bold"),
            table,
            *notes,
            Text(f"{done}; queue {len(experiment['queue'])}; graders: {graders}; jobs: {jobs}", style="dim"),
            Text(""),
        ]
        if not experiment["jobs"] and not experiment["over"]:
            parts.insert(-1, Text("no job is running: `autorl-hpc launch` with the same file goes on", style="yellow"))
    return Group(*parts)


def _coloured(state: str) -> str:
    colour = {"finished": "green", "running": "cyan", "closing": "blue", "interrupted": "yellow", "damaged": "red"}.get(
        state
    )
    return f"[{colour}]{state}[/{colour}]" if colour else state


def _time(row: dict[str, Any]) -> str:
    if row["state"] not in ("running", "interrupted") or row.get("left_s") is None:
        return ""
    seconds = int(row["left_s"])
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _score(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def show(facts: list[dict[str, Any]]) -> None:
    """Prints the facts once."""
    from rich.console import Console

    Console().print(render(facts))


def watch(paths: Sequence[Path]) -> None:
    """Refreshes until every experiment is over or no job is left that could go on. ctrl-C ends the watching alone."""
    from rich.console import Console
    from rich.live import Live

    keeper = Watch()
    console = Console()
    facts = collect(paths, keeper)
    if not console.is_terminal:
        while not _settled(facts):
            time.sleep(REFRESH_S)
            facts = collect(paths, keeper)
        console.print(render(facts))
        return
    with Live(render(facts), console=console, refresh_per_second=4) as live:
        while not _settled(facts):
            time.sleep(REFRESH_S)
            facts = collect(paths, keeper)
            live.update(render(facts))


def _settled(facts: list[dict[str, Any]]) -> bool:
    return all(experiment["over"] or not experiment["jobs"] for experiment in facts)
