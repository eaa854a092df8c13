"""The walk of the workspace: its size on the disk, in slices, whatever lies there."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

from autorl_hpc.recorder.usage import PAUSE_S, Sweep
from autorl_hpc.recorder.watch import Moment

NOW = Moment(1.0, "2030-01-01T00:00:00.000+00:00", 1)


def walk(sweep: Sweep, limit: int = 100_000) -> int:
    """Looks until one walk is done; how many looks it took."""
    before = sweep.walks
    for looks in range(1, limit):
        sweep.look(NOW)
        if sweep.walks > before:
            return looks
    raise AssertionError("the walk never ends")


def descriptors(folder: Path) -> list[str]:
    """What this process has open there; elsewhere other tests' garbage may be closed at any time."""
    opened = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            opened.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in opened if path.startswith(str(folder))]


def test_the_size_is_that_of_du(tmp_path: Path) -> None:
    for number in range(300):
        path = tmp_path / f"d{number % 7}" / f"e{number % 3}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(number * 37))
    os.link(path, tmp_path / "second name")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(50 * 2**30)
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    sweep = Sweep(tmp_path)
    walk(sweep)
    told = int(
        subprocess.run(["du", "-s", "-B1", tmp_path], capture_output=True, text=True, check=True).stdout.split()[0]
    )
    own = tmp_path.stat().st_blocks * 512
    assert sweep.disk_bytes == told - own
    assert descriptors(tmp_path) == []


def test_one_look_takes_one_slice(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in range(6_000):
        os.close(os.open(tmp_path / "a" / str(number), os.O_CREAT | os.O_WRONLY))
    sweep, met = Sweep(tmp_path, slice_s=0.001), []
    sweep.visitors.append(lambda parts, status: met.append(parts))
    assert walk(sweep) > 3
    assert len(met) == 6_001
    assert sweep.every_s >= PAUSE_S, "a pause follows"


def test_what_can_not_be_measured_is_null(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(80):
        deep = deep / "d"
        deep.mkdir()
    events = tmp_path.parent / f"{tmp_path.name}-events.jsonl"
    sweep = Sweep(tmp_path, events)
    walk(sweep)
    walk(sweep)
    assert sweep.disk_bytes is None
    told = [json.loads(line) for line in events.read_text().splitlines()]
    assert [(e["event"], e["watch"], e["folders_too_deep"]) for e in told] == [("recorder_left_out", "workspace", 1)]


def test_folders_that_change_under_the_walk(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "f").write_text("x")
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "secret").write_text("x")
    sweep, met = Sweep(tmp_path, slice_s=0.0), []
    sweep.visitors.append(lambda parts, status: met.append(parts))
    for number in range(200):
        sweep.look(NOW)
        if number % 2 == 0:
            (tmp_path / str(number) / "f").unlink()
            (tmp_path / str(number)).rmdir()
            if number % 4 == 0:
                (tmp_path / str(number)).symlink_to(outside)
    walk(sweep)  # that one was under way
    walk(sweep)
    assert not [parts for parts in met if parts[-1] == "secret"]
    assert sweep.disk_bytes is not None
