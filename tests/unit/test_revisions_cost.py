"""What looks at an agent's code cost: large files, trees that rest, files that never rest, floods of questions."""

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
from codeworld import NOW, World

from autorl_hpc.recorder import code
from autorl_hpc.recorder.code import Pointer, files_at
from autorl_hpc.recorder.watch import Pace

world = codeworld.world


def large_file(world: World, size: int) -> Path:
    path = world.code / "large.bin"
    with open(path, "wb") as file:
        file.truncate(size)
    return path


def test_a_large_file_is_hashed_in_slices_once_it_rests(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "SURE_S", 0.3)
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


def test_code_that_rests_is_looked_at_less_often_and_settles_as_soon(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "RESTS_S", 0.2)
    (world.code / "a.py").write_text("0")
    world.watch.look(NOW)
    world.watch.look(NOW)
    assert world.watch.every_s == code.LOOK_S
    world.later(0.25)
    world.watch.look(NOW)
    assert world.watch.every_s == code.RESTING_LOOK_S
    assert code.RESTING_LOOK_S + code.SETTLE_S < 2.0
    monkeypatch.setattr(code, "OVERDUE_S", 0.3)
    before, begun = len(world.lines()), world.now_s
    for number in range(20):  # it never stays the same from one look to the next
        (world.code / "a.py").write_text(f"x{number}")
        world.watch.look(NOW)
        if len(world.lines()) > before:
            break
        assert world.watch.every_s == code.SETTLE_S
        world.later(0.05)
    assert world.now_s - begun > 0.2 and len(world.lines()) == before + 1


def test_a_tree_that_rests_is_not_read_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "SURE_S", 0.05)
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


def test_data_that_rests_is_looked_at_in_turns_and_by_submissions_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "SURE_S", 0.05)
    monkeypatch.setattr(code, "SURE_S", 0.05)
    monkeypatch.setattr(code, "OTHERS_AT_ONCE", 4)
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

    monkeypatch.setattr(code.os, "stat", counting)
    for _ in range(code.TURNS):
        world.watch._dear = False
        world.watch.look(NOW)
    assert {path.name for path in data} <= set(asked) and len(asked) < code.TURNS * len(data) / 2
    for path in (*texts, world.code / "train.py"):
        assert asked.count(path.name) == code.TURNS, "a small text may be the program, whatever its name"
    assert len(world.lines()) == 1 and world.lines()[0].reason is None
    texts[-1].write_text("replaced")
    for _ in range(2):
        world.watch._dear = False
        world.watch.look(NOW)
    last = files_at(world.run.code_git, world.lines()[-1].revision)
    assert last["code/a-text-7"] == b"replaced" and world.lines()[-1].reason == code.IN_TURNS
    for path in data:
        path.write_text("new\0")
    binary = Pointer("binary", 4, hashlib.sha256(b"new\0").hexdigest())
    assert {data for path, data in world.files().items() if path.endswith(".dat")} == {binary}
    world.later(0.06)
    world.watch.look(NOW)
    data[-1].write_text("newer\0")
    for _ in range(code.TURNS + 1):
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
    monkeypatch.setattr(code, "SURE_S", 0.05)
    monkeypatch.setattr(code, "SURE_S", 0.05)
    monkeypatch.setattr(code, "OTHERS_AT_ONCE", 0)
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
    assert any(code.TEXTS_IN_TURNS in str(line.reason) for line in world.lines())


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


def test_a_flood_of_questions_is_not_answered_on_credit(world: World) -> None:
    world.watch.look(NOW)
    world.watch._pace.credit_s = -code.MOST_DEBT_S - 1
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


def test_the_recorder_loads_nothing_heavy() -> None:
    script = "import sys, autorl_hpc.recorder.run_recorder; print('numpy' in sys.modules, 'autorl_hpc.supervise' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
