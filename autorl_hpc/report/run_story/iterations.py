"""Cut a run at its submissions (`Stretch`): gain, route, settings, failures and logs of each; texts cleaned for the report."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean
from typing import Any, TypeVar

from autorl_hpc.files.redact import masked
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records.entries import Contamination, Submission, Timings
from autorl_hpc.records.recorded import ProcessSeen, TraceEvent
from autorl_hpc.report import scores
from autorl_hpc.report.format import clean, clean_code
from autorl_hpc.report.hidden_items import CODE_FOLDER, NOTHING, Hidden
from autorl_hpc.report.routes import Executed, Planned, executed, planned, settings, trained_in_vain
from autorl_hpc.report.run_folder import Unusable
from autorl_hpc.report.run_story.context import RunContext
from autorl_hpc.report.run_story.failures import CONTAMINATED_ITEMS, GainBounds, IterationFacts, LogExcerpt, ProcessExit
from autorl_hpc.report.run_story.resources import Trained, trained_by
from autorl_hpc.report.scores import PairedItems
from autorl_hpc.report.statistics import hull, tango_of, tango_of_clusters, totals, variance_of_mean
from autorl_hpc.report.story_records import EvidenceLine, Failure, Iteration, RouteTold, Setting
from autorl_hpc.report.summary import Point
from autorl_hpc.scoring import stats
from autorl_hpc.states import Route, SubmissionState

# --- gain of each submission over the base model on the same feedback items

POINTS = 100.0
MAX_PAIRED = 12
"""With more scored submissions, only the items of the selected one (or the best, before one is selected) are read. The optimism
gap needs them anyway; fifty files per run would make a report over a thousand runs take a minute."""

MAX_IDS = 20
NO_WIDTH = 1e-9
MIN_UNITS = 3
"""Items or clusters; with two, a t interval is wider than the scale."""


@dataclass(frozen=True)
class FeedbackGain:
    """Gain over the base model in points, with the 95 % interval of the paired comparison."""

    difference: float
    low: float | None
    high: float | None
    won_ids: tuple[str, ...] = ()
    lost_ids: tuple[str, ...] = ()
    won: int | None = None
    lost: int | None = None


def feedback_gains(
    view: RunView, selected: int | None, pair_of: Callable[[Submission], PairedItems]
) -> Mapping[int, FeedbackGain]:
    """Return the gain of each submission whose items are read and usable.

    Args:
        pair_of: returns base model and submission on the feedback items; raises Unusable.
    """
    found: dict[int, FeedbackGain] = {}
    for submission in opened(view, selected):
        try:
            gain = feedback_gain(pair_of(submission))
        except Unusable:
            continue
        if gain is not None:
            found[submission.submission_id] = gain
    return found


def opened(view: RunView, selected: int | None) -> list[Submission]:
    """Return the submissions whose items are compared: all scored ones, or one if there are more than MAX_PAIRED."""
    scored = [s for s in view.accepted() if (score := view.score_of(s)) and score.evaluation.score is not None]
    if len(scored) <= MAX_PAIRED:
        return scored
    wanted = selected
    if wanted is None:
        best = view.best()
        wanted = best.submission_id if best else None
    return [submission for submission in scored if submission.submission_id == wanted]


def feedback_gain(pair: PairedItems) -> FeedbackGain | None:
    """Return the gain: with Tango's interval for right or wrong outcomes, a t interval for graded or clustered items (a bootstrap
    would take a second per run). None for length-controlled win rates, which are not a mean over items."""
    if scores.is_fitted(pair.base, pair.new):
        return None
    base, new = pair.base.outcomes, pair.new.outcomes
    binary = pair.base.binary and pair.new.binary
    low: float | None
    high: float | None
    if binary and pair.clusters is None:
        found = stats.paired(base, new)
        difference, low, high = found.difference, found.low, found.high
    else:
        difference, low, high = _t_interval(base, new, pair.clusters)
    each = list(zip(pair.base.ids, base, new, strict=True)) if binary else []
    won, lost = [name for name, b, n in each if n > b], [name for name, b, n in each if n < b]
    return FeedbackGain(
        difference=POINTS * difference,
        low=None if low is None else POINTS * low,
        high=None if high is None else POINTS * high,
        won_ids=tuple(won[:MAX_IDS]),
        lost_ids=tuple(lost[:MAX_IDS]),
        won=len(won) if binary else None,
        lost=len(lost) if binary else None,
    )


def _t_interval(
    base: Sequence[float], new: Sequence[float], clusters: Sequence[str] | None
) -> tuple[float, float | None, float | None]:
    """Return mean difference and t interval. A cluster counts as one observation; no interval with fewer than three."""
    differences = [n - b for b, n in zip(base, new, strict=True)]
    mean = fmean(differences)
    of = clusters if clusters is not None else [str(i) for i in range(len(differences))]
    units = len(set(of))
    if units < MIN_UNITS:
        return mean, None, None
    found = totals(differences, of)
    half = stats.t_quantile(units - 1) * math.sqrt(variance_of_mean(differences, of))
    interval = stats.Interval(max(-1.0, mean - half), min(1.0, mean + half))
    if half > NO_WIDTH:
        return mean, *interval
    return mean, *hull(interval, tango_of(found) if clusters is None else tango_of_clusters(found))


# --- what broke in a stretch of time, from the log, the processes and the trace

SeenT = TypeVar("SeenT")
_time = attrgetter("elapsed_s")

MAX_FAILED = 20
"""Failed programs per stretch that are used: an agent that retries a thousand times fails in one way."""

AGENT_LOG = "agent.log"

_SAMPLING = frozenset({Route.GRPO, Route.PPO, Route.RL, Route.SFT_RL, Route.REJECTION_SAMPLING, Route.DISTILLATION})
"""Routes that sample from a model."""


def exits_between(known: RunContext, begin_s: float, end_s: float) -> list[ProcessExit]:
    """Return the last failed programs and failed tool calls in a stretch of time."""
    if not known.failed_programs and not known.failed_calls:  # the common case
        return []
    seen = _in_interval(known.failed_programs, begin_s, end_s, _time)
    exits = [ProcessExit(p.command, p.exit_code, p.elapsed_s) for p in seen[-MAX_FAILED:]]
    calls = _in_interval(known.failed_calls, begin_s, end_s, _time_of_call)
    exits += [ProcessExit(command, e.exit_code, e.elapsed_s, e.ok) for e, command in calls[-MAX_FAILED:]]
    return sorted(exits, key=_time)


def _in_interval(
    seen: Sequence[SeenT], begin_s: float, end_s: float, time: Callable[[SeenT], float]
) -> Sequence[SeenT]:
    """Return items after `begin_s` and up to `end_s`; `seen` is sorted by time."""
    return seen[bisect_right(seen, begin_s, key=time) : bisect_right(seen, end_s, key=time)]


def _time_of_call(call: tuple[TraceEvent, str]) -> float:
    return call[0].elapsed_s


def logs_between(known: RunContext, begin_s: float, end_s: float) -> tuple[LogExcerpt, ...]:
    """Return excerpts of the agent's log and traces about what broke in a stretch of time."""
    return (*_of_traces(known, begin_s, end_s), *known.log.excerpts(begin_s, end_s))


def whole_log(known: RunContext, end_s: float) -> tuple[LogExcerpt, ...]:
    """Return these excerpts for the whole run; works without the log's times."""
    return (*_of_traces(known, -1.0, end_s), *known.log.whole())


def _of_traces(known: RunContext, begin_s: float, end_s: float) -> list[LogExcerpt]:
    """Return tracebacks in tool results of traces other than agent.log, which is read directly and completely."""
    events = [
        e
        for e, _ in _in_interval(known.failed_calls, begin_s, end_s, _time_of_call)
        if e.source != AGENT_LOG and e.text and "Traceback" in e.text
    ]
    return [_excerpt(event) for event in events[-MAX_FAILED:]]


def _excerpt(event: TraceEvent) -> LogExcerpt:
    text = (event.text or "").replace("\\n", "\n")  # the recorder escapes it
    return LogExcerpt(event.source, event.offset, text, only_tracebacks=True)


def samples(route: RouteTold) -> bool | None:
    """Return whether a route samples from a model; None if unknown."""
    if route.planned in _SAMPLING or route.executed in _SAMPLING:
        return True
    return None if Route.UNKNOWN in (route.planned, route.executed) else False


def any_samples(routes: Iterable[RouteTold]) -> bool | None:
    """Return whether any of several routes samples from a model; None if unknown."""
    each = [samples(route) for route in routes]
    return True if True in each else None if None in each or not each else False


# --- findings from code and logs, cleaned for the report: masked, bounded, held-out items hidden

MAX_LINES = 8
MAX_NAMED = 2
"""Evidence lines that a sentence names."""

MAX_SAYS_CHARS = 240
MAX_WHERE_CHARS = 160
MAX_SETTINGS = 30
MAX_VALUE_CHARS = 120


def shown_lines(lines: Sequence[EvidenceLine], hidden: Hidden = NOTHING) -> tuple[EvidenceLine, ...]:
    """Return evidence for the report, without what `hidden` covers."""
    distinct = list(dict.fromkeys(lines))[:MAX_LINES] if len(lines) > 1 else lines
    return tuple(_shown(line, hidden) for line in distinct)


def _shown(line: EvidenceLine, hidden: Hidden) -> EvidenceLine:
    where = clean(masked(hidden.place(line.where)), MAX_WHERE_CHARS) or ""
    says = hidden.instead(line.where) or clean_code(masked(line.says).strip(), MAX_SAYS_CHARS)
    return line if where == line.where and says == line.says else EvidenceLine(where=where, says=says)


def shown_route(plan: Planned, done: Executed, hidden: Hidden = NOTHING) -> RouteTold:
    """Return planned and executed route for the report."""
    by_code, by_logs = shown_lines(plan.evidence, hidden), shown_lines(done.evidence, hidden)
    disputed = None
    if done.disputed:
        disputed = f"by code {plan.route} ({_first(by_code)}), by logs {done.route} ({_first(by_logs)})"
    return RouteTold(
        planned=plan.route, executed=done.route, planned_by=by_code, executed_by=by_logs, disputed=disputed
    )


def _first(lines: Sequence[EvidenceLine]) -> str:
    return "; ".join(f"{line.where}: {line.says}" for line in lines[:MAX_NAMED]) or "no line to show"


def shown_failure(failure: Failure | None, hidden: Hidden = NOTHING) -> Failure | None:
    """Return a failure with its evidence cleaned."""
    if failure is None:
        return None
    return Failure(kind=failure.kind, evidence=shown_lines(failure.evidence, hidden))


def shown_settings(settings: Sequence[Setting], hidden: Hidden = NOTHING) -> tuple[Setting, ...]:
    """Return settings cleaned for the report."""
    return tuple(
        Setting(
            name=clean(one.name, MAX_VALUE_CHARS) or "",
            value=_value(one, hidden),
            where=clean(masked(hidden.place(one.where)), MAX_WHERE_CHARS) or "",
        )
        for one in settings[:MAX_SETTINGS]
    )


def _value(setting: Setting, hidden: Hidden) -> str:
    """Mask the value together with its name: `api_key` shows that it is a secret."""
    shown = masked(f"{setting.name}={setting.value}").removeprefix(f"{setting.name}=")
    return hidden.value(clean(shown, MAX_VALUE_CHARS) or "", setting.where)


Command = ProcessSeen | TraceEvent
Routed = tuple[RouteTold, tuple[Any, ...]]
NO_PLAN = Planned(Route.UNKNOWN)
"""The plan if no code was recorded."""


@dataclass(frozen=True)
class Stretch:
    """The time from one submission (or the start) to the next.

    Attributes:
        revision: the code at the submission; None: not recorded.
        commands: command lines observed in the stretch.
        gain: over the base model on the same items; None: the items were not read.
    """

    point: Point
    begin_s: float
    revision: str | None
    trained: Trained
    commands: Sequence[Command]
    exits: Sequence[ProcessExit]
    gain: FeedbackGain | None

    @property
    def end_s(self) -> float:
        """Return the time of the submission in seconds of budget."""
        return self.point.elapsed_s


def stretches_of(known: RunContext) -> list[Stretch]:
    """Return the run's stretches in order, without the time after the last submission."""
    points = known.points
    times = [p.elapsed_s for p in points]
    begins = [0.0, *times][: len(times)]
    gains = feedback_gains(known.view, known.summary.selected, known.pair_of)
    trained = trained_by(known.recorded.training.records, times)
    return [
        Stretch(
            point=point,
            begin_s=begin_s,
            revision=_revision(known, point),
            trained=of_it,
            commands=_between(known.commands, begin_s, point.elapsed_s),
            exits=exits_between(known, begin_s, point.elapsed_s),
            gain=gains.get(point.submission_id),
        )
        for point, begin_s, of_it in zip(points, begins, trained, strict=True)
    ]


def _timings(known: RunContext, point: Point) -> Timings | None:
    score = known.view.scores.get(point.submission_id)
    return None if score is None or score.evaluation.score is None else score.evaluation.timings


def _revision(known: RunContext, point: Point) -> str | None:
    return known.view.submissions[point.submission_id].code_revision or known.code.at(point.elapsed_s)


def _between(commands: Sequence[Command], begin_s: float, end_s: float) -> Sequence[Command]:
    first, end = (bisect_right(commands, s, key=lambda c: c.elapsed_s) for s in (begin_s, end_s))
    return commands[first:end]


def routes_of(known: RunContext, stretches: Sequence[Stretch]) -> list[Routed]:
    """Return route and key settings of each stretch. A resubmitted content keeps its first route."""
    routes: dict[int, Route] = {}
    by_number: dict[int, Routed] = {}
    parsed: dict[Any, Any] = {}
    for stretch in stretches:
        point = stretch.point
        same = by_number.get(point.same_as) if point.same_as is not None else None
        if same is not None and point.same_as is not None:
            routed = _again(known, stretch, same, point.same_as)
        else:
            routed = _route(known, stretch, parsed, routes)
        by_number[point.submission_id] = routed
        routes[point.submission_id] = routed[0].executed
    return [by_number[stretch.point.submission_id] for stretch in stretches]


def _again(known: RunContext, stretch: Stretch, same: Routed, number: int) -> Routed:
    """Return the route of content first submitted as `number`, adding the training since then, which is not in it."""
    vain = shown_lines(trained_in_vain(stretch.trained.points, number), known.hidden)
    route, keys = same
    return route.model_copy(update={"executed_by": (*route.executed_by, *vain)}), keys


def iterations_of(
    known: RunContext, stretches: Sequence[Stretch], routes: Sequence[Routed], failures: Sequence[Failure | None]
) -> tuple[Iteration, ...]:
    """Return one iteration per stretch; `failures`: the failure of each, or None."""
    told: list[Iteration] = []
    best: float | None = None
    base = known.summary.baseline_feedback.score if known.summary.baseline_feedback else None
    before: Stretch | None = None
    for stretch, (route, keys), failure in zip(stretches, routes, failures, strict=True):
        point = stretch.point
        if point.score is not None:
            best = point.score if best is None else max(best, point.score)
        change = known.code.change(before.revision if before else None, stretch.revision)
        gain = stretch.gain
        told.append(
            Iteration(
                submission_id=point.submission_id,
                status=point.status,
                score=point.score,
                improvement=None if point.score is None or base is None else point.score - base,
                improvement_low=gain.low if gain else None,
                improvement_high=gain.high if gain else None,
                won=gain.won if gain else None,
                lost=gain.lost if gain else None,
                won_ids=gain.won_ids if gain else (),
                lost_ids=gain.lost_ids if gain else (),
                best_so_far=best,
                elapsed_s=point.elapsed_s,
                duration_s=max(0.0, point.elapsed_s - stretch.begin_s),
                waited_s=known.waits.get(point.submission_id),
                timings=_timings(known, point),
                tokens=known.spent.tokens_at(point.elapsed_s),
                cost_usd=known.spent.cost_at(point.elapsed_s),
                gpu_hours=known.usage.gpu_hours(point.elapsed_s),
                route=route,
                settings=keys,
                revision=stretch.revision,
                changes=change.changes,
                more_changes=change.more_changes,
                diff=change.diff,
                training_steps=stretch.trained.steps,
                last_loss=stretch.trained.last_loss,
                last_reward=stretch.trained.last_reward,
                failure=shown_failure(failure, known.hidden),
            )
        )
        before = stretch
    return tuple(told)


def _route(known: RunContext, stretch: Stretch, parsed: dict[Any, Any], routes: Mapping[int, Route]) -> Routed:
    """Return the planned and executed route of a stretch, and the key settings of its code."""
    point = stretch.point
    sources = known.code.sources(stretch.revision)
    lines = [command.command for command in stretch.commands if command.command]
    plan = planned(sources, lines, parsed) if sources else NO_PLAN
    fingerprint = known.view.fingerprint_of(known.view.submissions[point.submission_id])
    parent = fingerprint.parent if fingerprint else None
    done = executed(
        stretch.trained.points,
        stretch.commands,
        fingerprint,
        plan,
        is_base=point.is_base,
        parent=routes.get(parent) if parent is not None else None,
        parent_fingerprint=known.view.fingerprints.get(parent) if parent is not None else None,
        submitted=point.status is not SubmissionState.REFUSED,
    )
    route = shown_route(plan, done, known.hidden)
    return route, shown_settings(settings(sources, lines, parsed), known.hidden) if sources else ()


def facts_of(
    known: RunContext, stretches: Sequence[Stretch], routes: Sequence[Routed], base: float | None
) -> list[IterationFacts]:
    """Return the failure classifier's input for each stretch."""
    befores = [None, *stretches][: len(stretches)]
    return [
        _facts(known, stretch, before, route, base)
        for stretch, before, (route, _) in zip(stretches, befores, routes, strict=True)
    ]


def _facts(
    known: RunContext, stretch: Stretch, before: Stretch | None, route: RouteTold, base: float | None
) -> IterationFacts:
    point = stretch.point
    submission = known.view.submissions[point.submission_id]
    needs_log = _needs_log(point, base)
    return IterationFacts(
        submission_id=point.submission_id,
        status=point.status,
        score=point.score,
        base_score=base,
        score_before=_built_on(known, point, before, base),
        gain=gain_of(known, stretch, base),
        fault=point.fault,
        code=submission.code,
        message=known.hidden.said(submission.message) or point.reason,
        flags=point.fingerprint.flags if point.fingerprint else (),
        contaminated_items=sum(point.contamination.whole.values()) if point.contamination else 0,
        hard_coded=found_in_code(known.looks_at.get(point.submission_id, ()), known.hidden),
        training=stretch.trained.points,
        dataset_rows=known.log.rows(stretch.begin_s, stretch.end_s) if needs_log else None,
        logs=logs_between(known, stretch.begin_s, stretch.end_s) if needs_log else (),
        exits=stretch.exits,
        samples=samples(route),
    )


def _built_on(known: RunContext, point: Point, before: Stretch | None, base: float | None) -> float | None:
    """Return the feedback score of the nearest earlier checkpoint; without a fingerprint, that of the previous submission."""
    if point.fingerprint is None or point.fingerprint.reason:
        return before.point.score if before else base
    parent = point.fingerprint.parent
    return base if parent is None else next((p.score for p in known.points if p.submission_id == parent), None)


def _needs_log(point: Point, base: float | None) -> bool:
    """Return whether to read logs: only for submissions that did not help."""
    return point.status is not SubmissionState.SCORED or base is None or point.score is None or point.score <= base


def gain_of(known: RunContext, stretch: Stretch | None, base: float | None) -> GainBounds | None:
    """Return a stretch's gain on the feedback split, as input of the failure classifier."""
    if stretch is None or stretch.point.score is None or base is None:
        return None
    gain, where = stretch.gain, _where(known, stretch.point.submission_id)
    points = stretch.point.score - base
    return GainBounds(points, gain.low if gain else None, gain.high if gain else None, where)


def _where(known: RunContext, number: int) -> str:
    """Return the ledger entry of a submission's score, in words."""
    seq = known.score_entries.get(known.view.submissions[number].same_as or number)
    return "ledger" if seq is None else f"ledger entry {seq:06d}"


def found_in_code(looks: Iterable[Contamination], hidden: Hidden) -> tuple[EvidenceLine, ...]:
    """Return files of the agent's code with whole held-out items, by name and count; never the items.

    Partial matches are mostly common phrases, and one or two whole items may be chance, so neither counts.
    """
    most: dict[str, int] = {}
    for look in looks:
        held: Counter[str] = Counter()
        for one in look.found:
            if one.how == "exact" and one.file.startswith(CODE_FOLDER):
                held[one.file] += one.items
        most |= {file: max(count, most.get(file, 0)) for file, count in held.items()}
    return tuple(
        EvidenceLine(where="ledger: contamination", says=f"{hidden.name(file)}: {count} held-out items, whole")
        for file, count in most.items()
        if count >= CONTAMINATED_ITEMS
    )
