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
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from autorl_hpc import __version__
from autorl_hpc.files import reading
from autorl_hpc.files.layout import share
from autorl_hpc.files.redact import masked
from autorl_hpc.report.format import clean
from autorl_hpc.report.summary import BaselineSummary, Excluded, Gain, Point, RunSummary, ScoreSummary
from autorl_hpc.states import Protocol, RunState, Split, SubmissionState

SCORES, META, RESULTS = "scores.json", "run_meta.json", "results.csv"
LOGS = ("run.log", "agent.log")
OURS = ("submissions", "results", "run.json")  # names in our own workspaces, which have a run_meta.json too
RECORDS = ("run.json", "experiment.json")
# required columns of results.csv; without them it is another table
COLUMNS = frozenset({"run_id", "task", "agent", "baseline", "best_score", "submissions", "workspace"})
DEPTH = 5  # levels searched: `bench/autorl_bench/workspace/<task>/<run>`
MAX_FOLDERS = 20_000  # bound on folders searched; a home directory passed by mistake has millions
MAX_ROWS, MAX_SUBMISSIONS = 100_000, 10_000
_WORKSPACE = re.compile(r"^(?P<run_id>[0-9]{8}T[0-9]{6}(?:_p[0-9]{1,5})?)_(?P<agent>.{1,200})$", re.DOTALL)


class ReferenceRun(NamedTuple):
    """What is on disk of a run of the reference."""

    home: Path  # the results folder that it belongs to
    task: str
    name: str  # of its workspace
    agent: str
    folder: Path | None  # its workspace; None: only its row is here
    scores: list[Any] | None  # the objects of scores.json; None: no such file, as for a run without a submission
    meta: dict[str, Any]
    row: dict[str, str]
    base_model: str | None
    troubles: list[str]  # what could not be read, in words
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
    for seen, (folder, folders, files) in enumerate(os.walk(path)):
        if seen >= MAX_FOLDERS:
            found.cut_short = True
            break
        here, names = Path(folder), {*folders, *files}
        ours = names & set(OURS)
        is_workspace = not ours and (SCORES in names or (META in names and names & set(LOGS)))
        if is_workspace:
            found.workspaces.append(here)
        # What agents wrote in our own workspaces is not a result.
        elif not names & set(RECORDS) and not (META in names and ours):
            if RESULTS in files and _rows(here / RESULTS) is not None:
                found.tables.append(here / RESULTS)
            if len(here.parts) - len(path.parts) < DEPTH:
                folders[:] = [name for name in sorted(folders) if here / name not in skip]
                continue
        folders.clear()
    return found


def read_reference(found: ReferenceFolders) -> Iterator[ReferenceRun]:
    """Yield every run: workspaces with their rows, then rows without a workspace. A run is known by its results folder,
    task and name: two tasks started in the same second have one name."""
    homes = {table.parent for table in found.tables}
    folders = {}
    for folder in found.workspaces:  # home: the nearest parent with a table, else that of `workspace/<task>/<run>`
        home = next((each for each in folder.parents if each in homes), folder.parent.parent.parent)
        folders[home, folder.parent.name, folder.name] = folder
    rows: dict[tuple[Path, str, str], list[dict[str, str]]] = defaultdict(list)
    for table in found.tables:
        for row in _rows(table) or ():
            told, workspace = (table.parent, row["task"]), Path(row["workspace"])
            name = workspace.name or f"{row['run_id']}_{row['agent']}"
            real = (table.parent, workspace.parent.name, name)
            several = rows[real if (*told, name) not in folders and real in folders else (*told, name)]
            if row not in several:
                several.append(row)
    for place in dict.fromkeys((*folders, *rows)):
        yield _read(*place, folders.get(place), rows.get(place, []))


def _rows(table: Path) -> list[dict[str, str]] | None:
    try:
        text = reading.read_bytes(table).decode("utf-8", "replace").replace("\0", "")
        reader = csv.DictReader(io.StringIO(text), restkey="", restval="")
        if not set(reader.fieldnames or ()) >= COLUMNS:
            return None
        several = islice(reader, MAX_ROWS)
        return [{str(name): value for name, value in row.items() if isinstance(value, str)} for row in several]
    except (OSError, ValueError, csv.Error):
        return None


def _read(home: Path, task: str, name: str, folder: Path | None, rows: list[dict[str, str]]) -> ReferenceRun:
    troubles = [] if folder is not None else ["its workspace is not here: only its row in results.csv is known"]
    row = rows[0] if len(rows) == 1 and rows[0]["task"] == task else {}
    if rows and not row:
        several = f"{len(rows)} rows of this run that differ"
        why = several if len(rows) > 1 else "a row of this run that names another task"
        troubles.append(f"{RESULTS} has {why}: none is used")
    scores, meta, read = None, None, list[str]()
    if folder is not None:
        scores = _json(folder / SCORES, list, troubles, read)
        meta = _json(folder / META, dict, troubles, read)
        if scores is not None and len(scores) > MAX_SUBMISSIONS:
            troubles.append(f"{SCORES} has {len(scores)} entries: only the first {MAX_SUBMISSIONS} are shown")
    named = _WORKSPACE.match(name)
    told = [name, *([row] if folder is not None else rows), read]
    return ReferenceRun(
        home=home,
        task=task,
        name=name,
        agent=(row or (rows[0] if folder is None else {})).get("agent") or (named["agent"] if named else name),
        folder=folder,
        scores=None if scores is None else scores[:MAX_SUBMISSIONS],
        meta=meta or {},
        row=row,
        base_model=row.get("base_model") or (_base_model(folder) if folder is not None else None),
        troubles=troubles,
        genesis=hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest(),
    )


def _json(path: Path, kind: type, troubles: list[str], read: list[str]) -> Any | None:
    """Return a JSON value of one type; None, with a trouble, if it is unusable. `read` gets the hash of the bytes."""
    data = b""
    try:
        data = reading.read_bytes(path)
        value = json.loads(data)
        if isinstance(value, kind):
            return value
        troubles.append(f"{path.name} holds something else than the reference writes")
    except FileNotFoundError:
        if path.name == META:
            troubles.append(f"{META} is missing: budget and time are unknown")
    except (OSError, ValueError, RecursionError):
        why = "is not JSON: damaged, or cut off" if data else "can not be read, or is too large"
        troubles.append(f"{path.name} {why}")
    finally:
        read.append(hashlib.sha256(data).hexdigest())
    return None


def _base_model(folder: Path) -> str | None:
    found = [path.relative_to(folder / "models").as_posix() for path in islice(folder.glob("models/*/*"), 2)]
    return found[0] if len(found) == 1 else None


def number(value: Any) -> float | None:
    """Return a finite number from JSON or a CSV cell; None for anything else, including booleans."""
    try:
        found = math.nan if isinstance(value, bool) or len(str(value)) > 40 else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def _points_or_none(value: Any) -> float | None:
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
ZERO_BASE = (
    "the base model's score is 0.0, which the reference also writes for an evaluation that failed: look whether it ran"
)
MODES = ("free", "sft-only", "rl-only", "multi")  # the paper's
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
    unknown = ("agent_hash", "base_model_content_hash", "recipe_hash", "code_hash", "task_hash", "ledger_head")
    return RunSummary(
        **dict.fromkeys(unknown, UNKNOWN),
        tool_version=__version__,
        run_id=_text(f"{run.task}-{run.name}"),
        experiment=SOURCE,
        imported=SOURCE,
        task=_text(run.task),
        level=_shipped_levels().get(run.task),
        mode=_mode(run),
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


def _mode(run: ReferenceRun) -> str:
    """Return the mode: of the row or the metadata, else the end of the agent's name (`claude-sft-only`); the reference's own code
    writes neither, users of its modes add one."""
    for told in (run.row.get("mode"), run.meta.get("mode")):
        if isinstance(told, str) and told.strip():
            return _text(told.strip().lower().replace("_", "-"))
    name = run.agent.lower().replace("_", "-")
    return next((mode for mode in MODES if name.endswith(f"-{mode}")), UNKNOWN)


@lru_cache(maxsize=1)
def _shipped_levels() -> dict[str, Any]:
    files = sorted(share("tasks").glob("*/task.yaml"))
    return {path.parent.name: reading.read_yaml(path).get("level", 1) for path in files}


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
    start, end = number(run.meta.get("start_time")), number(run.meta.get("end_time"))
    used = end - start if start is not None and end is not None else number(run.row.get("duration_s"))
    elapsed_s = max(used or 0.0, 0.0) or max((point.elapsed_s for point in points), default=0.0)
    budget_s = number(run.meta.get("timeout_s"))
    return elapsed_s, budget_s if budget_s is not None and budget_s > 0 else max(elapsed_s, 1.0)


def _baseline(run: ReferenceRun) -> float | None:
    told = [entry.get("baseline_score") for entry in run.scores or () if isinstance(entry, dict)]
    return _points_or_none(next((one for one in (*told, run.row.get("baseline")) if number(one) is not None), None))


def _best_of_row(run: ReferenceRun) -> float | None:
    """Return the row's best score if there is no scores.json. Without a submission 0 means none; with some it may be failed evaluations,
    and counts as it was told: a failed run must not leave its agent's mean."""
    best = None if run.scores is not None else _points_or_none(run.row.get("best_score"))
    return best if best or number(run.row.get("submissions")) else None


def _gain(run: ReferenceRun, baseline: float | None, told: float | None) -> tuple[Gain | None, Excluded | None]:
    if not _over(run):
        return None, "unfinished"
    if any("scores.json" in trouble for trouble in run.troubles):
        return None, "damaged"
    if baseline is None:
        return None, "incomplete"
    if told is not None:
        return Gain(difference=told - baseline, how="scores_only"), None
    return Gain(difference=0.0, how="base_kept"), None


def _notes(run: ReferenceRun, points: tuple[Point, ...], baseline: float | None) -> list[str]:
    notes = [UNPROVEN, ONE_SPLIT, *(f"left out: {trouble}" for trouble in run.troubles)]
    if baseline == 0:
        notes.append(ZERO_BASE)
    if baseline is None:
        notes.append("the base model's score is unknown: there is no improvement")
    if run.scores is None and _best_of_row(run) == 0:
        notes.append(f"{RESULTS} tells the best score 0.0: every evaluation may have failed")
    if zeros := sum(point.score == 0 for point in points):
        what = "have the score 0.0 and no error: it may be an evaluation that failed"
        notes.append(f"{zeros} of {len(points)} submissions {what}")
    return notes
