"""What a run's page shows of its story, as rows of words and numbers: the same for HTML and Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from autorl_hpc.report import format as fmt
from autorl_hpc.report import plot
from autorl_hpc.report.axes import axes_of
from autorl_hpc.report.story import Iteration, ReferenceMetrics, Resources, Story
from autorl_hpc.report.summary import RunSummary
from autorl_hpc.report.text import markdown
from autorl_hpc.states import FailureKind, Route

MARKDOWN_DIFF_LINES = 40
"""The page and summary.json have more of it."""


_PLAIN = re.compile(r"[\w .,;:%+\[\]\N{EN DASH}\N{MINUS SIGN}-]*")
"""Numbers and words of ours, which are no markup inside a cell: escaping them one by one took half of the time of a page."""


BY_LEDGER = (FailureKind.NO_GAIN, FailureKind.ARTIFACT_REFUSED, FailureKind.INFRASTRUCTURE)
"""Failures that the ledger tells, and the table of submissions shows."""


class Row(NamedTuple):
    """One line of a table: a name, what is known, and what it means."""

    name: str
    shown: str
    says: str = ""


def parts(run: RunSummary, *, html: bool) -> dict[str, Any]:
    """Everything that the templates need beside the summary."""
    from markupsafe import Markup

    story = run.story
    drawn = [(axis.name, Markup(plot.trajectory(run, axis))) for axis in axes_of(run)] if html else []
    return {
        "story": story,
        "plots": drawn,
        "points": {point.submission_id: point for point in run.trajectory},
        "metrics": metric_rows(story.metrics),
        "used": used_rows(story.resources),
        "skill": skill_rows(story),
        "mode_told": mode_told(run),
        "places": "; ".join(story.jobs + story.nodes),
        "versions": "; ".join(f"{name} {version}" for name, version in story.versions.items()),
        "recorded": is_recorded(story),
        "diff": (lambda one: Markup(diff_html(one))) if html else (lambda one: Markup(diff_markdown(one))),
        "facts": iteration_rows,
        "rows": (lambda rows: Markup(rows_html(rows))) if html else (lambda rows: Markup(rows_markdown(rows))),
    }


def rows_html(rows: Sequence[Row]) -> str:
    """Rows as a list of terms; built here, for a page of fifty iterations has hundreds."""
    told = []
    for row in rows:
        says = f" <small>{escape(row.says)}</small>" if row.says else ""
        told.append(f"<div><dt>{escape(row.name)}</dt><dd>{escape(row.shown)}{says}</dd></div>\n")
    return f'<dl class="facts tight">\n{"".join(told)}</dl>'


def rows_markdown(rows: Sequence[Row]) -> str:
    """Rows of a table of three columns."""
    return "".join(
        f"| {' | '.join(cell if _PLAIN.fullmatch(cell) else markdown(cell) for cell in row)} |\n" for row in rows
    )


def is_recorded(story: Story) -> bool:
    """Whether there is more to tell of the iterations than what stands in the table of submissions."""
    return any(
        one.revision
        or (one.failure and one.failure.kind not in BY_LEDGER)
        or one.training_steps
        or one.tokens is not None
        or one.gpu_hours is not None
        or (one.route.executed, one.route.planned) != (Route.UNKNOWN, Route.UNKNOWN)
        for one in story.iterations
    )


def mode_told(run: RunSummary) -> str:
    """The mode that was asked for against the route that was executed."""
    kept = run.story.mode_kept
    words = {True: "kept", False: "not kept", None: "nothing tells whether it was kept"}[kept]
    return f"{run.mode}: any route" if run.mode == "free" else f"{run.mode}: {words}"


def metric_rows(metrics: ReferenceMetrics) -> list[Row]:
    """AutoRL-Bench's metrics, by its names."""
    return [
        Row("valid_submission_rate", share(metrics.valid_submission_rate), "submissions that got a score"),
        Row("first_valid_idx", number(metrics.first_valid_idx), "the first of them, counting from 1"),
        Row("first_valid_delay", time(metrics.first_valid_delay), "when it was submitted"),
        Row(
            "time_to_first_improvement", time(metrics.time_to_first_improvement), "first feedback score above the base"
        ),
        Row("time_to_best", time(metrics.time_to_best), "when the best was submitted"),
        Row("monotonic_ratio", share(metrics.monotonic_ratio), "steps from score to score that go up"),
        Row("copy_model_count", number(metrics.copy_model_count), "submissions that are the base model"),
        Row("time_used_ratio", share(metrics.time_used_ratio), "of the budget and what was given back"),
        Row("last_submit_gap", time(metrics.last_submit_gap), "from the last submission to the end"),
    ]


def used_rows(used: Resources) -> list[Row]:
    """What was used, as far as it was measured."""
    gpus = f"{used.gpus} \N{MULTIPLICATION SIGN} {used.gpu_model or 'unknown model'}" if used.gpus else ""
    cached = f"{count(used.tokens_cached)} of the input from a cache" if used.tokens_cached else ""
    failures = f"{used.tool_failures} failed" if used.tool_failures else ""
    rows = [
        Row("GPU-hours", fmt.UNKNOWN if used.gpu_hours is None else f"{used.gpu_hours:.2f}", gpus),
        Row("GPU use", share(used.gpu_use), "mean share of the time that kernels ran"),
        Row("CPU", fmt.UNKNOWN if used.cpu_hours is None else f"{used.cpu_hours:.2f} core-hours"),
        Row("memory", fmt.UNKNOWN if used.memory_peak_bytes is None else fmt.size(used.memory_peak_bytes), "peak"),
        Row("disk", fmt.UNKNOWN if used.disk_peak_bytes is None else fmt.size(used.disk_peak_bytes), "peak"),
        Row("tokens in", count(used.tokens_in), cached),
        Row("tokens out", count(used.tokens_out)),
        Row("cost", fmt.UNKNOWN if used.cost_usd is None else f"{used.cost_usd:.2f} USD", "as the agent's trace says"),
        Row("driver calls", number(used.driver_calls)),
        Row("tool calls", number(used.tool_calls), failures),
        Row("idle", time(used.idle_s), "no core, GPU or driver at work"),
        Row("waits for scores", time(used.wait_s), "together"),
        Row("revisions of code", number(used.revisions)),
    ]
    return [row for row in rows if row.shown != fmt.UNKNOWN]


def skill_rows(story: Story) -> list[Row]:
    """The reference's summarization skill."""
    alone = {True: "yes", False: "no", None: fmt.UNKNOWN}[story.skill.without_human_help]
    return [
        Row("without human help", alone),
        Row("recovered from", number(story.skill.recovered_from), "failures before the last scored submission"),
        Row("stage reached", story.skill.stage_reached, "of design, implementation, execution, evaluation"),
    ]


def iteration_rows(one: Iteration) -> list[Row]:
    """The figures of one iteration that are known."""
    noise = fmt.signed_between(one.improvement_low, one.improvement_high)
    items = f"{one.won} items won, {one.lost} lost" if one.won is not None else ""
    says = "; ".join(part for part in (noise, items) if part)
    trained = "" if one.last_loss is None else f"last loss {one.last_loss:.4g}"
    trained += "" if one.last_reward is None else f"{', ' if trained else ''}last reward {one.last_reward:.4g}"
    cost = "" if one.cost_usd is None else f"{one.cost_usd:.2f} USD"
    rows = [
        Row("improvement on the base", fmt.signed(one.improvement), says or "no interval"),
        Row("best so far", fmt.points(one.best_so_far)),
        Row("took", time(one.duration_s), f"submitted at {fmt.duration(one.elapsed_s)}"),
        Row("route planned, executed", f"{one.route.planned}, {one.route.executed}"),
        Row("training steps", number(one.training_steps), trained),
        Row("waited for its score", time(one.waited_s)),
        Row("tokens so far", count(one.tokens), cost),
        Row("GPU-hours so far", fmt.UNKNOWN if one.gpu_hours is None else f"{one.gpu_hours:.2f}"),
    ]
    return [row for row in rows if row.shown != fmt.UNKNOWN]


def diff_html(one: Iteration) -> str:
    """The lines of a diff, each marked as what it is."""
    kinds = {"+": "add", "-": "del", "@": "hunk", "(": "hunk"}
    lines = []
    for line in (one.diff or "").split("\n"):
        kind = "file" if line.startswith(("--- ", "+++ ")) else kinds.get(line[:1], "same")
        lines.append(f'<span class="{kind}">{escape(line) or " "}\n</span>')
    return "".join(lines)


def diff_markdown(one: Iteration) -> str:
    """The beginning of a diff as an indented code block, out of which no line can break."""
    lines = (one.diff or "").split("\n")
    shown = lines[:MARKDOWN_DIFF_LINES]
    rest = [f"({len(lines) - len(shown)} more lines)"] if len(lines) > len(shown) else []
    return "\n".join(f"    {line}" for line in [*shown, *rest])


def share(value: float | None) -> str:
    """`71 %`."""
    return fmt.UNKNOWN if value is None else f"{100 * value:.0f} %"


def time(value: float | None) -> str:
    """`3.4 h`."""
    return fmt.UNKNOWN if value is None else fmt.duration(value)


def number(value: int | None) -> str:
    """`12`."""
    return fmt.UNKNOWN if value is None else str(value)


def count(value: int | None) -> str:
    """`3.4 M`: of tokens."""
    if value is None:
        return fmt.UNKNOWN
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return str(value)
