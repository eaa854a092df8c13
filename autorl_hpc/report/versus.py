"""`report --compare A B`: compare two agents, or two experiments, per task and over tasks.

A side is an agent (`AGENT`, `AGENT/DRIVER` or `AGENT/DRIVER/MODE`), an experiment's name, or a folder of runs. Only runs under
equal conditions are compared: agents in the same mode unless modes are named, experiments agent by agent.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError
from autorl_hpc.records.base import Record, Strict
from autorl_hpc.report import format as fmt
from autorl_hpc.report import statistics
from autorl_hpc.report.conditions import cell_key, unlike
from autorl_hpc.report.format import clean
from autorl_hpc.report.leaderboard import improvements, over_runs
from autorl_hpc.report.summary import Board, Conditions, MergedReport, OverRuns, RunSummary, TasksCompared
from autorl_hpc.scoring.stats import ALPHA

Kind = Literal["agent", "experiment", "folder"]

ON_REPORT = "Improvements on the report split in points, intervals 95 %."
AS_TOLD = "Improvements in points as they were told, the maximum kept of one split, without intervals."
DOUBTED = "may not be what they say"


class Side(Strict):
    """One side of a comparison as it was understood."""

    name: str
    kind: Kind
    runs: int
    counted: int
    lost: int = 0  # runs lost to the infrastructure


class VersusTask(Strict):
    """Both sides on one task under equal conditions."""

    leaderboard: int  # of the report's leaderboards, from 1
    task: str
    what: str  # mode, or agent with driver and mode: what is equal on both sides besides
    imported: bool = False  # scores as somebody else told them: no interval, no test
    a: OverRuns
    b: OverRuns
    difference: float | None = None  # mean improvement of a less that of b; null: a side has no run
    p_value: float | None = None  # by `test`, as for two agents of a leaderboard; null below three runs a side
    test: str | None = None
    p_holm: float | None = None  # adjusted for the number of tests of this comparison
    p_permutation: float | None = None  # permutation of runs, from five a side on
    probability_of_improvement: float | None = None  # that a run of a beats one of b; null of imported runs


class VersusAll(TasksCompared):
    """Both sides over the tasks of one leaderboard; tasks weigh the same, and the modes of a task share its weight."""

    leaderboard: int
    conditions: Conditions
    ambiguous_tasks: tuple[str, ...] = ()  # left out: both sides met under several recipes or splits


class Versus(Record):
    """The comparison of two sides."""

    TITLE: ClassVar[str] = "comparison"

    tool_version: str
    a: Side
    b: Side
    tasks: tuple[VersusTask, ...]
    over_tasks: tuple[VersusAll, ...]
    notes: tuple[str, ...] = ()

    def measured(self) -> str:
        """Return a sentence on what the numbers of the rows are."""
        imported = {one.imported for one in self.tasks}
        if imported == {True}:
            return AS_TOLD
        return f"{ON_REPORT} Of imported results: {AS_TOLD[0].lower()}{AS_TOLD[1:]}" if True in imported else ON_REPORT

    def verdict(self) -> str:
        """Return which side is better, by how much and whether that is more than noise, and whose runs are in doubt."""
        doubt = next((f" But {note}." for note in self.notes if DOUBTED in note), "")
        return f"{self._told()}{doubt}"

    def _told(self) -> str:
        met = [one for one in self.tasks if one.difference is not None]
        if not met:
            return f"{self.a.name} and {self.b.name} can't be compared: they never met under equal conditions."
        over = self.over_tasks[0] if len(self.over_tasks) == 1 and len(self.over_tasks[0].tasks) > 1 else None
        of = over if over is not None else met[0] if len(met) == 1 else None
        wins = [one for one in met if one.p_holm is not None and one.p_holm < ALPHA]
        for_a = sum((one.difference or 0) > 0 for one in wins)
        counts = f"{self.a.name} is better in {for_a} and {self.b.name} in {len(wins) - for_a}"
        apart = f"of {len(met)} comparisons {counts} beyond noise (p by Holm below {ALPHA})"
        if of is None or of.difference is None:
            return f"{apart[0].upper()}{apart[1:]}."
        better, other = (self.a.name, self.b.name) if of.difference > 0 else (self.b.name, self.a.name)
        size, p = fmt.points(abs(of.difference)), f"p {fmt.p_value(of.p_value)}"
        where = f"over {len(over.tasks)} tasks" if over is not None else f"on {met[0].task}"
        if of.p_value is None:
            return f"{better} gained {size} points more than {other} {where}; too few runs tell whether that is more than noise."
        if of.p_value >= ALPHA:
            told = f"{better} and {other} are not told apart {where}: {size} points ({p})"
        else:
            told = f"{better} is better than {other} {where} by {size} points, more than noise ({p})"
        return f"{told}{'; ' + apart if over is not None else ''}."


class _Chosen(NamedTuple):
    side: Side
    places: set[int]
    mode_named: bool


def compare(merged: MergedReport, a: str, b: str) -> Versus:
    """Compare side A with side B. Raises AutorlError: a side is not in the report or is more than one agent, or the
    sides share runs."""
    left, right = _choose(merged, a), _choose(merged, b)
    if left.places & right.places:
        raise AutorlError("the two sides share runs", where=f"--compare {a} {b}", next_step=_known(merged))
    tasks, over, ambiguous, every = list[VersusTask](), list[VersusAll](), set[str](), Strata()
    for number, board in enumerate(merged.boards, 1):
        strata = _strata(merged, board, left, right)
        every |= strata
        proven = board.conditions.imported is None  # no tests on scores that can't be checked
        tasks += [_task(number, key, sides, tested=proven) for key, sides in sorted(strata.items())]
        if proven:
            # tasks on which both sides share several groups (recipes or splits): none of these represents the task
            shared = Counter(task for task, _ in {(key.task, key.group) for key, both in strata.items() if all(both)})
            several = {task for task, count in shared.items() if count > 1}
            ambiguous |= several
            over += _over(number, board.conditions, strata, several)
    holm = statistics.holm_by({place: one.p_value for place, one in enumerate(tasks)})
    return Versus(
        tool_version=__version__,
        a=left.side,
        b=right.side,
        tasks=tuple(one.model_copy(update={"p_holm": holm.get(place)}) for place, one in enumerate(tasks)),
        over_tasks=tuple(over),
        notes=(
            *_notes(tasks, ambiguous),
            *_other_agents(merged, left, right),
            *_why_apart(merged, every),
            *_doubts(merged, left, right),
        ),
    )


def _choose(merged: MergedReport, name: str) -> _Chosen:
    parts, folder = name.split("/"), Path(name).resolve()
    ways: tuple[tuple[Kind, Callable[[RunSummary, Path], bool]], ...] = (
        ("agent", lambda run, _: [run.agent, run.driver, run.mode][: len(parts)] == parts),
        ("experiment", lambda run, _: run.experiment == name),
        ("folder", lambda _, home: folder in (home, *home.parents)),
    )
    homes = [Path(home) for home in merged.run_folders] or [Path()] * len(merged.runs)
    for kind, holds in ways:
        places = {p for p, (run, home) in enumerate(zip(merged.runs, homes, strict=True)) if holds(run, home)}
        if not places:
            continue
        runs = [merged.runs[place] for place in places]
        if kind == "agent":
            _one_agent(name, runs)
        lost = sum(run.excluded == "infrastructure" for run in runs)
        counted = sum(run.counted for run in runs)
        side = Side(name=clean(name) or "", kind=kind, runs=len(runs), counted=counted, lost=lost)
        return _Chosen(side, places, kind == "agent" and len(parts) == 3)
    what = "no run of the report is of this agent, experiment or folder"
    raise AutorlError(what, where=name, next_step=_known(merged))


def _one_agent(name: str, runs: Sequence[RunSummary]) -> None:
    drivers = sorted({run.driver for run in runs})
    if len(drivers) > 1:
        told = " or ".join(f"{runs[0].agent}/{driver}" for driver in drivers[:6])
        raise AutorlError("this agent has several drivers", where=name, next_step=f"name one: {told}")
    if len({run.agent_hash for run in runs if run.imported is None}) > 1:  # the files of imported runs are unknown
        what = "this agent's files changed between its runs, so it is two agents"
        raise AutorlError(what, where=name, next_step="compare the experiments that they ran in")
    if len({cell_key(run)[4] for run in runs}) > 1:
        what = "this driver's settings changed between its runs, so it is two drivers"
        raise AutorlError(what, where=name, next_step="compare the experiments that they ran in")


def _known(merged: MergedReport) -> str:
    agents = sorted({f"{run.agent}/{run.driver}" for run in merged.runs})
    shown = ", ".join(clean(agent) or "" for agent in agents[:12])
    return f"agents: {shown}; experiments: {', '.join(merged.experiments[:12])}; or a folder below which runs lie"


class _Key(NamedTuple):
    """One row: a column of the leaderboard, and what else is equal on both sides."""

    task: str
    name: str
    group: int
    what: str


Strata = dict[_Key, tuple[list[float], list[float]]]  # improvements of both sides, by row


def _strata(merged: MergedReport, board: Board, left: _Chosen, right: _Chosen) -> Strata:
    modes_named, by_agent = left.mode_named and right.mode_named, "agent" in (left.side.kind, right.side.kind)
    found: dict[_Key, tuple[list[RunSummary], list[RunSummary]]] = defaultdict(lambda: ([], []))
    for column, task in enumerate(board.tasks):
        for place in (place for cell in merged.groups[task.group].cells for place in cell.places):
            run = merged.runs[place]
            whole = f"{run.agent} · {run.driver} · {run.mode}"
            key = _Key(task.task, board.column(column), task.group, "")
            key = key._replace(what=whole if not by_agent else "" if modes_named else run.mode)
            for side, chosen in enumerate((left, right)):
                if place in chosen.places and run.counted and run.improvement is not None:
                    found[key][side].append(run)
    return {key: (improvements(a), improvements(b)) for key, (a, b) in found.items()}


def _task(number: int, key: _Key, sides: tuple[list[float], list[float]], *, tested: bool) -> VersusTask:
    a, b = sides
    over_a, over_b = map(over_runs, sides)
    if not tested:  # no interval of scores that can't be checked
        over_a, over_b = (OverRuns(n=one.n, mean=one.mean, interval="none") for one in (over_a, over_b))
    difference = over_a.mean - over_b.mean if over_a.mean is not None and over_b.mean is not None else None
    return VersusTask(
        leaderboard=number,
        task=key.name,
        what=key.what,
        imported=not tested,
        a=over_a,
        b=over_b,
        difference=difference,
        **(statistics.compared(a, b) if tested else statistics.AgentTest())._asdict(),
        probability_of_improvement=statistics.probability_of_improvement(a, b) if tested and a and b else None,
    )


def _over(number: int, conditions: Conditions, strata: Strata, ambiguous: set[str]) -> list[VersusAll]:
    clear = {f"{key.name}{' · ' * bool(key.what)}{key.what}": key for key in strata if key.task not in ambiguous}
    a, b = ({name: strata[key][side] for name, key in clear.items()} for side in (0, 1))
    found = statistics.over_tasks(a, b, {name: key.task for name, key in clear.items()})
    told = {"leaderboard": number, "conditions": conditions, "ambiguous_tasks": tuple(sorted(ambiguous))}
    return [] if found is None else [VersusAll(**told, **found.model_dump())]


def _doubts(merged: MergedReport, *sides: _Chosen) -> list[str]:
    told = []
    for side in sides:
        counted = [run for run in map(merged.runs.__getitem__, side.places) if run.counted]
        if doubted := sum(bool(run.doubts) for run in counted):
            told.append(f"{doubted} of {len(counted)} runs of {side.side.name}")
    return [f"{' and '.join(told)} {DOUBTED}: see their notes"] if told else []


def _notes(tasks: Sequence[VersusTask], ambiguous: set[str]) -> list[str]:
    met = [one for one in tasks if one.difference is not None]
    notes = [] if met else ["the two sides never met: no task on which both have a counted run under equal conditions"]
    if ambiguous:
        names = ", ".join(clean(task) or "" for task in sorted(ambiguous))
        notes.append(f"left out of the mean over tasks, for several recipes or splits: {names}")
    if any(one.imported for one in met):
        notes.append("imported results are unproven: their difference is shown, with no test and not over tasks")
    ours = [one for one in met if not one.imported]
    if ours and not any(one.p_value is not None for one in ours):
        notes.append("no test: it takes three counted runs a side on a task, and runs that are not all equal")
    return notes


def _other_agents(merged: MergedReport, left: _Chosen, right: _Chosen) -> list[str]:
    """Return a sentence for each agent that both sides ran with other files, or with other settings of the same driver."""
    keys = [{cell_key(merged.runs[place]) for place in side.places} for side in (left, right)]
    found = []
    for name in sorted({key[:3] for key in keys[0]} & {key[:3] for key in keys[1]}):
        a, b = ({key[3:] for key in side if key[:3] == name} for side in keys)
        if a != b:
            files = "its files" if {one[0] for one in a} != {one[0] for one in b} else ""
            settings = [" or ".join(sorted(one[1] for one in side)) for side in (a, b)]
            driver = f"its driver (A {settings[0]}, B {settings[1]})" if settings[0] != settings[1] else ""
            found.append(
                clean(f"{name[0]}: not the same on both sides: {' and '.join(filter(None, (files, driver)))}") or ""
            )
    return found


def _why_apart(merged: MergedReport, every: Strata) -> list[str]:
    """Return a sentence for what only one side ran: every condition in which the other side's nearest runs differ."""
    found: dict[str, set[str]] = defaultdict(set)
    keys = [{key for key, sides in every.items() if sides[side]} for side in (0, 1)]
    for side, name in enumerate("AB"):
        for key in sorted(keys[side] - keys[1 - side]):
            others = [_unlike(merged, key, other, name) for other in sorted(keys[1 - side]) if other.task == key.task]
            told = f"run by {name} alone"
            if others:
                told = f"not met, for they differ in {', '.join(sorted(others, key=len)[0])}"
            found[told].add(key.task)
    return [f"{', '.join(clean(task) or '' for task in sorted(tasks))}: {told}" for told, tasks in found.items()]


def _unlike(merged: MergedReport, one: _Key, other: _Key, name: str) -> list[str]:
    """Return each condition that differs, with both values in the order of the sides: `network (A none, B open)`."""
    pair = (one, other) if name == "A" else (other, one)
    values = unlike(*(merged.groups[key.group].comparable for key in pair))
    if pair[0].what != pair[1].what:
        values.append(("agent or mode", pair[0].what, pair[1].what))
    return [f"{each} (A {mine}, B {its})" for each, mine, its in values]
