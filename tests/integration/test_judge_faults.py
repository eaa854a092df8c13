"""A judge that fails: nothing is scored, nobody is blamed, other runs go on, and what was answered is judged later."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S, SUBMITS_ONE, Cluster, wait_for
from judge_server import JudgeServer, Reply, completion

pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'autorl-hpc[alpacaeval]'")

from autorl_hpc.files.ledger import Ledger
from autorl_hpc.records.entries import Score
from autorl_hpc.states import EntryKind

KEY = "sk-test-0123456789abcdef"


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which nobody listens until the test does."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


def scores(cluster: Cluster, run_id: str) -> list[Score]:
    return [entry.body for entry in Ledger(cluster.run_dir(run_id)).read() if entry.kind is EntryKind.SCORE]


def prepared(cluster: Cluster, tmp_path: Path, port: int) -> dict[str, str]:
    """Run ids by task, of alpacaeval-mini with a judge at that port and of a task without one; both agents have ended."""
    cluster.mini_task()
    cluster.run("stage", "alpacaeval-mini", "--root", str(cluster.root.path))
    cluster.agent("one", SUBMITS_ONE)
    key = tmp_path / "judge.key"
    key.write_text(KEY)
    key.chmod(0o600)
    judge = {
        "url": f"http://127.0.0.1:{port}/v1",
        "model": "judge",
        "key_file": str(key),
        "retries": 0,
        "price_in": 1.0,
    }
    matrix = {"task": ["alpacaeval-mini", "mini"], "agent": "one", "base_model": "autorl/tiny"}
    run_ids = cluster.prepare(["one"], matrix=matrix, judge=judge)
    for run_id in run_ids:
        assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
    return {"alpacaeval-mini" if run_id.startswith("alpaca") else "mini": run_id for run_id in run_ids}


def test_a_judge_that_is_offline_and_comes_back(cluster: Cluster, tmp_path: Path, port: int) -> None:
    runs = prepared(cluster, tmp_path, port)
    judged, other = runs["alpacaeval-mini"], runs["mini"]
    grader = cluster.grader()
    wait_for(lambda: cluster.finished([other]), what="the run that needs no judge")
    wait_for(lambda: "the judge failed, nothing was scored" in cluster.logs_of("grader"), what="the judge's failure")
    assert scores(cluster, judged) == [] and not cluster.finished([judged])
    assert any(name.startswith("f-alpaca") for name in os.listdir(cluster.experiment.queue))
    log = cluster.logs_of("grader")
    assert "fault: grader" in log and "fault: cluster" not in log
    assert "can't be reached" in log and "goes back to the queue" in log and "Traceback" not in log

    def says(number: int, body: dict[str, Any]) -> Reply:
        return Reply(completion("12"[len(body["messages"][-1]["content"]) % 2]))

    server = JudgeServer(says, port)
    try:
        assert grader.wait(PATIENCE_S) == 0, cluster.logs()
    finally:
        server.end()
    (score,) = scores(cluster, judged)
    found = score.evaluation
    assert found.score is not None and found.fault is None and found.correct is None
    assert found.metrics["lc_win_rate"] == found.score and "mean_outcome" in found.metrics
    assert found.metrics["judge_requests"] + found.metrics["judge_cached"] > 0
    assert found.metrics["judge_cost"] == pytest.approx(found.metrics["judge_prompt_tokens"] / 1e6)
    closed = cluster.view(judged).closed
    assert closed is not None and closed.report is not None and closed.report.score is not None

    assert all(asked.headers["Authorization"] == f"Bearer {KEY}" for asked in server.asked)
    for path in cluster.root.path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path
    # Each question was asked once, over both measurements of the base model and both splits.
    asked = len({json.dumps(each.body) for each in server.asked})
    cached = list(cluster.root.judge_cache.rglob("*.json"))
    assert len(cached) == asked == len(server.asked)
    done = cluster.run("verify", str(cluster.experiment.path))
    assert "2 runs, 0 damaged" in done.stdout
    cluster.run("report", str(cluster.experiment.path))
    (summary,) = [run for run in json.loads((cluster.experiment.report / "summary.json").read_text())["runs"] if run["run_id"] == judged]  # fmt: skip
    assert summary["improvement"]["how"] == "length_controlled_items"
    assert summary["report"]["score"] == closed.report.score and summary["gap"] is not None
    assert any(note.startswith("secondary: ") and "on all 38 items" in note for note in summary["notes"])


def test_the_built_in_judge_needs_no_network(cluster: Cluster) -> None:
    cluster.run("stage", "alpacaeval-mini", "--root", str(cluster.root.path))
    run_id = cluster.sealed_run(matrix={"task": "alpacaeval-mini"})
    assert cluster.grader().wait(PATIENCE_S) == 0, cluster.logs()
    (score,) = scores(cluster, run_id)
    assert score.evaluation.score is not None and score.evaluation.metrics["judge_requests"] == 12
    assert score.evaluation.standard_error is not None and "standard_error" not in score.evaluation.metrics
    assert cluster.finished([run_id])
    done = cluster.run("report", str(cluster.experiment.path))
    assert "alpacaeval-mini" in done.stdout
