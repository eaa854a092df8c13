"""Revisions of an agent's code: when a state is committed, what is in it, and what happens when recorders, disks and attempts fail."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import codeworld
import pytest
from codehistory import Pointer, files_at, history, message_of
from codeworld import NOW, World

from autorl_hpc.recorder import code
from autorl_hpc.recorder.code import Repository

world = codeworld.world


def test_each_state_is_committed_once(world: World) -> None:
    (world.code / "train.py").write_text("x = 1\n")
    world.look()
    world.look()
    (line,) = world.lines()
    assert (line.files, line.changed, line.parent, line.reason, line.elapsed_s) == (1, 1, None, None, 1.5)
    assert world.held() == {"code/train.py": b"x = 1\n"}
    assert message_of(world.run.code_git, line.revision) == "1.5 s, attempt 1"
    for pause_s in (1.0, 60.0):
        (world.code / "train.py").write_text(f"{pause_s}")
        world.look(pause_s)
    assert [line.reason for line in world.lines()] == [None, None, "60 s since the state before was seen last"]


def test_a_submission_has_its_state_at_once(world: World) -> None:
    world.look()
    (world.code / "a.py").write_text("as submitted")
    revision = world.snapshot(7)
    (world.code / "a.py").write_text("overwritten!")
    assert revision is not None
    assert files_at(world.run.code_git, revision) == {"code/a.py": b"as submitted"}
    assert world.lines()[-1].submission_id == 7
    assert message_of(world.run.code_git, revision) == "1.5 s, attempt 1, submission 7"
    again = world.snapshot(8)
    assert again != revision and world.snapshot(9) == again  # nothing changed: no new commit
    assert len(world.lines()) == 3


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


def test_a_new_recorder_goes_on_and_a_new_attempt_too(world: World) -> None:
    (world.code / "a.py").write_text("1")
    world.look()
    world.watch = world.fresh()
    world.look()
    assert len(world.lines()) == 1  # nothing changed since
    (world.code / "a.py").write_text("2")
    world.watch = world.fresh(attempt=2)
    second = world.snapshot()
    first, last = world.lines()
    assert (last.parent, last.revision, last.changed) == (first.revision, second, 1)
    assert Repository(world.run.code_git).head() == second


def test_two_attempts_at_once_don_t_harm_each_other(world: World) -> None:
    world.look()
    older, newer = world.watch, world.fresh(attempt=2)
    for number in range(10):
        (world.code / "a.py").write_text(str(number))
        for watch in (older, newer):
            world.watch = watch
            assert world.snapshot() is not None
    repository = Repository(world.run.code_git)
    assert repository.head() == newer.head and repository.ref("attempt-1") == older.head
    assert [len(history(world.run.code_git, each.head)) for each in (newer, older)] == [11, 11]
    world.fsck()


def test_the_end_keeps_the_last_state(world: World) -> None:
    world.look()
    (world.code / "a.py").write_text("last words")
    world.watch.close(NOW)
    line = world.lines()[-1]
    assert world.watch.head == line.revision
    assert world.held() == {"code/a.py": b"last words"}


# ---------------------------------------------------------------- what is kept


ASIDE = ("__pycache__", "node_modules", ".venv")
"""Folders left out by name, of names that git allows."""


def test_what_is_kept_and_what_is_not(world: World, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not the agent's")
    texts = {"code/a.py": b"1", "code/sub/deep/b.txt": b"2", "code/noext": b"", "top.py": b"3", "Makefile": b"all:\n"}
    for path, data in texts.items():
        (world.workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (world.workspace / path).write_bytes(data)
    (world.code / "run.sh").write_text("#!/bin/sh\n")
    (world.code / "run.sh").chmod(0o755)
    (world.code / "link").symlink_to(secret)
    (world.code / "folder-link").symlink_to(tmp_path)
    (world.workspace / "top-link.py").symlink_to(secret)
    os.mkfifo(world.code / "fifo.py")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(world.code / "sock"))
    (world.code / "binary").write_bytes(b"\x7fELF\0\1")
    (world.code / "large.txt").write_bytes(b"y" * ((1 << 20) + 1))
    for name in (".git", "__pycache__", "node_modules", ".venv", ".GIT", "sub/.git\u200c"):
        (world.code / name).mkdir(parents=True)
        (world.code / name / "x.py").write_text("kept, where git allows the name")
        (world.code / name / "deep").mkdir()
        (world.code / name / "deep" / "y.py").write_text("left out")
    (world.code / ".env").write_text("KEY=sk-1")
    (world.code / ".gitmodules").write_text('[submodule "x"]\n\turl = -bad\n')
    for name in ("instructions.md", "submit", "run_meta.json", ".hidden.py", "weights.bin"):
        (world.workspace / name).write_text("laid, hidden or no source")
    (world.workspace / "output").mkdir()
    (world.workspace / "output" / "z.py").write_text("elsewhere")
    found = world.files()
    large = hashlib.sha256(b"y" * ((1 << 20) + 1)).hexdigest()
    assert found == {
        **texts,
        "code/run.sh": b"#!/bin/sh\n",
        **{f"code/{name}/x.py": b"kept, where git allows the name" for name in ASIDE},
        "code/link": Pointer("link", target=str(secret)),
        "code/folder-link": Pointer("link", target=str(tmp_path)),
        "code/binary": Pointer("binary", 6, hashlib.sha256(b"\x7fELF\0\1").hexdigest()),
        "code/large.txt": Pointer("large", (1 << 20) + 1, large),
    }
    line = world.lines()[-1]
    assert (line.files, line.by_hash, line.by_name, line.left_out) == (13, 2, 8, 0)
    assert line.reason is not None and "left out by name: code/.GIT, code/.git, code/.venv and 3 more" in line.reason
    mode = {path: mode for path, (mode, _) in Repository(world.run.code_git).files(line.revision).items()}
    assert mode[b"code/run.sh"] == code.PROGRAM and mode[b"code/link"] == code.LINK
    world.fsck()


@pytest.mark.parametrize("target", [".", "..", "../elsewhere", "/", "other/../../elsewhere", "file.bin", "via", "code"])
def test_a_link_out_of_the_workspace_is_told_and_not_followed(world: World, tmp_path: Path, target: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret.py").write_text("not the agent's")
    (world.workspace / "other").mkdir()
    (world.workspace / "file.bin").write_text("")
    (world.workspace / "via").symlink_to(tmp_path / "elsewhere")
    world.code.rmdir()
    world.code.symlink_to(target)
    assert world.files() == {"code": Pointer("link", target=target)}
    assert "no folder of the workspace" in str(world.lines()[-1].reason)


@pytest.mark.parametrize("kind", ["link", "file", "fifo", "gone", "link to itself"])
def test_code_may_be_replaced_by_anything(world: World, tmp_path: Path, kind: str) -> None:
    (world.code / "a.py").write_text("1")
    world.look()
    shutil.rmtree(world.code)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "b.py").write_text("not the agent's")
    if kind == "link":
        world.code.symlink_to(outside)
    elif kind == "link to itself":
        world.code.symlink_to("code")
    elif kind == "file":
        world.code.write_text("a file now")
    elif kind == "fifo":
        os.mkfifo(world.code)
    found = world.files()
    expected: dict[str, dict[str, bytes | Pointer]] = {
        "link": {"code": Pointer("link", target=str(outside))},
        "link to itself": {"code": Pointer("link", target="code")},
        "file": {"code": b"a file now"},
    }
    assert found == expected.get(kind, {})
    if world.code.is_symlink() or world.code.exists():
        world.code.unlink()
    world.code.mkdir()
    (world.code / "a.py").write_text("back")
    assert world.files() == {"code/a.py": b"back"}
    world.fsck()


# ---------------------------------------------------------------- what looks cost: large files, trees that rest, files that never rest


def test_a_change_of_the_same_size_within_one_tick_of_the_clock_is_seen(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system with coarse times: the second change leaves size, times and inode as they were."""
    path = world.code / "a.py"
    path.write_text("one")
    true_stat, true_fstat, coarse = os.stat, os.fstat, 10**18

    class Coarse:
        def __init__(self, status: os.stat_result) -> None:
            self._status = status
            self.st_mtime_ns = self.st_ctime_ns = coarse

        def __getattr__(self, name: str) -> Any:
            return getattr(self._status, name)

    monkeypatch.setattr(code.os, "stat", lambda *a, **k: Coarse(true_stat(*a, **k)))
    monkeypatch.setattr(code.os, "fstat", lambda fd: Coarse(true_fstat(fd)))
    assert world.files() == {"code/a.py": b"one"}
    path.write_text("two")
    assert world.files() == {"code/a.py": b"two"}  # a submission's look believes no young time
    path.write_text("tri")
    world.look(2.6)
    assert world.held() == {"code/a.py": b"tri"}


def test_the_recorder_loads_nothing_heavy() -> None:
    script = "import sys, autorl_hpc.recorder.run_recorder; print('numpy' in sys.modules, 'autorl_hpc.supervise' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
