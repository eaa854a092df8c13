"""A rating that never ends: given up after its limit, with the blame where it belongs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Desk, tiny_base

from autorl_hpc.files.artifacts import READY_NAME
from autorl_hpc.files.layout import Root
from autorl_hpc.grading.attempts import Attempts, ClusterTrouble
from autorl_hpc.grading.evaluate import Answered, Bench, Scored
from autorl_hpc.grading.patience import OutsideOverdue, RatingOverdue, within
from autorl_hpc.records.experiment import GraderSpec
from autorl_hpc.records.ledger import Evaluation, Timings
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
        self.go = threading.Event()
        self.asked: list[str] = []
        self.dropped = 0

    def answer(self, science: Science, weights: Path, content_hash: str, split: Split, **_: Any) -> Answered:
        self.asked.append(content_hash)
        return answered(science, content_hash)

    def _rate(self, answered: Answered) -> Scored:
        if answered.content_hash in self.hangs_on:
            self.go.wait()
        science = answered.science
        return Scored(
            Evaluation(
                split=answered.split, content_hash=answered.content_hash, score=50.0, recipe_hash=science.recipe.hash()
            ),
            (),
        )

    def drop_engine(self) -> None:
        self.dropped += 1


def answered(science: Science, content_hash: str) -> Answered:
    """The answers to one item."""
    answers = [[Answer("it is 7", 3, False)]]
    return Answered(science, Split.FEEDBACK, content_hash, [], answers, "e" * 64, ("asked", content_hash), Timings())


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path / "exp", tiny_base())
    (made.experiment.artifacts / ARTIFACT).mkdir()
    (made.experiment.artifacts / ARTIFACT / READY_NAME).touch()
    return made


@pytest.fixture
def slow(desk: Desk) -> Iterator[Slow]:
    bench = Slow(desk.record.science, {ARTIFACT})
    yield bench
    bench.go.set()


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
    slow.go.set()
    assert slow.rate(answered(slow.science, ARTIFACT)).evaluation.score == 50.0


@pytest.mark.parametrize(("change", "who"), [({"judge": "logprob"}, "judge"), ({"scorer": "task"}, "own scorer")])
def test_judges_and_own_scorers_are_nobodys_artifact(slow: Slow, change: dict[str, str], who: str) -> None:
    science = slow.science.model_copy(update={"recipe": slow.science.recipe.model_copy(update=change)})
    asked = answered(science, ARTIFACT)
    with pytest.raises(OutsideOverdue, match=f"the {who} of task {science.task} is too slow, or hangs") as told:
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
    assert slow.asked == [ARTIFACT, ARTIFACT, science.base_model_content_hash] and slow.dropped == 0


def test_nothing_is_said_of_it_where_the_base_models_are_not(desk: Desk, slow: Slow) -> None:
    slow.hangs_on.add(slow.science.base_model_content_hash)
    attempts = Attempts(desk.experiment, slow)
    with pytest.raises(ClusterTrouble, match="the base model can't be scored on this node either"):
        attempts.evaluate(slow.science, ARTIFACT, Split.FEEDBACK, desk.experiment.path / "items.gz", "f-r--000001", 1)
