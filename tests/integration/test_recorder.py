"""The recorder as a process: what it keeps, and that nothing which befalls it reaches the agent or its scores."""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
from codehistory import files_at, history
from helpers import PATIENCE_S, VARIANTS, Cluster, alive, wait_for

from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.processes import end_all
from autorl_hpc.recorder.code import GitDamage, Repository
from autorl_hpc.records.experiment import Budget
from autorl_hpc.records.recorded import CodeRevision
from autorl_hpc.supervise.budget import BudgetClock, BudgetUsed
from autorl_hpc.supervise.children import RecorderProcess

HEAD = '#!/usr/bin/env bash\nset -e\ncd "$WORKSPACE"\n'

WAITS = (
    HEAD
    + VARIANTS
    + "variants 0 2\necho $AUTORL_ATTEMPT > code/train.py\nuntil [ -e output/go ]; do sleep 0.05; done\n./submit output/v0\n"
)
"""An agent that submits when the test says so, and ends when its checkpoint is accepted."""


def one(cluster: Cluster, script: str, **changes: Any) -> str:
    cluster.agent("one", script)
    (run_id,) = cluster.prepare(["one"], **changes)
    return run_id


def lines_of(path: Path) -> list[str]:
    """The whole lines of a file that somebody may just be writing to."""
    try:
        return path.read_text().split("\n")[:-1]
    except OSError:
        return []


def events(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, lines_of(run.events)) if line["event"] == kind]


def recorder_pid(run: RunDir) -> int:
    """The recorder's process id, once it has begun."""
    found = wait_for(lambda: events(run, "recorder_started"), what="the recorder")
    return int(found[-1]["pid"])


def revisions(run: RunDir) -> list[CodeRevision]:
    return [CodeRevision.model_validate_json(line) for line in lines_of(run.recorded("revisions"))]


def code_at(run: RunDir, lines: list[CodeRevision]) -> dict[str, bytes]:
    """The files of the last of them."""
    return files_at(run.code_git, lines[-1].revision) if lines else {}


@pytest.mark.parametrize("level", ["bwrap", "namespaces", "landlock", "none"])
def test_what_the_observer_saw_is_in_the_runs_folder(cluster: Cluster, level: str) -> None:
    """In each sandbox, with the agent's own modules behind the observer's; a definition's `env` turns it off."""
    script = HEAD + "echo 'FOUND = 1' > code/mine.py\npython3 -c 'import mine; raise ValueError(mine.FOUND)' || true\n"
    cluster.agent("seen", script, env={"PYTHONPATH": "code"})
    cluster.agent("unseen", script, env={"PYTHONPATH": "code", "AUTORL_OBSERVED": ""})
    names = ["seen", "unseen"] if level == "none" else ["seen"]
    seen, *unseen = cluster.prepare(names, sandbox={"level": level}, attempts=1)
    for run_id in (seen, *unseen):
        if cluster.supervisor(run_id).wait(PATIENCE_S) and "can't be had on this node" in cluster.logs():
            needs.skip(level, f"level {level} can't be had on this node")
    told = [json.loads(line) for line in lines_of(cluster.run_dir(seen).recorded("observed"))]
    assert [each["what"] for each in told] == ["start", "crashed", "memory"]
    assert told[1]["facts"]["message"] == "1" and told[1]["program"] == "-c"
    assert not any(cluster.run_dir(run_id).recorded("observed").exists() for run_id in unseen)


def go(cluster: Cluster, run_id: str) -> None:
    (cluster.workspace(run_id) / "output" / "go").write_text("")


PATIENT = {
    "    answer_s = 2.0": "    answer_s = 300.0",
    "    patience_s = 6.0": "    patience_s = 3000.0",
    "    begin_s = 1.0": "    begin_s = 300.0",
    "    end_s = 5.0": "    end_s = 300.0",
}


def patient(cluster: Cluster) -> None:
    """Waits longer for the recorder than it does where it must not hold up a run: a busy machine's may take seconds to start."""
    path = cluster._frozen() / "autorl_hpc" / "supervise" / "children.py"
    text = path.read_text()
    for before, after in PATIENT.items():
        assert text.count(f"\n{before}") == 1, before
        text = text.replace(f"\n{before}", f"\n{after}")
    path.write_text(text)


# ---------------------------------------------------------------- through the supervisor


def test_the_revision_of_a_submission_is_the_code_as_it_was_then(cluster: Cluster) -> None:
    patient(cluster)
    script = HEAD + VARIANTS + "variants 0 2\n"
    for number in (0, 1):
        script += f"echo 'submitted {number}' > code/train.py\n./submit output/v{number}\necho 'overwritten {number}' > code/train.py\n"
    drop = """./submit output/none || true
echo last > code/train.py
echo '{"model_path": "output/v2"}' > submissions/.tmp-x && mv submissions/.tmp-x submissions/x.json
"""
    run_id = cluster.sealed_run(script.replace("variants 0 2", "variants 0 3") + drop)
    run, view = cluster.run_dir(run_id), cluster.view(run_id)
    held = []
    for submission in view.submissions.values():
        assert submission.code_revision is not None
        held.append(files_at(run.code_git, submission.code_revision)["code/train.py"])
    assert held == [b"submitted 0\n", b"submitted 1\n", b"overwritten 1\n", b"last\n"]
    assert [s.status for s in view.submissions.values()] == ["accepted", "accepted", "refused", "accepted"]
    last = Repository(run.code_git).head()
    assert last is not None and files_at(run.code_git, last) == {"code/train.py": b"last\n"}
    assert revisions(run)[-1].revision == last
    assert files_at(run.code_git, revisions(run)[0].revision).keys() <= {"code/train.py"}, "not what the suite laid"


def test_a_recorder_ends_with_its_supervisor_and_may_be_killed(cluster: Cluster) -> None:
    patient(cluster)
    run_id = one(cluster, WAITS, budget={"wall_clock": "1h"})
    run = cluster.run_dir(run_id)
    supervisor = cluster.supervisor(run_id)
    pid = recorder_pid(run)
    # All that there is to record: one that is ended between a commit and its line leaves a commit more.
    wait_for(
        lambda: code_at(run, revisions(run)) == {"code/train.py": b"1\n"}, what="the revision of what the agent wrote"
    )
    os.kill(pid, signal.SIGTERM)  # what a scheduler sends to all processes of a job doesn't end it
    os.kill(pid, signal.SIGSTOP)
    supervisor.kill()
    supervisor.wait()
    wait_for(lambda: not alive(pid), "the recorder's end")
    supervisor = cluster.supervisor(run_id)
    wait_for(lambda: code_at(run, revisions(run)) == {"code/train.py": b"2\n"}, what="the second attempt's code")
    wait_for(lambda: len(events(run, "recorder_started")) == 2, what="the second recorder")
    os.kill(recorder_pid(run), signal.SIGKILL)
    wait_for(lambda: events(run, "recorder_crashed"), what="its crash in the record")
    go(cluster, run_id)
    assert supervisor.wait(PATIENCE_S) == 0, cluster.logs()
    assert [crash["exit_code"] for crash in events(run, "recorder_crashed")] == [-9]
    (submission,) = cluster.view(run_id).submissions.values()
    assert submission.status == "accepted" and cluster.view(run_id).sealed is not None
    lines = revisions(run)
    assert {line.attempt for line in lines} == {1, 2}
    last = lines[-1]
    assert files_at(run.code_git, last.revision)["code/train.py"] == b"2\n"
    chain = history(run.code_git, last.revision)
    assert lines[0].revision in chain and len(chain) == len(lines)
    elapsed = [line.elapsed_s for line in lines]
    assert elapsed == sorted(elapsed)


# ---------------------------------------------------------------- a recorder without an agent


class Bench:
    """A recording of a workspace that the test itself writes."""

    def __init__(self, tmp: Path) -> None:
        self.run, self.workspace = RunDir(tmp / "run"), tmp / "workspace"
        self.run.path.mkdir()
        self.code = self.workspace / "code"
        self.code.mkdir(parents=True)
        budget = Budget.model_validate({"wall_clock": "1h"})
        self.clock = BudgetClock(self.run.clock, budget, 1, BudgetUsed(100.0))
        self.clock.start()
        self.recording = RecorderProcess(self.run, self.workspace, self.clock, os.getpid(), "no such mark")

    def end(self) -> None:
        self.recording.end()
        self.clock.stop()

    def holds(self, text: bytes) -> bool:
        """Whether the last commit has train.py so."""
        return self.held().get("code/train.py") == text

    def held(self) -> dict[str, Any]:
        """The files of the last commit."""
        head = Repository(self.run.code_git).head() if self.run.code_git.exists() else None
        try:
            return {} if head is None else files_at(self.run.code_git, head)
        except GitDamage:
            return {}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    try:
        yield made
    finally:
        made.end()


def test_a_change_is_settled_and_a_full_disk_costs_only_what_it_refuses(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that knows no secrets and has a lower priority; a watch that fails goes on."""
    monkeypatch.setenv("SOME_API_KEY", "sk-secret")
    bench.run.code_git.write_text("a file where the repository belongs")
    bench.recording.start()
    pid = recorder_pid(bench.run)
    assert b"sk-secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)
    assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == 500
    (trouble, *_) = wait_for(lambda: events(bench.run, "recorder_trouble"), what="the trouble")
    assert trouble["watch"] == "revisions" and "NotADirectoryError" in trouble["message"]
    bench.run.code_git.unlink()
    for text in (b"1", b"2"):
        (bench.code / "train.py").write_bytes(text)
        wait_for(functools.partial(bench.holds, text), "the revision")
    assert 100.0 < revisions(bench.run)[0].elapsed_s <= revisions(bench.run)[-1].elapsed_s < bench.clock.elapsed_s
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))  # every write to a file fails
    (bench.code / "train.py").write_bytes(b"3")
    assert bench.recording.ask(1)() is None and bench.held() == {"code/train.py": b"2"}
    assert alive(pid) and events(bench.run, "recorder_crashed") == []


def test_a_recorder_that_hangs_slows_down_neither_submissions_nor_the_end(bench: Bench) -> None:
    bench.recording.answer_s, bench.recording.patience_s = 0.2, 0.6
    bench.recording.start()
    pid = recorder_pid(bench.run)
    os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    for number in range(300):
        assert bench.recording.ask(number)() is None
    assert time.monotonic() - begun < 20, "300 times the patience of one answer is 60 s"
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: bench.recording.ask(999)() is not None, "an answer")
    os.kill(pid, signal.SIGSTOP)
    bench.recording.end_s = 0.5
    bench.recording.end()
    assert not alive(pid)


def test_a_recorder_that_hangs_is_killed_and_started_again(bench: Bench) -> None:
    bench.recording.ping_s, bench.recording.pauses_s = 1.0, (0.1,)
    bench.recording.hung_pings = 10**6  # until it is stopped: a busy machine's seems to hang while it starts
    bench.recording.start()
    first = recorder_pid(bench.run)
    os.kill(first, signal.SIGSTOP)
    bench.recording.hung_pings = 3
    wait_for(lambda: events(bench.run, "recorder_crashed"), what="the end of the one that hangs")
    bench.recording.hung_pings = 10**6
    wait_for(lambda: len(events(bench.run, "recorder_started")) >= 2, what="the second recorder")
    crash = events(bench.run, "recorder_crashed")[0]
    assert (crash["hung"], crash["exit_code"], crash["again_in_s"]) == (True, -9, 0.1)
    assert not alive(first)
    (bench.code / "a.py").write_text("1")
    wait_for(lambda: bench.held() == {"code/a.py": b"1"}, "a revision of the second recorder")


def test_a_recorder_that_is_just_starting_is_not_ended_with_the_agent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, there, ended = subprocess.Popen, threading.Event(), threading.Event()

    def slow(*arguments: Any, **named: Any) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = real(*arguments, **named)
        there.set()
        ended.wait(2.0)  # nobody knows yet whose it is
        return process

    bench.recording.pauses_s = (300.0,)
    monkeypatch.setattr(subprocess, "Popen", slow)
    bench.recording.start()
    assert there.wait(PATIENCE_S)
    end_all(os.getpid(), "no such mark")  # as in the thread that keeps the agent
    ended.set()
    wait_for(lambda: events(bench.run, "recorder_started") or events(bench.run, "recorder_crashed"), what="its word")
    assert events(bench.run, "recorder_crashed") == []


@pytest.mark.parametrize(("executable", "why"), [("/bin/false", "exit_code"), ("/no/such/python", "error")])
def test_a_recorder_that_can_t_live_is_started_again_ever_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, executable: str, why: str
) -> None:
    bench.recording.pauses_s = (0.05, 0.1)
    monkeypatch.setattr(sys, "executable", executable)
    bench.recording.start()
    crashes = wait_for(lambda: events(bench.run, "recorder_crashed")[2:] and events(bench.run, "recorder_crashed"), "3")
    assert [c["again_in_s"] for c in crashes][:3] == [0.05, 0.1, 0.1] and crashes[0][why]
    assert bench.recording.ask(1)() is None


def test_an_end_right_after_the_start_keeps_the_state(bench: Bench) -> None:
    (bench.code / "a.py").write_text("1")
    bench.recording.begin_s = bench.recording.end_s = 300.0
    bench.recording.start()
    bench.recording.end()
    assert bench.held() == {"code/a.py": b"1"}
    assert bench.recording.ask(1)() == Repository(bench.run.code_git).head()
