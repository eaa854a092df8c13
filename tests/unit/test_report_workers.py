"""Runs shared out to forked processes: the answers in order whatever becomes of a process, and the same report by them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from treemaker import Tree

from autorl_hpc.report import report
from autorl_hpc.report.report import Options
from autorl_hpc.report.run_summary import Library
from autorl_hpc.report.run_summary import digest as real_digest

PIECES = 300
"""More than may wait for a slow one."""


def test_answers_come_in_order_from_several_processes() -> None:
    def work(number: int) -> bytes:
        if number == 3:
            time.sleep(0.3)  # the others overtake it
        return f"{number} {os.getpid()} ".encode() + b"x" * (number * 1000)

    with report.shared_out(work, PIECES, 3) as answers:
        found = [answer.split() for answer in answers if answer is not None]
    assert [int(answer[0]) for answer in found] == list(range(PIECES))
    assert [len(answer[2]) for answer in found[1:]] == [1000 * number for number in range(1, PIECES)]
    told = {int(answer[1]) for answer in found}
    assert len(told) == 3 and os.getpid() not in told
    assert gone(told)


def gone(pids: set[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_what_fails_in_a_worker_has_no_answer_and_the_others_have() -> None:
    def work(number: int) -> bytes:
        if number % 7 == 0:
            raise ValueError(number)
        return b"" if number % 2 else b"even"

    with report.shared_out(work, PIECES, 2) as answers:
        found = list(answers)
    assert found == [None if n % 7 == 0 else b"" if n % 2 else b"even" for n in range(PIECES)]


@pytest.mark.parametrize("killed_by", [(5,), (5, 40), tuple(range(PIECES))], ids=["one", "both", "each"])
def test_what_a_killed_worker_took_with_it_has_no_answer(killed_by: tuple[int, ...]) -> None:
    def work(number: int) -> bytes:
        if number in killed_by:
            os.kill(os.getpid(), signal.SIGKILL)
        return str(number).encode()

    with report.shared_out(work, PIECES, 2) as answers:
        found = list(answers)
    assert len(found) == PIECES
    assert all(answer in (None, str(number).encode()) for number, answer in enumerate(found))
    assert all(found[number] is None for number in killed_by)


def test_workers_end_when_nobody_asks_any_more() -> None:
    def work(number: int) -> bytes:
        return str(os.getpid()).encode()

    with pytest.raises(KeyboardInterrupt), report.shared_out(work, PIECES, 2) as answers:
        told = {int(next(answers) or b"0") for _ in range(4)}
        raise KeyboardInterrupt
    assert told and gone(told)


def test_workers_end_with_the_process_that_asks() -> None:
    """Killed, it can tell them nothing."""
    reading, writing = os.pipe()
    asking = os.fork()
    if not asking:
        try:
            with report.shared_out(lambda number: str(os.getpid()).encode(), PIECES, 2) as answers:
                told = {next(answers) or b"" for _ in range(20)}
                os.write(writing, b" ".join(told))
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as pipe:  # it ends when the last of them has gone, for each holds the other end
        told = pipe.read()
    assert os.waitpid(asking, 0)[1] == signal.SIGKILL
    assert told


def test_the_report_by_workers_is_the_report_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the runs one that nobody can read, and one whose worker is killed."""
    tree = Tree(tmp_path / "runs" / "exp", n_feedback=20, n_report=30)
    for seed in range(12):
        run = tree.run(seed=seed).start()
        run.submit(10.0, [1.0] * (seed + 1) + [0.0] * (19 - seed))
        run.seal().close([1.0] * (2 * seed) + [0.0] * (30 - 2 * seed))
    tree.save()
    runs = sorted(path.parent for path in (tmp_path / "runs" / "exp").glob("*/run.json"))
    assert len(runs) == 12
    (runs[2] / "run.json").write_text("{")
    here = os.getpid()

    def digest(run: report.RunDir, library: Library, chain: object = None) -> object:
        if os.getpid() != here and run.path == runs[5]:
            os.kill(os.getpid(), signal.SIGKILL)
        return real_digest(run, library, chain)  # type: ignore[arg-type]

    def made(count: int) -> dict[str, bytes]:
        monkeypatch.setattr(report, "workers_for", lambda pieces: count)
        done = report.refresh([tmp_path / "runs"], None, Options(fresh=True))
        assert done.read == 11 and done.left_out == 1
        pages = [path for path in (tmp_path / "runs").rglob("report/*") if path.is_file() and path.name[0] != "."]
        return {str(path.relative_to(tmp_path)): path.read_bytes() for path in pages}

    by_one = made(0)
    monkeypatch.setattr(report, "digest", digest)
    assert len(by_one) > 3 * 11 and made(2) == by_one
    again = report.refresh([tmp_path / "runs"])
    assert again.read == 0
