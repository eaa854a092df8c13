"""What looks at an agent's code cost: large files, trees that rest, files that never rest."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import codeworld
import pytest
from codehistory import Pointer, files_at
from codeworld import NOW, World

from autorl_hpc.recorder import code

world = codeworld.world


def large_file(world: World, size: int) -> Path:
    path = world.code / "large.bin"
    with open(path, "wb") as file:
        file.truncate(size)
    return path


def test_a_large_file_is_hashed_in_slices_once_it_rests(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "SURE_S", 0.3)
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
    monkeypatch.setattr(code, "SURE_S", 0.3)
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
    world.later(0.35)
    world.watch.look(NOW)
    world.watch.look(NOW)
    assert files_at(world.run.code_git, world.lines()[-1].revision) == {"code/a.py": b"tri"}


def test_a_tree_that_rests_is_not_read_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "SURE_S", 0.05)
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

    monkeypatch.setattr(code.os, "open", counting)
    world.watch.look(NOW)
    assert not [path for path in opened if str(path).endswith(".py")]
    (world.code / "7.py").write_text("changed")
    world.watch.look(NOW)
    assert [path for path in opened if str(path).endswith(".py")] == ["7.py"]


def test_a_log_that_never_rests_is_read_seldom_but_exact_for_submissions(world: World) -> None:
    log = world.code / "train.log"
    for number in range(60):
        with open(log, "a") as file:
            file.write(f"step {number}\n")
        world.watch.look(NOW)
    kept = world.lines()
    held = files_at(world.run.code_git, kept[-1].revision)["code/train.log"]
    assert isinstance(held, bytes) and held.count(b"\n") <= code.RESTLESS_CHANGES + 2
    (world.code / "new.py").write_text("1")
    world.watch.look(NOW)
    world.watch.look(NOW)
    line = world.lines()[-1]
    assert line.reason is not None and "never rest" in line.reason and line.changed == 1
    log_at_submission = world.files()["code/train.log"]
    assert log_at_submission == log.read_bytes()


def test_a_source_that_is_rewritten_without_end_is_read_at_every_look(world: World) -> None:
    program = world.code / "train.py"
    for number in range(code.RESTLESS_CHANGES + 5):
        program.write_text(f"{number}")
        world.watch.look(NOW)
    program.write_text("trained with this")
    for _ in range(2):
        world.watch.look(NOW)
    held = files_at(world.run.code_git, world.lines()[-1].revision)
    assert held == {"code/train.py": b"trained with this"} and world.lines()[-1].reason is None


def test_that_a_file_was_read_seldom_is_said_though_it_was_read_since(world: World) -> None:
    (world.code / "other.py").write_text("1")
    for number in range(code.RESTLESS_CHANGES + 5):
        (world.code / "train").write_text(f"{number}")
        world.watch.look(NOW)
    assert world.files()["code/train"] == b"24"
    assert "never rest" in str(world.lines()[-1].reason)


def test_the_recorder_loads_nothing_heavy() -> None:
    script = "import sys, autorl_hpc.recorder.run_recorder; print('numpy' in sys.modules, 'autorl_hpc.supervise' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
