"""Revisions of an agent's code: what is kept of awkward and hostile trees, how soon, and at what cost."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import multiprocessing
import os
import queue
import random
import shutil
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autorl_hpc.files import gitobjects
from autorl_hpc.files.code_history import Pointer, changes, files_at
from autorl_hpc.files.gitobjects import Repository
from autorl_hpc.files.layout import RunDir
from autorl_hpc.recorder import codefiles, codewalk, revisions
from autorl_hpc.recorder.job import Job
from autorl_hpc.recorder.pace import Allowance, Pace
from autorl_hpc.recorder.revisions import Ask, Revisions
from autorl_hpc.recorder.watch import Moment
from autorl_hpc.records.recorded import CodeRevision

NOW = Moment(1.5, "2026-01-01T00:00:00.000+00:00", 1)
ASIDE = ("__pycache__", "node_modules", ".venv", "myenv")
"""Folders left out by name, of names that git allows."""

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


class World:
    """A workspace, and a watch on it, whose clock goes when it is told to; what looks cost counts for nothing."""

    def __init__(self, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s, time=time.time)
        for module in (revisions, codefiles, codewalk):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(revisions, "Pace", partial(Pace, now=clock.monotonic, cpu=lambda: 0.0))
        self.workspace, self.run = tmp / "workspace", RunDir(tmp / "run")
        (self.workspace / "code").mkdir(parents=True)
        self.code = self.workspace / "code"
        self.run.path.mkdir()
        self.asks: queue.SimpleQueue[Ask] = queue.SimpleQueue()
        self.watch = self.fresh()

    def fresh(self, attempt: int = 1) -> Revisions:
        """The watch of a recorder that has just been started."""
        job = Job(
            run=self.run,
            workspace=self.workspace,
            agent_log=self.run.agent_log,
            keeper_pid=1,
            mark="m",
            attempt=attempt,
            elapsed_s=0.0,
            told_at_s=0.0,
            suspension_s=30.0,
            laid=frozenset({"submit", "instructions.md", "run_meta.json"}),
        )
        return Revisions(job, self.asks)

    def later(self, seconds: float) -> None:
        self.now_s += seconds

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

    def lines(self) -> list[CodeRevision]:
        text = self.run.recorded("revisions").read_text().splitlines()
        return [CodeRevision.model_validate_json(line) for line in text]

    def fsck(self) -> None:
        if shutil.which("git"):
            command = ["git", "-c", "safe.directory=*", "--git-dir", str(self.run.code_git)]
            done = subprocess.run([*command, "fsck", "--full", "--strict"], capture_output=True, check=True)
            assert not [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith(b"dangling")]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


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
    assert len(world.lines()) == 1 and world.watch.every_s == revisions.SETTLE_S
    world.watch.look(NOW)
    assert len(world.lines()) == 2 and world.watch.every_s == revisions.LOOK_S
    for number, pause_s in enumerate((0.75, 0.36, 0.42)):  # 1.53 s since the look that saw no change
        (world.code / "a.py").write_text("2" * (2 + number))
        world.later(pause_s)
        assert len(world.lines()) == 2
        world.watch.look(NOW)
    assert len(world.lines()) == 3


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
    for name in (".git", "__pycache__", "node_modules", ".venv", "myenv", ".GIT", "sub/.git\u200c"):
        (world.code / name).mkdir(parents=True)
        (world.code / name / "x.py").write_text("kept, where git allows the name")
        (world.code / name / "deep").mkdir()
        (world.code / name / "deep" / "y.py").write_text("left out")
    environment(world.code / "myenv")
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
        "code/myenv/pyvenv.cfg": b"",
        "code/link": Pointer("link", target=str(secret)),
        "code/folder-link": Pointer("link", target=str(tmp_path)),
        "code/binary": Pointer("binary", 6, hashlib.sha256(b"\x7fELF\0\1").hexdigest()),
        "code/large.txt": Pointer("large", (1 << 20) + 1, large),
    }
    line = world.lines()[-1]
    assert (line.files, line.by_hash, line.by_name, line.left_out) == (15, 2, 9, 0)
    assert line.reason is not None and "left out by name: code/.GIT, code/.git, code/.venv and 4 more" in line.reason
    mode = {path: mode for path, (mode, _) in Repository(world.run.code_git).files(line.revision).items()}
    assert mode[b"code/run.sh"] == gitobjects.PROGRAM and mode[b"code/link"] == gitobjects.LINK
    world.fsck()


def test_names_that_are_no_text_survive(world: World) -> None:
    names = [b"\xff\xfe.py", b"new\nline.py", b"\x1b[2J", b"a" * 255, "é漢\u202e".encode(), b" ", b"-rf", b"tab\t\"'\\"]
    for name in names:
        with open(os.path.join(os.fsencode(world.code), name), "wb") as file:
            file.write(name)
    found = world.files()
    assert {name.encode("utf-8", "surrogateescape"): data for name, data in found.items()} == {
        b"code/" + name: name for name in names
    }
    world.fsck()


def environment(folder: Path) -> None:
    """Makes what `python -m venv` makes."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "lib").mkdir()
    (folder / "bin" / "python").symlink_to("/usr/bin/python3")
    (folder / "pyvenv.cfg").write_text("")


def test_a_folder_that_only_says_it_is_an_environment_is_kept(world: World) -> None:
    (world.code / "real" / "sub").mkdir(parents=True)
    (world.code / "real" / "pyvenv.cfg").write_text("")
    (world.code / "real" / "sub" / "train.py").write_text("GRPOTrainer().train()")
    assert world.files()["code/real/sub/train.py"] == b"GRPOTrainer().train()"
    assert (world.lines()[-1].by_name, world.lines()[-1].reason) == (0, None)


def test_what_lies_hidden_in_a_folder_left_out_by_name_is_said(world: World) -> None:
    (world.code / "__pycache__").mkdir()
    (world.code / "__pycache__" / "a.pyc").write_bytes(b"\0")
    (world.code / "a.py").write_text("1")
    world.watch.look(NOW)
    assert (world.lines()[-1].by_name, world.lines()[-1].reason) == (1, None)
    (world.code / ".cache" / "deep").mkdir(parents=True)
    world.watch.look(NOW)
    shutil.rmtree(world.code / ".cache")
    world.watch.look(NOW)  # nothing that is kept has changed: no commit
    assert len(world.lines()) == 1
    world.watch.close(NOW)
    assert world.lines()[-1].reason == "left out by name: code/.cache" and world.lines()[-1].changed == 0


@pytest.mark.parametrize("target", ["src", "{workspace}/src", "./other/../two-links"])
def test_a_link_to_a_folder_of_the_workspace_is_walked_as_the_code(world: World, target: str) -> None:
    (world.code / "sub").mkdir()
    (world.code / "sub" / "train.py").write_text("1")
    (world.workspace / "other").mkdir()
    (world.workspace / "two-links").symlink_to("src")
    world.code.rename(world.workspace / "src")
    world.code.symlink_to(target.format(workspace=world.workspace))
    assert world.files() == {"code/sub/train.py": b"1"}
    assert world.lines()[-1].reason == "code is a link: what lies in src is kept as code"
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
    assert "no folder of the workspace" in str(world.lines()[-1].reason)


@pytest.mark.parametrize("kind", ["link", "file", "fifo", "gone", "link to itself"])
def test_code_may_be_replaced_by_anything(world: World, tmp_path: Path, kind: str) -> None:
    (world.code / "a.py").write_text("1")
    world.watch.look(NOW)
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


def test_a_workspace_that_is_gone_is_an_error_and_then_seen_again(world: World) -> None:
    world.workspace.rename(world.workspace.with_name("moved"))
    with pytest.raises(OSError):
        world.watch.look(NOW)
    world.workspace.with_name("moved").rename(world.workspace)
    assert world.files() == {}


def test_limits_of_files_folders_depth_and_names(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codewalk, "MAX_FILES", 30)
    monkeypatch.setattr(codewalk, "MAX_OTHERS", 10)
    monkeypatch.setattr(codewalk, "MAX_DEPTH", 4)
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


def test_a_file_that_was_kept_is_found_again_in_a_folder_too_large_to_list(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (world.code / "train.py").write_text("1")
    assert world.files() == {"code/train.py": b"1"}
    monkeypatch.setattr(codewalk, "MAX_LISTED_IN_ONE", 1)
    for number in range(200):
        (world.code / f"n{number}").write_text("")
    (world.code / "train.py").write_text("2")
    assert world.files()["code/train.py"] == b"2"
    reason = world.lines()[-1].reason
    assert reason is not None and "too many files to list" in reason


def test_texts_together_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codefiles, "MAX_TEXTS_BYTES", 1000)
    for number in range(20):
        (world.code / f"{number:02d}.py").write_bytes(b"z" * 100)
    assert len(world.files()) == 10 and world.lines()[-1].left_out == 10


def test_a_repository_that_is_full_keeps_submissions_for_longer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.watch.look(NOW)
    monkeypatch.setattr(revisions, "MAX_REPOSITORY_BYTES", world.watch._repository.size_bytes + 50_000)
    monkeypatch.setattr(revisions, "RESERVED_BYTES", 50_000)
    (world.code / "a.py").write_text("1")
    world.watch.look(NOW)
    with pytest.raises(revisions.RepositoryFull, match="only states of submissions"):
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


def large_file(world: World, size: int) -> Path:
    path = world.code / "large.bin"
    with open(path, "wb") as file:
        file.truncate(size)
    return path


def test_a_large_file_is_hashed_in_slices_once_it_rests(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codefiles, "SURE_S", 0.3)
    monkeypatch.setattr(codewalk, "SURE_S", 0.3)
    large_file(world, 40 << 20)
    first = world.files()["code/large.bin"]
    assert isinstance(first, Pointer) and first.sha256 is None and first.size_bytes == 40 << 20
    reason = world.lines()[-1].reason
    assert reason is not None and "have not rested yet" in reason
    world.later(0.4)
    looks = 0
    while len(world.lines()) == 1:
        world.watch.look(NOW)
        looks += 1
        assert looks < 10
    assert looks >= 3  # 16 MiB each
    found = files_at(world.run.code_git, world.lines()[-1].revision)
    assert found == {"code/large.bin": Pointer("large", 40 << 20, hashlib.sha256(bytes(40 << 20)).hexdigest())}


def test_fifty_gigabytes_are_not_read(world: World) -> None:
    large_file(world, 50 << 30)
    begun = time.thread_time()
    found = world.files()["code/large.bin"]
    for _ in range(5):
        world.watch.look(NOW)
    assert time.thread_time() - begun < 5.0
    assert isinstance(found, Pointer) and found.size_bytes == 50 << 30 and found.sha256 is None
    assert found.note == "for they are larger than 256 MiB"


def test_a_change_of_the_same_size_within_one_tick_of_the_clock_is_seen(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system with coarse times: the second change leaves size, times and inode as they were."""
    monkeypatch.setattr(codefiles, "SURE_S", 0.3)
    monkeypatch.setattr(codewalk, "SURE_S", 0.3)
    path = world.code / "a.py"
    path.write_text("one")
    true_stat, true_fstat, coarse = os.stat, os.fstat, 10**18

    class Coarse:
        def __init__(self, status: os.stat_result) -> None:
            self._status = status
            self.st_mtime_ns = self.st_ctime_ns = coarse

        def __getattr__(self, name: str) -> Any:
            return getattr(self._status, name)

    monkeypatch.setattr(codewalk.os, "stat", lambda *a, **k: Coarse(true_stat(*a, **k)))
    monkeypatch.setattr(codefiles.os, "fstat", lambda fd: Coarse(true_fstat(fd)))
    assert world.files() == {"code/a.py": b"one"}
    path.write_text("two")
    assert world.files() == {"code/a.py": b"two"}  # a submission's look believes no young time
    path.write_text("tri")
    world.later(0.35)
    world.watch.look(NOW)
    world.watch.look(NOW)
    assert files_at(world.run.code_git, world.lines()[-1].revision) == {"code/a.py": b"tri"}


def test_code_that_rests_is_looked_at_less_often_and_settles_as_soon(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revisions, "RESTS_S", 0.2)
    (world.code / "a.py").write_text("0")
    world.watch.look(NOW)
    world.watch.look(NOW)
    assert world.watch.every_s == revisions.LOOK_S
    world.later(0.25)
    world.watch.look(NOW)
    assert world.watch.every_s == revisions.RESTING_LOOK_S
    assert revisions.RESTING_LOOK_S + revisions.SETTLE_S < 2.0
    monkeypatch.setattr(revisions, "OVERDUE_S", 0.3)
    before, begun = len(world.lines()), world.now_s
    for number in range(20):  # it never stays the same from one look to the next
        (world.code / "a.py").write_text(f"x{number}")
        world.watch.look(NOW)
        if len(world.lines()) > before:
            break
        assert world.watch.every_s == revisions.SETTLE_S
        world.later(0.05)
    assert world.now_s - begun > 0.2 and len(world.lines()) == before + 1


def test_a_tree_that_rests_is_not_read_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codefiles, "SURE_S", 0.05)
    monkeypatch.setattr(codewalk, "SURE_S", 0.05)
    for number in range(100):
        (world.code / f"{number}.py").write_text(str(number))
    world.watch.look(NOW)
    world.later(0.1)
    world.watch.look(NOW)
    opened: list[Any] = []
    true_open = os.open

    def counting(path: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(path)
        return true_open(path, *args, **kwargs)

    monkeypatch.setattr(codefiles.os, "open", counting)
    world.watch.look(NOW)
    assert not [path for path in opened if str(path).endswith(".py")]
    (world.code / "7.py").write_text("changed")
    world.watch.look(NOW)
    assert [path for path in opened if str(path).endswith(".py")] == ["7.py"]


def test_data_that_rests_is_looked_at_in_turns_and_by_submissions_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codefiles, "SURE_S", 0.05)
    monkeypatch.setattr(codewalk, "SURE_S", 0.05)
    monkeypatch.setattr(codewalk, "OTHERS_AT_ONCE", 4)
    data = [world.code / f"{number:02d}.dat" for number in range(64)]
    texts = [world.code / f"a-text-{number}" for number in range(8)]
    for path in (*data, *texts, world.code / "train.py"):
        path.write_text("old\0" if path in data else "old")
    for _ in range(3):
        world.watch.look(NOW)
        world.later(0.06)
    asked: list[str] = []
    true_stat = os.stat

    def counting(name: str, **how: Any) -> os.stat_result:
        asked.append(name)
        return true_stat(name, **how)

    monkeypatch.setattr(codewalk.os, "stat", counting)
    for _ in range(codewalk.TURNS):
        world.watch._dear = False
        world.watch.look(NOW)
    assert {path.name for path in data} <= set(asked) and len(asked) < codewalk.TURNS * len(data) / 2
    for path in (*texts, world.code / "train.py"):
        assert asked.count(path.name) == codewalk.TURNS, "a small text may be the program, whatever its name"
    assert len(world.lines()) == 1 and world.lines()[0].reason is None
    texts[-1].write_text("replaced")
    for _ in range(2):
        world.watch._dear = False
        world.watch.look(NOW)
    last = files_at(world.run.code_git, world.lines()[-1].revision)
    assert last["code/a-text-7"] == b"replaced" and world.lines()[-1].reason == codewalk.IN_TURNS
    for path in data:
        path.write_text("new\0")
    binary = Pointer("binary", 4, hashlib.sha256(b"new\0").hexdigest())
    assert {data for path, data in world.files().items() if path.endswith(".dat")} == {binary}
    world.later(0.06)
    world.watch.look(NOW)
    data[-1].write_text("newer\0")
    for _ in range(codewalk.TURNS + 1):
        world.watch.look(NOW)
    last = files_at(world.run.code_git, world.lines()[-1].revision)
    assert last["code/63.dat"] == Pointer("binary", 6, hashlib.sha256(b"newer\0").hexdigest())
    data[0].with_suffix(".new").write_text("newest\0")
    data[0].with_suffix(".new").rename(data[5])
    world.watch.look(NOW)  # the folder has changed: nothing in it waits
    world.watch.look(NOW)
    last = files_at(world.run.code_git, world.lines()[-1].revision)
    assert last["code/05.dat"] == Pointer("binary", 7, hashlib.sha256(b"newest\0").hexdigest())


def test_where_looks_are_dear_small_texts_are_looked_at_by_every_second(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codefiles, "SURE_S", 0.05)
    monkeypatch.setattr(codewalk, "SURE_S", 0.05)
    monkeypatch.setattr(codewalk, "OTHERS_AT_ONCE", 0)
    texts = [world.code / f"text-{number}" for number in range(16)]
    for path in texts:
        path.write_text("old")
    for _ in range(3):
        world.watch.look(NOW)
        world.later(0.06)
    for path in texts:
        path.write_text("new!")
    states: list[set[str]] = []
    for _ in range(2):
        world.watch._dear = True
        world.watch.look(NOW)
        states.append({os.fsdecode(path) for path, known in world.watch._files._known.items() if not known.sure})
    assert states[0] < states[1] == {f"code/{path.name}" for path in texts}
    world.watch._dear = True
    world.watch.look(NOW)
    assert world.files() == {f"code/{path.name}": b"new!" for path in texts}
    assert any(codewalk.TEXTS_IN_TURNS in str(line.reason) for line in world.lines())


def test_a_log_that_never_rests_is_read_seldom_but_exact_for_submissions(world: World) -> None:
    log = world.code / "train.log"
    for number in range(60):
        with open(log, "a") as file:
            file.write(f"step {number}\n")
        world.watch.look(NOW)
    kept = world.lines()
    held = files_at(world.run.code_git, kept[-1].revision)["code/train.log"]
    assert isinstance(held, bytes) and held.count(b"\n") <= codefiles.RESTLESS_CHANGES + 2
    (world.code / "new.py").write_text("1")
    world.watch.look(NOW)
    world.watch.look(NOW)
    line = world.lines()[-1]
    assert line.reason is not None and "never rest" in line.reason and line.changed == 1
    log_at_submission = world.files()["code/train.log"]
    assert log_at_submission == log.read_bytes()


def test_a_source_that_is_rewritten_without_end_is_read_at_every_look(world: World) -> None:
    program = world.code / "train.py"
    for number in range(codefiles.RESTLESS_CHANGES + 5):
        program.write_text(f"{number}")
        world.watch.look(NOW)
    program.write_text("trained with this")
    for _ in range(2):
        world.watch.look(NOW)
    held = files_at(world.run.code_git, world.lines()[-1].revision)
    assert held == {"code/train.py": b"trained with this"} and world.lines()[-1].reason is None


def test_that_a_file_was_read_seldom_is_said_though_it_was_read_since(world: World) -> None:
    (world.code / "other.py").write_text("1")
    for number in range(codefiles.RESTLESS_CHANGES + 5):
        (world.code / "train").write_text(f"{number}")
        world.watch.look(NOW)
    assert world.files()["code/train"] == b"24"
    assert "never rest" in str(world.lines()[-1].reason)


def test_changes_without_end_are_committed_less_often(world: World) -> None:
    clock = [0.0]
    world.watch._allowance = Allowance(5, 20.0, lambda: clock[0])
    for number in range(40):
        (world.code / f"{number}.py").write_text("1")
        world.watch.look(NOW)
        world.watch.look(NOW)
    assert len(world.lines()) == 5
    clock[0] = 21.0
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

        patched.setattr(gitobjects.os, "write", full)
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
    assert changes(world.run.code_git, world.lines()[0].revision, line.revision).added_lines == 1


def test_a_flood_of_questions_is_not_answered_on_credit(world: World) -> None:
    world.watch.look(NOW)
    world.watch._pace.credit_s = -revisions.MOST_DEBT_S - 1
    assert world.snapshot() is None


def test_pace() -> None:
    now, cpu = [0.0], [0.0]
    pace = Pace(0.01, 2.0, 1.0, 30.0, lambda: now[0], lambda: cpu[0])

    def look(cost_s: float, wall_s: float = 0.0) -> float:
        pace.begin()
        cpu[0] += cost_s
        now[0] += max(cost_s, wall_s)
        return pace.end()

    assert look(0.001) == 1.0
    assert look(0.9) == pytest.approx(2.7)  # a quarter of the clock
    assert look(0.001, wall_s=5.0) == 15.0
    pauses = []
    for _ in range(400):
        pauses.append(look(0.1))
        now[0] += pauses[-1]
    assert pauses[0] == 1.0 and pauses[-1] == pytest.approx(10.0, rel=0.05)  # 0.1 s in 10 s: 1 %
    assert look(10.0) == 30.0


def test_what_a_job_says_is_read_back() -> None:
    job = Job(
        RunDir(Path("/r\udcff")), Path("/w"), Path("/l"), 5, "m", 2, 1.5, 9.0, 30.0, "codex", frozenset({"b", "a"})
    )
    assert Job.told(job.line()) == job and json.loads(job.line())["laid"] == ["a", "b"]


def test_the_recorder_loads_nothing_heavy() -> None:
    script = (
        "import sys, autorl_hpc.recorder.main; print('numpy' in sys.modules, 'autorl_hpc.supervise' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
