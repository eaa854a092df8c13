"""The long parts of a run's page: submissions, looks, iterations. Built here and not by templates: a run of fifty submissions
has thousands of cells, and a report thousands of runs. Whatever is not a number or a word of ours goes through `html`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from autorl_hpc.records.ledger import Contaminated, Contamination
from autorl_hpc.report import format as fmt
from autorl_hpc.report import plot
from autorl_hpc.report.axes import axes_of
from autorl_hpc.report.run_parts import Row, Shown, lines, looks_of
from autorl_hpc.report.story import Change, EvidenceLine, Iteration
from autorl_hpc.report.summary import Point, RunSummary
from autorl_hpc.report.text import html
from autorl_hpc.states import SubmissionState

BAD = (SubmissionState.REFUSED, SubmissionState.FAILED)
HOW_FOUND = {"ngram": "13 words in a row", "exact": "the whole text"}
LINE_KINDS = {"+": "add", "-": "del", "@": "hunk", "(": "hunk"}


def parts(shown: Shown) -> dict[str, Any]:
    """Everything that run.html.j2 needs."""
    from markupsafe import Markup

    run = shown.run
    return {
        **shown.rest,
        "plots": [(name, Markup(drawing)) for name, drawing in plot.trajectories(run, axes_of(run))],
        "submissions": Markup(lines(_submissions(shown))),
        "looks": Markup(lines(_look(number, look) for number, look in looks_of(run))),
        "iterations": Markup(lines(_iterations(shown))),
        "rows": lambda rows: Markup(rows_html(rows)),
        "evidence": lambda lines: Markup(evidence(lines)),
    }


def rows_html(rows: Iterable[Row]) -> str:
    """Rows as a list of terms."""
    told = "".join(
        f"<div><dt>{html(row.name)}</dt><dd>{html(row.shown)}"
        f"{f' <small>{html(row.says)}</small>' if row.says else ''}</dd></div>\n"
        for row in rows
    )
    return f'<dl class="facts tight">\n{told}</dl>'


def evidence(lines: Iterable[EvidenceLine]) -> str:
    """The lines that a finding rests on."""
    told = "".join(f"<li><code>{html(line.where)}</code> {html(line.says)}</li>\n" for line in lines)
    return f'<ul class="evidence">\n{told}</ul>\n' if told else ""


def _submissions(shown: Shown) -> Iterable[str]:
    run = shown.run
    columns = zip(run.trajectory, shown.at, shown.score, shown.between, shown.status, strict=True)
    for point, at, score, between, status in columns:
        reason = ""
        if point.reason:
            reason = f' <span class="warn">{html(point.fault or "")}: {html(point.reason)}</span>'
        yield (
            f'<tr>\n<td class="n" data-name="no.">{point.submission_id}</td>\n'
            f'<td data-name="manifest">{html(point.manifest_id)}</td>\n'
            f'<td class="n" data-name="at">{at}</td>\n'
            f'<td class="n" data-name="feedback"><span>{score} <small>{between}</small></span></td>\n'
            f'<td data-name="status"><span>{status}</span></td>\n'
            f'<td data-name="weights"{_empty(point.fingerprint)}><span>{_weights(point, run)}</span></td>\n'
            f'<td data-name="path"{_empty(point.model_path)}>{html(point.model_path or fmt.UNKNOWN)}</td>\n'
            f'<td data-name="note or reason"{_empty(point.note or point.reason)}>'
            f"<span>{html(point.note or '')}{reason}</span></td>\n</tr>\n"
        )


def _empty(value: object) -> str:
    return "" if value else ' class="empty"'


def _weights(point: Point, run: RunSummary) -> str:
    """Where a checkpoint's weights come from, as its fingerprint has it."""
    found = point.fingerprint
    if found is None:
        return fmt.UNKNOWN
    flags = f'<span class="warn">{", ".join(found.flags)}</span> ' if found.flags else ""
    if found.reason:
        return f'{flags}<small class="warn">not known: {html(found.reason)}</small>'
    near = ""
    if found.nearest_model and found.nearest_model != run.base_model:
        near = f"{fmt.delta(found.nearest_delta)} from {html(found.nearest_model)}; "
    parent = "the base" if found.parent is None else f"submission {found.parent} ({fmt.delta(found.parent_delta)})"
    alike = ""
    if "degenerate_outputs" in found.flags:
        shares = fmt.percent(found.commonest_output_share), fmt.percent(found.base_output_share)
        alike = f"; {shares[0]} of the answers are one (base {shares[1]})"
    return f"{flags}{fmt.delta(found.relative_delta)} <small>{near}from {parent}{alike}</small>"


def _look(number: int | None, look: Contamination) -> str:
    """One look at the workspace for held-out items."""
    ended = "" if not look.reason else f" <small>{html(look.reason)}</small>"
    if not look.complete:
        ended = f' <small class="warn">cut short{f": {html(look.reason)}" if look.reason else ""}</small>'
    skipped = f" <small>{look.files_skipped} skipped</small>" if look.files_skipped else ""
    found = "".join(_found(one) for one in look.found) or fmt.UNKNOWN
    more = f" <small>and {look.found_unlisted} more files</small>" if look.found_unlisted else ""
    return (
        f'<tr>\n<td class="head">{"the end" if number is None else f"submission {number}"}{ended}</td>\n'
        f"{_items(look, 'feedback')}{_items(look, 'report')}"
        f'<td class="n" data-name="files"><span>{look.files_scanned}{skipped}</span></td>\n'
        f'<td class="n" data-name="scanned">{fmt.size(look.bytes_scanned)}</td>\n'
        f'<td class="n" data-name="unchanged">{fmt.size(look.bytes_unchanged)}</td>\n'
        f'<td class="n" data-name="skipped">{fmt.size(look.bytes_skipped)}</td>\n'
        f'<td data-name="found in"{_empty(look.found)}>'
        f"<span>{found}{more}</span></td>\n</tr>\n"
    )


def _items(look: Contamination, split: Any) -> str:
    told = fmt.UNKNOWN
    if split in look.of or split in look.items:
        warned = ' class="warn"' if look.items.get(split) else ""
        told = f"<span{warned}>{look.items.get(split, 0)}</span> <small>of {look.of.get(split, 0)}</small>"
    return f'<td class="n" data-name="{split}"><span>{told}</span></td>\n'


def _found(one: Contaminated) -> str:
    which = html(", ".join(map(str, one.first_items)))
    return f"{html(one.file)} <small>{one.items} of {one.split}, {HOW_FOUND[one.how]}: {which}</small>"


def _iterations(shown: Shown) -> Iterable[str]:
    points = {point.submission_id: place for place, point in enumerate(shown.run.trajectory)}
    for one, facts in zip(shown.run.story.iterations, shown.facts, strict=False):
        between = shown.between[points[one.submission_id]]
        yield _iteration(one, facts, between, one.submission_id == shown.run.selected)


def _iteration(one: Iteration, facts: Sequence[Row], between: str, selected: bool) -> str:
    """One section of the page."""
    badge = " bad" if one.status in BAD else " good" if selected else ""
    score = "" if one.score is None else f" {fmt.points(one.score)} <small>{between}</small>"
    failure = ""
    if one.failure:
        failure = f'<p class="warn">{one.failure.kind}</p>\n{evidence(one.failure.evidence)}\n'
    return (
        f'<section class="iteration">\n<h3>Submission {one.submission_id} '
        f'<span class="badge{badge}">{one.status!s}{", selected" if selected else ""}</span>{score}</h3>\n'
        f"{failure}{rows_html(facts)}\n{_settings(one)}"
        f"{_changes(one)}{_diff(one)}</section>\n"
    )


def _settings(one: Iteration) -> str:
    told = "".join(
        f"<li>{html(setting.name)} <b>{html(setting.value)}</b> <small>{html(setting.where)}</small></li>\n"
        for setting in one.settings
    )
    return f'<ul class="settings">\n{told}</ul>\n' if told else ""


def _changes(one: Iteration) -> str:
    if not one.changes:
        return '<p class="soft"><small>The code is as it was.</small></p>\n' if one.revision else ""
    more = f"<li><small>and {one.more_changes} more files</small></li>\n" if one.more_changes else ""
    return f'<ul class="files">\n{"".join(map(_change, one.changes))}{more}</ul>\n'


def _change(change: Change) -> str:
    told = "<small>changed, kept by hash</small>"
    if change.what != "binary":
        what = f" <small>{change.what}</small>" if change.what != "changed" else ""
        told = f'<span class="plus">+{change.added}</span> <span class="minus">{fmt.MINUS}{change.removed}</span>{what}'
    return f"<li><b>{html(change.path)}</b> {told}</li>\n"


def _diff(one: Iteration) -> str:
    return f'<pre class="diff" tabindex="0"><code>{diff_html(one.diff)}</code></pre>\n' if one.diff else ""


def diff_html(diff: str) -> str:
    """The lines of a diff, each marked as what it is."""
    lines = []
    for line in diff.split("\n"):
        kind = "file" if line.startswith(("--- ", "+++ ")) else LINE_KINDS.get(line[:1], "same")
        lines.append(f'<span class="{kind}">{html(line) or " "}\n</span>')
    return "".join(lines)
