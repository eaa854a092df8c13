"""A run cut at its submissions: what was done from one to the next, and what it gave."""

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
from autorl_hpc.report import paired
from autorl_hpc.report.format import clean, clean_code
from autorl_hpc.report.hidden_items import CODE_FOLDER, NOTHING, Hidden
from autorl_hpc.report.paired import PairedItems
from autorl_hpc.report.routes import Executed, Planned, executed, planned, settings, trained_in_vain
from autorl_hpc.report.run_folder import Unusable
from autorl_hpc.report.run_story.context import RunContext
from autorl_hpc.report.run_story.failures import CONTAMINATED_ITEMS, GainBounds, IterationFacts, LogExcerpt, ProcessExit
from autorl_hpc.report.run_story.resources import Trained, trained_by
from autorl_hpc.report.statistics import hull, tango_of, tango_of_clusters, totals, variance_of_mean
from autorl_hpc.report.story_records import EvidenceLine, Failure, Iteration, RouteTold, Setting
from autorl_hpc.report.summary import Point
from autorl_hpc.scoring import stats
from autorl_hpc.states import Route, SubmissionState

# Each submission against the base model on the same feedback items: difference, its interval, items won and lost.

POINTS = 100.0
MAX_PAIRED = 12
"""Scored submissions of a run whose items files are all opened. Of a run with more only the selected one, or the best before one
is selected, is compared: its items are open for the optimism gap anyway, and fifty files a run would make a report of a
thousand runs take a minute."""

MAX_IDS = 20
NO_WIDTH = 1e-9
MIN_UNITS = 3
"""Items or clusters; of two, a t interval is wider than all points there are."""


@dataclass(frozen=True)
class FeedbackGain:
    """Points on the base model; interval of the paired comparison, 95 %."""

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
    """By submission, for those of which the items are opened and can be used.

    Args:
        pair_of: base model and submission on the feedback items; raises Unusable.
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
    """The submissions whose items are compared: all, or one of more than MAX_PAIRED."""
    scored = [s for s in view.accepted() if (score := view.score_of(s)) and score.evaluation.score is not None]
    if len(scored) <= MAX_PAIRED:
        return scored
    wanted = selected
    if wanted is None:
        best = view.best()
        wanted = best.submission_id if best else None
    return [submission for submission in scored if submission.submission_id == wanted]


def feedback_gain(pair: PairedItems) -> FeedbackGain | None:
    """Right or wrong outcomes: Tango's interval. Graded ones, and items in clusters: a t interval of the differences, for the
    bootstrap of the selected checkpoint would take a second a run. None: length-controlled win rates, which are no mean over
    items."""
    if paired.is_fitted(pair.base, pair.new):
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
    """Mean difference and its t interval; clusters count as one observation each. No interval from fewer than three."""
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


# What broke in a stretch of time: tracebacks and ends of programs, by the log, the processes and the agent's own trace.

SeenT = TypeVar("SeenT")
_time = attrgetter("elapsed_s")

MAX_FAILED = 20
"""Failed programs of one stretch that are looked at: an agent that tries again a thousand times fails in one way."""

AGENT_LOG = "agent.log"

_SAMPLING = frozenset({Route.GRPO, Route.PPO, Route.RL, Route.SFT_RL, Route.REJECTION_SAMPLING, Route.DISTILLATION})
"""Routes on which a model is sampled from."""


def exits_between(known: RunContext, begin_s: float, end_s: float) -> list[ProcessExit]:
    """The last programs that failed in a stretch of time, and the last calls of tools that did."""
    if not known.failed_programs and not known.failed_calls:  # most often
        return []
    seen = _in_interval(known.failed_programs, begin_s, end_s, _time)
    exits = [ProcessExit(p.command, p.exit_code, p.elapsed_s) for p in seen[-MAX_FAILED:]]
    calls = _in_interval(known.failed_calls, begin_s, end_s, _time_of_call)
    exits += [ProcessExit(command, e.exit_code, e.elapsed_s, e.ok) for e, command in calls[-MAX_FAILED:]]
    return sorted(exits, key=_time)


def _in_interval(
    seen: Sequence[SeenT], begin_s: float, end_s: float, time: Callable[[SeenT], float]
) -> Sequence[SeenT]:
    """Those after `begin_s`, up to `end_s`; `seen` in the order of their times."""
    return seen[bisect_right(seen, begin_s, key=time) : bisect_right(seen, end_s, key=time)]


def _time_of_call(call: tuple[TraceEvent, str]) -> float:
    return call[0].elapsed_s


def logs_between(known: RunContext, begin_s: float, end_s: float) -> tuple[LogExcerpt, ...]:
    """What the agent's log and traces tell of what broke in a stretch of time."""
    return (*_of_traces(known, begin_s, end_s), *known.log.excerpts(begin_s, end_s))


def whole_log(known: RunContext, end_s: float) -> tuple[LogExcerpt, ...]:
    """The same of the whole run; the log's times need not be known."""
    return (*_of_traces(known, -1.0, end_s), *known.log.whole())


def _of_traces(known: RunContext, begin_s: float, end_s: float) -> list[LogExcerpt]:
    """Tracebacks that tools returned, by traces that are files of their own; those in the log are read there, and whole."""
    events = [
        e
        for e, _ in _in_interval(known.failed_calls, begin_s, end_s, _time_of_call)
        if e.source != AGENT_LOG and e.text and "Traceback" in e.text
    ]
    return [_excerpt(event) for event in events[-MAX_FAILED:]]


def _excerpt(event: TraceEvent) -> LogExcerpt:
    text = (event.text or "").replace("\\n", "\n")  # as the recorder escapes it
    return LogExcerpt(event.source, event.offset, text, only_tracebacks=True)


def samples(route: RouteTold) -> bool | None:
    """Whether a route samples from a model; None: it is not known."""
    if route.planned in _SAMPLING or route.executed in _SAMPLING:
        return True
    return None if Route.UNKNOWN in (route.planned, route.executed) else False


def any_samples(routes: Iterable[RouteTold]) -> bool | None:
    """The same of several routes together."""
    each = [samples(route) for route in routes]
    return True if True in each else None if None in each or not each else False


# What others found in an agent's code and logs, made fit to be shown: cleaned, masked, bounded, held-out items hidden.

MAX_LINES = 8
MAX_NAMED = 2
"""Lines of evidence in a sentence."""

MAX_SAYS_CHARS = 240
MAX_WHERE_CHARS = 160
MAX_SETTINGS = 30
MAX_VALUE_CHARS = 120


def shown_lines(lines: Sequence[EvidenceLine], hidden: Hidden = NOTHING) -> tuple[EvidenceLine, ...]:
    """Evidence for people, without what `hidden` says."""
    distinct = list(dict.fromkeys(lines))[:MAX_LINES] if len(lines) > 1 else lines
    return tuple(_shown(line, hidden) for line in distinct)


def _shown(line: EvidenceLine, hidden: Hidden) -> EvidenceLine:
    where = clean(masked(hidden.place(line.where)), MAX_WHERE_CHARS) or ""
    says = hidden.instead(line.where) or clean_code(masked(line.says).strip(), MAX_SAYS_CHARS)
    return line if where == line.where and says == line.says else EvidenceLine(where=where, says=says)


def shown_route(plan: Planned, done: Executed, hidden: Hidden = NOTHING) -> RouteTold:
    """What code planned beside what was executed, for people."""
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
    """A failure with its evidence made fit to be shown."""
    if failure is None:
        return None
    return Failure(kind=failure.kind, evidence=shown_lines(failure.evidence, hidden))


def shown_settings(settings: Sequence[Setting], hidden: Hidden = NOTHING) -> tuple[Setting, ...]:
    """Settings for people."""
    return tuple(
        Setting(
            name=clean(one.name, MAX_VALUE_CHARS) or "",
            value=_value(one, hidden),
            where=clean(masked(hidden.place(one.where)), MAX_WHERE_CHARS) or "",
        )
        for one in settings[:MAX_SETTINGS]
    )


def _value(setting: Setting, hidden: Hidden) -> str:
    """Masked with its name: `api_key` tells what `value` alone doesn't."""
    shown = masked(f"{setting.name}={setting.value}").removeprefix(f"{setting.name}=")
    return hidden.value(clean(shown, MAX_VALUE_CHARS) or "", setting.where)


Command = ProcessSeen | TraceEvent
Routed = tuple[RouteTold, tuple[Any, ...]]
NO_PLAN = Planned(Route.UNKNOWN)
"""Of code that nobody recorded."""


@dataclass(frozen=True)
class Stretch:
    """From one submission, or the start, to the next.

    Attributes:
        revision: the code when the submission was made; None: not recorded.
        commands: command lines that were seen in it.
        gain: on the base model over the same items; None: no items were opened.
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
        """When the submission was made."""
        return self.point.elapsed_s


def stretches_of(known: RunContext) -> list[Stretch]:
    """The run's stretches in order, the time after the last submission left out."""
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
    """The route of each stretch, and the key settings of its code. The same content again came about in the same way."""
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
    """The route of a content that was submitted before, as submission `number`, with what was trained since and is not in it."""
    vain = shown_lines(trained_in_vain(stretch.trained.points, number), known.hidden)
    route, keys = same
    return route.model_copy(update={"executed_by": (*route.executed_by, *vain)}), keys


def iterations_of(
    known: RunContext, stretches: Sequence[Stretch], routes: Sequence[Routed], failures: Sequence[Failure | None]
) -> tuple[Iteration, ...]:
    """One iteration for each stretch; `failures`: why each did not help, as it was found."""
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
    """Planned and executed route of one stretch, and the key settings of its code."""
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
    """What the classifier of failures is told of each stretch."""
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
    """Feedback score of the checkpoint that the weights are nearest to; without a fingerprint, of the submission before."""
    if point.fingerprint is None or point.fingerprint.reason:
        return before.point.score if before else base
    parent = point.fingerprint.parent
    return base if parent is None else next((p.score for p in known.points if p.submission_id == parent), None)


def _needs_log(point: Point, base: float | None) -> bool:
    """Logs are read only for what did not help."""
    return point.status is not SubmissionState.SCORED or base is None or point.score is None or point.score <= base


def gain_of(known: RunContext, stretch: Stretch | None, base: float | None) -> GainBounds | None:
    """A stretch's gain on the feedback split, as the classifier of failures takes it."""
    if stretch is None or stretch.point.score is None or base is None:
        return None
    gain, where = stretch.gain, _where(known, stretch.point.submission_id)
    points = stretch.point.score - base
    return GainBounds(points, gain.low if gain else None, gain.high if gain else None, where)


def _where(known: RunContext, number: int) -> str:
    """The ledger entry of a submission's score."""
    seq = known.score_entries.get(known.view.submissions[number].same_as or number)
    return "ledger" if seq is None else f"ledger entry {seq:06d}"


def found_in_code(looks: Iterable[Contamination], hidden: Hidden) -> tuple[EvidenceLine, ...]:
    """Files of the agent's code in which held-out items stood whole, by name and number; never the items.

    Some words of an item are most often a common phrase, and one or two whole items may be chance.
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
