"""Time-stamps of the agent's output, whatever the agent did to its log."""

from __future__ import annotations

import os
from pathlib import Path

from autorl_hpc.files.safe_open import MAX_TIMES_BYTES, read_times
from autorl_hpc.recorder.trainings import RESOLUTIONS, OutputStamps
from autorl_hpc.recorder.watch import Moment


def moment(elapsed_s: float) -> Moment:
    return Moment(elapsed_s, "2030-01-01T00:00:00.000+00:00", 1)


def test_a_second_attempt_goes_on_after_a_half_written_stamp(tmp_path: Path) -> None:
    log, times = tmp_path / "agent.log", tmp_path / "agent.times"
    log.write_text("one\n")
    times.write_text("4 1.00 then\n9")
    stamps = OutputStamps(log, times)
    stamps.look(moment(5))
    with log.open("a") as file:
        file.write("two\n")
    stamps.close(moment(6))
    found = read_times(times)
    assert [found.written_by(s) for s in (0.9, 1.0, 5.9, 6.0)] == [0, 4, 4, 8]
    assert len(times.read_text().splitlines()) == 3, "nothing is written while nothing is said"


def test_a_log_that_its_agent_cuts(tmp_path: Path) -> None:
    log, times = tmp_path / "agent.log", tmp_path / "agent.times"
    stamps = OutputStamps(log, times)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for at_s, data, cut in ((1, b"first\n", None), (2, b"hidden\n", 6), (3, b"", None), (4, b"later\n", None)):
        os.write(fd, data)
        stamps.look(moment(at_s))
        if cut is not None:
            os.ftruncate(fd, cut)
    found = read_times(times)
    assert [found.written_by(s) for s in (1.0, 2.0, 3.0, 4.0)] == [6, 6, 6, 12]
    os.ftruncate(fd, 0)
    os.write(fd, b"x\n")
    stamps.close(moment(5))
    assert [read_times(times).written_by(s) for s in (4.0, 5.0)] == [0, 2]


def test_the_file_of_stamps_is_bounded(tmp_path: Path) -> None:
    log, times = tmp_path / "agent.log", tmp_path / "agent.times"
    stamps = OutputStamps(log, times, ((200, 0.25), (400, 2.0)))
    paces = []
    with log.open("a") as file:
        for number in range(100):
            file.write("x")
            file.flush()
            stamps.look(moment(number))
            paces.append(stamps.every_s)
    assert paces[0] == 0.25 and paces[-1] == 2.0
    assert times.stat().st_size < 450
    assert RESOLUTIONS[-1][0] < MAX_TIMES_BYTES


def test_damaged_stamps_are_skipped(tmp_path: Path) -> None:
    times = tmp_path / "agent.times"
    times.write_bytes(b"\xff\xfe\n4 1.5 t\nnan nan nan\n-3 2 t\n6 inf t\n7\n" + b"9" * 6000 + b" 1 t\n8 2.5 t\n1")
    found = read_times(times)
    assert [found.written_by(s) for s in (1.0, 1.5, 9.0)] == [0, 4, 8]
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "nothing"):
        assert read_times(tmp_path / name).written_by(9.0) == 0
