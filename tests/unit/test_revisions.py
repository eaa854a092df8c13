"""Revisions of an agent's code: when a state is committed, what is in it, and what happens when recorders, disks and attempts fail."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import queue
import random
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from codehistory import Pointer, files_at, history, message_of

from autorl_hpc.files.layout import RunDir
from autorl_hpc.recorder import code
from autorl_hpc.recorder.code import Ask, CodeLimits, Repository, RepositoryFull, Revisions
from autorl_hpc.recorder.watch import Moment, RecorderJob
from autorl_hpc.records.recorded import CodeRevision

NOW = Moment(1.5, "2026-01-01T00:00:00.000+00:00", 1)


class World:
    """A workspace, and a watch on it, whose clock goes when it is told to."""

    def __init__(self, tmp: Path) -> None:
        self.now_s = 1000.0
        self.workspace, self.run = tmp / "workspace", RunDir(tmp / "run")
        self.code = self.workspace / "code"
        self.code.mkdir(parents=True)
        self.run.path.mkdir()
        self.asks: queue.SimpleQueue[Ask] = queue.SimpleQueue()
        self.watch = self.fresh()

    def fresh(self, attempt: int = 1, limits: CodeLimits | None = None) -> Revisions:
        """The watch of a recorder that has just been started."""
        job = RecorderJob(
            run_folder=self.run.path,
            workspace=self.workspace,
            keeper_pid=1,
            mark="m",
            attempt=attempt,
            elapsed_s=0.0,
            told_at_s=0.0,
            suspension_s=30.0,
            laid=frozenset({"submit", "instructions.md", "run_meta.json"}),
        )
        read_back = RecorderJob.model_validate_json(job.line())
        assert read_back == job
        return Revisions(read_back, self.asks, limits, lambda: self.now_s)

    def look(self, seconds: float = 0.0) -> None:
        self.now_s += seconds
        self.watch.look(NOW)

    def snapshot(self, submission_id: int = 1) -> str | None:
        """What a submission is told."""
        told: list[str | None] = []
        self.asks.put(Ask(submission_id, told.append))
        self.watch.look(NOW)
        (revision,) = told
        return revision

    def files(self) -> dict[str, bytes | Pointer]:
        """What a commit of this moment holds."""
        revision = self.snapshot()
        assert revision is not None
        return files_at(self.run.code_git, revision)

    def held(self) -> dict[str, bytes | Pointer]:
        """What the last commit holds."""
        return files_at(self.run.code_git, self.lines()[-1].revision)

    def lines(self) -> list[CodeRevision]:
        path = self.run.recorded("revisions")
        text = path.read_text() if path.exists() else ""
        return [CodeRevision.model_validate_json(line) for line in text.splitlines()]

    def fsck(self) -> None:
        if shutil.which("git"):
            command = ["git", "-c", "safe.directory=*", "--git-dir", str(self.run.code_git)]
            done = subprocess.run([*command, "fsck", "--full", "--strict"], capture_output=True, check=True)
            assert not [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith(b"dangling")]
            log = subprocess.run([*command, "log", "--format=%H %an: %s"], capture_output=True, check=True, text=True)
            head, _, said = log.stdout.partition(" ")
            assert head == Repository(self.run.code_git).head() and said.startswith("autorl-hpc recorder: ")
            assert " s, attempt " in said


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


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


def test_a_repository_that_is_full_keeps_submissions_for_longer(world: World) -> None:
    world.look()
    most = Repository.create(world.run.code_git).size_bytes + 50_000
    world.watch = world.fresh(limits=CodeLimits(repository_bytes=most, reserved_bytes=50_000))
    (world.code / "a.py").write_text("1")
    with pytest.raises(RepositoryFull, match="only states of submissions"):
        world.look()
    world.look()  # said once
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


def test_damage_to_what_was_kept_is_said_and_a_new_history_begins(world: World) -> None:
    world.look()
    revision = world.lines()[0].revision
    path = world.run.code_git / "objects" / revision[:2] / revision[2:]
    path.unlink()
    path.write_bytes(b"damaged")
    (world.code / "a.py").write_text("1")
    world.watch = world.fresh()
    world.look()
    line = world.lines()[-1]
    assert line.parent is None and line.reason is not None and "can't be read" in line.reason


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
    assert line.reason is not None and "3 folders left out by name" in line.reason
    mode = {path: mode for path, (mode, _) in Repository(world.run.code_git).files(line.revision).items()}
    assert mode[b"code/run.sh"] == code.PROGRAM and mode[b"code/link"] == code.LINK
    world.fsck()


ODD_NAMES = [b"\xff\xfe.py", b"new\nline.py", b"\x1b[2J", b"a" * 255, "é漢\u202e".encode(), b" ", b"-rf", b"tab\t\"'\\"]
ODD_NAMES += [b"b-b", b"b0", b"b/b", b"b/b.py", b"b.py", b"bb/x"]  # a tree sorts folders as if they ended in a slash


def test_what_lies_hidden_in_a_folder_left_out_by_name_is_said(world: World) -> None:
    """Whatever the names of files beside it, which survive."""
    for name in ODD_NAMES:
        (world.code / os.fsdecode(name)).parent.mkdir(exist_ok=True)
        (world.code / os.fsdecode(name)).write_bytes(name)
    (world.code / "__pycache__").mkdir()
    (world.code / "__pycache__" / "a.pyc").write_bytes(b"\0")
    (world.code / "a.py").write_text("1")
    world.look()
    assert (world.lines()[-1].by_name, world.lines()[-1].reason) == (1, None)
    held = {name.encode("utf-8", "surrogateescape"): data for name, data in world.held().items()}
    assert {name: data for name, data in held.items() if name != b"code/a.py" and b"cache" not in name} == {
        b"code/" + name: name for name in ODD_NAMES
    }
    world.fsck()
    (world.code / ".cache" / "deep").mkdir(parents=True)
    (world.code / "a.py").write_text("22")
    world.look()
    assert "1 folders left out by name" in str(world.lines()[-1].reason)


@pytest.mark.parametrize("target", ["src", "{workspace}/src", "./other/../two-links"])
def test_a_link_to_a_folder_of_the_workspace_is_walked_as_the_code(world: World, target: str) -> None:
    (world.code / "sub").mkdir()
    (world.code / "sub" / "train.py").write_text("1")
    (world.workspace / "other").mkdir()
    (world.workspace / "two-links").symlink_to("src")
    world.code.rename(world.workspace / "src")
    world.code.symlink_to(target.format(workspace=world.workspace))
    assert world.files() == {"code/sub/train.py": b"1"}
    assert world.lines()[-1].reason == "1 link `code` to a folder of the workspace, which is recorded as code"
    (world.workspace / "src" / "sub" / "train.py").write_text("22")
    assert world.files() == {"code/sub/train.py": b"22"}


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
    assert "no such folder" in str(world.lines()[-1].reason)


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


def test_limits_of_files_folders_depth_names_and_texts(world: World) -> None:
    world.watch = world.fresh(limits=CodeLimits(files=30, others=10, depth=4))
    for number in range(50):
        (world.code / f"{number:02d}.dat").write_text(str(number))
    (world.code / "zz.py").write_text("source first")
    deep = world.code / "1" / "2" / "3" / "4" / "5"
    deep.mkdir(parents=True)
    (deep / "too-deep.py").write_text("")
    (deep.parents[1] / "deep-enough.py").write_text("")
    found = world.files()
    assert "code/zz.py" in found and "code/1/2/3/deep-enough.py" in found
    assert not any("too-deep" in path for path in found)
    assert sum(path.endswith(".dat") for path in found) == 10
    line = world.lines()[-1]
    assert line.left_out == 40 and line.reason is not None and "folders beyond the limits" in line.reason
    world.watch = world.fresh(limits=CodeLimits(texts_bytes=5))
    assert len(world.files()) == 7 and world.lines()[-1].left_out >= 45
    world.watch = world.fresh(limits=CodeLimits(listed=20))
    assert world.snapshot() is not None and "too many files to list" in str(world.lines()[-1].reason)


# ---------------------------------------------------------------- what looks cost: large files, trees that rest, files that never rest


def test_large_files_are_hashed_up_to_a_limit(world: World) -> None:
    for name, size in (("a.bin", 20 << 20), ("b.bin", 20 << 20), ("c.bin", 50 << 30)):
        with open(world.code / name, "wb") as file:
            file.truncate(size)
    begun = time.thread_time()
    found = world.files()
    assert [pointer.sha256 is None for pointer in found.values() if isinstance(pointer, Pointer)] == [False, True, True]
    reason = str(world.lines()[-1].reason)
    assert "have not rested yet" in reason and "larger than 32 MiB" in reason
    for _ in range(3):
        world.look(3.0)
    assert time.thread_time() - begun < 5.0
    digest = hashlib.sha256(bytes(20 << 20)).hexdigest()
    assert world.held()["code/b.bin"] == Pointer("large", 20 << 20, digest)
    last = world.held()["code/c.bin"]
    assert isinstance(last, Pointer) and last.size_bytes == 50 << 30 and last.sha256 is None


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

    monkeypatch.setattr(os, "stat", lambda *a, **k: Coarse(true_stat(*a, **k)))
    monkeypatch.setattr(os, "fstat", lambda fd: Coarse(true_fstat(fd)))
    assert world.files() == {"code/a.py": b"one"}
    path.write_text("two")
    assert world.files() == {"code/a.py": b"two"}  # a submission's look believes no young time
    path.write_text("tri")
    world.look(2.6)
    assert world.held() == {"code/a.py": b"tri"}


def test_a_log_that_never_rests_is_read_seldom_but_exact_for_submissions_and_a_source_always(world: World) -> None:
    log, source = world.code / "train.log", world.code / "train.py"
    for number in range(60):
        with open(log, "a") as file:
            file.write(f"step {number}\n")
        source.write_text(f"{number:03}")
        world.look()
    held = world.held()["code/train.log"]
    assert isinstance(held, bytes) and held.count(b"\n") <= code.RESTLESS_CHANGES + 2
    assert world.held()["code/train.py"] == b"059"
    assert "never rest" in str(world.lines()[-1].reason) and world.lines()[-1].changed == 1
    assert world.files()["code/train.log"] == log.read_bytes()
