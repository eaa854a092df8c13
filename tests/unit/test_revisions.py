"""Revisions of an agent's code: when a state is committed, and what becomes of it when recorders, disks and attempts fail."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import codeworld
import pytest
from codehistory import Pointer, files_at
from codeworld import NOW, World

from autorl_hpc.files.layout import RunDir
from autorl_hpc.recorder import code
from autorl_hpc.recorder.code import Ask, Repository
from autorl_hpc.recorder.watch import RecorderJob

world = codeworld.world


def test_the_first_look_keeps_what_is_there_and_the_next_nothing(world: World) -> None:
    (world.code / "train.py").write_text("x = 1\n")
    world.watch.look(NOW)
    world.watch.look(NOW)
    (line,) = world.lines()
    assert (line.files, line.changed, line.parent, line.reason, line.elapsed_s) == (1, 1, None, None, 1.5)
    assert files_at(world.run.code_git, line.revision) == {"code/train.py": b"x = 1\n"}
    commit = Repository(world.run.code_git).commit_of(line.revision)
    assert commit.message == "1.5 s, attempt 1"


def test_a_change_is_committed_when_two_looks_agree_or_it_is_overdue(world: World) -> None:
    world.watch.look(NOW)
    (world.code / "a.py").write_text("1")
    world.watch.look(NOW)
    assert len(world.lines()) == 1 and world.watch.every_s == code.SETTLE_S
    world.watch.look(NOW)
    assert len(world.lines()) == 2 and world.watch.every_s == code.LOOK_S
    for number, pause_s in enumerate((0.75, 0.36, 0.42)):  # 1.53 s since the look that saw no change
        (world.code / "a.py").write_text("2" * (2 + number))
        world.later(pause_s)
        assert len(world.lines()) == 2
        world.watch.look(NOW)
    assert len(world.lines()) == 3


def test_states_that_may_have_been_missed_between_two_looks_are_said(world: World) -> None:
    """A look that came late: a busy node, a slow file server, a suspension."""
    world.watch.look(NOW)
    for pause_s in (1.0, 60.0):
        (world.code / "a.py").write_text(f"{pause_s}")
        world.later(pause_s)
        world.watch.look(NOW)
        world.watch.look(NOW)
    assert [line.reason for line in world.lines()] == [None, None, "60 s since the state before was seen last"]


def test_a_submission_has_its_state_at_once(world: World) -> None:
    world.watch.look(NOW)
    (world.code / "a.py").write_text("as submitted")
    revision = world.snapshot(7)
    (world.code / "a.py").write_text("overwritten!")
    assert revision is not None
    assert files_at(world.run.code_git, revision) == {"code/a.py": b"as submitted"}
    assert world.lines()[-1].submission_id == 7
    assert Repository(world.run.code_git).commit_of(revision).message == "1.5 s, attempt 1, submission 7"
    again = world.snapshot(8)
    assert again != revision and world.snapshot(9) == again  # nothing changed: no new commit
    assert len(world.lines()) == 3


def test_a_repository_that_is_full_keeps_submissions_for_longer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.watch.look(NOW)
    monkeypatch.setattr(code, "MAX_REPOSITORY_BYTES", world.watch._repository.size_bytes + 50_000)
    monkeypatch.setattr(code, "RESERVED_BYTES", 50_000)
    (world.code / "a.py").write_text("1")
    world.watch.look(NOW)
    with pytest.raises(code.RepositoryFull, match="only states of submissions"):
        world.watch.look(NOW)
    world.watch.look(NOW)  # said once
    assert len(world.lines()) == 1
    assert world.snapshot() is not None
    for number in range(20):
        (world.code / "a.py").write_text(os.urandom(5000).hex())
        if world.snapshot(number) is None:
            break
    else:
        raise AssertionError("the bound was never met")
    assert number > 1
    world.fsck()


def test_changes_without_end_are_committed_less_often(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "COMMITS_AT_ONCE", 5)
    for number in range(40):
        (world.code / f"{number}.py").write_text("1")
        world.watch.look(NOW)
        world.watch.look(NOW)
    assert len(world.lines()) == 5
    assert world.watch.every_s == code.LOOK_S, "nothing waits for a change to settle that can't be committed"
    world.later(21.0)
    world.watch.look(NOW)
    line = world.lines()[-1]
    assert len(world.lines()) == 6 and line.files == 40 and "changes without end" in str(line.reason)
    assert world.snapshot() == line.revision


def _work(code: Path) -> None:
    """Changes the tree as fast as it can, in all the ways there are; until it is killed."""

    def write(path: Path, data: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        os.write(fd, data)
        os.close(fd)

    chance = random.Random(1)
    while True:
        path, inner = code / f"f{chance.randrange(5)}.py", code / "d" / "e"
        with contextlib.suppress(OSError):
            match chance.randrange(7):
                case 0 | 1:
                    write(path, b"abc" * chance.randrange(50))
                case 2:
                    path.unlink()
                case 3:
                    path.symlink_to("nowhere")
                case 4:
                    os.mkfifo(path)
                case 5:
                    inner.mkdir(parents=True, exist_ok=True)
                    write(inner / "x.py", b"abc")
                case 6:
                    shutil.rmtree(code / "d")


def test_an_agent_at_work_during_looks_gets_whole_commits(world: World) -> None:
    """Files change, come, go, become links and FIFOs while looks go on: every commit can be read, and holds real bytes."""
    worker = multiprocessing.get_context("fork").Process(target=_work, args=(world.code,))
    worker.start()
    try:
        deadline = time.monotonic() + 240
        while len(world.lines()) < 100:
            assert world.snapshot() is not None
            assert time.monotonic() < deadline
    finally:
        worker.kill()
        worker.join()
    for line in world.lines():
        for data in files_at(world.run.code_git, line.revision).values():
            assert data == Pointer("link", target="nowhere") or (isinstance(data, bytes) and not data.strip(b"abc"))
    world.fsck()


def test_a_full_disk_costs_looks_and_nothing_that_was_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (world.code / "a.py").write_text("1")
    world.watch.look(NOW)
    (world.code / "a.py").write_text("2")
    with monkeypatch.context() as patched:

        def full(*_: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        patched.setattr(code.os, "write", full)
        told: list[str | None] = []
        world.asks.put(Ask(1, told.append))
        with pytest.raises(OSError, match="No space"):
            world.watch.look(NOW)
        assert told == [None]
    assert world.files() == {"code/a.py": b"2"}
    assert [line.changed for line in world.lines()] == [1, 1]
    world.fsck()


def test_a_new_recorder_goes_on_and_a_new_attempt_too(world: World) -> None:
    (world.code / "a.py").write_text("1")
    world.watch.look(NOW)
    world.watch = world.fresh()
    world.watch.look(NOW)
    assert len(world.lines()) == 1  # nothing changed since
    (world.code / "a.py").write_text("2")
    world.watch = world.fresh(attempt=2)
    second = world.snapshot()
    first, last = world.lines()
    assert (last.parent, last.revision, last.changed) == (first.revision, second, 1)
    assert Repository(world.run.code_git).head() == second


def test_two_attempts_at_once_don_t_harm_each_other(world: World) -> None:
    world.watch.look(NOW)
    older, newer = world.watch, world.fresh(attempt=2)
    for number in range(10):
        (world.code / "a.py").write_text(str(number))
        for watch in (older, newer):
            world.watch = watch
            assert world.snapshot() is not None
    repository = Repository(world.run.code_git)
    assert repository.head() == newer.head and repository.ref("attempt-1") == older.head
    assert len(list(repository.history(newer.head))) == 11 == len(list(repository.history(older.head)))
    world.fsck()


def test_damage_to_what_was_kept_is_said_and_a_new_history_begins(world: World) -> None:
    world.watch.look(NOW)
    revision = world.lines()[0].revision
    path = world.run.code_git / "objects" / revision[:2] / revision[2:]
    path.unlink()
    path.write_bytes(b"damaged")
    (world.code / "a.py").write_text("1")
    world.watch = world.fresh()
    world.watch.look(NOW)
    line = world.lines()[-1]
    assert line.parent is None and line.reason is not None and "can't be read" in line.reason


def test_the_end_keeps_the_last_state(world: World) -> None:
    world.watch.look(NOW)
    (world.code / "a.py").write_text("last words")
    world.watch.close(NOW)
    line = world.lines()[-1]
    assert world.watch.head == line.revision
    assert files_at(world.run.code_git, line.revision) == {"code/a.py": b"last words"}


def test_what_a_job_says_is_read_back() -> None:
    job = RecorderJob(
        RunDir(Path("/r\udcff")), Path("/w"), Path("/l"), 5, "m", 2, 1.5, 9.0, 30.0, "codex", frozenset({"b", "a"})
    )
    assert RecorderJob.told(job.line()) == job and json.loads(job.line())["laid"] == ["a", "b"]
