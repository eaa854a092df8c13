"""Whole files or none: killed at every step, raced by many processes, on a full disk."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import needs
import pytest
from helpers import PATIENCE_S

from autorl_hpc.files import atomic, reading

OLD, NEW = b"old" * 1000, b"new" * 50_000
WRITE_STEPS = ("start", "created", "written", "synced", "renamed", "done")
PUBLISH_STEPS = ("start", "created", "written", "synced", "linked", "done")
REPLACED, LINKED = ("renamed", "done"), ("linked", "done")

Writer = Callable[[Path, Callable[[str], None]], object]


def killed_at(step: str, path: Path, writer: Writer) -> list[str]:
    """Forks a child that writes and kills itself at `step`; the steps it came to, that one included."""
    reader, out = os.pipe()
    child = os.fork()
    if child == 0:  # the child must not come back into pytest, whatever happens

        def hook(name: str) -> None:
            os.write(out, f"{name}\n".encode())
            if name == step:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            writer(path, hook)
        finally:
            os._exit(3)
    os.close(out)
    with os.fdopen(reader) as steps:
        seen = steps.read().split()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{step} was never reached: {seen}"
    return seen


@pytest.mark.parametrize("before", [None, OLD], ids=["new file", "replaced file"])
@pytest.mark.parametrize("step", WRITE_STEPS)
def test_write_killed_at_each_step_leaves_old_or_new(tmp_path: Path, step: str, before: bytes | None) -> None:
    path = tmp_path / "record.json"
    if before is not None:
        path.write_bytes(before)
    seen = killed_at(step, path, lambda target, hook: atomic.write_bytes(target, NEW, hook=hook))
    assert seen == list(WRITE_STEPS[: WRITE_STEPS.index(step) + 1])
    expected = NEW if step in REPLACED else before
    assert (path.read_bytes() if path.exists() else None) == expected
    assert reading.list_names(tmp_path) == ([] if expected is None else ["record.json"])


@pytest.mark.parametrize("before", [None, OLD], ids=["free name", "taken name"])
@pytest.mark.parametrize("step", PUBLISH_STEPS)
def test_publish_killed_at_each_step_leaves_all_or_nothing(tmp_path: Path, step: str, before: bytes | None) -> None:
    path = tmp_path / "000001.json"
    if before is not None:
        path.write_bytes(before)
    seen = killed_at(step, path, lambda target, hook: atomic.publish_bytes(target, NEW, hook=hook))
    assert seen == list(PUBLISH_STEPS[: PUBLISH_STEPS.index(step) + 1])
    expected = before if before is not None else NEW if step in LINKED else None
    assert (path.read_bytes() if path.exists() else None) == expected
    assert reading.list_names(tmp_path) == ([] if expected is None else ["000001.json"])


def test_a_killed_writer_is_in_no_ones_way(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    killed_at("written", path, lambda target, hook: atomic.write_bytes(target, OLD, hook=hook))
    atomic.write_bytes(path, NEW)
    assert path.read_bytes() == NEW


def test_a_failed_write_leaves_no_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(OLD)

    def fail(step: str) -> None:
        if step == "written":
            raise OSError(errno.EDQUOT, "quota")

    for write in (atomic.write_bytes, atomic.publish_bytes):
        with pytest.raises(OSError, match="quota"):
            write(path, NEW, hook=fail)
    assert os.listdir(tmp_path) == ["record.json"] and path.read_bytes() == OLD


def test_written_and_published_modes(tmp_path: Path) -> None:
    atomic.write_bytes(tmp_path / "written", NEW, mode=0o600)
    assert atomic.publish_bytes(tmp_path / "published", NEW)
    assert (tmp_path / "written").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "published").stat().st_mode & 0o777 == 0o444


RACER = """
import sys, time
from pathlib import Path
from autorl_hpc.files.atomic import publish_bytes
folder, me, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
(folder / "ready" / me).touch()
while len(list((folder / "ready").iterdir())) < int(sys.argv[4]):
    time.sleep(0.001)
print("".join("1" if publish_bytes(folder / "names" / f"{n:04d}", me.encode() * 1000) else "0" for n in range(rounds)))
"""


def test_eight_processes_racing_for_a_name_have_one_winner(tmp_path: Path) -> None:
    racers, rounds = 8, 100
    (tmp_path / "ready").mkdir()
    (tmp_path / "names").mkdir()

    def race(number: int) -> str:
        command = [sys.executable, "-c", RACER, str(tmp_path), str(number), str(rounds), str(racers)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout.strip()

    with ThreadPoolExecutor(racers) as pool:
        results = list(pool.map(race, range(racers)))
    for name in range(rounds):
        winners = [number for number, result in enumerate(results) if result[name] == "1"]
        assert len(winners) == 1, f"name {name} was won by {winners}"
        assert (tmp_path / "names" / f"{name:04d}").read_bytes() == str(winners[0]).encode() * 1000
    assert sum("1" in result for result in results) > 1, "one process won everything: this was no race"
    assert len(os.listdir(tmp_path / "names")) == rounds, "a loser left its temporary file"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if done.returncode:
        needs.skip("mount", f"mounting a tmpfs is not permitted here: {done.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def test_full_disk_keeps_the_old_content(small_disk: Path) -> None:
    path = small_disk / "record.json"
    atomic.write_bytes(path, OLD)
    for attempt in range(3):
        with pytest.raises(OSError) as caught:
            atomic.write_bytes(path, b"x" * 1024 * 1024)
        assert caught.value.errno == errno.ENOSPC, attempt
        with pytest.raises(OSError):
            atomic.publish_bytes(small_disk / "000001.json", b"x" * 1024 * 1024)
    assert os.listdir(small_disk) == ["record.json"], "rubbish is left"
    assert path.read_bytes() == OLD
    atomic.write_bytes(path, NEW)
    assert path.read_bytes() == NEW
