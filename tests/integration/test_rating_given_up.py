"""What a rating has running ends with it, when it is given up: programs, a task's own processes, requests to a judge."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers import PATIENCE_S
from judge_server import JudgeServer, Reply

from autorl_hpc.files.processes import GivenUp
from autorl_hpc.grading.background import RatingOverdue, under_way, within
from autorl_hpc.records.experiment import JudgeSpec
from autorl_hpc.scoring.judge_cache import JudgeCache
from autorl_hpc.scoring.judges import HttpJudge
from autorl_hpc.scoring.outcome import Context
from autorl_hpc.scoring.own import OwnScorer
from autorl_hpc.tasks.heldout import Item

LONG_END_S = 300.0
"""For what is given up to end: a grader waits a moment and goes on, these tests wait until it has ended, also on a busy machine."""

BUSY = f"""
import sys
from autorl_hpc.grading.background import RatingOverdue, under_way, within
from autorl_hpc.sandbox.programs import Program, ProgramLimits as Limits
from autorl_hpc.sandbox.programs import run_programs
busy = [Program(f"N = {{n}}\\nwhile True: pass", "def check(f): pass", "f") for n in range(20)]
limits = Limits(cpu_s=900, wall_s=900.0)
try:
    within(float(sys.argv[1]), lambda: run_programs(busy, workers=2, limits=limits, layers=()), {LONG_END_S})
except RatingOverdue:
    print("overdue", len(under_way()), flush=True)
"""


def busy(folder: Path, limit_s: float) -> subprocess.Popen[str]:
    """A process that rates twenty programs, each of which takes a quarter of an hour."""
    return subprocess.Popen(
        [sys.executable, "-c", BUSY, str(limit_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()


def test_an_overdue_rating_of_programs_keeps_no_process_from_ending(tmp_path: Path) -> None:
    process = busy(tmp_path, 2.0)
    assert ended(process) == ("overdue 0\n", "") and process.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_an_overdue_rating_by_a_tasks_own_code_leaves_no_process(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    (tmp_path / "evaluate.py").write_text(
        "import os, time\n\n\ndef evaluate(question, model_answer, reference):\n"
        f"    new = {str(mark) + '.new'!r}\n    open(new, 'w').write(str(os.getpid()))\n"
        f"    os.rename(new, {str(mark)!r})\n    time.sleep(900)\n"  # it is ended at any moment
    )
    rater, context = OwnScorer("mine", tmp_path, "1"), Context(options={"evaluate_timeout_s": 900})

    def rate() -> None:
        rater.score([Item("a", "?", "7", {})], [["7"]], context)

    with pytest.raises(RatingOverdue):
        within(4.0, rate, LONG_END_S)
    assert under_way() == []
    if mark.exists():  # else this machine was too busy to begin
        assert not Path(f"/proc/{mark.read_text()}").exists()


def test_what_a_judge_says_too_late_counts_for_no_other_evaluation(tmp_path: Path) -> None:
    go = threading.Event()

    def replies(number: int, body: object) -> Reply:
        go.wait(PATIENCE_S)
        return Reply()

    server = JudgeServer(replies)
    try:
        spec = JudgeSpec(url=server.url, model="judge", timeout_s=PATIENCE_S, concurrency=2)
        judge = HttpJudge(spec, JudgeCache(tmp_path))
        talks = [[{"role": "user", "content": f"question {n}"}] for n in range(6)]
        given_up: list[str] = []

        def rate() -> None:
            try:
                judge.ask(talks, max_tokens=8)
            finally:
                try:
                    judge.ask(talks[::-1], max_tokens=8)
                except GivenUp:
                    given_up.append("nothing is begun any more")

        with pytest.raises(RatingOverdue):
            within(1.0, rate, LONG_END_S)
        before = judge.usage
        go.set()
        assert given_up and under_way() == []
        assert judge.usage == before and len(server.asked) <= 2, "no further one is asked, and none is counted late"
        judge.ask(talks, max_tokens=8)
        used = judge.usage.since(before)
        assert used["judge_requests"] + used["judge_cached"] == 6
        assert used["judge_prompt_tokens"] == 100 * used["judge_requests"]
    finally:
        go.set()
        server.end()
