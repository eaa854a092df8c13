"""Build the long parts of a run's Markdown (submissions, looks, iterations) in code, as templates are too slow for these.

Foreign text goes through `markdown`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from autorl_hpc.records.entries import Contamination
from autorl_hpc.report import format as fmt
from autorl_hpc.report.format import markdown
from autorl_hpc.report.run_page import RunPage, TableRow, lines, looks_of
from autorl_hpc.report.story_records import Change, Iteration
from autorl_hpc.report.summary import Point, RunSummary
from autorl_hpc.states import Split

DIFF_LINES = 40
"""The page and summary.json have more lines."""

_PLAIN = re.compile(r"[\w .,;:%+\[\]\N{EN DASH}\N{MINUS SIGN}-]*")
"""Text that needs no escaping inside a table cell; escaping it anyway took half of a page's time."""


def markdown_parts(shown: RunPage) -> dict[str, Any]:
    """Return all variables of run.md.j2."""
    from markupsafe import Markup

    return {
        **shown.rest,
        "submissions": Markup(lines(_submissions(shown))),
        "looks": Markup(lines(_look(number, look) for number, look in looks_of(shown.run))),
        "iterations": Markup(lines(_iterations(shown))),
        "rows": lambda rows: Markup(rows_markdown(rows)),
    }


def rows_markdown(rows: Iterable[TableRow]) -> str:
    """Return rows of a three-column table."""
    return "".join(f"| {_cell(row.name)} | {_cell(row.shown)} | {_cell(row.says)} |\n" for row in rows)


@lru_cache(maxsize=10_000)
def _cell(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else markdown(text)


def _submissions(shown: RunPage) -> Iterable[str]:
    for point, at, score, between, status in shown.submissions:
        reason = f" {markdown(point.fault or '')}: {markdown(point.reason)}" if point.reason else ""
        yield (
            f"| {point.submission_id} | {markdown(point.manifest_id)} | {at} | {f'{score} {between}'.strip()} "
            f"| {status} | {_weights(point, shown.run)} | {markdown(point.model_path or fmt.UNKNOWN)} "
            f"| {markdown(point.note or '')}{reason} |\n"
        )


def _weights(point: Point, run: RunSummary) -> str:
    """Return three cells: flags, relative delta, nearest model or submission."""
    found = point.fingerprint
    if found is None:
        return " |  | "
    flags = markdown(", ".join(found.flags))
    if found.reason:
        return f"{flags}not known: {markdown(found.reason)} | {fmt.delta(found.relative_delta)} | "
    near = f"{markdown(found.nearest_model)}; " if found.nearest_model != run.base_model else ""
    parent = "base" if found.parent is None else f"submission {found.parent}"
    return f"{flags} | {fmt.delta(found.relative_delta)} | {near}{parent}"


def _look(number: int | None, look: Contamination) -> str:
    found = "".join(f"{markdown(one.file)} ({one.items} of {one.split!s}) " for one in look.found)
    more = f"and {look.found_unlisted} more files" if look.found_unlisted else ""
    items = [f"{look.items.get(split, 0)} of {look.of.get(split, 0)}" for split in (Split.FEEDBACK, Split.REPORT)]
    return (
        f"| {'the end' if number is None else f'submission {number}'}{'' if look.complete else ', cut short'} "
        f"| {items[0]} | {items[1]} | {look.files_scanned} | {fmt.size(look.bytes_scanned)} "
        f"| {fmt.size(look.bytes_unchanged)} | {fmt.size(look.bytes_skipped)} | {found}{more} |\n"
    )


def _iterations(shown: RunPage) -> Iterable[str]:
    for one, facts in shown.iterations:
        yield _iteration(one, facts, one.submission_id == shown.run.selected)


def _iteration(one: Iteration, facts: Sequence[TableRow], selected: bool) -> str:
    """Return one section, ending with a blank line."""
    score = "" if one.score is None else f", {fmt.points(one.score)}"
    settings = "".join(
        f"| {markdown(setting.name)} | {markdown(setting.value)} | {markdown(setting.where)} |\n"
        for setting in one.settings
    )
    diff = f"Changes since the iteration before:\n\n{diff_markdown(one.diff)}\n\n" if one.diff else ""
    return (
        f"### Submission {one.submission_id}: {one.status!s}{', selected' if selected else ''}{score}\n\n"
        f"{_failure(one)}| | | |\n|---|--:|---|\n{rows_markdown(facts)}{settings}"
        f"{''.join(map(_change, one.changes))}\n{diff}"
    )


def _failure(one: Iteration) -> str:
    if one.failure is None:
        return ""
    lines = "".join(f"* {markdown(line.where)}: {markdown(line.says)}\n" for line in one.failure.evidence)
    return f"**{markdown(one.failure.kind)}**\n\n{lines}\n"


def _change(change: Change) -> str:
    told = {"binary": "kept by hash", "link": "link"}.get(change.what, f"+{change.added} -{change.removed}")
    return f"| {markdown(change.path)} | {told} | {change.what} |\n"


def diff_markdown(diff: str) -> str:
    """Return the beginning of a diff as an indented code block that no line can end."""
    lines = diff.split("\n")
    shown = lines[:DIFF_LINES]
    rest = [f"({len(lines) - len(shown)} more lines)"] if len(lines) > len(shown) else []
    return "\n".join(f"    {line}" for line in [*shown, *rest])
