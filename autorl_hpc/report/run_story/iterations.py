"""Cut a run at its submissions (`Stretch`): gain, route, settings, failures and logs of each; texts cleaned for the report."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import NamedTuple, TypeVar

from autorl_hpc.files.redact import masked
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records.entries import Contamination, Submission
from autorl_hpc.records.recorded import Seen
from autorl_hpc.report import scores
from autorl_hpc.report.format import clean, clean_code
from autorl_hpc.report.hidden_items import CODE_FOLDER, NOTHING, Hidden
from autorl_hpc.report.routes import Executed, Planned, executed, planned, settings, trained_in_vain
from autorl_hpc.report.run_folder import Unusable
from autorl_hpc.report.run_story.context import RunContext
from autorl_hpc.report.run_story.failures import CONTAMINATED_ITEMS, GainBounds, IterationFacts, ProcessExit
from autorl_hpc.report.run_story.logs import AGENT_LOG, LogExcerpt
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


class FeedbackGain(NamedTuple):
    """Gain over the base model in points, with the 95 % interval of the paired comparison."""

    difference: float
    low: float | None
    high: float | None
    won: int | None = None
    lost: int | None = None
    won_ids: tuple[str, ...] = ()
    lost_ids: tuple[str, ...] = ()


def opened(view: RunView, chosen: int | None) -> list[Submission]:
    """Return the submissions whose items are compared: all scored ones, or the chosen one if there are more than MAX_PAIRED."""
    scored = [s for s in view.accepted() if (score := view.score_of(s)) and score.evaluation.score is not None]
    return scored if len(scored) <= MAX_PAIRED else [s for s in scored if s.submission_id == chosen]


def feedback_gain(pair: PairedItems) -> FeedbackGain | None:
    """Return the gain: with Tango's interval for right or wrong outcomes, a t interval for graded or clustered items (a bootstrap
    would take a second per run). None for length-controlled win rates, which are not a mean over items."""
    if scores.is_fitted(pair.base, pair.new):
        return None
    base, new = pair.base.outcomes, pair.new.outcomes
    binary = pair.base.binary and pair.new.binary
    if binary and pair.clusters is None:
        found = stats.paired(base, new)
        interval: tuple[float | None, float | None] = found.low, found.high
    else:
        interval = _t_interval(base, new, pair.clusters)
    low, high = (None if bound is None else POINTS * bound for bound in interval)
    each = list(zip(pair.base.ids, base, new, strict=True))
    gain = FeedbackGain(POINTS * fmean(n - b for _, b, n in each), low, high)
    if not binary:
        return gain
    won, lost = tuple(name for name, b, n in each if n > b), tuple(name for name, b, n in each if n < b)
    return gain._replace(won=len(won), lost=len(lost), won_ids=won[:MAX_IDS], lost_ids=lost[:MAX_IDS])


def _t_interval(
    base: Sequence[float], new: Sequence[float], clusters: Sequence[str] | None
) -> tuple[float | None, float | None]:
    """Return the t interval. A cluster counts as one observation; no interval with fewer than three."""
    differences = [n - b for b, n in zip(base, new, strict=True)]
    of = clusters if clusters is not None else [str(i) for i in range(len(differences))]
    units = len(set(of))
    if units < MIN_UNITS:
        return None, None
    mean, half = fmean(differences), stats.t_quantile(units - 1) * math.sqrt(variance_of_mean(differences, of))
    interval = stats.Interval(max(-1.0, mean - half), min(1.0, mean + half))
    if half > NO_WIDTH:
        return interval
    found = totals(differences, of)
    return hull(interval, tango_of(found) if clusters is None else tango_of_clusters(found))


# --- findings from code and logs, cleaned for the report: masked, bounded, held-out items hidden

MAX_EVIDENCE_LINES = 8
MAX_NAMED = 2
"""Evidence lines that a sentence names."""

MAX_SAYS_CHARS = 240
MAX_WHERE_CHARS = 160
MAX_SETTINGS = 30
MAX_VALUE_CHARS = 120


def shown_lines(lines: Sequence[EvidenceLine], hidden: Hidden = NOTHING) -> tuple[EvidenceLine, ...]:
    """Return evidence for the report, without what `hidden` covers."""
    return tuple(
        EvidenceLine(
            where=clean(masked(hidden.place(line.where)), MAX_WHERE_CHARS) or "",
            says=hidden.instead(line.where) or clean_code(masked(line.says).strip(), MAX_SAYS_CHARS),
        )
        for line in list(dict.fromkeys(lines))[:MAX_EVIDENCE_LINES]
    )


def shown_route(plan: Planned, done: Executed, hidden: Hidden = NOTHING) -> RouteTold:
    """Return planned and executed route for the report."""
    by_code, by_logs = shown_lines(plan.evidence, hidden), shown_lines(done.evidence, hidden)
    code, logs = (
        "; ".join(f"{line.where}: {line.says}" for line in lines[:MAX_NAMED]) or "no line to show"
        for lines in (by_code, by_logs)
    )
    return RouteTold(
        planned=plan.route,
        executed=done.route,
        planned_by=by_code,
        executed_by=by_logs,
        disputed=f"by code {plan.route} ({code}), by logs {done.route} ({logs})" if done.disputed else None,
    )


def shown_failure(failure: Failure | None, hidden: Hidden = NOTHING) -> Failure | None:
    """Return a failure with its evidence cleaned."""
    return failure and Failure(kind=failure.kind, evidence=shown_lines(failure.evidence, hidden))


def shown_settings(settings: Sequence[Setting], hidden: Hidden = NOTHING) -> tuple[Setting, ...]:
    """Return settings cleaned for the report. A value is masked together with its name: `api_key` shows that it is a secret."""
    found = []
    for name, value, where in ((one.name, one.value, one.where) for one in settings[:MAX_SETTINGS]):
        shown = clean(masked(f"{name}={value}").removeprefix(f"{name}="), MAX_VALUE_CHARS) or ""
        place = clean(masked(hidden.place(where)), MAX_WHERE_CHARS) or ""
        found.append(Setting(name=clean(name, MAX_VALUE_CHARS) or "", value=hidden.value(shown, where), where=place))
    return tuple(found)


# --- stretches of time from one submission to the next


SeenT = TypeVar("SeenT", bound=Seen)


def between(seen: Sequence[SeenT], begin_s: float, end_s: float) -> Sequence[SeenT]:
    """Return items after `begin_s` and up to `end_s`; `seen` is sorted by time."""
    first, end = (bisect_right(seen, at_s, key=lambda one: one.elapsed_s) for at_s in (begin_s, end_s))
    return seen[first:end]


@dataclass(frozen=True)
class Stretch:
    """The time from one submission (or the start) to the next.

    Attributes:
        revision: the code at the submission; None: not recorded.
        gain: over the base model on the same items; None: the items were not read.
        settings: key settings of the code, cleaned.
    """

    point: Point
    begin_s: float
    revision: str | None
    trained: Trained
    gain: FeedbackGain | None
    route: RouteTold = field(default_factory=RouteTold)
    settings: tuple[Setting, ...] = ()

    @property
    def end_s(self) -> float:
        """Return the time of the submission in seconds of budget."""
        return self.point.elapsed_s


def stretches_of(known: RunContext) -> list[Stretch]:
    """Return the run's stretches in order, without the time after the last submission."""
    times = [point.elapsed_s for point in known.points]
    gains: dict[int, FeedbackGain | None] = {}
    for submission in opened(known.view, known.chosen):
        try:
            gains[submission.submission_id] = feedback_gain(known.pair_of(submission))
        except Unusable:
            continue
    found: dict[int, Stretch] = {}
    trainings = trained_by(known.recorded.training.records, times)
    for point, begin_s, trained in zip(known.points, [0.0, *times], trainings, strict=False):
        number = point.submission_id
        revision = known.view.submissions[number].code_revision or known.code.at(point.elapsed_s)
        stretch = Stretch(point, begin_s, revision, trained, gains.get(number))
        same = found.get(point.same_as) if point.same_as is not None else None
        if same is None:
            route, keys = _routed(known, stretch, found)
        else:  # the route of content that was submitted before, and the training since then, which is not in it
            vain = shown_lines(trained_in_vain(trained.points, same.point.submission_id), known.hidden)
            route = same.route.model_copy(update={"executed_by": (*same.route.executed_by, *vain)})
            keys = same.settings
        found[number] = replace(stretch, route=route, settings=keys)
    return list(found.values())


def _routed(
    known: RunContext, stretch: Stretch, earlier: Mapping[int, Stretch]
) -> tuple[RouteTold, tuple[Setting, ...]]:
    """Return the planned and executed route up to a submission, and the key settings of its code."""
    point, sources = stretch.point, known.code.sources(stretch.revision)
    commands = between(known.commands, stretch.begin_s, stretch.end_s)
    lines = [command.command for command in commands if command.command]
    plan = planned(sources, lines)
    fingerprint = known.view.fingerprint_of(known.view.submissions[point.submission_id])
    parent = fingerprint.parent if fingerprint else None
    done = executed(
        stretch.trained.points,
        commands,
        fingerprint,
        plan,
        is_base=point.is_base,
        parent=earlier[parent].route.executed if parent is not None and parent in earlier else None,
        parent_fingerprint=known.view.fingerprints.get(parent) if parent is not None else None,
        submitted=point.status is not SubmissionState.REFUSED,
    )
    return shown_route(plan, done, known.hidden), shown_settings(settings(sources, lines), known.hidden)


_SAMPLING = frozenset({Route.GRPO, Route.PPO, Route.RL, Route.SFT_RL, Route.REJECTION_SAMPLING, Route.DISTILLATION})
"""Routes that sample from a model."""


def samples(routes: Iterable[RouteTold]) -> bool | None:
    """Return whether any of several routes samples from a model; None if unknown."""
    each = {route for told in routes for route in (told.planned, told.executed)}
    return True if each & _SAMPLING else None if Route.UNKNOWN in each or not each else False


# --- what broke in a stretch of time, from the log, the processes and the trace

MAX_FAILED = 20
"""Failed programs per stretch that are used: an agent that retries a thousand times fails in one way."""


def exits_between(known: RunContext, begin_s: float, end_s: float) -> list[ProcessExit]:
    """Return the last failed programs and failed tool calls in a stretch of time."""
    programs = between(known.failed_programs, begin_s, end_s)[-MAX_FAILED:]
    exits = [ProcessExit(p.command, p.exit_code, p.elapsed_s) for p in programs]
    calls = between(known.failed_calls, begin_s, end_s)[-MAX_FAILED:]
    exits += [ProcessExit(e.command or "", e.exit_code, e.elapsed_s, e.ok) for e in calls]
    return sorted(exits, key=lambda one: one.elapsed_s)


def quoted_between(known: RunContext, begin_s: float, end_s: float) -> tuple[LogExcerpt, ...]:
    """Return tracebacks in tool results of traces other than agent.log, which is read directly and completely."""
    told = [
        LogExcerpt(e.source, e.offset, e.text.replace("\\n", "\n"), only_tracebacks=True)  # the recorder escapes it
        for e in between(known.failed_calls, begin_s, end_s)
        if e.source != AGENT_LOG and e.text and "Traceback" in e.text
    ]
    return tuple(told[-MAX_FAILED:])


def found_in_code(looks: Iterable[Contamination], hidden: Hidden) -> tuple[EvidenceLine, ...]:
    """Return files of the agent's code with whole held-out items, by name and count; never the items.

    Partial matches are mostly common phrases, and one or two whole items may be chance, so neither counts.
    """
    most: Counter[str] = Counter()
    for look in looks:
        held: Counter[str] = Counter()
        for one in look.found:
            if one.how == "exact" and one.file.startswith(CODE_FOLDER):
                held[one.file] += one.items
        most |= held
    return tuple(
        EvidenceLine(where="ledger: contamination", says=f"{hidden.name(file)}: {count} held-out items, whole")
        for file, count in most.items()
        if count >= CONTAMINATED_ITEMS
    )


def gain_of(known: RunContext, stretch: Stretch) -> GainBounds | None:
    """Return a stretch's gain on the feedback split, as input of the failure classifier."""
    point, gain = stretch.point, stretch.gain
    if point.score is None or known.base is None:
        return None
    number = known.score_entries.get(point.same_as or point.submission_id)
    where = "ledger" if number is None else f"ledger entry {number:06d}"
    return GainBounds(point.score - known.base, gain.low if gain else None, gain.high if gain else None, where)


def facts_of(known: RunContext, stretches: Sequence[Stretch]) -> list[IterationFacts]:
    """Return the failure classifier's input for each stretch."""
    scores = {stretch.point.submission_id: stretch.point.score for stretch in stretches}
    found = []
    before = known.base
    for stretch in stretches:
        point, begin_s, end_s = stretch.point, stretch.begin_s, stretch.end_s
        submission = known.view.submissions[point.submission_id]
        looks = [look for look in known.view.contaminations if look.submission_id == point.submission_id]
        print_ = point.fingerprint
        if print_ is not None and not print_.reason:  # the nearest earlier checkpoint, else the submission before
            before = known.base if print_.parent is None else scores.get(print_.parent)
        helped = point.status is SubmissionState.SCORED and point.score is not None and known.base is not None
        needs_log = not (helped and (point.score or 0.0) > (known.base or 0.0))
        logs = (*quoted_between(known, begin_s, end_s), *known.log.excerpts(begin_s, end_s)) if needs_log else ()
        found.append(
            IterationFacts(
                submission_id=point.submission_id,
                status=point.status,
                score=point.score,
                score_before=before,
                gain=gain_of(known, stretch),
                fault=point.fault,
                code=submission.code,
                message=known.hidden.said(submission.message) or point.reason,
                flags=print_.flags if print_ else (),
                contaminated_items=sum(point.contamination.whole.values()) if point.contamination else 0,
                hard_coded=found_in_code(looks, known.hidden),
                training=stretch.trained.points,
                dataset_rows=known.log.rows(begin_s, end_s) if needs_log else None,
                logs=logs,
                exits=exits_between(known, begin_s, end_s),
                samples=samples([stretch.route]),
            )
        )
        before = point.score
    return found


def iterations_of(
    known: RunContext, stretches: Sequence[Stretch], failures: Sequence[Failure | None]
) -> tuple[Iteration, ...]:
    """Return one iteration per stretch; `failures`: the failure of each, or None."""
    told: list[Iteration] = []
    best: float | None = None
    before: str | None = None
    for stretch, failure in zip(stretches, failures, strict=True):
        point, gain, at_s = stretch.point, stretch.gain or FeedbackGain(0.0, None, None), stretch.end_s
        best = max((score for score in (best, point.score) if score is not None), default=None)
        score = known.view.scores.get(point.submission_id)
        change = known.code.change(before, stretch.revision)
        told.append(
            Iteration(
                submission_id=point.submission_id,
                status=point.status,
                score=point.score,
                improvement=None if point.score is None or known.base is None else point.score - known.base,
                improvement_low=gain.low,
                improvement_high=gain.high,
                won=gain.won,
                lost=gain.lost,
                won_ids=gain.won_ids,
                lost_ids=gain.lost_ids,
                best_so_far=best,
                elapsed_s=at_s,
                duration_s=max(0.0, at_s - stretch.begin_s),
                waited_s=known.waits.get(point.submission_id),
                timings=score.evaluation.timings if score and score.evaluation.score is not None else None,
                tokens=known.spent.tokens_at(at_s),
                cost_usd=known.spent.cost_at(at_s),
                gpu_hours=known.usage.gpu_hours(at_s),
                route=stretch.route,
                settings=stretch.settings,
                revision=stretch.revision,
                **change._asdict(),
                training_steps=stretch.trained.steps,
                last_loss=stretch.trained.last_loss,
                last_reward=stretch.trained.last_reward,
                failure=shown_failure(failure, known.hidden),
            )
        )
        before = stretch.revision
    return tuple(told)
