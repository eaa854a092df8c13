"""Reports as they lie on disk against what the ledgers give: a page is what most readers see, and anybody's to edit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from autorl_hpc import __version__
from autorl_hpc.files import reading
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.report.chain import read_chain
from autorl_hpc.report.digest import Library, digest
from autorl_hpc.report.summary import MergedReport, RunSummary
from autorl_hpc.report.write import SUMMARY_NAME, merged_files, run_files

FIGURES = (
    *(
        "task",
        "agent",
        "base_model",
        "seed",
        "protocol",
        "state",
        "selected",
        "selected_by",
        "counted",
        "ranked",
        "sandbox",
    ),
    *("accepted", "failed", "best_feedback.score", "report.score", "baseline_report.score", "baseline_feedback.score"),
    *("improvement.difference", "improvement.low", "improvement.high", "improvement.p_value"),
)
"""What a report claims. Other fields, and wording, may come of another version of the package."""

AGAIN = "write it again: autorl-hpc report"


def check_run_report(run: RunDir, problems: list[str], notes: list[str]) -> None:
    """Checks `<run>/report/`, if it is there, of a run whose chain is whole."""
    told = _told(run.report, "report/", problems)
    if told is None:
        return
    chain = read_chain(run)
    now = digest(run, Library(), chain)
    if not _same_state(told, now, (chain.genesis, *chain.hashes), "report/", problems, notes):
        return
    _compare(run.report, "report/", run_files(now), problems, notes, _differences(told, now))


def check_merged_report(experiment: ExperimentDir, merged: MergedReport, problems: list[str], notes: list[str]) -> None:
    """Checks `report/` of an experiment, if it is there, against the present report of all its runs."""
    told = _told(experiment.report, "report/", problems)
    if told is None:
        return
    rows = told.get("runs")
    by_id = {row.get("run_id"): row for row in rows if isinstance(row, dict)} if isinstance(rows, list) else {}
    present = {run.run_id: run for run in merged.runs}
    if any(by_id.get(run_id, {}).get("ledger_head") != run.ledger_head for run_id, run in present.items()):
        notes.append(f"report/ was written before the last entries of its runs; {AGAIN}")
        return
    differences = [f"{run_id}: {text}" for run_id, run in present.items() for text in _differences(by_id[run_id], run)]
    differences += [f"{run_id!r}, which is no run here" for run_id in by_id if run_id not in present]
    links = {
        place: quote(Path(os.path.relpath(RunDir(Path(folder)).report / "run.html", experiment.report)).as_posix())
        for place, folder in enumerate(merged.run_folders)
    }
    files = merged_files(merged, links)
    if (experiment.report / "runs").exists() or told.get("tool_version") != __version__:
        files = {SUMMARY_NAME: files[SUMMARY_NAME]}  # the pages lie elsewhere, or are worded otherwise
    _compare(experiment.report, "report/", files, problems, notes, differences)


def _told(folder: Path, name: str, problems: list[str]) -> dict[str, Any] | None:
    try:
        value = reading.read_json(folder / SUMMARY_NAME)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{name}{SUMMARY_NAME} can't be read: {error}")
        return None
    if isinstance(value, dict):
        return value
    problems.append(f"{name}{SUMMARY_NAME} was altered: it is no report")
    return None


def _same_state(
    told: dict[str, Any], now: RunSummary, hashes: tuple[str, ...], name: str, problems: list[str], notes: list[str]
) -> bool:
    """Whether the report was written of the chain as it is now."""
    head = told.get("ledger_head")
    if head == now.ledger_head:
        return True
    if head in hashes:
        notes.append(f"{name} was written {len(hashes) - 1 - hashes.index(head)} entries ago; {AGAIN}")
    else:
        problems.append(f"{name}{SUMMARY_NAME} names a head that this ledger never had: one of them was altered")
    return False


def _differences(told: dict[str, Any], now: RunSummary) -> list[str]:
    present = now.model_dump(mode="json")
    rows = ((name, _field(told, name), _field(present, name)) for name in FIGURES)
    return [f"`{name}` is {was!r:.40}, and the ledger gives {is_!r:.40}" for name, was, is_ in rows if was != is_]


def _field(value: Any, name: str) -> Any:
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _compare(
    folder: Path, name: str, files: dict[str, bytes], problems: list[str], notes: list[str], differences: list[str]
) -> None:
    if differences:
        problems.append(f"{name}{SUMMARY_NAME} was altered: {differences[0]}")
        return
    if _bytes(folder / SUMMARY_NAME) != files[SUMMARY_NAME]:
        notes.append(
            f"{name} is of another version of autorl-hpc, with the same results; its pages were not compared; {AGAIN}"
        )
        return
    for file, data in files.items():
        found = _bytes(folder / file)
        if found is not None and found != data:
            problems.append(f"{name}{file} was altered: it is not what {name}{SUMMARY_NAME} and the ledgers give")


def _bytes(path: Path) -> bytes | None:
    try:
        return reading.read_bytes(path, max_bytes=1 << 30)
    except (OSError, ValueError):
        return None
