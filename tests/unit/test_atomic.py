"""Whole files or none: killed at every step, on a full disk. test_ledger.py has many processes that race for a name."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import needs
import pytest

from autorl_hpc.errors import from_os_error
from autorl_hpc.files import atomic, reading

OLD, NEW = b"old" * 1000, b"new" * 50_000
CALLS = ("open", "write", "fsync", "close", "replace", "link", "unlink")


def killed_at(number: int, write: Callable[[], object]) -> bool:
    """Fork a child that writes and is killed right before its call of the system of this number; False if it had fewer."""
    child = os.fork()
    if child == 0:  # the child must not come back into pytest, whatever happens
        count = itertools.count(1)

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                if next(count) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **named)

            return call

        try:
            for name in CALLS:
                setattr(os, name, counted(getattr(os, name)))
            write()
        finally:
            os._exit(3)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("before", [None, OLD], ids=["new", "there"])
@pytest.mark.parametrize("write", [atomic.write_bytes, atomic.publish_bytes])
def test_killed_at_any_step_it_leaves_old_or_new(
    tmp_path: Path, write: Callable[[Path, bytes], object], before: bytes | None
) -> None:
    left: list[bytes | None] = []
    killed = True
    while killed:
        folder = tmp_path / str(len(left))
        folder.mkdir()
        path = folder / "record.json"
        if before is not None:
            path.write_bytes(before)
        killed = killed_at(len(left) + 1, lambda path=path: write(path, NEW))
        left.append(path.read_bytes() if path.exists() else None)
        assert reading.list_names(folder) == ([] if left[-1] is None else ["record.json"])
    assert len(left) > 6, "it was killed nowhere"
    after = NEW if before is None or write is atomic.write_bytes else before
    assert left[0] == before and left[-1] == after and set(left) == {before, after}
    assert left == sorted(left, key=lambda content: content == after), "from the new one back to the old one"
    atomic.write_bytes(path, OLD)
    assert path.read_bytes() == OLD, "what a killed one left is in nobody's way"


def test_a_failed_write_leaves_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(OLD)

    def fail(fd: int) -> None:
        raise OSError(errno.EDQUOT, "quota")

    monkeypatch.setattr(os, "fsync", fail)
    for write in (atomic.write_bytes, atomic.publish_bytes):
        with pytest.raises(OSError, match="quota"):
            write(path, NEW)
    assert os.listdir(tmp_path) == ["record.json"] and path.read_bytes() == OLD


def test_written_and_published_modes(tmp_path: Path) -> None:
    atomic.write_bytes(tmp_path / "written", NEW, mode=0o600)
    assert atomic.publish_bytes(tmp_path / "published", NEW)
    assert (tmp_path / "written").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "published").stat().st_mode & 0o777 == 0o444


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


def test_a_full_disk_is_told_with_its_file_system_and_room(tmp_path: Path) -> None:
    """Catches words such as "No space left on device" alone: of many file systems nobody knows which, nor whether room or files are out."""
    told = from_os_error(OSError(errno.ENOSPC, "No space left on device"), "writing", tmp_path / "not" / "there").what
    found = re.search(r"file system (\S+): [\d.]+ of ([\d.]+) GiB free, \d+ of \d+ files$", told)
    assert found is not None and os.path.ismount(found[1]) and str(tmp_path).startswith(found[1])
    assert float(found[2]) == pytest.approx(shutil.disk_usage(tmp_path).total / 2**30, abs=0.1)
