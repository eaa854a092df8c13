"""Graders at a queue of many runs: the order they keep, what they do side by side, and a part of the feedback split."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S, VARIANTS, Cluster

from autorl_hpc.files.ledger import Ledger
from autorl_hpc.grading import engines as grading_engines
from autorl_hpc.grading import schedule
from autorl_hpc.grading.daemon import Grader
from autorl_hpc.records.entries import Score
from autorl_hpc.records.exchange import Engine as Identity
from autorl_hpc.rollouts.engine import Answer, Loaded
from autorl_hpc.states import EntryKind
from autorl_hpc.tasks.loader import PATH_VARIABLE

pytestmark = pytest.mark.xdist_group("order")
SUBMITS = "#!/usr/bin/env bash\nset -e\ncd $WORKSPACE\n" + VARIANTS + "variants $((AUTORL_SEED * 50)) 3\n"
SUBMITS += 'for folder in output/v*; do ./submit "$folder"; done\n'


class RecordingEngine:
    """Answers every prompt alike, and notes what it is asked to do."""

    def __init__(self) -> None:
        self.did: list[tuple[str, str]] = []
        self.content = ""
        self.before_answer: Callable[[], None] = lambda: None

    @property
    def identity(self) -> Identity:
        return Identity(backend="recording", versions={}, device="none", dtype="float32")

    def load(self, weights: Path, content_hash: str) -> Loaded:
        self.content = content_hash
        self.did.append(("load", content_hash))
        return Loaded(0.0, 0.0)

    def prefetch(self, weights: Path, content_hash: str) -> None:
        assert weights.name == content_hash and weights.is_dir()
        self.did.append(("prefetch", content_hash))

    def encode(self, text: str) -> list[int]:
        return [len(text)]

    def chat(self, messages: Sequence[dict[str, str]]) -> None:
        return None

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Any, seed: int) -> list[Answer]:
        self.before_answer()
        self.did.append(("generate", self.content))
        return [Answer("#### 1", 3, False) for _ in prompts]

    def close(self) -> None:
        pass


class Desk:
    """Two ended runs of three submissions each, and a grader in this process whose engine takes notes."""

    def __init__(self, cluster: Cluster, runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster, self.runs = cluster, runs
        self.engine = RecordingEngine()
        monkeypatch.setenv(PATH_VARIABLE, str(cluster.share / "tasks"))
        monkeypatch.setattr(grading_engines, "make_engine", lambda *arguments: self.engine)
        monkeypatch.setattr(schedule, "RETRY_AFTER_TROUBLE_S", 0.05)
        self.grader = Grader(cluster.experiment)

    def work(self) -> None:
        """Until nothing is left."""
        until = time.monotonic() + PATIENCE_S
        while os.listdir(self.cluster.experiment.queue):
            assert time.monotonic() < until, os.listdir(self.cluster.experiment.queue)
            if not self.grader.step():
                time.sleep(0.02)
        self.grader._collect_all()
        assert os.listdir(self.cluster.experiment.claims) == []

    def scores(self) -> dict[str, list[int]]:
        """Every score entry, doubles included."""
        return {
            run: [e.body.submission_id for e in Ledger(self.cluster.run_dir(run)).read() if e.kind is EntryKind.SCORE]
            for run in self.runs
        }

    def contents(self) -> list[str]:
        """Of the submissions, in the order in which they were answered."""
        wanted = {s.content_hash for run in self.runs for s in self.cluster.view(run).accepted()}
        return [content for what, content in self.engine.did if what == "generate" and content in wanted]


@pytest.fixture(scope="module")
def ended(staged: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, list[str]]]:
    cluster = Cluster(staged, tmp_path_factory.mktemp("order"))
    try:
        cluster.mini_task(2)
        cluster.agent("three", SUBMITS)
        runs = cluster.prepare(["three"], matrix={"task": "mini", "seed": [0, 1]})
        for process in [cluster.supervisor(run) for run in runs]:
            assert process.wait(PATIENCE_S) == 0, cluster.logs()
        yield cluster, runs
    finally:
        cluster.end()


@pytest.fixture
def desk(ended: tuple[Cluster, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """The runs as they were at their end; put back afterwards."""
    path, kept = ended[0].experiment.path, tmp_path / "kept"
    shutil.copytree(path, kept, symlinks=True)
    yield Desk(*ended, monkeypatch)
    shutil.rmtree(path)
    shutil.copytree(kept, path, symlinks=True)


ONCE = [1, 2, 3]


def in_order(scores: dict[str, list[int]]) -> dict[str, list[int]]:
    """Doubles stay; which of two that are rated side by side is committed first is chance."""
    return {run: sorted(numbers) for run, numbers in scores.items()}


def test_the_next_is_loaded_ahead_and_answered_while_the_former_is_rated(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, rated = threading.Event(), list[bool]()
    rate, beside = desk.grader.bench.rate, itertools.count()

    def rate_late(answered: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and next(beside) == 0:
            rated.append(asked.wait(PATIENCE_S))  # the first submission is rated once the second is being answered
        return rate(answered)

    def answering() -> None:
        desk.grader.heart.look()  # as the heartbeat does
        if len(desk.contents()) == 1:
            asked.set()

    monkeypatch.setattr(desk.grader.bench, "rate", rate_late)
    desk.engine.before_answer = answering
    desk.work()
    assert rated == [True]
    assert in_order(desk.scores()) == dict.fromkeys(desk.runs, ONCE)
    assert all(view.closed and not view.unfingerprinted() for view in map(desk.cluster.view, desk.runs))
    order = desk.contents()[:6]
    ahead = [content for what, content in desk.engine.did if what == "prefetch"]
    assert [content for content in order[1:] if content not in ahead] == [], "each was read ahead, but for the first"
    for former, content in itertools.pairwise(order):
        place = desk.engine.did.index(("generate", former))
        assert ("prefetch", content) in desk.engine.did[:place], "before the former was answered"
    runs = [run for content in order for run in desk.runs if content in desk.cluster.view(run).contents()]
    assert runs[0] != runs[1] and runs[2] != runs[3], "by turns"


def test_a_part_of_the_feedback_split(cluster: Cluster) -> None:
    cluster.mini_task(6)
    cluster.agent("three", SUBMITS)
    (run,) = cluster.prepare(["three"], matrix={"task": "mini"}, feedback={"items": 4})
    supervisor, grader = cluster.supervisor(run), cluster.grader()
    assert supervisor.wait(PATIENCE_S) == 0 and grader.wait(PATIENCE_S) == 0, cluster.logs()
    view = cluster.view(run)
    scores: list[Score] = list(view.scores.values())
    assert len(scores) == 3 and view.closed is not None and view.closed.report is not None
    for evaluation in (score.evaluation for score in scores):
        assert evaluation.n == 4 and evaluation.standard_error is not None and evaluation.standard_error > 0
        assert evaluation.timings.waiting_s is not None and evaluation.timings.waiting_s < PATIENCE_S
    assert view.closed.report.n == 6, "the report split is always whole"
    assert "a part of the feedback split: 4 of 6 items" in (cluster.workspace(run) / "instructions.md").read_text()
    assert "0 damaged" in cluster.run("verify", str(cluster.experiment.path)).stdout
    told = cluster.run("report", str(cluster.experiment.path.parent), "--json").stdout
    assert "feedback scores are of a part: 4 of 6 items" in told or "feedback_of" in told
