"""Build a run's story (`tell`) from its files: iterations, route, failure, resources and notes. Deterministic."""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Sequence

from autorl_hpc.files.redact import masked
from autorl_hpc.records.recorded import CodeRevision
from autorl_hpc.report.format import clean
from autorl_hpc.report.hidden_items import Hidden
from autorl_hpc.report.routes import Planned, executed, mode_kept, planned
from autorl_hpc.report.run_folder import looks
from autorl_hpc.report.run_story.context import RunContext, jobs_of, nodes_of, versions_of
from autorl_hpc.report.run_story.failures import GainBounds, IterationFacts, RunFacts, failure_of
from autorl_hpc.report.run_story.iterations import (
    NO_PLAN,
    Stretch,
    any_samples,
    exits_between,
    facts_of,
    found_in_code,
    gain_of,
    iterations_of,
    opened,
    routes_of,
    shown_failure,
    shown_lines,
    shown_route,
    stretches_of,
    whole_log,
)
from autorl_hpc.report.run_story.resources import reference_metrics, skill_metrics
from autorl_hpc.report.story_records import Failure, Iteration, ResourcesUsed, RouteTold, Story
from autorl_hpc.states import Fault, Route, SubmissionState

log = logging.getLogger("autorl_hpc.report")

MAX_NOTES = 12
RECORDER_EVENTS = "recorder"
"""Prefix of the recorder's own events: what it missed, and its crashes."""

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
    stretches = stretches_of(known)
    summary, view = known.summary, known.view
    routes = routes_of(known, stretches)
    facts = facts_of(known, stretches, routes, summary.baseline_feedback.score if summary.baseline_feedback else None)
    failures = [failure_of(each) for each in facts]
    iterations = iterations_of(known, stretches, routes, failures)
    route = _route(known, iterations)
    compared = opened(view, summary.selected)
    return Story(
        route=route,
        mode_kept=mode_kept(summary.mode, route.executed, disputed=route.disputed is not None),
        iterations=iterations,
        failure=_failure(known, stretches, facts, failures, any_samples([route, *(r for r, _ in routes)])),
        metrics=reference_metrics(
            known.points,
            base_score=summary.baseline_feedback.score if summary.baseline_feedback else None,
            elapsed_s=summary.elapsed_s,
            allowed_s=summary.budget_s + summary.given_back_s,
            ended=view.sealed is not None,
            refused_unrecorded=view.sealed.refused_unrecorded if view.sealed else 0,
        ),
        resources=_resources(known),
        skill=skill_metrics(
            summary.agent,
            known.points,
            known.recorded,
            known.events,
            started=bool(view.attempts),
            said_something=known.log.size() > 0,
        ),
        jobs=jobs_of(known.entries),
        nodes=nodes_of(known.entries),
        versions=versions_of(known.record, known.engine, known.recorded.trace.records, known.events, known.hidden),
        opened=tuple(sorted({view.submissions[s.submission_id].same_as or s.submission_id for s in compared})),
        recorder=tuple(_notes(known)[:MAX_NOTES]),
    )


def _route(known: RunContext, iterations: Sequence[Iteration]) -> RouteTold:
    """Return the route. Executed: that of the selected, else best, else last submission. Planned: that of the whole run, because
    stages submitted one by one are one plan. Without a submission, both cover the whole run."""
    if iterations:
        return _of_whole_run(known, _chosen(known, iterations).route, iterations)
    plan, sources = _whole_plan(known, iterations)
    points = known.recorded.training.records
    if not sources and not points:
        return RouteTold(executed=Route.NONE if known.view.sealed else Route.UNKNOWN)
    done = executed(points, known.commands, None, plan, submitted=False)
    return shown_route(plan, done, known.hidden)


def _chosen(known: RunContext, iterations: Sequence[Iteration]) -> Iteration:
    by_number = {iteration.submission_id: iteration for iteration in iterations}
    if known.summary.selected in by_number:
        return by_number[known.summary.selected]
    best = known.view.best()
    return by_number.get(best.submission_id, iterations[-1]) if best else iterations[-1]


def _of_whole_run(known: RunContext, chosen: RouteTold, iterations: Sequence[Iteration]) -> RouteTold:
    """Return one iteration's route with the plan of all iterations; unchanged if all have the same plan."""
    if {iteration.route.planned for iteration in iterations} == {chosen.planned}:
        return chosen
    plan, _ = _whole_plan(known, iterations)
    if plan.route in (Route.UNKNOWN, Route.NONE):
        return chosen
    by = shown_lines(plan.evidence, known.hidden)
    return chosen.model_copy(update={"planned": plan.route, "planned_by": by})


def _whole_plan(known: RunContext, iterations: Sequence[Iteration]) -> tuple[Planned, dict[str, bytes]]:
    """Return the plan of the last state of the code with all commands of the run, and that code.

    A script that was run and later deleted is taken from the last submission that had it.
    """
    sources = dict(known.code.sources(known.code.revisions[-1].revision if known.code.revisions else None))
    lines = [command.command for command in known.commands if command.command]
    words = {posixpath.basename(word) for line in lines for word in line.split()}
    for revision in dict.fromkeys(iteration.revision for iteration in reversed(iterations)):
        for path, data in known.code.sources(revision).items():
            if posixpath.basename(path) in words:
                sources.setdefault(path, data)
    return planned(sources, lines) if sources else NO_PLAN, sources


def _failure(
    known: RunContext,
    stretches: Sequence[Stretch],
    of_each: Sequence[IterationFacts],
    failures: Sequence[Failure | None],
    samples: bool | None,
) -> Failure | None:
    """Return why the run did not help, or None. `failures`: of its iterations; `samples`: whether a model was sampled from."""
    summary, view = known.summary, known.view
    base = summary.baseline_feedback.score if summary.baseline_feedback else None
    chosen = next((s for s in stretches if s.point.submission_id == summary.selected), None)
    if chosen is None and (best := view.best()) is not None:
        chosen = next((s for s in stretches if s.point.submission_id == best.submission_id), None)
    gain = summary.improvement
    facts = RunFacts(
        budget_s=summary.budget_s,
        elapsed_s=summary.elapsed_s,
        iterations=of_each,
        failures=failures,
        ended_by=summary.ended_by,
        fault=Fault.CLUSTER if summary.excluded == "infrastructure" and summary.fault is None else summary.fault,
        reason=summary.reason,
        refused=summary.refused,
        first_accepted_s=next((p.elapsed_s for p in known.points if p.status is not SubmissionState.REFUSED), None),
        feedback_gain=gain_of(known, chosen, base),
        report_gain=GainBounds(gain.difference, gain.low, gain.high, f"ledger entry {len(known.entries):06d}")
        if gain is not None and gain.how != "base_kept"
        else None,
        optimism_gap=summary.gap.gap if summary.gap else None,
        flags=summary.flags,
        contaminated_items=max((sum(look.whole.values()) for look in looks(summary)), default=0),
        hard_coded=found_in_code(view.contaminations, known.hidden),
        training=known.recorded.training.records,
        logs=whole_log(known, summary.elapsed_s),
        exits=exits_between(known, 0.0, summary.elapsed_s),
        samples=samples,
    )
    return shown_failure(failure_of(facts), known.hidden)


def _resources(known: RunContext) -> ResourcesUsed:
    usage, spent, counted = known.usage, known.spent, known.counted
    waits = known.waits
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
        tokens_from=None if spent.tokens_in is None else "trace" if counted is None else "gateway",
        cost_from=None
        if spent.cost_usd is None
        else "trace"
        if counted is None or counted.cost_usd is None
        else "gateway",
        tokens_estimated=counted.estimated if counted else None,
        calls_refused=counted.refused if counted else None,
        calls_failed=counted.failed if counted else None,
        tool_calls=spent.tool_calls,
        tool_failures=spent.tool_failures,
        idle_s=usage.idle_s(spent.driver_spans),
        wait_s=sum(waits.values()) if waits else None,
        revisions=len(known.code.revisions) if known.recorded.revisions.present else None,
    )


def _notes(known: RunContext) -> list[str]:
    """Return notes on what the recorder missed, and on crashes of it and of the gateway."""
    notes = list(known.recorded.troubles)
    events = [event for event in known.events if event["event"] not in NO_TROUBLE]
    notes += [_event(event, known.hidden) for event in events if event["event"].startswith(RECORDER_EVENTS)]
    notes += _of_gateway(known)
    notes += _of_revisions(known.code.revisions, known.hidden)
    if known.recorded.usage.present:
        unseen = [str(number) for number in known.attempts if number not in known.usage.sampled]
        if unseen:
            notes.append(
                f"no samples of usage of attempt {', '.join(unseen)}: figures of usage are those of the others"
            )
    notes += list(dict.fromkeys(known.code.troubles))
    if known.spent.skipped:
        notes.append(f"{known.spent.skipped} lines of the agent's trace were too long to be read")
    if len(notes) > MAX_NOTES:
        notes[MAX_NOTES - 1 :] = [f"and {len(notes) - MAX_NOTES + 1} more"]
    return [clean(note) or "" for note in notes]


def _event(event: dict[str, object], hidden: Hidden) -> str:
    """Return an event in words, masked because its message may name files of the workspace."""
    shown = {
        name: value if name == "watch" or isinstance(value, int) else hidden.said(masked(str(value)))
        for name, value in event.items()
        if name not in ("event", "at")
    }
    told = ", ".join(f"{name} {value}" for name, value in shown.items())
    return f"{str(event['event']).replace('_', ' ')}: {told}" if told else str(event["event"]).replace("_", " ")


def _of_gateway(known: RunContext) -> list[str]:
    """Return a line per kind of gateway failure; the usage of interrupted calls is estimated."""
    names = [str(event["event"]) for event in known.events]
    often = {name: names.count(name) for name in GATEWAY_EVENTS}
    return [f"{name.replace('_', ' ')}: {count} time{'s' * (count > 1)}" for name, count in often.items() if count]


def _of_revisions(revisions: Sequence[CodeRevision], hidden: Hidden) -> list[str]:
    """Return notes on what the recorded states of the code lack. Reasons are masked, because they may name folders."""
    left_out = max((r.left_out for r in revisions), default=0)
    by_name = max((r.by_name for r in revisions), default=0)
    notes = [f"code: of up to {left_out} files beyond the limits nothing was kept"] if left_out else []
    if by_name:
        but = "of such folders no more than the sources that lie in them directly was kept"
        notes.append(f"code: up to {by_name} files and folders were left out by their names; {but}")
    reasons = [masked(reason) for reason in dict.fromkeys(r.reason for r in revisions if r.reason)]
    return notes + [f"code: {hidden.said(reason) if hidden.names else reason}" for reason in reasons]
