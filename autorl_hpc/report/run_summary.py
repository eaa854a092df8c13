"""Digest one run folder into a RunSummary (`digest`): scores, improvement, optimism gap, noise, story, whether it counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.frozen_records import read_run
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.entries import Contamination, Evaluation, FingerprintFlag, Submission
from autorl_hpc.records.exchange import Baseline, Clock
from autorl_hpc.records.run import RunRecord
from autorl_hpc.report.conditions import driver_settings, limits_of
from autorl_hpc.report.format import clean
from autorl_hpc.report.hidden_items import hidden_of
from autorl_hpc.report.run_folder import (
    Bases,
    Items,
    ReadableLedger,
    Unusable,
    came_with_agent,
    in_doubt,
    looks,
    marks_of,
    ranks,
    read_chain,
    read_items,
    sandboxes,
    shown_look,
    unlike_the_seal,
    worst_found,
)
from autorl_hpc.report.run_story.context import RunContext
from autorl_hpc.report.run_story.story import tell
from autorl_hpc.report.scores import (
    PairedItems,
    ScoreInterval,
    baseline_summary,
    gain,
    intervals_of,
    needs_items,
    noise_of_queries,
    on_all_items,
    optimism,
    points_of,
    score_summary,
    visible_gain,
)
from autorl_hpc.report.story_records import Story
from autorl_hpc.report.summary import UNTRIED, Excluded, Figures, Gain, Gap, RunSummary, ScoreSummary
from autorl_hpc.report.tables import notes_of, notes_of_story
from autorl_hpc.states import EndedBy, Fault, Protocol, RunState, Split, SubmissionState

INFRASTRUCTURE = (Fault.CLUSTER, Fault.GRADER)


def digest(run: RunDir, chain: ReadableLedger | None = None, *, unpacked: bool = False) -> RunSummary:
    """Summarise one run; of a live or damaged run, what can be read. `unpacked`: it is a bundle's, which lacks what doubts rest on:
    they are its own summary's. Raises AutorlError: run.json can't be read."""
    return _Digest(run, read_run(run), chain or read_chain(run), unpacked).summary()


class _Digest:
    def __init__(self, run: RunDir, record: RunRecord, chain: ReadableLedger, unpacked: bool) -> None:
        self.unpacked = unpacked
        self.run, self.record, self.science, self.chain = run, record, record.science, chain
        self.view: RunView = chain.view
        self.closed, self.sealed = self.view.closed, self.view.sealed
        self.bases = Bases(ExperimentDir(run.path.parent).baselines)
        self.is_paper = self.science.protocol is Protocol.PAPER
        self.feedback_split = Split.REPORT if self.is_paper else Split.FEEDBACK
        self.improvement: Gain | None = None
        self.gap: Gap | None = None
        self.excluded: Excluded | None = None
        self.troubles: list[str] = []
        self.commonest_output_share: float | None = None
        self.secondary: str | None = None
        selected = self.closed.selected if self.closed else None
        self.chosen = self.view.submissions.get(selected) if selected is not None else None
        """The submission that the run was closed with; None for the base model or if not closed."""

    def summary(self) -> RunSummary:
        view, science, record = self.view, self.science, self.record
        closed, sealed = self.closed, self.sealed
        feedback_base = self._as_closed(self._base(self.feedback_split))
        report_base = self._as_closed(self._base(Split.REPORT))
        self._judge(feedback_base, report_base)
        feedback_items, report_items = self._base_items(feedback_base), self._base_items(report_base)
        intervals = self._intervals()
        points = points_of(view, intervals)
        best, report = view.best(), closed.report if closed else None
        best_score = view.score_of(best) if best else None
        fault, reason = self._fault()
        sandbox, network = view.sandbox or (UNTRIED, science.network)
        count = Counter(point.status for point in points)
        measured = [report, *(score.evaluation for score in view.scores.values())]
        gpus, gpu_model = _gpus(view)
        summary = RunSummary(
            **_fields(
                science, "task agent driver base_model base_model_content_hash base_model_prompting_hash seed protocol"
            ),
            environment_hash=science.environment_hash,
            **_fields(record, "experiment agent_hash recipe_hash code_hash task_hash"),
            **_fields(sealed, "starts reprompts ended_by exit_code"),
            **_fields(closed, "selected selected_by"),
            **_fields(self, "improvement gap excluded"),
            **self._used(),
            tool_version=__version__,
            run_id=clean(record.run_id) or "",
            level=3 if science.recipe.max_steps is not None else 2 if science.recipe.judge != "none" else 1,
            mode=clean(science.mode) or "",
            state=RunState.DAMAGED if self.chain.damage else view.state,
            damage=clean(self.chain.damage),
            budget_s=science.budget.wall_clock_s,
            driver_settings=driver_settings(science),
            limits=limits_of(science),
            attempts=view.attempt,
            accepted=len(view.accepted()),
            refused=count[SubmissionState.REFUSED] + (sealed.refused_unrecorded if sealed else 0),
            failed=count[SubmissionState.FAILED],
            waiting=count[SubmissionState.ACCEPTED],
            baseline_feedback=baseline_summary(feedback_base, feedback_items) if feedback_base else None,
            best_feedback=self._score(best_score.evaluation, best) if best and best_score else None,
            report=self._score(report, self.chosen) if report else None,
            baseline_report=baseline_summary(report_base, report_items) if report_base else None,
            figures=self._figures(feedback_base, report_base),
            noise=noise_of_queries(view, intervals),
            visible_gain_report=visible_gain(report_base.evaluation, report_items) if report_base else None,
            visible_gain_feedback=visible_gain(feedback_base.evaluation, feedback_items) if feedback_base else None,
            counted=self.excluded is None,
            ranked=ranks((pin.sha256 for pin in science.splits.values()), sandbox, self._flags()),
            flags=self._flags(),
            marks=marks_of(self.run, view, self.chain.entries),
            contamination_end=self._last_look(),
            fault=fault,
            reason=clean(reason),
            trajectory=points,
            engine_hash=next((one.engine_hash for one in measured if one is not None and one.engine_hash), None),
            feedback_of=science.splits[Split.FEEDBACK].n if science.feedback_part else None,
            split_hashes={str(name): science.split_hash(name) for name in sorted(science.splits)},
            genesis=self.chain.genesis,
            ledger_head=self.chain.hashes[-1] if self.chain.hashes else self.chain.genesis,
            ledger_entries=len(self.chain.hashes),
            gpus=gpus,
            gpu_model=clean(gpu_model),
            network=network,
            sandbox=sandbox,
            sandboxes=sandboxes(view),
        )
        looked = looks(summary)
        summary = summary.model_copy(update={"contaminated": worst_found(looked), "looks": len(looked)})
        notes = notes_of(summary, self.troubles, self.commonest_output_share, self.secondary)
        story = tell(self._context(summary.model_copy(update={"notes": notes}), feedback_base))
        summary = summary.model_copy(update={"story": story, "notes": (*notes, *notes_of_story(story))})
        doubts = list(self._doubts(story))
        return in_doubt(summary, doubts) if doubts else summary

    def _doubts(self, story: Story) -> Iterator[str]:
        """Yield why this run may not be what it says; `same_runs` finds what only several runs show."""
        content = self.chosen.content_hash if self.chosen is not None else None
        if content is None or (self.chosen is not None and self.chosen.is_base):
            return
        if (folder := came_with_agent(self.run, self.record, content)) is not None:
            yield f"the selected weights came with the agent, in its folder {clean(folder)}"
        gained = self.improvement.difference if self.improvement is not None else 0.0
        if gained <= 0:
            return
        if self.unpacked:
            told = reading.read_json_or_none(self.run.report / "summary.json")
            doubts = told.get("doubts") if isinstance(told, dict) else None
            yield from (clean(str(each)) or "" for each in (doubts if isinstance(doubts, list) else ()))
        elif unlike := unlike_the_seal(self.run, self.sealed):
            yield f"{gained:+.1f} points, and nothing shows a training as it was sealed: {unlike[0]}"
        elif story.trained is False:
            yield f"{gained:+.1f} points, and nothing was trained: no step was logged, and no program ran that could train"

    def _score(self, evaluation: Evaluation, submission: Submission | None) -> ScoreSummary:
        number = submission.submission_id if submission else None
        return score_summary(evaluation, number, self._items_behind(submission, evaluation))

    def _last_look(self) -> Contamination | None:
        last = next((look for look in self.view.contaminations if look.submission_id is None), None)
        return last and shown_look(last, hidden_of(self.view.contaminations))

    def _context(self, summary: RunSummary, feedback_base: Baseline | None) -> RunContext:
        def pair_of(submission: Submission) -> PairedItems:
            score = self.view.score_of(submission)
            if score is None or feedback_base is None:
                raise Unusable("no score")
            return self._pair(submission, score.evaluation, feedback_base)

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
        known = self.view.fingerprint_of(self.chosen) if self.chosen else None
        if known is not None:
            return known.flags
        return ("untrained_copy",) if self.chosen is not None and self.chosen.is_base else ()

    def _as_closed(self, base: Baseline | None) -> Baseline | None:
        """Return the base model's score, or None with a trouble if it was altered after the run was closed."""
        recorded = self.closed.baseline_sha256.get(base.key) if base is not None and self.closed is not None else None
        if base is None or recorded in (None, base.digest()):
            return base
        self.troubles.append("the base model's score was altered after this run was closed: it is not used")
        return None

    def _judge(self, feedback_base: Baseline | None, report_base: Baseline | None) -> None:
        """Decide whether the run counts; if so, compute improvement and optimism gap."""
        closed = self.closed
        self.excluded = self._why_excluded()
        if self.chain.damage or closed is None:
            return
        if closed.selected is None or (closed.report is not None and closed.report.score is None):
            if self.excluded is None:
                self.improvement = Gain(difference=0.0, how="base_kept")
            return
        lacking = None
        if self.chosen is None or closed.report is None or closed.report.recipe_hash != self.record.recipe_hash:
            lacking = "the closing entry names a submission or a recipe that this run does not have"
        elif report_base is None:
            lacking = "no base model score by the same engine: there is no improvement without one"
        elif closed.baseline_report not in (None, report_base.key):
            other = "the closing entry names another base model score than that of the report score's engine"
            self.troubles.append(other)
        if lacking is None:
            assert self.chosen is not None and closed.report is not None and report_base is not None
            self._compare(self.chosen, closed.report, report_base, feedback_base)
        else:
            self.troubles.append(lacking)
            self.excluded = self.excluded or "incomplete"

    def _why_excluded(self) -> Excluded | None:
        closed, sealed = self.closed, self.sealed
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
        try:
            report_pair = self._pair(chosen, report, report_base)
            self.improvement = gain(report_pair)
            self.commonest_output_share = report_pair.new.commonest_output_share
        except Unusable as error:
            self.troubles.append(f"the improvement has no interval: {error}")
            if report.score is not None and report_base.evaluation.score is not None:
                self.improvement = Gain(difference=report.score - report_base.evaluation.score, how="scores_only")
            else:
                self.excluded = self.excluded or "incomplete"
            return
        score = self.view.score_of(chosen)
        if self.is_paper or score is None:
            return
        if feedback_base is None:
            why = "the base model has no feedback score by the engine that scored the checkpoint"
            self.troubles.append(f"no optimism gap: {why}")
            return
        try:
            feedback_pair = self._pair(chosen, score.evaluation, feedback_base)
            self.gap = optimism(feedback_pair, report_pair)
            self.secondary = on_all_items(feedback_pair.new, report_pair.new)
        except Unusable as error:
            self.troubles.append(f"no optimism gap: {error}")

    def _pair(self, chosen: Submission, evaluation: Evaluation, base: Baseline) -> PairedItems:
        """Return the outcomes of base model and checkpoint. A copy of the base has the base's outcomes."""
        if evaluation.engine_hash != base.evaluation.engine_hash:
            raise Unusable("base model and checkpoint were scored by different engines")
        base_items = read_items(self.bases.items_path(base), base.evaluation)
        if chosen.is_base:
            return PairedItems(base_items, base_items)
        return PairedItems(base_items, read_items(self._items_path(chosen, evaluation), evaluation))

    def _items_path(self, submission: Submission, evaluation: Evaluation) -> Path:
        scored = self.view.score_of(submission) if evaluation.split is self.feedback_split else None
        return self.run.items / f"{(scored or submission).submission_id:06d}.{evaluation.split}.jsonl.gz"

    def _base(self, split: Split) -> Baseline | None:
        """Return the base model's score by the same engine as the score that it is compared with."""
        engine = None
        if split is Split.REPORT and self.closed is not None and self.closed.report is not None:
            engine = self.closed.report.engine_hash
        elif split is self.feedback_split:
            chosen = self.chosen or self.view.best()
            score = self.view.score_of(chosen) if chosen else None
            engine = score.evaluation.engine_hash if score else None
        if engine is not None:
            return self.bases.by_engine(self.science, split, engine)
        return self.bases.any_engine(self.science, split)

    def _base_items(self, base: Baseline | None) -> Items | None:
        """Return the base model's items if its interval needs them; the comparison reports troubles with them."""
        return None if base is None else self._needed(self.bases.items_path(base), base.evaluation)

    def _needed(self, path: Path, evaluation: Evaluation) -> Items | None:
        with suppress(Unusable):
            return read_items(path, evaluation) if needs_items(evaluation) else None
        return None

    def _items_behind(self, submission: Submission | None, evaluation: Evaluation) -> Items | None:
        if submission is None:
            return None
        if submission.is_base:
            return self._base_items(self._base(evaluation.split))
        return self._needed(self._items_path(submission, evaluation), evaluation)

    def _intervals(self) -> dict[int, ScoreInterval]:
        return intervals_of(
            (number, one.evaluation, self._items_behind(self.view.submissions.get(number), one.evaluation))
            for number, one in self.view.scores.items()
            if one.evaluation.clusters is not None and one.evaluation.score is not None
        )

    def _figures(self, feedback_base: Baseline | None, report_base: Baseline | None) -> Figures:
        chosen = self.chosen or self.view.best()
        score = self.view.score_of(chosen) if chosen is not None else None
        report = self.closed.report if self.closed is not None and self.closed.selected is not None else None
        scored = [base.evaluation if base else None for base in (feedback_base, report_base)]
        scored += [score.evaluation if score else None, report]
        names = ("base_feedback", "base_report", "feedback", "report")
        return Figures(**{name: one.metrics for name, one in zip(names, scored, strict=True) if one is not None})

    def _fault(self) -> tuple[Fault | None, str | None]:
        for part in (self.closed, self.sealed):
            if part is not None and part.fault is not None:
                return part.fault, part.reason
        if self.sealed is not None:
            return None, self.sealed.reason
        return None, self.view.ended[-1].reason if self.view.state is RunState.INTERRUPTED else None

    def _used(self) -> dict[str, Any]:
        """Return what was used of the budget: as sealed, else the seconds as last written by the supervisor."""
        view, sealed = self.view, self.sealed
        if sealed is not None:
            driver = sealed.driver
            parts = {
                "max_submissions": len(view.contents()),
                "gpu_hours": sealed.gpu_hours,
                "tokens": driver.tokens if driver else None,
                "cost_usd": driver.cost_usd if driver else None,
            }
            used = {name: float(value) for name, value in parts.items() if value is not None}
            return {"elapsed_s": sealed.elapsed_s, "given_back_s": sealed.given_back_s, "used": used}
        told = [one.elapsed_s for part in (view.attempts, view.ended, view.submissions.values()) for one in part]
        with suppress(AutorlError):
            if (raw := reading.read_json_or_none(self.run.clock)) is not None:
                clock = parse_record(Clock, raw, self.run.clock)
                return {"elapsed_s": max([*told, clock.elapsed_s]), "given_back_s": clock.given_back_s}
        return {"elapsed_s": max(told, default=0.0)}


def _gpus(view: RunView) -> tuple[str | None, str | None]:
    """Return number and model of the GPUs of the first attempt's job; of earlier versions' ledgers the number, from the sealed hours."""
    first, sealed = view.attempts[0] if view.attempts else None, view.sealed
    if first is not None and first.gpus is not None:
        return str(first.gpus), first.gpu_model
    charged_s = sealed.elapsed_s - sealed.given_back_s if sealed is not None else 0.0
    if sealed is None or sealed.gpu_hours is None or charged_s <= 0:
        return None, None
    return str(round(3600 * sealed.gpu_hours / charged_s)), None


def _fields(record: object, names: str) -> dict[str, Any]:
    """Return fields of a record by name; none if there is no record, so that their defaults hold."""
    return {} if record is None else {name: getattr(record, name) for name in names.split()}
