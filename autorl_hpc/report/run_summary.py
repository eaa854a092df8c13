"""Digest one run folder into a RunSummary (`digest`): scores, improvement, optimism gap, noise, story, whether it counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.frozen_records import read_run
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.entries import Evaluation, FingerprintFlag, Submission
from autorl_hpc.records.exchange import Baseline, Clock
from autorl_hpc.records.run import RunRecord
from autorl_hpc.report.axes import used_of
from autorl_hpc.report.format import clean
from autorl_hpc.report.groups import limits_of
from autorl_hpc.report.paired import PairedItems, gain, on_all_items, optimism
from autorl_hpc.report.run_folder import (
    Bases,
    Items,
    ItemsReader,
    ReadableLedger,
    Unusable,
    contamination_of,
    looks,
    ranks,
    read_chain,
    sandboxes,
    worst_found,
)
from autorl_hpc.report.run_story.context import RunContext
from autorl_hpc.report.run_story.story import tell
from autorl_hpc.report.scores import (
    ScoreInterval,
    baseline_summary,
    intervals_of,
    needs_items,
    noise_of_queries,
    points_of,
    score_summary,
    visible_gain,
)
from autorl_hpc.report.summary import UNTRIED, BaselineSummary, Excluded, Gain, Gap, RunSummary, figures_of
from autorl_hpc.report.tables import notes_of, notes_of_story
from autorl_hpc.states import EndedBy, Fault, Protocol, RunState, Split, SubmissionState

INFRASTRUCTURE = (Fault.CLUSTER, Fault.GRADER)


class Library:
    """Baselines and items files of all runs in a report, each read once."""

    def __init__(self) -> None:
        self.items = ItemsReader()
        self._bases: dict[Path, Bases] = {}

    def bases(self, experiment: ExperimentDir) -> Bases:
        """Return the baselines of an experiment."""
        return self._bases.setdefault(experiment.path, Bases(experiment.baselines))


@dataclass
class PairedFindings:
    """The comparison of base model and selected checkpoint, with the troubles met."""

    improvement: Gain | None = None
    gap: Gap | None = None
    excluded: Excluded | None = None
    troubles: list[str] = field(default_factory=list)
    commonest_output_share: float | None = None
    secondary: str | None = None


def digest(run: RunDir, library: Library, chain: ReadableLedger | None = None) -> RunSummary:
    """Summarise one run; of a live or damaged run, what can be read.

    Raises:
        AutorlError: run.json can't be read.
    """
    return _Digest(run, read_run(run), chain or read_chain(run), library).summary()


class _Digest:
    """The steps of `digest`, which share the run's records."""

    def __init__(self, run: RunDir, record: RunRecord, chain: ReadableLedger, library: Library) -> None:
        self.run = run
        self.record = record
        self.science = record.science
        self.chain = chain
        self.view: RunView = chain.view
        self.items = library.items
        self.bases = library.bases(ExperimentDir(run.path.parent))
        self.is_paper = self.science.protocol is Protocol.PAPER
        self.feedback_split = Split.REPORT if self.is_paper else Split.FEEDBACK
        self.found = PairedFindings()

    def summary(self) -> RunSummary:
        """Return the whole summary."""
        view, science, found = self.view, self.science, self.found
        feedback_base, report_base = self._base(self.feedback_split), self._base(Split.REPORT)
        feedback_base, report_base = self._as_closed(feedback_base), self._as_closed(report_base)
        self._judge(feedback_base, report_base)
        intervals = self._intervals()
        points = points_of(view, intervals)
        best, report = view.best(), view.closed.report if view.closed else None
        best_score = view.score_of(best) if best else None
        fault, reason = self._fault()
        sandbox, network = self.view.sandbox or (UNTRIED, self.science.network)
        elapsed_s, given_back_s = self._used()
        count = Counter(p.status for p in points)
        unrecorded = view.sealed.refused_unrecorded if view.sealed else 0
        summary = RunSummary(
            tool_version=__version__,
            run_id=clean(self.record.run_id) or "",
            experiment=self.record.experiment,
            task=science.task,
            agent=science.agent,
            agent_hash=self.record.agent_hash,
            driver=science.driver,
            base_model=science.base_model,
            base_model_content_hash=science.base_model_content_hash,
            mode=clean(science.mode) or "",
            seed=science.seed,
            protocol=science.protocol,
            state=RunState.DAMAGED if self.chain.damage else view.state,
            damage=clean(self.chain.damage),
            budget_s=science.budget.wall_clock_s,
            limits=limits_of(science.budget),
            environment_hash=science.environment_hash,
            elapsed_s=elapsed_s,
            given_back_s=given_back_s,
            used=used_of(view),
            starts=view.sealed.starts if view.sealed else 0,
            reprompts=view.sealed.reprompts if view.sealed else 0,
            attempts=view.attempt,
            accepted=len(view.accepted()),
            refused=count[SubmissionState.REFUSED] + unrecorded,
            failed=count[SubmissionState.FAILED],
            waiting=count[SubmissionState.ACCEPTED],
            baseline_feedback=self._shown_base(feedback_base),
            best_feedback=score_summary(
                best_score.evaluation, best.submission_id, self._items_behind(best, best_score.evaluation)
            )
            if best and best_score
            else None,
            selected=view.closed.selected if view.closed else None,
            selected_by=view.closed.selected_by if view.closed else None,
            report=score_summary(report, view.closed.selected, self._items_behind(self._chosen(), report))
            if report and view.closed
            else None,
            baseline_report=self._shown_base(report_base),
            figures=figures_of(view, feedback_base, report_base),
            improvement=found.improvement,
            gap=found.gap,
            noise=noise_of_queries(view, intervals),
            visible_gain_report=self._visible(report_base),
            visible_gain_feedback=self._visible(feedback_base),
            counted=found.excluded is None,
            excluded=found.excluded,
            ranked=ranks(sandbox, self._flags()),
            flags=self._flags(),
            contamination_end=contamination_of(view, None),
            fault=fault,
            reason=clean(reason),
            ended_by=view.sealed.ended_by if view.sealed else None,
            exit_code=view.sealed.exit_code if view.sealed else None,
            trajectory=points,
            recipe_hash=self.record.recipe_hash,
            engine_hash=self._engine(report, report_base, feedback_base),
            feedback_of=science.splits[Split.FEEDBACK].n if science.feedback_part else None,
            split_hashes={str(name): science.split_hash(name) for name in sorted(science.splits)},
            code_hash=self.record.code_hash,
            task_hash=self.record.task_hash,
            genesis=self.chain.genesis,
            ledger_head=self.chain.hashes[-1] if self.chain.hashes else self.chain.genesis,
            ledger_entries=len(self.chain.hashes),
            network=network,
            sandbox=sandbox,
            sandboxes=sandboxes(view),
        )
        looked = looks(summary)
        summary = summary.model_copy(update={"contaminated": worst_found(looked), "looks": len(looked)})
        summary = summary.model_copy(
            update={"notes": notes_of(summary, found.troubles, found.commonest_output_share, found.secondary)}
        )
        story = tell(self._known(summary, feedback_base))
        return summary.model_copy(update={"story": story, "notes": (*summary.notes, *notes_of_story(story))})

    def _known(self, summary: RunSummary, feedback_base: Baseline | None) -> RunContext:
        """Return the input of the run's story."""

        def pair_of(submission: Submission) -> PairedItems:
            score = self.view.score_of(submission)
            if score is None or feedback_base is None:
                raise Unusable("no score")
            return self._pair(submission, score.submission_id, score.evaluation, feedback_base)

        return RunContext(
            run=self.run,
            record=self.record,
            view=self.view,
            entries=self.chain.entries,
            summary=summary,
            pair_of=pair_of,
            engine=feedback_base.engine if feedback_base else None,
        )

    def _flags(self) -> tuple[FingerprintFlag, ...]:
        """Return the flags of the selected checkpoint."""
        chosen = self._chosen()
        known = self.view.fingerprint_of(chosen) if chosen else None
        if known is not None:
            return known.flags
        return ("untrained_copy",) if chosen is not None and chosen.is_base else ()

    def _as_closed(self, base: Baseline | None) -> Baseline | None:
        """Return the base model's score, or None with a trouble if it was altered after the run was closed."""
        closed = self.view.closed
        if base is None or closed is None or closed.baseline_sha256.get(base.key) in (None, self.bases.digest(base)):
            return base
        self.found.troubles.append("the base model's score was altered after this run was closed: it is not used")
        return None

    def _judge(self, feedback_base: Baseline | None, report_base: Baseline | None) -> None:
        """Decide whether the run counts; if so, compute improvement and optimism gap."""
        view, found = self.view, self.found
        closed = view.closed
        found.excluded = self._why_excluded()
        if self.chain.damage or closed is None:
            return
        if closed.selected is None or (closed.report is not None and closed.report.score is None):
            if found.excluded is None:
                found.improvement = Gain(difference=0.0, how="base_kept")
            return
        chosen = view.submissions.get(closed.selected)
        if chosen is None or closed.report is None or closed.report.recipe_hash != self.record.recipe_hash:
            found.troubles.append("the closing entry names a submission or a recipe that this run does not have")
            found.excluded = found.excluded or "incomplete"
            return
        if report_base is None:
            found.troubles.append("no base model score by the same engine: there is no improvement without one")
            found.excluded = found.excluded or "incomplete"
            return
        if closed.baseline_report not in (None, report_base.key):
            found.troubles.append(
                "the closing entry names another base model score than that of the report score's engine"
            )
        self._compare(chosen, closed.report, report_base, feedback_base)

    def _why_excluded(self) -> Excluded | None:
        closed, sealed = self.view.closed, self.view.sealed
        if self.chain.damage:
            return "damaged"
        if closed is None:
            return "unfinished"
        if sealed is not None and sealed.ended_by is EndedBy.CANCELLED:
            return "cancelled"
        cut_short = sealed is not None and sealed.ended_by is EndedBy.CRASHED
        not_scored = closed.report is not None and closed.report.fault in INFRASTRUCTURE
        if cut_short or not_scored or closed.selected_by == "infrastructure":
            return "infrastructure"
        return "foreign_weights" if "foreign_weights" in self._flags() else None

    def _compare(
        self, chosen: Submission, report: Evaluation, report_base: Baseline, feedback_base: Baseline | None
    ) -> None:
        found = self.found
        try:
            report_pair = self._pair(chosen, chosen.submission_id, report, report_base)
            found.improvement = gain(report_pair)
            found.commonest_output_share = report_pair.new.commonest_output_share
        except Unusable as error:
            found.troubles.append(f"the improvement has no interval: {error}")
            assert report.score is not None
            if report_base.evaluation.score is not None:
                found.improvement = Gain(difference=report.score - report_base.evaluation.score, how="scores_only")
            else:
                found.excluded = found.excluded or "incomplete"
            return
        score = self.view.score_of(chosen)
        if self.is_paper or score is None:
            return
        if feedback_base is None:
            found.troubles.append(
                "no optimism gap: the base model has no feedback score by the engine that scored the checkpoint"
            )
            return
        try:
            feedback_pair = self._pair(chosen, score.submission_id, score.evaluation, feedback_base)
            found.gap = optimism(feedback_pair, report_pair)
            found.secondary = on_all_items(feedback_pair.new, report_pair.new)
        except Unusable as error:
            found.troubles.append(f"no optimism gap: {error}")

    def _pair(self, chosen: Submission, number: int, evaluation: Evaluation, base: Baseline) -> PairedItems:
        """Return the outcomes of base model and checkpoint. A copy of the base has the base's outcomes."""
        if evaluation.engine_hash != base.evaluation.engine_hash:
            raise Unusable("base model and checkpoint were scored by different engines")
        base_items = self.items.read(self.bases.items_path(base), base.evaluation)
        if chosen.is_base:
            return PairedItems(base_items, base_items)
        if self.is_paper:  # one evaluation is both scores, filed under the submission that was scored
            scored = self.view.score_of(chosen)
            number = scored.submission_id if scored else number
        return PairedItems(base_items, self.items.read(self._items_path(number, evaluation), evaluation))

    def _items_path(self, number: int, evaluation: Evaluation) -> Path:
        return self.run.items / f"{number:06d}.{evaluation.split}.jsonl.gz"

    def _base(self, split: Split) -> Baseline | None:
        """Return the base model's score by the same engine as the score that it is compared with."""
        closed, engine = self.view.closed, None
        if split is Split.REPORT and closed is not None and closed.report is not None:
            engine = closed.report.engine_hash
        elif split is self.feedback_split:
            chosen = self.view.submissions.get(closed.selected) if closed and closed.selected else self.view.best()
            score = self.view.score_of(chosen) if chosen else None
            engine = score.evaluation.engine_hash if score else None
        if engine is not None:
            return self.bases.by_engine(self.science, split, engine)
        return self.bases.any_engine(self.science, split)

    def _shown_base(self, base: Baseline | None) -> BaselineSummary | None:
        if base is None:
            return None
        return baseline_summary(base, self._base_items(base))

    def _visible(self, base: Baseline | None) -> float | None:
        return None if base is None else visible_gain(base.evaluation, self._base_items(base))

    def _base_items(self, base: Baseline) -> Items | None:
        """Return the base model's items if its interval needs them; the comparison reports troubles with them."""
        if not needs_items(base.evaluation):
            return None
        try:
            return self.items.read(self.bases.items_path(base), base.evaluation)
        except Unusable:
            return None

    def _items_behind(
        self, submission: Submission | None, evaluation: Evaluation, *, keep: bool = True
    ) -> Items | None:
        """Return the items of a checkpoint's score if its interval needs them."""
        if submission is None or not needs_items(evaluation):
            return None
        if submission.is_base:
            base = self._base(evaluation.split)
            return self._base_items(base) if base is not None else None
        scored = self.view.score_of(submission) if evaluation.split is self.feedback_split else None
        number = scored.submission_id if scored else submission.submission_id
        try:
            return self.items.read(self._items_path(number, evaluation), evaluation, keep=keep)
        except Unusable:
            return None

    def _intervals(self) -> dict[int, ScoreInterval]:
        """Return the intervals of feedback scores of clustered items; other scores need no items."""
        return intervals_of(
            (
                number,
                score.evaluation,
                self._items_behind(self.view.submissions.get(number), score.evaluation, keep=False),
            )
            for number, score in self.view.scores.items()
            if score.evaluation.clusters is not None and score.evaluation.score is not None
        )

    def _chosen(self) -> Submission | None:
        """Return the submission that the run was closed with; None for the base model or if not closed."""
        closed = self.view.closed
        return self.view.submissions.get(closed.selected) if closed and closed.selected else None

    def _engine(self, report: Evaluation | None, *bases: Baseline | None) -> str | None:
        """Return the engine for comparisons: that of the report score, else of the base model's score."""
        if report is not None and report.engine_hash is not None:
            return report.engine_hash
        return next((b.evaluation.engine_hash for b in bases if b is not None), None)

    def _fault(self) -> tuple[Fault | None, str | None]:
        closed, sealed = self.view.closed, self.view.sealed
        for part in (closed, sealed):
            if part is not None and part.fault is not None:
                return part.fault, part.reason
        ended = self.view.ended[-1] if self.view.state is RunState.INTERRUPTED else None
        reason = sealed.reason if sealed is not None else ended.reason if ended is not None else None
        return None, reason

    def _used(self) -> tuple[float, float]:
        """Return elapsed and given-back seconds: as sealed, else as last written by the supervisor."""
        view = self.view
        if view.sealed is not None:
            return view.sealed.elapsed_s, view.sealed.given_back_s
        told = [a.elapsed_s for a in view.attempts] + [e.elapsed_s for e in view.ended]
        told += [s.elapsed_s for s in view.submissions.values()]
        raw = reading.read_json_or_none(self.run.clock)
        try:
            clock = None if raw is None else parse_record(Clock, raw, self.run.clock)
        except AutorlError:
            clock = None
        if clock is not None:
            told.append(clock.elapsed_s)
        return max(told, default=0.0), clock.given_back_s if clock else 0.0
