"""Reports as they lie on disk against what the ledgers give: a page is what most readers see, and anybody's to edit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autorl_hpc import __version__
from autorl_hpc.files import reading
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.report.cache import SUMMARY_NAME, elsewhere_of, link_to
from autorl_hpc.report.pages import merged_files, run_files, run_summary
from autorl_hpc.report.run_folder import read_chain
from autorl_hpc.report.run_summary import Library, digest
from autorl_hpc.report.story_records import Story
from autorl_hpc.report.summary import MergedReport, RunSummary
from autorl_hpc.report.written_extras import check_extras, with_what_was_asked
from autorl_hpc.states import RunState

FIGURES = (
    *("task", "agent", "base_model", "seed", "protocol", "state", "selected", "selected_by", "counted", "excluded"),
    *(
        "ranked",
        "sandbox",
        "network",
        "flags",
        "contaminated",
        "contamination_end.items",
        "fault",
        "ended_by",
        "damage",
    ),
    *("accepted", "failed", "best_feedback.score", "report.score", "baseline_report.score", "baseline_feedback.score"),
    *("improvement.difference", "improvement.low", "improvement.high", "improvement.p_value"),
)
"""What a report claims, whatever version wrote it. Other fields, and wording, may come of another version of the package."""

AGAIN = "write it again: autorl-hpc report"


@dataclass
class ReportComparison:
    """What came of comparing a report.

    Attributes:
        unseen: what lies here and says something that was not compared: nobody may be told that it is whole.
    """

    problems: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)


def check_run_report(run: RunDir, *, exported: bool = False) -> ReportComparison:
    """Compares `<run>/report/`, if it is there, of a run whose chain is whole.

    Args:
        exported: of a bundle's run: it has no pages, and another machine's arithmetic may differ in a last digit.
    """
    look = ReportComparison()
    chain = read_chain(run)
    now = digest(run, Library(), chain)
    files = run_files(now)
    if exported:
        now = _with_story_told(now, run.report)
        files = {SUMMARY_NAME: run_summary(now)}
    told = _told(run.report, files, look)
    if told is None:
        return look
    head = told.get("ledger_head")
    hashes = (chain.genesis, *chain.hashes)
    if head != now.ledger_head and head in hashes:
        old = f"was written {len(hashes) - 1 - hashes.index(head)} entries ago: not compared; {AGAIN}"
        look.unseen += [f"report/{name} {old}" for name in files]
        return look
    if head != now.ledger_head:
        what = "names a head that this ledger never had: one of them was altered"
        look.problems.append(f"report/{SUMMARY_NAME} {what}")
        return look
    look.problems += _altered(_differences(told, now))
    final = chain.view.closed is not None and not exported
    _compare(run.report, told, files, look, final=final)
    return look


def _with_story_told(now: RunSummary, folder: Path) -> RunSummary:
    """`now` with the story that the report tells: what it was made of is not in a bundle, and no score rests on it."""
    value = reading.read_json_or_none(folder / SUMMARY_NAME)
    try:
        story = Story.model_validate(value["story"]) if isinstance(value, dict) else now.story
    except (KeyError, ValueError):
        story = now.story
    return now.model_copy(update={"story": story})


def check_merged_report(experiment: ExperimentDir, merged: MergedReport) -> ReportComparison:
    """Compares `report/` of an experiment, if it is there, with the present report of all its runs."""
    look = ReportComparison()
    elsewhere = _elsewhere(experiment, merged)
    files = merged_files(merged, _links(experiment, merged, elsewhere))
    told = _told(experiment.report, files, look)
    if told is None:
        return look
    if told.get("paper") is not None:
        merged = with_what_was_asked(merged, told)
        files = merged_files(merged, _links(experiment, merged, elsewhere))
    rows = told.get("runs")
    by_id = {row.get("run_id"): row for row in rows if isinstance(row, dict)} if isinstance(rows, list) else {}
    present = {run.run_id: run for run in merged.runs}
    if any(by_id.get(run_id, {}).get("ledger_head") != run.ledger_head for run_id, run in present.items()):
        old = f"was written before the last entries of its runs: not compared; {AGAIN}"
        look.unseen += [f"report/{name} {old}" for name in files]
        return look
    differences = [f"{run_id}: {text}" for run_id, run in present.items() for text in _differences(by_id[run_id], run)]
    differences += [f"{run_id!r}, which is no run here" for run_id in by_id if run_id not in present]
    look.problems += _altered(differences)
    if elsewhere:  # left by somebody who could not write into the runs: the index may lead here, or to the runs since
        plain = merged_files(merged, _links(experiment, merged, {}))
        files |= {name: data for name, data in plain.items() if _bytes(experiment.report / name) == data}
    final = all(run.state is RunState.FINISHED for run in merged.runs)
    _compare(experiment.report, told, files, look, final=final)
    if not look.problems and not look.unseen:
        problems, unseen = check_extras(experiment.report, merged, final=final)
        look.problems += problems
        look.unseen += unseen
    for place, folder in elsewhere.items():
        pages = run_files(merged.runs[place])
        name = f"report/{folder.relative_to(experiment.report)}/"
        mine = _told(folder, pages, look, name)
        if mine is not None:
            look.problems += _altered(_differences(mine, merged.runs[place]), name)
            _compare(folder, mine, pages, look, final=final, name=name)
    for place, run_folder in enumerate(merged.run_folders):
        home = RunDir(Path(run_folder))
        if place not in elsewhere and not (home.report / SUMMARY_NAME).exists():
            look.problems.append(
                f"{home.run_id}/report/{SUMMARY_NAME} is missing, though report/{SUMMARY_NAME} is there"
            )
    return look


def _elsewhere(experiment: ExperimentDir, merged: MergedReport) -> dict[int, Path]:
    """Folders of runs' pages beside the index, by the run's place: of runs that were not the writer's to write into."""
    homes = zip(merged.runs, map(RunDir, map(Path, merged.run_folders)), strict=True)
    folders = enumerate(elsewhere_of(experiment.report, run.genesis, home) for run, home in homes)
    return {place: folder for place, folder in folders if folder.is_dir()}


def _links(experiment: ExperimentDir, merged: MergedReport, elsewhere: dict[int, Path]) -> dict[int, str]:
    pages = {place: RunDir(Path(folder)).report for place, folder in enumerate(merged.run_folders)} | elsewhere
    return {place: link_to(folder, experiment.report) for place, folder in pages.items()}


def _told(
    folder: Path, files: dict[str, bytes], look: ReportComparison, name: str = "report/"
) -> dict[str, Any] | None:
    """What the report says; None if there is none, or none that can be read."""
    try:
        value = reading.read_json(folder / SUMMARY_NAME)
    except (FileNotFoundError, NotADirectoryError):
        left = [page for page in files if (folder / page).exists()]
        look.problems += [f"{name}{SUMMARY_NAME} is missing, though {name}{left[0]} is there"] if left else []
        return None
    except (OSError, ValueError) as error:
        look.problems.append(f"{name}{SUMMARY_NAME} can't be read: {error}")
        return None
    if isinstance(value, dict):
        return value
    look.problems.append(f"{name}{SUMMARY_NAME} was altered: it is no report")
    return None


def _differences(told: dict[str, Any], now: RunSummary) -> list[str]:
    present = now.model_dump(mode="json")
    rows = ((name, _field(told, name), _field(present, name)) for name in FIGURES)
    return [f"`{name}` is {was!r:.40}, and the ledger gives {is_!r:.40}" for name, was, is_ in rows if was != is_]


def _altered(differences: list[str], name: str = "report/") -> list[str]:
    return [f"{name}{SUMMARY_NAME} was altered: {differences[0]}"] if differences else []


def _field(value: Any, name: str) -> Any:
    """A field; None where there is nothing in it, or no such field in an older version."""
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return None if value in ([], {}) else value


def _compare(
    folder: Path,
    told: dict[str, Any],
    files: dict[str, bytes],
    look: ReportComparison,
    *,
    final: bool,
    name: str = "report/",
) -> None:
    """Compares byte by byte.

    Args:
        final: what the report is made of can't change any more, the arithmetic is this machine's: other bytes are an alteration.
    """
    if look.problems:
        return
    version = _version(told)
    for file, data in files.items():
        found = _bytes(folder / file)
        if found is None:
            look.problems.append(f"{name}{file} is missing or can't be read")
        elif found == data:
            continue
        elif version != __version__:
            word = repr(version)[:40] if version is not None else "none that it names"
            look.unseen.append(f"{name}{file} is of another version, {word}: not compared; {AGAIN}")
        elif final:
            look.problems.append(f"{name}{file} was altered: it is not what the ledgers give")
        else:
            look.unseen.append(f"{name}{file} is not what the ledgers give here and now: not compared; {AGAIN}")


def _version(told: dict[str, Any]) -> object:
    """Of the package that wrote a report; None if not every run in it names the same."""
    rows = told.get("runs", [])
    named = [
        one.get("tool_version") for one in (told, *(rows if isinstance(rows, list) else ())) if isinstance(one, dict)
    ]
    return named[0] if all(one == named[0] for one in named) else None


def _bytes(path: Path) -> bytes | None:
    try:
        return reading.read_bytes(path, max_bytes=1 << 30)
    except (OSError, ValueError):
        return None
