"""Build a run's story (`tell`) from its files: iterations from one submission to the next, route, failure, resources and notes."""

from __future__ import annotations

import logging
import math
import posixpath
import re
import signal
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from autorl_hpc.report.routes import (
    Executed,
    Planned,
    executed,
    has_effect,
    mode_kept,
    planned,
    rows_observed,
    settings,
    steps_observed,
    trained_in_vain,
)
from autorl_hpc.report.run_folder import Unusable, looks
from autorl_hpc.report.run_story.context import BY_HASH_MARK, RunContext
from autorl_hpc.report.run_story.failures import (
    CONTAMINATED_ITEMS,
    GainBounds,
    IterationFacts,
    ProcessExit,
    RunFacts,
    failure_of,
)
from autorl_hpc.report.run_story.logs import AGENT_LOG, LogExcerpt, crashes_in, last_error
from autorl_hpc.report.run_story.resources import (
    Trained,
    is_program,
    may_train,
    reference_metrics,
    trained_by,
)
from autorl_hpc.report.scores import PairedItems
from autorl_hpc.report.statistics import hull, tango_of, tango_of_clusters, totals, variance_of_mean
from autorl_hpc.report.story_records import (
    AGENT_PROGRAM,
    CHANGED,
    EvidenceLine,
    Failure,
    Iteration,
    Quoted,
    ResourcesUsed,
    RouteTold,
    Setting,
    Story,
)
from autorl_hpc.report.summary import Point
from autorl_hpc.scoring import stats
from autorl_hpc.states import Fault, Route, SubmissionState

# --- gain of each submission over the base model on the same feedback items

POINTS = 100.0
MAX_PAIRED = 12
"""With more scored submissions, only the items of the selected one (or the best, before one is selected) are read. The optimism
gap needs them anyway; fifty files per run would make a report over a thousand runs take a minute."""

NO_WIDTH = 1e-9
MIN_UNITS = 3  # items or clusters; with two, a t interval is wider than the scale


class FeedbackGain(NamedTuple):
    """Gain over the base model in points, with the 95 % interval of the paired comparison."""

    difference: float
    low: float | None
    high: float | None
    won: int | None = None
    lost: int | None = None
    p_value: float | None = None


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
    p_value: float | None = None
    interval: tuple[float | None, float | None]
    if binary and pair.clusters is None:
        found = stats.paired(base, new)
        p_value, interval = found.p_value, (found.low, found.high)
    else:
        interval = _t_interval(base, new, pair.clusters)
    low, high = (None if bound is None else POINTS * bound for bound in interval)
    changes = [n - b for b, n in zip(base, new, strict=True)]
    gain = FeedbackGain(POINTS * fmean(changes), low, high, p_value=p_value)
    return gain._replace(won=sum(c > 0 for c in changes), lost=sum(c < 0 for c in changes)) if binary else gain


def _t_interval(
    base: Sequence[float], new: Sequence[float], clusters: Sequence[str] | None
) -> tuple[float | None, float | None]:
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
MAX_NAMED = 2  # evidence lines that a sentence names
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
        source=done.source,
        disputed=f"planned {plan.route} ({code}), executed {done.route} ({logs})" if done.disputed else None,
    )


def shown_failure(failure: Failure | None, hidden: Hidden = NOTHING) -> Failure | None:
    return failure and Failure(kind=failure.kind, evidence=shown_lines(failure.evidence, hidden))


def shown_settings(settings: Sequence[Setting], hidden: Hidden = NOTHING) -> tuple[Setting, ...]:
    """Return settings cleaned for the report. A value is masked together with its name: `api_key` shows that it is a secret."""
    found = []
    for name, value, where, source in ((s.name, s.value, s.where, s.source) for s in settings[:MAX_SETTINGS]):
        shown = clean(masked(f"{name}={value}").removeprefix(f"{name}="), MAX_VALUE_CHARS) or ""
        place = clean(masked(hidden.place(where)), MAX_WHERE_CHARS) or ""
        told = clean(name, MAX_VALUE_CHARS) or ""
        found.append(Setting(name=told, value=hidden.value(shown, where), where=place, source=source))
    return tuple(found)


# --- the places that evidence names, with the lines around them

MAX_QUOTED, QUOTED_LINES = 12, 500
_PLACE = re.compile(r"agent\.log(?:, byte (\d{1,15})|(?:, step \d+)?, (\d{1,12}) s(?: to \d+ s)?)|(.+):(\d{1,7})")


def quoted_of(known: RunContext, cited: Iterable[tuple[str | None, str]]) -> tuple[Quoted, ...]:
    """Return the code and the parts of agent.log at these places (revision, place), without what is hidden."""
    found: dict[tuple[str | None, str], Quoted] = {}
    for revision, where in cited:
        match = _PLACE.fullmatch(where)
        if match is None or len(found) >= MAX_QUOTED or known.hidden.instead(where):
            continue
        byte, at_s, path, line = match.groups()
        if path is None:
            text = known.log.quoted(None if byte is None else int(byte), float(at_s or 0))
            found.setdefault((None, where), Quoted(path=where, first=0, text=_quote(text.split("\n"))))
        elif (revision, path) not in found:
            tree = known.code.tree(revision) or {}
            data = known.code.blob(tree.get(CODE_FOLDER + path) or tree.get(path, BY_HASH_MARK))
            lines = (data or b"").decode("utf-8", "replace").split("\n")
            first = 1 if len(lines) <= QUOTED_LINES else max(1, int(line) - QUOTED_LINES // 2)
            text = _quote(lines[first - 1 : first - 1 + QUOTED_LINES])
            if data is not None:
                found[revision, path] = Quoted(path=path, revision=revision, first=first, text=text)
    return tuple(found.values())


def _quote(lines: Sequence[str]) -> str:
    return "\n".join(clean_code(line, MAX_SAYS_CHARS) for line in masked("\n".join(lines)).split("\n"))


def _cited(story: Story, last: str | None) -> Iterator[tuple[str | None, str]]:
    """Yield the places that a story's evidence and settings name, those of the whole run first."""
    told: list[tuple[Story | Iteration, str | None]] = [(story, last)]
    told += [(one, one.revision) for one in story.iterations]
    for one, revision in told:
        lines = (*(one.failure.evidence if one.failure else ()), *one.route.planned_by, *one.route.executed_by)
        yield from ((revision, line.where) for line in lines)
    yield from ((each.revision, setting.where) for each in story.iterations for setting in each.settings)
    if story.last_error is not None:
        yield last, story.last_error.where


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
        steps = trained.steps
        if steps is None:
            steps = steps_observed(between(known.recorded.observed.records, begin_s, point.elapsed_s))
        stretch = Stretch(point, begin_s, revision, replace(trained, steps=steps), gains.get(number))
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
    point, sources = stretch.point, known.code.sources(stretch.revision)
    commands = between(known.commands, stretch.begin_s, stretch.end_s)
    lines = [command.command for command in commands if command.command]
    plan = planned(sources, lines)
    observed = between(known.recorded.observed.records, -1.0, stretch.end_s)
    fingerprint = known.view.fingerprint_of(known.view.submissions[point.submission_id])
    parent = fingerprint.parent if fingerprint else None
    done = executed(
        stretch.trained.points,
        commands,
        fingerprint,
        plan,
        observed=observed,
        begin_s=stretch.begin_s,
        checkpoint=known.view.submissions[point.submission_id].model_path,
        is_base=point.is_base,
        parent=earlier[parent].route.executed if parent is not None and parent in earlier else None,
        parent_fingerprint=known.view.fingerprints.get(parent) if parent is not None else None,
        submitted=point.status is not SubmissionState.REFUSED,
    )
    keys = settings(between(observed, stretch.begin_s, stretch.end_s), stretch.trained.points, plan)
    return shown_route(plan, done, known.hidden), shown_settings(keys, known.hidden)


# routes that sample from a model
_SAMPLING = frozenset({Route.GRPO, Route.PPO, Route.RL, Route.SFT_RL, Route.REJECTION_SAMPLING, Route.DISTILLATION})


def samples(routes: Iterable[RouteTold]) -> bool | None:
    """Return whether any of several routes samples from a model; None if unknown."""
    each = {route for told in routes for route in (told.planned, told.executed)}
    return True if each & _SAMPLING else None if Route.UNKNOWN in each or not each else False


# --- what broke in a stretch of time, from the log, the processes and the trace

MAX_FAILED = 20  # failed programs per stretch that are used: an agent that retries a thousand times fails in one way


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
    point = stretch.point
    if point.score is None or known.base is None:
        return None
    number = known.score_entries.get(point.same_as or point.submission_id)
    where = "ledger" if number is None else f"ledger entry {number:06d}"
    gain = stretch.gain or FeedbackGain(0.0, None, None)
    return GainBounds(point.score - known.base, gain.low, gain.high, where, gain.p_value)


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
                crashes=crashes_in(between(known.recorded.observed.records, begin_s, end_s))[-MAX_FAILED:],
                samples=samples([stretch.route]),
            )
        )
        before = point.score
    return found


def iterations_of(
    known: RunContext, stretches: Sequence[Stretch], failures: Sequence[Failure | None]
) -> tuple[Iteration, ...]:
    """Return one iteration per stretch; `failures`: the failure of each, or None."""
    told, observed = list[Iteration](), known.recorded.observed.records
    before: str | None = None
    for stretch, failure in zip(stretches, failures, strict=True):
        point, gain, at_s = stretch.point, stretch.gain or FeedbackGain(0.0, None, None), stretch.end_s
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
                elapsed_s=at_s,
                duration_s=max(0.0, at_s - stretch.begin_s),
                waited_s=known.waits.get(point.submission_id),
                tokens=known.spent.tokens_at(at_s),
                cost_usd=known.spent.cost_at(at_s),
                gpu_hours=known.usage.gpu_hours(at_s),
                route=stretch.route,
                settings=stretch.settings,
                revision=stretch.revision,
                **change._asdict(),
                rows=known.log.rows(stretch.begin_s, at_s) or rows_observed(between(observed, stretch.begin_s, at_s)),
                training_steps=stretch.trained.steps,
                last_loss=stretch.trained.last_loss,
                last_reward=stretch.trained.last_reward,
                failure=shown_failure(failure, known.hidden),
            )
        )
        before = stretch.revision
    return tuple(told)


log = logging.getLogger("autorl_hpc.report")
MAX_NOTES, MAX_VERSIONS = 12, 4
MAX_NAMED = 40  # limit for jobs and nodes; of a run that was requeued for weeks the last ones are shown
AGENT_VERSION = "agent_version"  # the event with the version that the agent's program printed, once per attempt
KILLED_BEFORE_S, KILLED_AFTER_S = (
    0.5,
    15.0,
)  # when the recorder sees that programs were killed with their agent, around its end
RECORDER_EVENTS = "recorder"  # prefix of the recorder's own events: what it missed, and its crashes
GATEWAY_EVENTS = ("gateway_hung", "gateway_crashed")
NO_TROUBLE = ("recorder_started", "recorder_ended")


def tell(known: RunContext) -> Story:
    """Return the story of a run; what was not recorded is null or empty.

    Its inputs are written by agents. A defect here costs the run its story, and the story says so, but never its scores.
    """
    try:
        return _told(known)
    except Exception as error:
        log.exception("the story of %s could not be told", known.run.run_id)
        return Story(recorder=(f"the story could not be told: {type(error).__name__}",))


def _told(known: RunContext) -> Story:
    summary, view = known.summary, known.view
    stretches = stretches_of(known)
    facts = facts_of(known, stretches)
    route = _route(known, stretches)
    writers = [entry.writer for entry in known.entries]
    disputed = route.disputed is not None and route.source != "observed"
    story = Story(
        route=route,
        mode_kept=mode_kept(summary.mode, route.executed, disputed=disputed),
        trained=_trained(known, stretches),
        iterations=iterations_of(known, stretches, [failure_of(each) for each in facts]),
        failure=_failure(known, stretches, facts, route),
        metrics=reference_metrics(
            known.points,
            base_score=known.base,
            elapsed_s=summary.elapsed_s,
            allowed_s=summary.budget_s + summary.given_back_s,
            ended=view.sealed is not None,
            refused_unrecorded=view.sealed.refused_unrecorded if view.sealed else 0,
        ),
        resources=_resources(known),
        jobs=_named(f"{w.role} {w.job_id}" for w in writers if w.job_id),
        nodes=_named(f"{w.role} on {w.host}" for w in writers if w.host),
        versions=_versions(known),
        recorder=_notes(known),
        last_error=_last_error(known),
    )
    chosen = _chosen(known, stretches)
    last = (chosen and chosen.revision) or (known.code.revisions[-1].revision if known.code.revisions else None)
    return story.model_copy(update={"quoted": quoted_of(known, _cited(story, last))})


def _last_error(known: RunContext) -> EvidenceLine | None:
    if not known.summary.exit_code or (found := last_error(known.log, known.recorded.observed.records)) is None:
        return None
    return shown_lines([EvidenceLine(where=found.where, says=found.text)], known.hidden)[0]


def _named(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(clean(name) or "" for name in list(dict.fromkeys(names))[-MAX_NAMED:])


def _versions(known: RunContext) -> dict[str, str]:
    trace, engine, hidden = known.recorded.trace.records, known.engine, known.hidden
    found = dict(sorted(known.record.versions.items()))
    if engine is not None:
        found["engine"] = f"{engine.backend}, {engine.dtype} on {engine.device}"
        found |= {f"engine: {name}": value for name, value in sorted(engine.versions.items())}
    told = [e["version"] for e in known.events if e["event"] == AGENT_VERSION and isinstance(e.get("version"), str)]
    if told:
        named = CHANGED.join(list(dict.fromkeys(told))[-MAX_VERSIONS:])
        found[AGENT_PROGRAM] = hidden.said(masked(f"{known.record.science.agent} {named}")) or ""
    if models := sorted({event.model for event in trace if event.model}):
        found["driver's model, by the trace"] = hidden.said(masked(", ".join(models))) or ""
    if formats := sorted({event.format for event in trace} - {""}):
        found["trace"] = ", ".join(formats)
    return {clean(name) or "": clean(value) or "" for name, value in found.items()}


def _chosen(known: RunContext, stretches: Sequence[Stretch]) -> Stretch | None:
    return next((stretch for stretch in stretches if stretch.point.submission_id == known.chosen), None)


def _route(known: RunContext, stretches: Sequence[Stretch]) -> RouteTold:
    """Return the route. Executed: that of the selected, else best, else last submission. Planned: that of the whole run, because
    stages submitted one by one are one plan. Without a submission, both cover the whole run."""
    if not stretches:
        points, plan = known.recorded.training.records, _whole_plan(known, ())
        observed = known.recorded.observed.records
        if not points and not observed and not _last_sources(known):
            return RouteTold(executed=Route.NONE if known.view.sealed else Route.UNKNOWN)
        done = executed(points, known.commands, None, plan, observed=observed, submitted=False)
        return shown_route(plan, done, known.hidden)
    route = (_chosen(known, stretches) or stretches[-1]).route
    if {stretch.route.planned for stretch in stretches} == {route.planned}:
        return route
    plan = _whole_plan(known, stretches)
    if plan.route in (Route.UNKNOWN, Route.NONE):
        return route
    return route.model_copy(update={"planned": plan.route, "planned_by": shown_lines(plan.evidence, known.hidden)})


def _trained(known: RunContext, stretches: Sequence[Stretch]) -> bool | None:
    """Return whether something was trained before the checkpoint that stands for the run; None if that is unknown."""
    chosen, processes = _chosen(known, stretches), known.recorded.processes.records
    if chosen is None:
        return None
    points = between(known.recorded.training.records, -1.0, chosen.end_s)
    if has_effect(points, between(known.recorded.observed.records, -1.0, chosen.end_s)):
        return True
    seen = {(one.pid, one.command): one for one in processes if one.began_s <= chosen.end_s}  # the last word on each
    return False if seen and not any(map(may_train, seen.values())) else None


def _whole_plan(known: RunContext, stretches: Sequence[Stretch]) -> Planned:
    """Return the plan of the last state of the code with all commands of the run.

    A script that was run and later deleted is taken from the last submission that had it.
    """
    sources = _last_sources(known)
    lines = [command.command for command in known.commands if command.command]
    words = {posixpath.basename(word) for line in lines for word in line.split()}
    for revision in dict.fromkeys(stretch.revision for stretch in reversed(stretches)):
        for path, data in known.code.sources(revision).items():
            if posixpath.basename(path) in words:
                sources.setdefault(path, data)
    return planned(sources, lines)


def _last_sources(known: RunContext) -> dict[str, bytes]:
    return known.code.sources(known.code.revisions[-1].revision if known.code.revisions else None)


def _failure(
    known: RunContext, stretches: Sequence[Stretch], of_each: Sequence[IterationFacts], route: RouteTold
) -> Failure | None:
    summary, view = known.summary, known.view
    chosen = _chosen(known, stretches)
    gain = summary.improvement
    report_gain = None
    if gain is not None and gain.how != "base_kept":
        where = f"ledger entry {len(known.entries):06d}"
        report_gain = GainBounds(gain.difference, gain.low, gain.high, where, gain.p_value)
    facts = RunFacts(
        budget_s=summary.budget_s,
        elapsed_s=summary.elapsed_s,
        iterations=of_each,
        ended_by=summary.ended_by,
        fault=Fault.CLUSTER if summary.excluded == "infrastructure" and summary.fault is None else summary.fault,
        reason=summary.reason,
        refused=summary.refused,
        first_accepted_s=next((p.elapsed_s for p in known.points if p.status is not SubmissionState.REFUSED), None),
        feedback_gain=gain_of(known, chosen) if chosen is not None else None,
        report_gain=report_gain,
        optimism_gap=summary.gap.gap if summary.gap else None,
        flags=summary.flags,
        contaminated_items=max((sum(look.whole.values()) for look in looks(summary)), default=0),
        hard_coded=found_in_code(view.contaminations, known.hidden),
        training=known.recorded.training.records,
        logs=(*quoted_between(known, -1.0, summary.elapsed_s), *known.log.whole()),
        exits=exits_between(known, 0.0, summary.elapsed_s),
        crashes=crashes_in(known.recorded.observed.records)[-MAX_FAILED:],
        samples=samples([route, *(stretch.route for stretch in stretches)]),
    )
    return shown_failure(failure_of(facts), known.hidden)


def _resources(known: RunContext) -> ResourcesUsed:
    usage, spent, counted = known.usage, known.spent, known.counted
    priced = counted is not None and counted.cost_usd is not None
    return ResourcesUsed(
        gpu_hours=usage.gpu_hours(),
        gpus=usage.gpu_counts(),
        gpu_model=clean(usage.gpu_model),
        gpu_use=usage.gpu_use,
        cpu_hours=usage.cpu_hours,
        memory_peak_bytes=usage.memory_peak_bytes,
        disk_peak_bytes=usage.disk_peak_bytes,
        tokens_in=spent.tokens_in,
        tokens_out=spent.tokens_out,
        tokens_cached=spent.tokens_cached,
        cost_usd=spent.cost_usd,
        driver_calls=spent.driver_calls,
        tokens_from=None if spent.tokens_in is None else "gateway" if counted else "trace",
        cost_from=None if spent.cost_usd is None else "gateway" if priced else "trace",
        tokens_estimated=counted.estimated if counted else None,
        calls_refused=counted.refused if counted else None,
        calls_failed=counted.failed if counted else None,
        tool_calls=spent.tool_calls,
        tool_failures=spent.tool_failures,
        idle_s=usage.idle_s(spent.driver_spans),
        wait_s=sum(known.waits.values()) if known.waits else None,
        revisions=len(known.code.revisions) if known.recorded.revisions.present else None,
    )


def _left_working(known: RunContext) -> list[str]:
    """Return for each end of the agent by itself which of its programs still worked: they were killed with it."""
    notes = []
    for event in known.events:
        if event["event"] != "agent_ended" or event.get("ended_by") != "agent_exit":
            continue
        at_s = told if isinstance(told := event.get("elapsed_s"), float) else math.inf
        last = between(known.recorded.processes.records, at_s - KILLED_BEFORE_S, at_s + KILLED_AFTER_S)
        dead = [p for p in last if p.what == "ended" and p.exit_code == -signal.SIGKILL]
        killed = [p.command for p in dead if is_program(p) and may_train(p)]
        if killed:
            named = "; ".join(known.hidden.said(masked(command)) or "" for command in killed[:MAX_NAMED])
            more = f" and {len(killed) - MAX_NAMED} more" if len(killed) > MAX_NAMED else ""
            words = f"the agent ended while {len(killed)} of its programs worked, and they were killed"
            notes.append(f"{words}: {named}{more}")
    return notes


def _notes(known: RunContext) -> tuple[str, ...]:
    hidden, revisions = known.hidden, known.code.revisions
    notes = [*_left_working(known), *known.recorded.troubles]
    for event in known.events:
        if event["event"].startswith(RECORDER_EVENTS) and event["event"] not in NO_TROUBLE:
            given = [(name, value) for name, value in event.items() if name not in ("event", "at")]
            plain = [name == "watch" or isinstance(value, int) for name, value in given]
            told = [v if ok else hidden.said(masked(str(v))) for (_, v), ok in zip(given, plain, strict=True)]
            words = ", ".join(f"{name} {value}" for (name, _), value in zip(given, told, strict=True))
            notes.append(event["event"].replace("_", " ") + (f": {words}" if words else ""))
    for name in GATEWAY_EVENTS:
        if count := sum(event["event"] == name for event in known.events):
            notes.append(f"{name.replace('_', ' ')}: {count} time{'s' * (count > 1)}")
    if left_out := max((r.left_out for r in revisions), default=0):
        notes.append(f"code: of up to {left_out} files beyond the limits nothing was kept")
    if by_name := max((r.by_name for r in revisions), default=0):
        but = "of such folders only the sources directly in them were kept"
        notes.append(f"code: up to {by_name} files and folders were left out by their names; {but}")
    reasons = [masked(reason) for reason in dict.fromkeys(r.reason for r in revisions if r.reason)]
    notes += [f"code: {hidden.said(reason) if hidden.names else reason}" for reason in reasons]
    unseen = [str(number) for number in known.usage.attempts if number not in known.usage.sampled]
    if known.recorded.usage.present and unseen:
        notes.append(f"no samples of usage of attempt {', '.join(unseen)}: figures of usage are those of the others")
    notes += known.code.troubles
    if known.spent.skipped:
        notes.append(f"{known.spent.skipped} lines of the agent's trace were too long to be read")
    if len(notes) > MAX_NOTES:
        notes[MAX_NOTES - 1 :] = [f"and {len(notes) - MAX_NOTES + 1} more"]
    return tuple(clean(note) or "" for note in notes)
