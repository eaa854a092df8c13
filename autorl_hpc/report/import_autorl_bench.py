"""Results folders of AutoRL-Bench (rdagent/scenarios/rl/autorl_bench of microsoft/RD-Agent), found and read.

A run of the reference leaves `workspace/<task>/<run_id>_<agent>/` with scores.json (a list, one object a submission) and
run_meta.json (start and end in epoch seconds, timeout), and a row in results.csv beside workspace/. All of it lay where the
agent could write: nothing here is proven, and every byte is taken as hostile.
"""

from __future__ import annotations

import csv
import datetime as dt
import hashlib
import io
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from autorl_hpc import __version__
from autorl_hpc.files import reading
from autorl_hpc.files.redact import masked
from autorl_hpc.report.format import clean
from autorl_hpc.report.summary import BaselineSummary, Excluded, Gain, Point, RunSummary, ScoreSummary
from autorl_hpc.states import Protocol, RunState, Split, SubmissionState

SCORES, META, RESULTS = "scores.json", "run_meta.json", "results.csv"
LOGS = ("run.log", "agent.log")
OURS = ("submissions", "results", "run.json")
"""Our own workspaces have a run_meta.json too, and these."""

RECORDS = ("run.json", "experiment.json")
"""In runs and experiments of our own."""

COLUMNS = frozenset({"run_id", "task", "agent", "baseline", "best_score", "submissions", "workspace"})
"""Columns of results.csv without which it is another table of that name."""

DEPTH = 5
"""`bench/autorl_bench/workspace/<task>/<run>`: folders that hold the folder of results are looked through too."""

MAX_FOLDERS = 20_000
"""A home directory given by mistake has millions."""

MAX_ROWS, MAX_SUBMISSIONS = 100_000, 10_000
_WORKSPACE = re.compile(r"^(?P<run_id>[0-9]{8}T[0-9]{6}(?:_p[0-9]{1,5})?)_(?P<agent>.{1,200})$", re.DOTALL)


@dataclass(frozen=True)
class ReferenceRun:
    """What a run of the reference left.

    Attributes:
        folder: its workspace; None: only its row is here.
        home: the folder of results that it is part of.
        scores: the objects of scores.json as they are; None: it is not there, as after a run without a submission.
        troubles: what could not be read, in words.
        genesis: hash of everything that was read.
    """

    name: str
    task: str
    agent: str
    folder: Path | None
    home: Path
    scores: tuple[Any, ...] | None
    meta: dict[str, Any]
    row: dict[str, str]
    base_model: str | None
    troubles: tuple[str, ...]
    genesis: str


@dataclass
class ReferenceFolders:
    """Workspaces and tables of results below one path."""

    workspaces: list[Path] = field(default_factory=list)
    tables: list[Path] = field(default_factory=list)
    cut_short: bool = False

    def __bool__(self) -> bool:
        return bool(self.workspaces or self.tables)


def find_reference(path: Path, skip: Set[Path] = frozenset()) -> ReferenceFolders:
    """The reference's workspaces and tables at or below `path`, no link followed, and nothing in the folders `skip`."""
    found = ReferenceFolders()
    level = [path]
    seen = 0
    for _ in range(DEPTH + 1):
        below: list[Path] = []
        for folder in level:
            seen += 1
            if seen > MAX_FOLDERS:
                found.cut_short = True
                return found
            below += (one for one in _look(folder, found) if one not in skip)
        level = below
    return found


def _look(folder: Path, found: ReferenceFolders) -> list[Path]:
    """Takes what `folder` is; returns the folders in it that are worth a look."""
    try:
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
        names = {entry.name for entry in entries}
        if names & set(RECORDS) or (META in names and names & set(OURS)):
            return []  # what agents of ours wrote into their workspaces is nobody's results
        if not names & set(OURS) and (SCORES in names or (META in names and names & set(LOGS))):
            found.workspaces.append(folder)
            return []
        if RESULTS in names and _rows(folder / RESULTS) is not None:
            found.tables.append(folder / RESULTS)
        return [folder / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def read_reference(found: ReferenceFolders) -> Iterator[ReferenceRun]:
    """Every run: workspaces with their rows, then the rows whose workspaces are not here."""
    homes = {table.parent for table in found.tables}
    folders = {_Place(_home_of(f, homes), f.parent.name, f.name): f for f in found.workspaces}
    rows: dict[_Place, list[dict[str, str]]] = defaultdict(list)
    for table in found.tables:
        for row in _rows(table) or ():
            told = _Place(table.parent, row["task"], _name_of(row))
            lies = told._replace(task=Path(row["workspace"]).parent.name)
            several = rows[lies if told not in folders and lies in folders else told]
            if row not in several:
                several.append(row)
    for place, folder in folders.items():
        yield _from_workspace(folder, place.home, rows.pop(place, []))
    for place, several in rows.items():
        yield _from_row(place, several)


class _Place(NamedTuple):
    """What a row and a workspace must share to be one run's: two tasks begun in the same second have one name."""

    home: Path
    task: str
    name: str


def _home_of(workspace: Path, homes: Set[Path]) -> Path:
    """The nearest folder above that has a table; without one, that around `workspace/<task>/<run>`."""
    return next((folder for folder in workspace.parents if folder in homes), workspace.parent.parent.parent)


def _name_of(row: dict[str, str]) -> str:
    """The name of a row's workspace."""
    return Path(row["workspace"]).name or f"{row['run_id']}_{row['agent']}"


def _rows(table: Path) -> list[dict[str, str]] | None:
    """The rows of results.csv; None if it is no table of the reference's."""
    try:
        text = reading.read_bytes(table).decode("utf-8", "replace").replace("\0", "")
        reader = csv.DictReader(io.StringIO(text), restkey="", restval="")
        if not set(reader.fieldnames or ()) >= COLUMNS:
            return None
        rows = []
        for row in reader:
            rows.append({str(name): value for name, value in row.items() if isinstance(value, str)})
            if len(rows) == MAX_ROWS:
                break
        return rows
    except (OSError, ValueError, csv.Error):
        return None


def _from_workspace(folder: Path, home: Path, rows: Sequence[dict[str, str]]) -> ReferenceRun:
    troubles: list[str] = []
    row = _one_of(rows, folder.parent.name, troubles)
    scores, first = _json(folder / SCORES, list, troubles)
    meta, second = _json(folder / META, dict, troubles)
    if meta is None and not any(META in trouble for trouble in troubles):
        troubles.append(f"{META} is missing: budget and time are unknown")
    if scores is not None and len(scores) > MAX_SUBMISSIONS:
        troubles.append(f"{SCORES} has {len(scores)} entries: only the first {MAX_SUBMISSIONS} are shown")
        scores = scores[:MAX_SUBMISSIONS]
    named = _WORKSPACE.match(folder.name)
    return ReferenceRun(
        name=folder.name,
        task=folder.parent.name,
        agent=row.get("agent") or (named["agent"] if named else folder.name),
        folder=folder,
        home=home,
        scores=None if scores is None else tuple(scores),
        meta=meta or {},
        row=row,
        base_model=row.get("base_model") or _base_model(folder),
        troubles=tuple(troubles),
        genesis=_genesis(folder.name, row, data=(first, second)),
    )


def _one_of(rows: Sequence[dict[str, str]], task: str, troubles: list[str]) -> dict[str, str]:
    """The row of a run; empty, and told, where several differ or it names another task than the folder does."""
    if len(rows) > 1:
        troubles.append(f"{RESULTS} has {len(rows)} rows of this run that differ: none is used")
    elif rows and rows[0]["task"] != task:
        troubles.append(f"{RESULTS} names another task for this run: its row is not used")
    return rows[0] if len(rows) == 1 and rows[0]["task"] == task else {}


def _from_row(place: _Place, rows: Sequence[dict[str, str]]) -> ReferenceRun:
    troubles = ["its workspace is not here: only its row in results.csv is known"]
    row = _one_of(rows, place.task, troubles)
    return ReferenceRun(
        name=place.name,
        task=place.task,
        agent=rows[0]["agent"],
        folder=None,
        home=place.home,
        scores=None,
        meta={},
        row=row,
        base_model=row.get("base_model") or None,
        troubles=tuple(troubles),
        genesis=_genesis(place.name, *rows),
    )


def _genesis(name: str, *rows: dict[str, str], data: Sequence[bytes] = ()) -> str:
    told = json.dumps([name, *rows, [hashlib.sha256(one).hexdigest() for one in data]], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def _json(path: Path, kind: type, troubles: list[str]) -> tuple[Any | None, bytes]:
    """A JSON file of that kind with its bytes; None where there is none, or none that can be used, which is then told."""
    try:
        data = reading.read_bytes(path)
    except FileNotFoundError:
        return None, b""
    except (OSError, ValueError) as error:
        troubles.append(
            f"{path.name} can't be read: {getattr(error, 'strerror', None) or 'it is too large or no file'}"
        )
        return None, b""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        troubles.append(f"{path.name} is not JSON: damaged, or cut off while it was written")
        return None, data
    if not isinstance(value, kind):
        troubles.append(f"{path.name} holds something else than the reference writes")
        return None, data
    return value, data


def _base_model(folder: Path) -> str | None:
    """The name of the base model's link, `models/<org>/<name>`; None unless there is one alone."""
    try:
        models = folder / "models"
        found = [f"{org}/{name}" for org in reading.list_names(models) for name in reading.list_names(models / org)]
    except OSError:
        return None
    return found[0] if len(found) == 1 else None


def number(value: Any) -> float | None:
    """A finite number, from JSON or from a cell; None for anything else, truth values among it."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float, str))
        or (isinstance(value, str) and len(value) > 40)
    ):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


# A run of AutoRL-Bench as a RunSummary: shown with what it lacks, in no group with runs of ours, never ranked.
#
# Its scores are those of one split that was told to the agent without limit, the maximum kept; they lay where the agent could
# write. Recipe, engine and items are unknown, so there is no interval. The reference writes 0.0 for an evaluation that failed;
# its newer versions add the error, older ones don't.

SOURCE = "AutoRL-Bench"
UNKNOWN = "unknown"
UNPROVEN = (
    "imported from AutoRL-Bench: scores and times lay where the agent could write them; recipe and engine are unknown: "
    "shown, and never ranked"
)
ONE_SPLIT = "one split, told without limit, maximum kept; items are unknown, so there is no interval"
ZERO_BASE = "the base model's score is 0.0, which the reference also writes for an evaluation that failed: the improvement is not counted"
NAME_CHARS = 120


def imported_summary(run: ReferenceRun) -> RunSummary:
    """The summary of a run of the reference."""
    points = _points(run)
    scored = [point for point in points if point.score is not None]
    best = max(scored, key=lambda point: point.score or 0.0) if scored else None
    baseline = _baseline(run)
    told = best.score if best is not None else _best_of_row(run)
    elapsed_s, budget_s = _times(run, points)
    gain, excluded = _gain(run, baseline, told, points)
    state = RunState.FINISHED if _over(run) else RunState.INTERRUPTED
    score = None if told is None else ScoreSummary(split=Split.REPORT, score=told, submission_id=_id(best))
    base = None if baseline is None else BaselineSummary(split=Split.REPORT, score=baseline, key=UNKNOWN)
    return RunSummary(
        tool_version=__version__,
        run_id=_text(f"{run.task}-{run.name}"),
        experiment=SOURCE,
        imported=SOURCE,
        task=_text(run.task),
        agent=_text(run.agent),
        agent_hash=UNKNOWN,
        driver=_text(run.row.get("driver_model")),
        base_model=_text(run.base_model),
        base_model_content_hash=UNKNOWN,
        mode=UNKNOWN,
        seed=0,
        protocol=Protocol.PAPER,
        state=state,
        budget_s=budget_s,
        elapsed_s=elapsed_s,
        attempts=1,
        accepted=len(points) or int(number(run.row.get("submissions")) or 0),
        failed=sum(point.status is SubmissionState.FAILED for point in points),
        baseline_feedback=base,
        best_feedback=score,
        selected=_id(best),
        selected_by="best_feedback" if best is not None else None,
        report=score,
        baseline_report=base,
        improvement=gain,
        counted=excluded is None,
        excluded=excluded,
        ranked=False,
        trajectory=points,
        recipe_hash=UNKNOWN,
        engine_hash=None,
        split_hashes={},
        code_hash=UNKNOWN,
        task_hash=UNKNOWN,
        genesis=run.genesis,
        ledger_head=UNKNOWN,
        ledger_entries=0,
        network="open",
        sandbox="none",
        notes=tuple(_notes(run, points, baseline)),
    )


def _text(value: str | None) -> str:
    return clean(value, NAME_CHARS) or UNKNOWN


def _id(point: Point | None) -> int | None:
    return None if point is None else point.submission_id


def _over(run: ReferenceRun) -> bool:
    return bool(run.row) or number(run.meta.get("end_time")) is not None


def _points(run: ReferenceRun) -> tuple[Point, ...]:
    began = _began(run)
    return tuple(_point(place, entry, began) for place, entry in enumerate(run.scores or (), 1))


def _point(place: int, entry: Any, began: dt.datetime | None) -> Point:
    """One entry of scores.json. Its own number is not used: two submissions at once could get the same."""
    fields = entry if isinstance(entry, dict) else {}
    score, problem = number(fields.get("score")), fields.get("error")
    if not isinstance(entry, dict):
        problem = "this entry is damaged"
    elif score is None or not 0 <= score <= 100:
        problem = problem or "its score is no number from 0 to 100"
    failed = problem is not None and problem != ""
    path = fields.get("model_path")
    return Point(
        submission_id=place,
        manifest_id="",
        elapsed_s=_dropped_s(fields, began),
        status=SubmissionState.FAILED if failed else SubmissionState.SCORED,
        score=None if failed else score,
        model_path=clean(masked(path)) if isinstance(path, str) else None,
        reason=clean(masked(str(problem)[:2000])) if failed else None,
    )


def _dropped_s(fields: dict[str, Any], began: dt.datetime | None) -> float:
    """Seconds from the start to a submission. The reference writes the time of its answer, and how long that took."""
    answered = _local_time(fields.get("timestamp"))
    if answered is None or began is None:
        return 0.0
    took_s = number(fields.get("elapsed_seconds")) or 0.0
    return max(0.0, (answered - began).total_seconds() - max(0.0, took_s))


def _began(run: ReferenceRun) -> dt.datetime | None:
    """The start by the machine's own clock and zone, as the timestamps are: it stands in the workspace's name."""
    try:
        return dt.datetime.strptime(run.name[:15], "%Y%m%dT%H%M%S")
    except ValueError:
        return _local_time(run.row.get("timestamp"))


def _local_time(value: Any) -> dt.datetime | None:
    try:
        return dt.datetime.fromisoformat(value).replace(tzinfo=None)
    except (TypeError, ValueError):
        return None


def _times(run: ReferenceRun, points: tuple[Point, ...]) -> tuple[float, float]:
    """Elapsed seconds and budget; where the budget is unknown, what was used."""
    start, end = number(run.meta.get("start_time")), number(run.meta.get("end_time"))
    used = end - start if start is not None and end is not None else number(run.row.get("duration_s"))
    elapsed_s = max(used or 0.0, 0.0) or max((point.elapsed_s for point in points), default=0.0)
    budget_s = number(run.meta.get("timeout_s"))
    return elapsed_s, budget_s if budget_s is not None and budget_s > 0 else max(elapsed_s, 1.0)


def _baseline(run: ReferenceRun) -> float | None:
    """The base model's score as the first entry that has one tells it, else as the row does."""
    told = [entry.get("baseline_score") for entry in run.scores or () if isinstance(entry, dict)]
    found = next((score for value in (*told, run.row.get("baseline")) if (score := number(value)) is not None), None)
    return found if found is not None and 0 <= found <= 100 else None


def _best_of_row(run: ReferenceRun) -> float | None:
    """The best score of a run whose scores.json is not here. The row says 0 where there is none."""
    if run.scores is not None or not number(run.row.get("submissions")):
        return None
    found = number(run.row.get("best_score"))
    return found if found is not None and 0 < found <= 100 else None


def _gain(
    run: ReferenceRun, baseline: float | None, told: float | None, points: tuple[Point, ...]
) -> tuple[Gain | None, Excluded | None]:
    """The improvement, and why it does not count."""
    if not _over(run):
        return None, "unfinished"
    if any("scores.json" in trouble for trouble in run.troubles):
        return None, "damaged"
    if not baseline:
        return None if baseline is None or told is None else Gain(difference=told, how="scores_only"), "incomplete"
    if told is not None:
        return Gain(difference=told - baseline, how="scores_only"), None
    if run.scores is None and number(run.row.get("submissions")):
        return None, "incomplete"
    return Gain(difference=0.0, how="base_kept"), None


def _notes(run: ReferenceRun, points: tuple[Point, ...], baseline: float | None) -> list[str]:
    notes = [UNPROVEN, ONE_SPLIT, *(f"left out: {trouble}" for trouble in run.troubles)]
    if baseline == 0:
        notes.append(ZERO_BASE)
    if baseline is None:
        notes.append("the base model's score is unknown: there is no improvement")
    zeros = sum(point.score == 0 for point in points)
    if zeros:
        notes.append(
            f"{zeros} of {len(points)} submissions have the score 0.0 and no error: it may stand for an evaluation that failed"
        )
    return notes
