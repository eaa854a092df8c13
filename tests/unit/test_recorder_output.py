"""Time-stamps of the agent's output, and the log read by line with them: whatever the agent did to its log."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import wait_for

from autorl_hpc.files.safe_open import MAX_TIMES_BYTES, lines, read_times, shown
from autorl_hpc.recorder.trainings import RESOLUTIONS, OutputStamps
from autorl_hpc.recorder.watch import Moment


def moment(elapsed_s: float) -> Moment:
    return Moment(elapsed_s, "2030-01-01T00:00:00.000+00:00", 1)


def test_lines_have_the_time_at_which_they_were_written(tmp_path: Path) -> None:
    log, times = tmp_path / "agent.log", tmp_path / "agent.times"
    script = "import sys\nfor n, _ in enumerate(sys.stdin):\n    print('line', n, flush=True)\n"
    stamps = OutputStamps(log, times)
    with log.open("ab") as file:
        agent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=file, text=True)
    assert agent.stdin is not None
    for number in range(3):
        print("go on", file=agent.stdin, flush=True)
        wait_for(lambda size=7 * (number + 1): log.stat().st_size == size, "a line")  # type: ignore[misc]
        for part in range(4):
            stamps.look(moment(number + part / 4))
    agent.stdin.close()
    agent.wait()
    stamps.close(moment(3))
    seen = list(lines(log, times))
    assert [line.text for line in seen] == ["line 0", "line 1", "line 2"]
    assert [line.offset for line in seen] == [0, 7, 14]
    assert [line.elapsed_s for line in seen] == [0.0, 1.0, 2.0]
    assert len(times.read_text().splitlines()) == 3, "nothing is written while nothing is said"


def test_a_second_attempt_goes_on_after_a_half_written_stamp(tmp_path: Path) -> None:
    log, times = tmp_path / "agent.log", tmp_path / "agent.times"
    log.write_text("one\n")
    times.write_text("4 1.00 then\n9")
    stamps = OutputStamps(log, times)
    stamps.look(moment(5))
    with log.open("a") as file:
        file.write("two\n")
    stamps.close(moment(6))
    assert [(line.text, line.elapsed_s) for line in lines(log, times)] == [("one", 1.0), ("two", 6.0)]


def test_a_log_that_its_agent_cuts(tmp_path: Path) -> None:
    log, times = tmp_path / "agent.log", tmp_path / "agent.times"
    stamps = OutputStamps(log, times)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, b"first\n")
    stamps.look(moment(1))
    os.write(fd, b"hidden\n")
    stamps.look(moment(2))
    os.ftruncate(fd, 6)
    stamps.look(moment(3))
    os.write(fd, b"later\n")
    stamps.look(moment(4))
    assert [(line.text, line.elapsed_s) for line in lines(log, times)] == [("first", 1.0), ("later", 4.0)]
    os.ftruncate(fd, 0)
    os.write(fd, b"x\n")
    stamps.close(moment(5))
    assert [(line.text, line.elapsed_s) for line in lines(log, times)] == [("x", 5.0)]


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


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\r 10%|#   |\r 90%|### |\r100%|####| 3/3", "100%|####| 3/3"),
        (b"done\r", "done"),
        (b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07text", "red text"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        (b"\xff\xfe bad", "�� bad"),
        (b"\x00" * 50 + b"after a hole", "after a hole"),
        (b"bell\x07 back\x08\xc2\x9b1m", "bell back1m"),
        (b"", ""),
        (b"\x1b", ""),
    ],
)
def test_text_is_what_a_terminal_would_leave(data: bytes, text: str) -> None:
    assert shown(data) == text


def test_a_line_without_an_end_costs_no_memory(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    with log.open("wb") as file:
        file.write(b"a\n" + b"y" * (3 * 2**20) + b"\nlast")
    first, long, last = lines(log, max_line_bytes=1000)
    assert (first.text, first.cut) == ("a", False)
    assert (long.offset, len(long.text), long.cut) == (2, 1000, True)
    assert (last.text, last.offset, last.cut) == ("last", 2 + 3 * 2**20 + 1, False)


def test_ten_gigabytes_are_read_from_where_one_asks(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    with log.open("wb") as file:
        file.write(b"begin\n")
        file.truncate(10 * 2**30)  # a hole, as ftruncate by the agent leaves it
        file.seek(0, 2)
        file.write(b"\nend\n")
    begun = time.monotonic()
    head = list(lines(log, max_bytes=2**20))
    tail = list(lines(log, start=log.stat().st_size - 1000, max_bytes=2**20))
    assert head[0].text == "begin" and head[1].cut
    assert [line.text for line in tail] == ["end"]
    assert time.monotonic() - begun < 20.0, "10 GB were read"


def test_reading_from_the_middle_begins_with_a_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    log.write_text("one\ntwo\nthree")
    assert [line.text for line in lines(log, start=4)] == ["two", "three"]
    assert [line.text for line in lines(log, start=5)] == ["three"]
    assert [(line.text, line.cut) for line in lines(log, max_bytes=6)] == [("one", False), ("tw", True)]


def test_damaged_stamps_are_skipped(tmp_path: Path) -> None:
    log, times = tmp_path / "agent.log", tmp_path / "agent.times"
    log.write_text("one\ntwo\n")
    times.write_bytes(b"\xff\xfe\n4 1.5 t\nnan nan nan\n-3 2 t\n6 inf t\n7\n" + b"9" * 6000 + b" 1 t\n8 2.5 t\n1")
    assert [line.elapsed_s for line in lines(log, times)] == [1.5, 2.5]


def test_what_is_not_a_plain_file_has_no_lines(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").write_text("secret\n")
    for name in ("fifo", "link", "nothing"):
        assert list(lines(tmp_path / name, tmp_path / "fifo")) == []
    assert read_times(tmp_path / "nothing").at(0) is None
