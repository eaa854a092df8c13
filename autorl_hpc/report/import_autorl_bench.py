"""Import results of AutoRL-Bench (rdagent/scenarios/rl/autorl_bench of microsoft/RD-Agent): find, read, convert to RunSummary.

A reference run leaves `workspace/<task>/<run_id>_<agent>/` with scores.json (a list, one object per submission) and run_meta.json
(start and end in epoch seconds, timeout), and a row in results.csv beside workspace/. The agent could write all of it, so
nothing is proven and every byte is treated as hostile.
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
from itertools import islice
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
OURS = ("submissions", "results", "run.json")  # names in our own workspaces, which have a run_meta.json too
RECORDS = ("run.json", "experiment.json")
COLUMNS = frozenset({"run_id", "task", "agent", "baseline", "best_score", "submissions", "workspace"})
"""Required columns of results.csv; without them it is another table."""

DEPTH = 5  # levels searched: `bench/autorl_bench/workspace/<task>/<run>`
MAX_FOLDERS = 20_000  # bound on folders searched; a home directory passed by mistake has millions
MAX_ROWS, MAX_SUBMISSIONS = 100_000, 10_000
_WORKSPACE = re.compile(r"^(?P<run_id>[0-9]{8}T[0-9]{6}(?:_p[0-9]{1,5})?)_(?P<agent>.{1,200})$", re.DOTALL)


@dataclass(frozen=True)
class ReferenceRun:
    """What is on disk of a run of the reference."""

    name: str  # of its workspace
    task: str
    agent: str
    folder: Path | None  # its workspace; None: only its row is here
    home: Path  # the results folder that it belongs to
    scores: tuple[Any, ...] | None  # the objects of scores.json; None: no such file, as for a run without a submission
    meta: dict[str, Any]
    row: dict[str, str]
    base_model: str | None
    troubles: tuple[str, ...]  # what could not be read, in words
    genesis: str  # hash of everything that was read


@dataclass
class ReferenceFolders:
    """Workspaces and results tables below one path."""

    workspaces: list[Path] = field(default_factory=list)
    tables: list[Path] = field(default_factory=list)
    cut_short: bool = False

    def __bool__(self) -> bool:
        return bool(self.workspaces or self.tables)


def find_reference(path: Path, skip: Set[Path] = frozenset()) -> ReferenceFolders:
    """Find the reference's workspaces and tables at or below `path`; follows no links, skips the folders `skip`."""
    found = ReferenceFolders()
    level, seen = [path], 0
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
    """Add `folder` if it is a workspace or has a table; return the folders in it to search."""
    try:
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
        names = {entry.name for entry in entries}
        ours = names & set(OURS)
        if names & set(RECORDS) or (META in names and ours):
            return []  # our own workspaces: what agents wrote there is not a result
        if not ours and (SCORES in names or (META in names and names & set(LOGS))):
            found.workspaces.append(folder)
            return []
        if RESULTS in names and _rows(folder / RESULTS) is not None:
            found.tables.append(folder / RESULTS)
        return [folder / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def read_reference(found: ReferenceFolders) -> Iterator[ReferenceRun]:
    """Yield every run: workspaces with their rows, then rows without a workspace."""
    homes = {table.parent for table in found.tables}
    folders = {_Place(_home_of(f, homes), f.parent.name, f.name): f for f in found.workspaces}
    rows: dict[_Place, list[dict[str, str]]] = defaultdict(list)
    for table in found.tables:
        for row in _rows(table) or ():
            name = Path(row["workspace"]).name or f"{row['run_id']}_{row['agent']}"
            told = _Place(table.parent, row["task"], name)
            lies = told._replace(task=Path(row["workspace"]).parent.name)
            several = rows[lies if told not in folders and lies in folders else told]
            if row not in several:
                several.append(row)
    for place, folder in folders.items():
        yield _read(place, folder, rows.pop(place, []))
    for place, several in rows.items():
        yield _read(place, None, several)


class _Place(NamedTuple):
    """What identifies a run in a row and a workspace: two tasks started in the same second have one name."""

    home: Path
    task: str
    name: str


def _home_of(workspace: Path, homes: Set[Path]) -> Path:
    """Return the nearest parent folder with a table; without one, the parent of `workspace/<task>/<run>`."""
    return next((folder for folder in workspace.parents if folder in homes), workspace.parent.parent.parent)


def _rows(table: Path) -> list[dict[str, str]] | None:
    """Return the rows of results.csv; None if it is not a table of the reference."""
    try:
        text = reading.read_bytes(table).decode("utf-8", "replace").replace("\0", "")
        reader = csv.DictReader(io.StringIO(text), restkey="", restval="")
        if not set(reader.fieldnames or ()) >= COLUMNS:
            return None
        several = islice(reader, MAX_ROWS)
        return [{str(name): value for name, value in row.items() if isinstance(value, str)} for row in several]
    except (OSError, ValueError, csv.Error):
        return None


def _read(place: _Place, folder: Path | None, rows: Sequence[dict[str, str]]) -> ReferenceRun:
    troubles = [] if folder is not None else ["its workspace is not here: only its row in results.csv is known"]
    if len(rows) > 1:
        troubles.append(f"{RESULTS} has {len(rows)} rows of this run that differ: none is used")
    elif rows and rows[0]["task"] != place.task:
        troubles.append(f"{RESULTS} names another task for this run: its row is not used")
    row = rows[0] if len(rows) == 1 and rows[0]["task"] == place.task else {}
    scores, meta, data = None, None, list[bytes]()
    if folder is not None:
        scores, first = _json(folder / SCORES, list, troubles)
        meta, second = _json(folder / META, dict, troubles)
        data = [first, second]
        if meta is None and not any(META in trouble for trouble in troubles):
            troubles.append(f"{META} is missing: budget and time are unknown")
        if scores is not None and len(scores) > MAX_SUBMISSIONS:
            troubles.append(f"{SCORES} has {len(scores)} entries: only the first {MAX_SUBMISSIONS} are shown")
    named = _WORKSPACE.match(place.name)
    told = [place.name, *([row] if folder is not None else rows), [hashlib.sha256(one).hexdigest() for one in data]]
    return ReferenceRun(
        name=place.name,
        task=place.task,
        agent=(row or (rows[0] if folder is None else {})).get("agent") or (named["agent"] if named else place.name),
        folder=folder,
        home=place.home,
        scores=None if scores is None else tuple(scores[:MAX_SUBMISSIONS]),
        meta=meta or {},
        row=row,
        base_model=row.get("base_model") or (_base_model(folder) if folder is not None else None),
        troubles=tuple(troubles),
        genesis=hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest(),
    )


def _json(path: Path, kind: type, troubles: list[str]) -> tuple[Any | None, bytes]:
    """Read a JSON file of one type; return value and bytes. None if absent or unusable, the latter with a trouble."""
    data = b""
    try:
        data = reading.read_bytes(path)
        value = json.loads(data)
        if isinstance(value, kind):
            return value, data
        troubles.append(f"{path.name} holds something else than the reference writes")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        why = f"can't be read: {getattr(error, 'strerror', None) or 'it is too large or no file'}"
        troubles.append(f"{path.name} {'is not JSON: damaged, or cut off while it was written' if data else why}")
    return None, data


def _base_model(folder: Path) -> str | None:
    """Return the name of the base model's link, `models/<org>/<name>`; None unless there is exactly one."""
    try:
        models = folder / "models"
        found = [f"{org}/{name}" for org in reading.list_names(models) for name in reading.list_names(models / org)]
    except OSError:
        return None
    return found[0] if len(found) == 1 else None


def number(value: Any) -> float | None:
    """Return a finite number from JSON or a CSV cell; None for anything else, including booleans."""
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


def _points_or_none(value: Any) -> float | None:
    """Return a score from 0 to 100; None for anything else."""
    found = number(value)
    return found if found is not None and 0 <= found <= 100 else None


# --- a reference run as RunSummary: in groups of its own, never ranked
# Its score is the maximum on one split whose scores the agent saw without limit. Recipe, engine and items are unknown, so there
# is not an interval. The reference writes 0.0 for a failed evaluation; only newer versions add the error.

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
    """Convert a reference run into a summary."""
    began = _began(run)
    points = tuple(_point(place, entry, began) for place, entry in enumerate(run.scores or (), 1))
    scored = [point for point in points if point.score is not None]
    best = max(scored, key=lambda point: point.score or 0.0) if scored else None
    selected = None if best is None else best.submission_id
    baseline = _baseline(run)
    told = best.score if best is not None else _best_of_row(run)
    elapsed_s, budget_s = _times(run, points)
    gain, excluded = _gain(run, baseline, told)
    score = None if told is None else ScoreSummary(split=Split.REPORT, score=told, submission_id=selected)
    base = None if baseline is None else BaselineSummary(split=Split.REPORT, score=baseline, key=UNKNOWN)
    unknown = ("agent_hash", "base_model_content_hash", "mode", "recipe_hash", "code_hash", "task_hash", "ledger_head")
    return RunSummary(
        **dict.fromkeys(unknown, UNKNOWN),
        tool_version=__version__,
        run_id=_text(f"{run.task}-{run.name}"),
        experiment=SOURCE,
        imported=SOURCE,
        task=_text(run.task),
        agent=_text(run.agent),
        driver=_text(run.row.get("driver_model")),
        base_model=_text(run.base_model),
        seed=0,
        protocol=Protocol.PAPER,
        state=RunState.FINISHED if _over(run) else RunState.INTERRUPTED,
        budget_s=budget_s,
        elapsed_s=elapsed_s,
        attempts=1,
        accepted=len(points) or int(number(run.row.get("submissions")) or 0),
        failed=sum(point.status is SubmissionState.FAILED for point in points),
        baseline_feedback=base,
        best_feedback=score,
        selected=selected,
        selected_by="best_feedback" if best is not None else None,
        report=score,
        baseline_report=base,
        improvement=gain,
        counted=excluded is None,
        excluded=excluded,
        ranked=False,
        trajectory=points,
        split_hashes={},
        genesis=run.genesis,
        ledger_entries=0,
        network="open",
        sandbox="none",
        notes=tuple(_notes(run, points, baseline)),
    )


def _text(value: str | None) -> str:
    return clean(value, NAME_CHARS) or UNKNOWN


def _over(run: ReferenceRun) -> bool:
    return bool(run.row) or number(run.meta.get("end_time")) is not None


def _point(place: int, entry: Any, began: dt.datetime | None) -> Point:
    """Convert one entry of scores.json. Its own number is not used, because concurrent submissions may share one."""
    fields = entry if isinstance(entry, dict) else {}
    score, problem, path = _points_or_none(fields.get("score")), fields.get("error"), fields.get("model_path")
    if not isinstance(entry, dict):
        problem = "this entry is damaged"
    elif score is None:
        problem = problem or "its score is not a number from 0 to 100"
    failed = problem is not None and problem != ""
    # the reference records when it answered and how long that took
    answered, took_s = _local_time(fields.get("timestamp")), max(0.0, number(fields.get("elapsed_seconds")) or 0.0)
    dropped_s = 0.0 if answered is None or began is None else (answered - began).total_seconds() - took_s
    return Point(
        submission_id=place,
        manifest_id="",
        elapsed_s=max(0.0, dropped_s),
        status=SubmissionState.FAILED if failed else SubmissionState.SCORED,
        score=None if failed else score,
        model_path=clean(masked(path)) if isinstance(path, str) else None,
        reason=clean(masked(str(problem)[:2000])) if failed else None,
    )


def _began(run: ReferenceRun) -> dt.datetime | None:
    """Return the start in the machine's local time, like the timestamps; it is part of the workspace's name."""
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
    """Return elapsed seconds and budget; if the budget is unknown, the elapsed time."""
    start, end = number(run.meta.get("start_time")), number(run.meta.get("end_time"))
    used = end - start if start is not None and end is not None else number(run.row.get("duration_s"))
    elapsed_s = max(used or 0.0, 0.0) or max((point.elapsed_s for point in points), default=0.0)
    budget_s = number(run.meta.get("timeout_s"))
    return elapsed_s, budget_s if budget_s is not None and budget_s > 0 else max(elapsed_s, 1.0)


def _baseline(run: ReferenceRun) -> float | None:
    """Return the base model's score of the first entry that has one, else of the row."""
    told = [entry.get("baseline_score") for entry in run.scores or () if isinstance(entry, dict)]
    return _points_or_none(next((one for one in (*told, run.row.get("baseline")) if number(one) is not None), None))


def _best_of_row(run: ReferenceRun) -> float | None:
    """Return the row's best score if there is no scores.json. 0 in the row means none."""
    if run.scores is not None or not number(run.row.get("submissions")):
        return None
    return _points_or_none(run.row.get("best_score")) or None


def _gain(run: ReferenceRun, baseline: float | None, told: float | None) -> tuple[Gain | None, Excluded | None]:
    """Return the improvement, and why it does not count (None if it does)."""
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
    if zeros := sum(point.score == 0 for point in points):
        what = "have the score 0.0 and no error: it may be an evaluation that failed"
        notes.append(f"{zeros} of {len(points)} submissions {what}")
    return notes
