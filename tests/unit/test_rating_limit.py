"""A rating that never ends: given up after its limit, with the blame where it belongs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from checkpoints import Desk, tiny_base
from treemaker import Tree

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.artifacts import READY_NAME
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.processes import GivenUp, ended_by
from autorl_hpc.files.queue import Claims, HeartbeatWatch
from autorl_hpc.grading import daemon, evaluate, timeouts
from autorl_hpc.grading.attempts import Attempts, Baselines, ClusterTrouble
from autorl_hpc.grading.daemon import Grader
from autorl_hpc.grading.evaluate import Bench, Scored, SplitAnswers
from autorl_hpc.grading.feedback import Feedback
from autorl_hpc.grading.schedule import MAX_RETRY_S, RunCatalog
from autorl_hpc.grading.timeouts import GraderOverdue, RatingOverdue, overdue_s, within
from autorl_hpc.records.entries import Evaluation, Timings
from autorl_hpc.records.experiment import GraderSpec
from autorl_hpc.records.run import Science
from autorl_hpc.rollouts.engine import Answer
from autorl_hpc.states import Fault, Split

ARTIFACT = "a" * 64
LIMIT_S = 0.2


class Slow(Bench):
    """A bench whose engine is not asked, and whose scorer doesn't come to an end with some contents' answers."""

    def __init__(self, science: Science, hangs_on: set[str]) -> None:
        super().__init__(Root(Path("/nowhere")), GraderSpec(rating_limit_s=LIMIT_S))
        self.science, self.hangs_on = science, hangs_on
        self.hangs = True
        self.asked: list[tuple[str, int | None]] = []
        self.dropped = 0
        self.rates_few = False

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
    return SplitAnswers(science, Split.FEEDBACK, content_hash, [], answers, "e" * 64, asked, Timings())


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path / "exp", tiny_base())
    (made.experiment.artifacts / ARTIFACT).mkdir()
    (made.experiment.artifacts / ARTIFACT / READY_NAME).touch()
    return made


@pytest.fixture
def slow(desk: Desk) -> Slow:
    return Slow(desk.record.science, {ARTIFACT})


def test_what_comes_in_time_is_passed_on() -> None:
    def raises() -> None:
        raise SystemExit(3)

    assert within(5.0, lambda: 7) == 7
    with pytest.raises(SystemExit):
        within(5.0, raises)
    with pytest.raises(TimeoutError, match="of its own"):  # not taken for the limit

        def late() -> None:
            raise TimeoutError("of its own")

        within(5.0, late)


def test_an_overdue_rating_keeps_no_other_from_its_turn(slow: Slow) -> None:
    began = time.monotonic()
    with pytest.raises(RatingOverdue, match=r"not rated within 0\.2 s"):
        slow.rate(answered(slow.science, ARTIFACT))
    assert slow.rate(answered(slow.science, "b" * 64)).evaluation.score == 50.0
    assert time.monotonic() - began < 5.0
    slow.hangs = False
    assert slow.rate(answered(slow.science, ARTIFACT)).evaluation.score == 50.0


@pytest.mark.parametrize(("change", "who"), [({"judge": "logprob"}, "judge"), ({"scorer": "task"}, "own scorer")])
def test_judges_and_own_scorers_are_nobodys_artifact(slow: Slow, change: dict[str, str], who: str) -> None:
    science = slow.science.model_copy(update={"recipe": slow.science.recipe.model_copy(update=change)})
    asked = answered(science, ARTIFACT)
    with pytest.raises(GraderOverdue, match=f"the {who} of task {science.task} is too slow, or hangs") as told:
        slow.rate(asked)
    assert told.value.fault is Fault.GRADER and "grader.rating_limit_s" in str(told.value)
    kept = slow._judging.kept(asked.asked)
    assert kept == (asked.answers if who == "judge" else None), "what was answered need not be answered again"


def test_the_artifact_is_blamed_after_two_tries_where_the_base_models_answers_are_rated(desk: Desk, slow: Slow) -> None:
    attempts = Attempts(desk.experiment, slow)
    science = slow.science
    found = attempts.evaluate(science, ARTIFACT, Split.FEEDBACK, desk.experiment.path / "items.gz", "f-r--000001", 1)
    assert found.score is None and found.fault is Fault.ARTIFACT
    assert str(found.reason).startswith("rating its answers came to no end twice, and works for the base model")
    assert slow.asked == [(ARTIFACT, None), (ARTIFACT, None), (science.base_model_content_hash, None)]
    assert slow.dropped == 0


@pytest.mark.parametrize("rates_few", [False, True])
def test_nothing_is_said_of_it_where_the_base_models_are_not(desk: Desk, slow: Slow, rates_few: bool) -> None:
    """Be it that a node is only too slow for so many of them."""
    slow.hangs_on.add(slow.science.base_model_content_hash)
    slow.rates_few = rates_few
    attempts = Attempts(desk.experiment, slow)
    with pytest.raises(ClusterTrouble, match="the base model can't be scored on this node either") as told:
        attempts.evaluate(slow.science, ARTIFACT, Split.FEEDBACK, desk.experiment.path / "items.gz", "f-r--000001", 1)
    assert told.value.fault is Fault.GRADER and overdue_s(told.value) == LIMIT_S
    assert slow.dropped == 0, "the engine is well"


def test_what_was_overdue_beside_another_one_has_had_its_first_try(desk: Desk, slow: Slow) -> None:
    attempts, items = Attempts(desk.experiment, slow), desk.experiment.path / "items.gz"
    with pytest.raises(RatingOverdue):
        attempts.finish(answered(slow.science, ARTIFACT), items, 1.0)
    found = attempts.evaluate(slow.science, ARTIFACT, Split.FEEDBACK, items, "f-r--000001", 1, overdue=True)
    assert found.fault is Fault.ARTIFACT and str(found.reason).startswith("rating its answers came to no end twice")
    assert slow.asked == [(ARTIFACT, None), (slow.science.base_model_content_hash, None)]


def test_that_first_try_counts_once(tmp_path: Path) -> None:
    run = Tree(tmp_path).run().start()
    number = run.submit(60.0)
    experiment, name = run.tree.experiment, f"f-{run.record.run_id}--{number:06d}"
    given: list[bool] = []

    def tried(*arguments: Any) -> NoReturn:
        given.append(arguments[-1])
        raise ClusterTrouble("not now")

    claims = Claims(experiment.claims, "g", "host", HeartbeatWatch(experiment.graders, 60.0))
    attempts, nothing = SimpleNamespace(evaluate=tried), SimpleNamespace()
    known = RunCatalog(experiment, lambda: [])
    feedback = Feedback(
        experiment,
        known,
        claims,
        nothing,
        attempts,
        nothing,
        "g",
        lambda *_: None,
        lambda: None,  # type: ignore[arg-type]
    )

    def late() -> NoReturn:
        raise RatingOverdue(LIMIT_S)

    feedback._finishing.start(name, 1, late)
    assert feedback.collect(None) is not None
    for _ in range(2):
        with pytest.raises(ClusterTrouble):
            feedback.score(run.record, number, name, 1, None)
    assert given == [True, False]


# --- what a grader does about it ---


@pytest.fixture
def grader(tmp_path: Path) -> Grader:
    tree = Tree(tmp_path)
    tree.run()
    tree.save()
    return Grader(tree.experiment)


ENTRY = "f-run--000001"


def wait_s(grader: Grader) -> float:
    return grader.backoff._not_before[ENTRY] - time.monotonic()


def overdue(*_: Any) -> NoReturn:
    raise RatingOverdue(3600.0)


def test_a_hanging_judge_is_waited_for_again_after_as_long_a_time(
    desk: Desk, slow: Slow, grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "within", overdue)
    science = slow.science.model_copy(update={"recipe": slow.science.recipe.model_copy(update={"judge": "logprob"})})
    attempts, items = Attempts(desk.experiment, slow), desk.experiment.path / "items.gz"
    with pytest.raises(ClusterTrouble) as beside:
        attempts.finish(answered(science, ARTIFACT), items, 1.0)
    with pytest.raises(ClusterTrouble) as whole:
        attempts.evaluate(science, ARTIFACT, Split.FEEDBACK, items, ENTRY, 1)
    for error in (beside.value, whole.value):
        assert error.fault is Fault.GRADER
        grader.backoff.well(ENTRY)
        grader._failed(ENTRY, error)
        assert 3500 < wait_s(grader) <= 3600
        grader._failed(ENTRY, error, took_s=7200.0)
        assert 7100 < wait_s(grader) <= 7200, "no more than half of the time"
    grader._failed(ENTRY, ClusterTrouble("another"))
    assert wait_s(grader) <= MAX_RETRY_S


def test_a_base_model_that_is_not_rated_in_time_costs_no_engine_and_no_attention(
    desk: Desk, slow: Slow, grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "within", overdue)
    baselines = Baselines(desk.experiment, grader.claims, slow, "g")

    def measure(*_: Any) -> bool:
        baselines._measure(slow.science, Split.REPORT, "k" * 64)
        return True

    with pytest.raises(AutorlError, match="the rating of the base model's answers") as told:  # as `rescore` tells it
        measure()
    assert told.value.fault is Fault.GRADER and told.value.exit_code is Exit.ENVIRONMENT
    monkeypatch.setattr(grader, "_do", measure)
    monkeypatch.setattr(grader.bench, "drop_engine", slow.drop_engine)
    grader._work(ENTRY, 1)
    assert slow.dropped == 0 and wait_s(grader) > 3500


def test_a_grader_does_not_wait_for_what_it_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would, for an executor's threads."""
    go, left = threading.Event(), list[tuple[int, tuple[str, ...]]]()
    monkeypatch.setattr(timeouts, "END_S", 0.05)
    ends: Any = SimpleNamespace(
        record=SimpleNamespace(cluster=None),
        run=lambda: None,
        _stop=False,
        _must_leave=lambda: False,
        feedback=SimpleNamespace(under_way=()),
    )
    monkeypatch.setattr(daemon, "Grader", lambda experiment: ends)
    monkeypatch.setattr(daemon, "deny_inspection", lambda: None)
    monkeypatch.setattr(daemon, "name_program", lambda cluster: None)
    monkeypatch.setattr(daemon, "_leave", lambda *how: left.append(how))
    nowhere = ExperimentDir(Path("/nowhere"))
    assert daemon.run_grader(nowhere) == 0 and left == []
    try:
        with pytest.raises(RatingOverdue):
            within(0.05, go.wait)
        daemon.run_grader(nowhere)
        assert left == [(0, ())]
    finally:
        go.set()


# --- what single calls may take ---


@pytest.mark.parametrize(
    ("recipe", "least_s"),
    [
        ({"scorer": "task", "scorer_version": "1", "options": {"evaluate_timeout_s": 3600}}, 500 / 8 * 3600),
        ({"scorer": "humaneval", "scorer_version": "2"}, 3600.0),
    ],
)
def test_who_keeps_to_the_limits_of_calls_is_not_overdue(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, recipe: dict[str, Any], least_s: float
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    bench, science = Bench(Root(Path("/nowhere")), GraderSpec()), desk.record.science
    assert bench._limit_s(answered(science, ARTIFACT, items=500)) == 3600.0
    science = science.model_copy(update={"recipe": science.recipe.model_copy(update=recipe)})
    assert bench._limit_s(answered(science, ARTIFACT)) == max(
        3600.0, 120.0 + recipe.get("options", {}).get("evaluate_timeout_s", 0)
    )
    assert bench._limit_s(answered(science, ARTIFACT, items=500)) > least_s
