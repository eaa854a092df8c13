"""What a report may hold besides its pages, against what the ledgers give: figures, a comparison, published results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.report.cache import COMPARE_NAME
from autorl_hpc.report.charts.files import FOLDER, drawn_with, expected_files
from autorl_hpc.report.pages import versus_files
from autorl_hpc.report.summary import MergedReport, read_paper
from autorl_hpc.report.versus import compare

MAX_BYTES = 1 << 28
"""Larger than any picture or comparison of ours: whatever lies there is not read further."""


def with_what_was_asked(merged: MergedReport, told: dict[str, Any]) -> MergedReport:
    """The present report with the published results, if the one on disk was asked for them."""
    return merged.model_copy(update={"paper": read_paper()}) if told.get("paper") is not None else merged


def check_extras(folder: Path, merged: MergedReport, *, final: bool) -> tuple[list[str], list[str]]:
    """Problems, and what was not compared.

    Args:
        folder: of the report, whose pages were found to be what the ledgers give.
        final: the runs can't change any more.
    """
    problems, unseen = _figures(folder, merged)
    more_problems, more_unseen = _comparison(folder, merged)
    problems, unseen = [*problems, *more_problems], [*unseen, *more_unseen]
    return (problems, unseen) if final else ([], [*problems, *unseen])


def _figures(folder: Path, merged: MergedReport) -> tuple[list[str], list[str]]:
    """Drawn again and compared byte by byte, if by the same version of matplotlib."""
    here = folder / FOLDER
    try:
        names = reading.list_names(here)
    except OSError as error:
        return [], [f"report/{FOLDER}/ can't be read: {error}"]
    if not names:
        return [], []
    try:
        version, files = expected_files(merged)
    except ImportError as error:
        return [], [f"report/{FOLDER}/ was not compared: {error}"]
    if drawn_with(folder) != version:
        return [], [f"report/{FOLDER}/ was drawn by another matplotlib than {version}: not compared"]
    problems = [
        f"report/{FOLDER}/{name} was altered: it is not what the ledgers give"
        for name, data in files.items()
        if _bytes(here / name) != data
    ]
    strange = sorted(set(names) - set(files))
    return problems, [f"report/{FOLDER}/{name} is no figure of this report: not compared" for name in strange[:10]]


def _comparison(folder: Path, merged: MergedReport) -> tuple[list[str], list[str]]:
    """Made again from the names of its sides."""
    try:
        told = reading.read_json(folder / COMPARE_NAME)
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError) as error:
        return [f"report/{COMPARE_NAME} can't be read: {error}"], []
    try:
        files = versus_files(compare(merged, told["a"]["name"], told["b"]["name"]))
    except (AutorlError, AttributeError, KeyError, TypeError, ValueError, OSError):
        return [], [f"report/{COMPARE_NAME} names sides that are not in this experiment: not compared"]
    return [
        f"report/{name} was altered: it is not what the ledgers give"
        for name, data in files.items()
        if _bytes(folder / name) != data
    ], []


def _bytes(path: Path) -> bytes | None:
    try:
        return reading.read_bytes(path, max_bytes=MAX_BYTES)
    except (OSError, ValueError):
        return None
