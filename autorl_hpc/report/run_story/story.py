"""Build a run's story (`tell`) from its files: iterations, route, failure, resources and notes. Deterministic."""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Iterable, Sequence

from autorl_hpc.files.redact import masked
from autorl_hpc.report.format import clean
from autorl_hpc.report.routes import Planned, executed, mode_kept, planned
from autorl_hpc.report.run_folder import looks
from autorl_hpc.report.run_story.context import RunContext
from autorl_hpc.report.run_story.failures import GainBounds, IterationFacts, RunFacts, failure_of
from autorl_hpc.report.run_story.iterations import (
    Stretch,
    exits_between,
    facts_of,
    found_in_code,
    gain_of,
    iterations_of,
    opened,
    quoted_between,
    samples,
    shown_failure,
    shown_lines,
    shown_route,
    stretches_of,
)
from autorl_hpc.report.run_story.resources import reference_metrics, skill_metrics
from autorl_hpc.report.story_records import AGENT_PROGRAM, CHANGED, Failure, ResourcesUsed, RouteTold, Story
from autorl_hpc.states import Fault, Route, SubmissionState

log = logging.getLogger("autorl_hpc.report")

MAX_NOTES, MAX_VERSIONS = 12, 4
MAX_NAMED = 40
"""Limit for jobs and nodes; of a run that was requeued for weeks the last ones are shown."""

AGENT_VERSION = "agent_version"
"""The event with the version that the agent's program printed, once per attempt."""

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
    summary, view = known.summary, known.view
    stretches = stretches_of(known)
    facts = facts_of(known, stretches)
    route = _route(known, stretches)
    compared, writers = opened(view, known.chosen), [entry.writer for entry in known.entries]
    return Story(
        route=route,
        mode_kept=mode_kept(summary.mode, route.executed, disputed=route.disputed is not None),
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
        skill=skill_metrics(
            summary.agent,
            known.points,
            known.recorded,
            known.events,
            started=bool(view.attempts),
            said_something=known.log.size() > 0,
        ),
        jobs=_named(f"{w.role} {w.job_id}" for w in writers if w.job_id),
        nodes=_named(f"{w.role} on {w.host}" for w in writers if w.host),
        versions=_versions(known),
        opened=tuple(sorted({view.submissions[s.submission_id].same_as or s.submission_id for s in compared})),
        recorder=_notes(known),
    )


def _named(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(clean(name) or "" for name in list(dict.fromkeys(names))[-MAX_NAMED:])


def _versions(known: RunContext) -> dict[str, str]:
    """Return versions of the suite, its environment, the scoring engine and the agent's program, and the model in its trace."""
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
        if not points and not _last_sources(known):
            return RouteTold(executed=Route.NONE if known.view.sealed else Route.UNKNOWN)
        return shown_route(plan, executed(points, known.commands, None, plan, submitted=False), known.hidden)
    route = (_chosen(known, stretches) or stretches[-1]).route
    if {stretch.route.planned for stretch in stretches} == {route.planned}:
        return route
    plan = _whole_plan(known, stretches)
    if plan.route in (Route.UNKNOWN, Route.NONE):
        return route
    return route.model_copy(update={"planned": plan.route, "planned_by": shown_lines(plan.evidence, known.hidden)})


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
    """Return why the run did not help, or None."""
    summary, view = known.summary, known.view
    chosen = _chosen(known, stretches)
    gain = summary.improvement
    report_gain = None
    if gain is not None and gain.how != "base_kept":
        report_gain = GainBounds(gain.difference, gain.low, gain.high, f"ledger entry {len(known.entries):06d}")
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


def _notes(known: RunContext) -> tuple[str, ...]:
    """Return notes on what the recorder missed, and on crashes of it and of the gateway. Words that may name files are masked."""
    hidden, revisions = known.hidden, known.code.revisions
    notes = list(known.recorded.troubles)
    for event in known.events:
        if event["event"].startswith(RECORDER_EVENTS) and event["event"] not in NO_TROUBLE:
            told = {
                name: value if name == "watch" or isinstance(value, int) else hidden.said(masked(str(value)))
                for name, value in event.items()
                if name not in ("event", "at")
            }
            words = ", ".join(f"{name} {value}" for name, value in told.items())
            notes.append(event["event"].replace("_", " ") + (f": {words}" if words else ""))
    for name in GATEWAY_EVENTS:
        if count := sum(event["event"] == name for event in known.events):
            notes.append(f"{name.replace('_', ' ')}: {count} time{'s' * (count > 1)}")
    if left_out := max((r.left_out for r in revisions), default=0):
        notes.append(f"code: of up to {left_out} files beyond the limits nothing was kept")
    if by_name := max((r.by_name for r in revisions), default=0):
        but = "of such folders no more than the sources that lie in them directly was kept"
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
