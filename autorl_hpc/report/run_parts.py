"""What a run's page shows of its story, as rows of words and numbers: the same for HTML and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autorl_hpc.records.ledger import Contamination, Timings
from autorl_hpc.report import format as fmt
from autorl_hpc.report.spent import NAMES
from autorl_hpc.report.story import Iteration, ReferenceMetrics, Resources, Story
from autorl_hpc.report.summary import Point, RunSummary
from autorl_hpc.states import FailureKind, Route

BY_LEDGER = (FailureKind.NO_GAIN, FailureKind.ARTIFACT_REFUSED, FailureKind.INFRASTRUCTURE)
"""Failures that the ledger tells, and the table of submissions shows."""


class Row(NamedTuple):
    """One line of a table: a name, what is known, and what it means."""

    name: str
    shown: str
    says: str = ""


@dataclass(frozen=True)
class Shown:
    """What HTML and Markdown both show of a run, in words; made once for the two.

    Attributes:
        at, score, between: of each submission.
        facts: of each iteration; empty where `recorded` is false.
    """

    run: RunSummary
    at: Sequence[str]
    score: Sequence[str]
    between: Sequence[str]
    status: Sequence[str]
    facts: Sequence[Sequence[Row]]
    recorded: bool
    rest: Mapping[str, Any]


def shown(run: RunSummary) -> Shown:
    """The words of one run's pages."""
    story, points = run.story, run.trajectory
    recorded = is_recorded(story)
    return Shown(
        run=run,
        at=[fmt.duration(point.elapsed_s) for point in points],
        score=[fmt.points(point.score) for point in points],
        between=[fmt.between(point.low, point.high) for point in points],
        status=[_status(point, run) for point in points],
        facts=[iteration_rows(one) for one in story.iterations] if recorded else [],
        recorded=recorded,
        rest={
            "run": run,
            "story": story,
            "metrics": metric_rows(story.metrics),
            "budget": budget_rows(run),
            "used": used_rows(story.resources),
            "skill": skill_rows(story),
            "mode_told": mode_told(run),
            "places": "; ".join(story.jobs + story.nodes),
            "versions": "; ".join(f"{name} {version}" for name, version in story.versions.items()),
            "recorded": recorded,
        },
    )


def _status(point: Point, run: RunSummary) -> str:
    parts = [str(point.status)]
    parts += ["selected"] if point.submission_id == run.selected else []
    parts += ["final"] if point.final else []
    parts += ["base model"] if point.is_base else []
    parts += [f"same as {point.same_as}"] if point.same_as is not None else []
    return ", ".join(parts)


def lines(parts: Iterable[str]) -> str:
    """Parts that end their lines, as one text in a line of a template."""
    return "".join(parts).removesuffix("\n")


def looks_of(run: RunSummary) -> list[tuple[int | None, Contamination]]:
    """The looks for held-out items: at each submission (its number), and at the end (None)."""
    found: list[tuple[int | None, Contamination]] = [
        (point.submission_id, point.contamination) for point in run.trajectory if point.contamination
    ]
    return found + ([(None, run.contamination_end)] if run.contamination_end else [])


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
    if kept is None and run.story.route.disputed is not None:
        words += ": logs and code disagree"
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


def budget_rows(run: RunSummary) -> list[Row]:
    """Each part of the budget that was limited or used, for a run's page."""
    more = f", {fmt.duration(run.given_back_s)} given back" if run.given_back_s else ""
    rows = [Row("time", fmt.duration(run.elapsed_s), f"of {fmt.duration(run.budget_s)}{more}")]
    for name, words in NAMES.items():
        used, limit = run.used.get(name), run.limits.get(name)
        if used or limit is not None:
            amount = fmt.UNKNOWN if used is None else _amount(name, used)
            rows.append(Row(words, amount, "no limit" if limit is None else f"of {_amount(name, limit)}"))
    if run.reprompts:
        rows.append(Row("starts", str(run.starts), f"{run.reprompts} after an end of its own with budget left"))
    return rows


def _amount(name: str, value: float) -> str:
    if name == "cost_usd":
        return f"{value:.2f} USD" if value >= 0.1 else f"{value:.4f} USD"
    return f"{value:.2f}" if name == "gpu_hours" else f"{value:,.0f}"


def used_rows(used: Resources) -> list[Row]:
    """What was used, as far as it was measured."""
    gpus = fmt.gpus(used.gpus, used.gpu_model)
    cached = f"{count(used.tokens_cached)} of the input from a cache" if used.tokens_cached else ""
    failures = f"{used.tool_failures} failed" if used.tool_failures else ""
    told = {"gateway": "counted by the gateway", "trace": "as the agent's trace says", None: ""}
    priced = {**told, "gateway": "counted by the gateway, at the experiment's prices"}
    tokens = "; ".join(part for part in (told[used.tokens_from], cached) if part)
    rows = [
        Row("GPU-hours", fmt.UNKNOWN if used.gpu_hours is None else f"{used.gpu_hours:.2f}", gpus),
        Row("GPU use", share(used.gpu_use), "mean share of the time that kernels ran"),
        Row("CPU", fmt.UNKNOWN if used.cpu_hours is None else f"{used.cpu_hours:.2f} core-hours"),
        Row("memory", fmt.UNKNOWN if used.memory_peak_bytes is None else fmt.size(used.memory_peak_bytes), "peak"),
        Row("disk", fmt.UNKNOWN if used.disk_peak_bytes is None else fmt.size(used.disk_peak_bytes), "peak"),
        Row("tokens in", count(used.tokens_in), tokens),
        Row("tokens out", count(used.tokens_out)),
        Row("cost", fmt.UNKNOWN if used.cost_usd is None else f"{used.cost_usd:.2f} USD", priced[used.cost_from]),
        Row("driver calls", number(used.driver_calls), _calls_beside(used)),
        Row("tool calls", number(used.tool_calls), failures),
        Row("idle", time(used.idle_s), "no core, GPU or driver at work"),
        Row("waits for scores", time(used.wait_s), "together"),
        Row("revisions of code", number(used.revisions)),
    ]
    return [row for row in rows if row.shown != fmt.UNKNOWN]


def _calls_beside(used: Resources) -> str:
    """What the gateway saw beside the calls that were answered."""
    beside = [
        (used.calls_refused, "refused by the gateway"),
        (used.calls_failed, "not answered by the driver"),
        (used.tokens_estimated, "whose tokens are estimated"),
    ]
    return ", ".join(f"{number} {words}" for number, words in beside if number)


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
        Row(
            "training steps",
            "not logged" if trained and one.training_steps is None else number(one.training_steps),
            trained,
        ),
        Row("waited for its score", time(one.waited_s), timed(one.timings)),
        Row("tokens so far", count(one.tokens), cost),
        Row("GPU-hours so far", fmt.UNKNOWN if one.gpu_hours is None else f"{one.gpu_hours:.2f}"),
    ]
    return [row for row in rows if row.shown != fmt.UNKNOWN]


def timed(timings: Timings | None) -> str:
    """Where a grader's seconds went: `in the queue 3.1 s, loading 0.5 s, ...`."""
    if timings is None:
        return ""
    named = (
        ("in the queue", timings.waiting_s),
        ("loading", timings.load_s),
        ("swapping", timings.swap_s),
        ("generating", timings.generate_s),
        ("scoring", timings.score_s),
    )
    return ", ".join(f"{name} {value:.1f} s" for name, value in named if value is not None)


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
