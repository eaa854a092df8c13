"""`report --compare A B`: two agents, or two experiments, against each other, per task and over tasks.

A side is an agent, `AGENT`, `AGENT/DRIVER` or `AGENT/DRIVER/MODE`, an experiment's name, or a folder of runs. Only runs
under equal conditions meet: agents in the same mode unless modes are named, experiments agent by agent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError
from autorl_hpc.records.base import Record, Strict
from autorl_hpc.report import statistics
from autorl_hpc.report.board import Conditions, OverRuns
from autorl_hpc.report.conditions import shared
from autorl_hpc.report.groups import RUNS_TO_COMPARE, improvements, over_runs
from autorl_hpc.report.summary import MergedReport, RunSummary
from autorl_hpc.report.text import clean

Kind = Literal["agent", "experiment", "folder"]


class Side(Strict):
    """What was named, as it was understood."""

    name: str
    kind: Kind
    runs: int
    counted: int
    lost: int = Field(0, description="Runs lost to the infrastructure.")


class VersusTask(Strict):
    """Both sides on one task under the same conditions."""

    leaderboard: int = Field(description="Of the report's leaderboards, from 1.")
    task: str
    what: str = Field(description="Mode, or agent with driver and mode: what is equal on both sides besides.")
    a: OverRuns
    b: OverRuns
    difference: float | None = Field(None, description="Mean improvement of a less that of b; null: a side has no run.")
    p_value: float | None = Field(None, description="Permutation of runs; null below two runs a side.")
    p_holm: float | None = Field(None, description="Adjusted for the number of tests of this comparison.")
    p_least: float | None = None
    probability_of_improvement: float | None = Field(None, description="That a run of a beats one of b.")


class VersusAll(Strict):
    """Both sides over the tasks of one leaderboard, each task with the same weight."""

    leaderboard: int
    conditions: Conditions
    tasks: tuple[str, ...]
    left_out: tuple[str, ...] = Field((), description="Where one side has fewer than two runs.")
    difference: float
    low: float | None = Field(None, description="Stratified bootstrap over runs; null: too few runs.")
    high: float | None = None
    p_value: float
    p_least: float
    probability_of_improvement: float
    probability_low: float | None = None
    probability_high: float | None = None


class Versus(Record):
    """One against another."""

    TITLE: ClassVar[str] = "comparison"

    tool_version: str
    a: Side
    b: Side
    tasks: tuple[VersusTask, ...]
    over_tasks: tuple[VersusAll, ...]
    notes: tuple[str, ...] = ()


class _Chosen:
    """A side with its runs' places in the report."""

    def __init__(self, name: str, kind: Kind, places: set[int], mode_named: bool = False) -> None:
        self.name, self.kind, self.places, self.mode_named = clean(name) or "", kind, places, mode_named

    def side(self, runs: Sequence[RunSummary]) -> Side:
        """As a record."""
        mine = [runs[place] for place in sorted(self.places)]
        lost = sum(run.excluded == "infrastructure" for run in mine)
        counted = sum(run.counted for run in mine)
        return Side(name=self.name, kind=self.kind, runs=len(mine), counted=counted, lost=lost)


def compare(merged: MergedReport, a: str, b: str) -> Versus:
    """A against B.

    Raises:
        AutorlError: a side is not in the report, is more than one agent, or both are the same runs.
    """
    left, right = _choose(merged, a), _choose(merged, b)
    if left.places & right.places:
        raise AutorlError("the two sides share runs", where=f"--compare {a} {b}", next_step=_known(merged))
    by_what = _alike(left, right)
    tasks, over = [], []
    for number, board in enumerate(merged.boards, 1):
        strata: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
        for column in board.tasks:
            group = merged.groups[column.group]
            places = [place for cell in group.cells for place in cell.places]
            task = column.task
            if sum(other.task == task for other in board.tasks) > 1:
                task = f"{task} {column.recipe_hash[:8]}"
            for what, sides in _split(merged.runs, places, left, right, by_what).items():
                strata[(task, what)] = sides
        both = {key: sides for key, sides in strata.items() if sides[0] or sides[1]}
        tasks += [_task(number, key, sides) for key, sides in sorted(both.items())]
        found = _over(number, shared(merged.groups[board.tasks[0].group].comparable), both)
        over += [found] if found is not None else []
    return Versus(
        tool_version=__version__,
        a=left.side(merged.runs),
        b=right.side(merged.runs),
        tasks=_adjusted(tasks),
        over_tasks=tuple(over),
        notes=tuple(_notes(tasks, left, right)),
    )


def _choose(merged: MergedReport, name: str) -> _Chosen:
    runs = merged.runs
    parts = name.split("/")
    agent = {p for p, run in enumerate(runs) if [run.agent, run.driver, run.mode][: len(parts)] == parts}
    if agent and len(parts) <= 3:
        _one_agent(name, [runs[place] for place in sorted(agent)])
        return _Chosen(name, "agent", agent, mode_named=len(parts) == 3)
    experiment = {place for place, run in enumerate(runs) if run.experiment == name}
    if experiment:
        return _Chosen(name, "experiment", experiment)
    folder = Path(name).resolve()
    below = {p for p, one in enumerate(merged.run_folders) if folder in (Path(one), *Path(one).parents)}
    if below:
        return _Chosen(name, "folder", below)
    raise AutorlError(
        "no run of the report is of this agent, experiment or folder", where=name, next_step=_known(merged)
    )


def _one_agent(name: str, runs: Sequence[RunSummary]) -> None:
    """Two drivers, or two versions of an agent's files, are two agents: never mixed without a word."""
    drivers = sorted({run.driver for run in runs})
    if len(drivers) > 1:
        told = " or ".join(f"{runs[0].agent}/{driver}" for driver in drivers[:6])
        raise AutorlError("this agent has several drivers", where=name, next_step=f"name one: {told}")
    if len({run.agent_hash for run in runs}) > 1:
        raise AutorlError(
            "this agent's files changed between its runs, so it is two agents",
            where=name,
            next_step="compare the experiments that they ran in",
        )


def _known(merged: MergedReport) -> str:
    agents = sorted({f"{run.agent}/{run.driver}" for run in merged.runs})
    shown = ", ".join(clean(agent) or "" for agent in agents[:12])
    return f"agents: {shown}; experiments: {', '.join(merged.experiments[:12])}; or a folder below which runs lie"


What = Callable[[RunSummary], str]


def _alike(left: _Chosen, right: _Chosen) -> What:
    """What must be equal on both sides beside the conditions."""
    if left.kind == "agent" and right.kind == "agent":
        return (lambda run: "") if left.mode_named and right.mode_named else lambda run: run.mode
    if "agent" in (left.kind, right.kind):
        return lambda run: run.mode
    return lambda run: " · ".join([run.agent, run.driver, run.mode])


def _split(
    runs: Sequence[RunSummary], places: Sequence[int], left: _Chosen, right: _Chosen, what: What
) -> dict[str, tuple[list[float], list[float]]]:
    """Improvements of both sides, by what is equal."""
    found: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for place in places:
        for at, side in enumerate((left, right)):
            if place in side.places:
                found[what(runs[place])][at].extend(improvements([runs[place]]))
    return dict(found)


def _task(number: int, key: tuple[str, str], sides: tuple[list[float], list[float]]) -> VersusTask:
    a, b = sides
    enough = min(len(a), len(b)) >= RUNS_TO_COMPARE
    over_a, over_b = over_runs(a), over_runs(b)
    difference = over_a.mean - over_b.mean if over_a.mean is not None and over_b.mean is not None else None
    return VersusTask(
        leaderboard=number,
        task=key[0],
        what=key[1],
        a=over_a,
        b=over_b,
        difference=difference,
        p_value=statistics.permutation_p(a, b) if enough else None,
        p_least=statistics.least_permutation_p(len(a), len(b)) if enough else None,
        probability_of_improvement=statistics.probability_of_improvement(a, b) if a and b else None,
    )


def _adjusted(tasks: Sequence[VersusTask]) -> tuple[VersusTask, ...]:
    known = [(place, one.p_value) for place, one in enumerate(tasks) if one.p_value is not None]
    holm = dict(zip((place for place, _ in known), statistics.holm([p for _, p in known]), strict=True))
    return tuple(one.model_copy(update={"p_holm": holm.get(place)}) for place, one in enumerate(tasks))


def _over(
    number: int, conditions: Conditions, strata: dict[tuple[str, str], tuple[list[float], list[float]]]
) -> VersusAll | None:
    """Over the tasks of a leaderboard; each pair of task and mode (or agent) is a stratum of the same weight."""
    names = {key: " · ".join(part for part in key if part) for key in strata}
    a = {names[key]: sides[0] for key, sides in strata.items()}
    b = {names[key]: sides[1] for key, sides in strata.items()}
    found = statistics.over_tasks(a, b) if strata else None
    return None if found is None else VersusAll(leaderboard=number, conditions=conditions, **found._asdict())


def _notes(tasks: Sequence[VersusTask], left: _Chosen, right: _Chosen) -> list[str]:
    met = [one for one in tasks if one.difference is not None]
    alone = len(tasks) - len(met)
    notes = [] if met else ["the two sides never met: no task on which both have a counted run under equal conditions"]
    if met and alone:
        notes.append(f"{alone} rows have runs on one side only, or under conditions that the other side has not")
    if met and not any(one.p_value is not None for one in tasks):
        notes.append("no test: it takes two counted runs a side on a task")
    return notes
