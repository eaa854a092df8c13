"""A run cut at its submissions: what was done from one to the next, and what it gave."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autorl_hpc.records.ledger import Contamination, Timings
from autorl_hpc.records.recorded import ProcessSeen, TraceEvent
from autorl_hpc.report.failures.facts import Exit, Gain, IterationFacts
from autorl_hpc.report.failures.rules import CONTAMINATED_ITEMS
from autorl_hpc.report.hiding import CODE_FOLDER, Hidden
from autorl_hpc.report.routes import Planned, executed, planned, settings, trained_in_vain
from autorl_hpc.report.story import EvidenceLine, Failure, Iteration, RouteTold
from autorl_hpc.report.summary import Point
from autorl_hpc.report.telling.broke import exits_between, logs_between, samples
from autorl_hpc.report.telling.gains import FeedbackGain, feedback_gains
from autorl_hpc.report.telling.known import Known
from autorl_hpc.report.telling.shown import shown_failure, shown_lines, shown_route, shown_settings
from autorl_hpc.report.telling.training import Trained, trained_by
from autorl_hpc.states import Route, SubmissionState

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
    exits: Sequence[Exit]
    gain: FeedbackGain | None

    @property
    def end_s(self) -> float:
        """When the submission was made."""
        return self.point.elapsed_s


def stretches_of(known: Known) -> list[Stretch]:
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


def _timings(known: Known, point: Point) -> Timings | None:
    score = known.view.scores.get(point.submission_id)
    return None if score is None or score.evaluation.score is None else score.evaluation.timings


def _revision(known: Known, point: Point) -> str | None:
    return known.view.submissions[point.submission_id].code_revision or known.code.at(point.elapsed_s)


def _between(commands: Sequence[Command], begin_s: float, end_s: float) -> Sequence[Command]:
    first, end = (bisect_right(commands, s, key=lambda c: c.elapsed_s) for s in (begin_s, end_s))
    return commands[first:end]


def routes_of(known: Known, stretches: Sequence[Stretch]) -> list[Routed]:
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


def _again(known: Known, stretch: Stretch, same: Routed, number: int) -> Routed:
    """The route of a content that was submitted before, as submission `number`, with what was trained since and is not in it."""
    vain = shown_lines(trained_in_vain(stretch.trained.points, number), known.hidden)
    route, keys = same
    return route.model_copy(update={"executed_by": (*route.executed_by, *vain)}), keys


def iterations_of(
    known: Known, stretches: Sequence[Stretch], routes: Sequence[Routed], failures: Sequence[Failure | None]
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


def _route(known: Known, stretch: Stretch, parsed: dict[Any, Any], routes: Mapping[int, Route]) -> Routed:
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
    known: Known, stretches: Sequence[Stretch], routes: Sequence[Routed], base: float | None
) -> list[IterationFacts]:
    """What the classifier of failures is told of each stretch."""
    befores = [None, *stretches][: len(stretches)]
    return [
        _facts(known, stretch, before, route, base)
        for stretch, before, (route, _) in zip(stretches, befores, routes, strict=True)
    ]


def _facts(
    known: Known, stretch: Stretch, before: Stretch | None, route: RouteTold, base: float | None
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


def _built_on(known: Known, point: Point, before: Stretch | None, base: float | None) -> float | None:
    """Feedback score of the checkpoint that the weights are nearest to; without a fingerprint, of the submission before."""
    if point.fingerprint is None or point.fingerprint.reason:
        return before.point.score if before else base
    parent = point.fingerprint.parent
    return base if parent is None else next((p.score for p in known.points if p.submission_id == parent), None)


def _needs_log(point: Point, base: float | None) -> bool:
    """Logs are read only for what did not help."""
    return point.status is not SubmissionState.SCORED or base is None or point.score is None or point.score <= base


def gain_of(known: Known, stretch: Stretch | None, base: float | None) -> Gain | None:
    """A stretch's gain on the feedback split, as the classifier of failures takes it."""
    if stretch is None or stretch.point.score is None or base is None:
        return None
    gain, where = stretch.gain, _where(known, stretch.point.submission_id)
    points = stretch.point.score - base
    return Gain(points, gain.low if gain else None, gain.high if gain else None, where)


def _where(known: Known, number: int) -> str:
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
