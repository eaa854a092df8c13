"""Items files of graders that were overtaken or died: what the committed score names is what stands."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from treemaker import ENGINE, Tree, TreeRun

from autorl_hpc.evidence.verify import verify_run
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.queue import Claims, HeartbeatWatch
from autorl_hpc.files.run_view import RunView
from autorl_hpc.grading.attempts import Attempts, offer, settle
from autorl_hpc.grading.evaluate import ItemOutcome, Scored
from autorl_hpc.grading.feedback import Feedback
from autorl_hpc.grading.schedule import RunCatalog
from autorl_hpc.records.entries import Evaluation, Score
from autorl_hpc.states import EntryKind, Split


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
        bench: Any = SimpleNamespace(rate=lambda answered: Scored(evaluation, outcomes), identity=None)
        tracing: Any = SimpleNamespace(enqueue=lambda *_: False)
        claims = Claims(experiment.claims, name, "host", HeartbeatWatch(experiment.graders, 60.0))
        self.attempts = Attempts(experiment, bench)
        known = RunCatalog(experiment, lambda: [])
        nothing: Any = SimpleNamespace()
        self.feedback = Feedback(
            experiment, known, claims, nothing, self.attempts, tracing, name, lambda *_: None, lambda: None
        )

    def rate(self) -> Evaluation:
        answered: Any = None
        return self.attempts.finish(answered, self.items, 1.0)

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


def test_offering_replaces_nothing_and_settling_may_be_done_twice(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl.gz"
    one, two = (offer(path, [ItemOutcome("q", value, "0" * 64, 3)]) for value in (0.0, 1.0))
    first = path.read_bytes()
    settle(path, one, own=two)
    assert path.read_bytes() == first and os.listdir(tmp_path) == [path.name]
    two = offer(path, [ItemOutcome("q", 1.0, "0" * 64, 3)])
    assert path.read_bytes() == first
    for _ in range(2):
        settle(path, two, own=two)
        assert path.read_bytes() != first and os.listdir(tmp_path) == [path.name]
