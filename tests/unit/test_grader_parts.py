"""Parts of a grader: a rating that never ends, engines that break, and items files of graders that were overtaken."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import Desk, tiny_base
from treemaker import ENGINE, Tree, TreeRun

from autorl_hpc.evidence.verify import verify_run
from autorl_hpc.files.artifacts import READY_NAME
from autorl_hpc.files.layout import Root
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.processes import GivenUp, ended_by
from autorl_hpc.files.queue import Claims, HeartbeatWatch
from autorl_hpc.files.run_view import RunView
from autorl_hpc.grading import engines
from autorl_hpc.grading.attempts import Attempts, ClusterTrouble, EvaluationRequest
from autorl_hpc.grading.background import Background, GraderOverdue, RatingOverdue, overdue_s
from autorl_hpc.grading.evaluate import Bench, ItemOutcome, Scored, SplitAnswers
from autorl_hpc.grading.feedback import Feedback
from autorl_hpc.grading.schedule import RunCatalog
from autorl_hpc.records.entries import Evaluation, Score, Timings
from autorl_hpc.records.experiment import GraderSpec
from autorl_hpc.records.run import Science
from autorl_hpc.rollouts.engine import Answer, EngineFailed
from autorl_hpc.stage.models import TINY, stage_model
from autorl_hpc.states import EntryKind, Fault, Split

ARTIFACT = "a" * 64
LIMIT_S = 0.2
ENTRY = "f-run--000001"


class Slow(Bench):
    """A bench whose engine is not asked, and whose scorer doesn't come to an end with some contents' answers."""

    def __init__(self, science: Science, hangs_on: set[str]) -> None:
        super().__init__(Root(Path("/nowhere")), GraderSpec(rating_limit_s=LIMIT_S))
        self.science, self.hangs_on = science, hangs_on
        self.hangs = True
        self.asked: list[tuple[str, int | None]] = []
        self.dropped = 0
        self.rates_few = False
        self.breaks_on: set[str] = set()

    def answer(
        self,
        science: Science,
        weights: Path,
        content_hash: str,
        split: Split,
        *,
        order: Sequence[int] | None = None,
        limit: int | None = None,
    ) -> SplitAnswers:
        self.asked.append((content_hash, limit))
        if content_hash in self.breaks_on:
            raise RuntimeError("CUDA error")
        return answered(science, content_hash, limit)

    def _limit_s(self, answered: SplitAnswers) -> float:
        return LIMIT_S

    def _rate(self, answered: SplitAnswers) -> Scored:
        few = self.rates_few and "few" in str(answered.asked)
        if self.hangs and answered.content_hash in self.hangs_on and not few:
            ended = threading.Event()
            with ended_by(ended.set):
                ended.wait()
            raise GivenUp
        science = answered.science
        return Scored(
            Evaluation(
                split=answered.split, content_hash=answered.content_hash, score=50.0, recipe_hash=science.recipe.hash()
            ),
            (),
        )

    def drop_engine(self) -> None:
        self.dropped += 1


def answered(science: Science, content_hash: str, limit: int | None = None, items: int = 1) -> SplitAnswers:
    """The answers to one item, or as many."""
    answers = [[Answer("it is 7", 3, False)] for _ in range(items)]
    asked = ("all" if limit is None else "few", content_hash)
    return SplitAnswers(science, Split.FEEDBACK, content_hash, [], answers, "a" * 64, "e" * 64, asked, Timings())


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path / "exp", tiny_base())
    (made.experiment.artifacts / ARTIFACT).mkdir()
    (made.experiment.artifacts / ARTIFACT / READY_NAME).touch()
    return made


@pytest.fixture
def slow(desk: Desk) -> Slow:
    return Slow(desk.record.science, {ARTIFACT})


@pytest.fixture
def request_(desk: Desk, slow: Slow) -> EvaluationRequest:
    return EvaluationRequest(slow.science, ARTIFACT, Split.FEEDBACK, desk.experiment.path / "items.gz", ENTRY)


@pytest.mark.parametrize(("change", "who"), [({"judge": "logprob"}, "judge"), ({"scorer": "task"}, "own scorer")])
def test_judges_and_own_scorers_are_nobodys_artifact(slow: Slow, change: dict[str, str], who: str) -> None:
    science = slow.science.model_copy(update={"recipe": slow.science.recipe.model_copy(update=change)})
    asked = answered(science, ARTIFACT)
    with pytest.raises(GraderOverdue, match=f"the {who} of task {science.task} is too slow, or hangs") as told:
        slow.rate(asked)
    assert told.value.fault is Fault.GRADER and "grader.rating_limit_s" in str(told.value)
    kept = slow._judging.kept(asked.asked)
    assert kept == ((asked.answers, asked.prompts_sha256) if who == "judge" else None), (
        "what was answered need not be answered again"
    )


def test_the_artifact_is_blamed_after_two_tries_where_the_base_models_answers_are_rated(
    desk: Desk, slow: Slow, request_: EvaluationRequest
) -> None:
    """A try beside another submission was the first one."""
    attempts, science = Attempts(desk.experiment, slow), slow.science
    with pytest.raises(RatingOverdue):
        attempts.finish(request_, answered(science, ARTIFACT))
    for beside, asked in ((True, 1), (False, 2)):
        slow.asked.clear()
        found = attempts.evaluate(request_, overdue=beside)
        assert found.score is None and found.fault is Fault.ARTIFACT
        assert str(found.reason).startswith("rating its answers came to no end twice, and works for the base model")
        assert slow.asked == [(ARTIFACT, None)] * asked + [(science.base_model_content_hash, None)]
    assert slow.dropped == 0


@pytest.mark.parametrize("rates_few", [False, True])
def test_nothing_is_said_of_it_where_the_base_models_are_not(
    desk: Desk, slow: Slow, request_: EvaluationRequest, rates_few: bool
) -> None:
    """Be it that a node is only too slow for so many of them."""
    slow.hangs_on.add(slow.science.base_model_content_hash)
    slow.rates_few = rates_few
    with pytest.raises(ClusterTrouble, match="the base model can't be scored on this node either") as told:
        Attempts(desk.experiment, slow).evaluate(request_)
    assert told.value.fault is Fault.GRADER and overdue_s(told.value) == LIMIT_S
    assert slow.dropped == 0, "the engine is well"


def feedback_of(run: TreeRun, attempts: Any, name: str) -> Feedback:
    experiment, nothing = run.tree.experiment, SimpleNamespace(enqueue=lambda *_: False)
    claims = Claims(experiment.claims, name, "host", HeartbeatWatch(experiment.graders, 60.0))
    known = RunCatalog(experiment, lambda: [])
    beside: Any = nothing
    return Feedback(experiment, known, claims, beside, attempts, beside, Background(), name, lambda: None)


def test_who_broke_the_engine_is_asked_of_the_base_model(desk: Desk, slow: Slow, request_: EvaluationRequest) -> None:
    attempts, base = Attempts(desk.experiment, slow), slow.science.base_model_content_hash
    slow.breaks_on = {ARTIFACT, base}
    with pytest.raises(ClusterTrouble, match="the base model can't be scored on this node either") as told:
        attempts.evaluate(request_)
    assert told.value.fault is Fault.CLUSTER and slow.dropped == 3, "an engine that broke is not used again"
    slow.breaks_on = {ARTIFACT}
    found = attempts.evaluate(request_)
    assert found.fault is Fault.ARTIFACT and "failed on it twice, and works for the base model" in str(found.reason)


# --- an engine that does not start is the node's trouble: no artifact's weights have come near it


class Starting(Bench):
    """A bench at which nothing is asked: it begins with the engine."""

    def answer(self, science: Any, *others: Any, **more: Any) -> Any:
        return self.engine(science)


@pytest.mark.parametrize("problem", [EngineFailed("its worker ended with 1"), RuntimeError("CUDA error: all in use")])
def test_an_artifact_is_not_blamed_where_the_engine_does_not_start(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    left = [problem] * 3  # a third would be the base model's trial

    def make_engine(*arguments: Any) -> str:
        if left:
            raise left.pop()
        return "the engine"

    monkeypatch.setattr(engines, "make_engine", make_engine)
    root = Root(tmp_path / "exp")
    stage_model(root, TINY, None)
    request = EvaluationRequest(desk.record.science, ARTIFACT, Split.FEEDBACK, tmp_path / "items.gz", ENTRY)
    attempts = Attempts(desk.experiment, Starting(root, GraderSpec()))
    while left:
        before = len(left)
        with pytest.raises(ClusterTrouble, match=str(problem)) as told:
            attempts.answer(request)
        assert len(left) == before - 1, "it is told at once, and counts as no try"
        assert told.value.fault is Fault.CLUSTER and "next:" in str(told.value) and ".log" not in str(told.value)
    found: object = attempts.answer(request)
    assert found == "the engine"


# --- items files: what the committed score names is what stands


class Rater:
    """A grader that has a submission's answers, and rates them in its own way."""

    def __init__(self, run: TreeRun, number: int, name: str, right: int) -> None:
        self.run, self.number, self.name = run, number, name
        experiment, record = run.tree.experiment, run.record
        self.items = run.dir.items / f"{number:06d}.feedback.jsonl.gz"
        view = RunView.of(Ledger(run.dir).read())
        outcomes = tuple(ItemOutcome(f"q{i}", float(i < right), "0" * 64, 3) for i in range(40))
        evaluation = Evaluation(
            split=Split.FEEDBACK,
            content_hash=view.submissions[number].content_hash,
            score=right * 2.5,
            n=40,
            recipe_hash=record.recipe_hash,
            engine_hash=ENGINE.digest(),
        )
        bench: Any = SimpleNamespace(rate=lambda answered: Scored(evaluation, outcomes))
        self.attempts = Attempts(experiment, bench)
        self.feedback = feedback_of(run, self.attempts, name)
        self.request = EvaluationRequest(record.science, "", Split.FEEDBACK, self.items, "")

    def rate(self) -> Evaluation:
        answers: Any = None
        return self.attempts.finish(self.request, answers)

    def commit(self, evaluation: Evaluation) -> None:
        self.feedback._commit(self.run.record, self.number, evaluation, 1)


def problems(run: TreeRun) -> list[str]:
    return [str(problem) for problem in verify_run(run.tree.experiment, run.dir).problems if "items" in str(problem)]


def hidden(run: TreeRun) -> list[str]:
    return [name for name in os.listdir(run.dir.items) if name.startswith(".")]


@pytest.fixture
def raters(tmp_path: Path) -> tuple[Rater, Rater]:
    run = Tree(tmp_path / "exp").run().start()
    number = run.submit(10.0)
    for folder in run.tree.experiment.folders():
        folder.mkdir(parents=True, exist_ok=True)
    run.dir.items.mkdir(exist_ok=True)
    return Rater(run, number, "slow", 20), Rater(run, number, "quick", 21)


@pytest.mark.parametrize("first", ["slow", "quick"])
def test_whoever_loses_the_commit_leaves_the_winners_items(raters: tuple[Rater, Rater], first: str) -> None:
    slow, quick = raters
    if first == "slow":  # it wrote its items, and was overtaken before it could commit
        late = slow.rate()
        quick.commit(quick.rate())
    else:
        quick.commit(quick.rate())
        assert problems(quick.run) == []
        late = slow.rate()
    assert problems(quick.run) == []
    slow.commit(late)
    assert problems(quick.run) == [] and hidden(quick.run) == []


def test_a_death_between_commit_and_items_is_mended_by_the_next_who_finds_the_entry(
    raters: tuple[Rater, Rater],
) -> None:
    slow, quick = raters
    slow.rate()  # dies
    evaluation = quick.rate()
    score = Score(submission_id=quick.number, evaluation=evaluation, grader="quick", generation=2)
    Ledger(quick.run.dir).append(EntryKind.SCORE, score, role="grader")  # dies, too
    assert problems(quick.run) != []
    slow.feedback.score(slow.run.record, slow.number, f"f-{slow.run.dir.run_id}--{slow.number:06d}", 3, None)
    assert problems(quick.run) == []
