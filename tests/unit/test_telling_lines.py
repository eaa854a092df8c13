"""What a recorder left, read back: absent, damaged, cut, newer, long and hostile files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autorl_hpc.files.layout import RunDir
from autorl_hpc.recorder.watch import LineWriter
from autorl_hpc.records.recorded import TrainingPoint
from autorl_hpc.report.run_story import logs
from autorl_hpc.report.run_story import logs as telling_log
from autorl_hpc.report.run_story.logs import AgentLog, UsageLine, read_events, read_part
from autorl_hpc.report.run_story.resources import usage_of

AT = "2026-01-01T00:00:00.000+00:00"


def write(path: Path, *points: TrainingPoint) -> None:
    out = LineWriter(path)
    out.add(*points)
    out.close()


def point(at_s: float, **more: object) -> TrainingPoint:
    return TrainingPoint.model_validate({"elapsed_s": at_s, "at": AT, "source": "agent.log", **more})


def read(path: Path, *, thin: bool = False) -> logs.RecordedLines[TrainingPoint]:
    return logs.read_lines(path, TrainingPoint, thin=thin)


def test_a_run_that_nobody_recorded_is_empty_and_says_nothing(tmp_path: Path) -> None:
    found = logs.read_recorded(RunDir(tmp_path))
    assert found == logs.Recorded() and not found.troubles and not found.usage.present


def test_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "training.jsonl"
    wrote = [point(1.0, step=1, loss=0.5), point(2.0, step=2, more={"entropy": 0.1})]
    write(path, *wrote)
    found = read(path)
    assert list(found.records) == wrote and found.present and found.troubles == ()


def test_damaged_lines_cost_only_themselves(tmp_path: Path) -> None:
    path = tmp_path / "training.jsonl"
    write(path, point(1.0, step=1))
    bad = [
        b"not json",
        b"[1, 2]",
        b"null",
        b'{"elapsed_s": -1, "at": "x", "source": "y"}',
        b'{"elapsed_s": NaN, "at": "x", "source": "y"}',
        b'{"elapsed_s": 1e999, "at": "x", "source": "y"}',
        b'{"elapsed_s": 2}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"elapsed_s": 1, "at": "' + b"x" * logs.MAX_LINE_BYTES + b'", "source": "y"}',
    ]
    with path.open("ab") as file:
        file.write(b"\n".join(bad) + b"\n\n")
    write(path, point(3.0, step=3))
    with path.open("ab") as file:
        file.write(b'{"elapsed_s": 4.0, "at": "2026')  # the recorder was killed here
    found = read(path)
    assert [one.step for one in found.records] == [1, 3]
    assert found.troubles == (
        f"{len(bad) + 1} lines of training.jsonl can't be read: cut, damaged or of a newer version",
    )


def test_fields_of_a_newer_version_are_passed_over(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    run.recorded("usage").write_bytes(
        b'{"elapsed_s": 1.0, "at": "x", "watts": 3, "gpus": [{"index": 0, "name": "H100", "sparks": true}]}\n'
    )
    run.recorded("trace").write_bytes(
        b'{"elapsed_s": 1.0, "at": "x", "kind": "usage", "source": "agent.log", "offset": 0, "format": "codex", "new": {}}\n'
        b'{"elapsed_s": 2.0, "at": "x", "kind": "a new kind", "source": "agent.log", "offset": 0, "format": "codex"}\n'
    )
    found = logs.read_recorded(run)
    assert found.usage.records == ({"elapsed_s": 1.0, "gpus": ({"name": "H100"},)},)
    assert len(found.trace.records) == 1 and "1 line of trace.jsonl" in found.troubles[0]


@pytest.mark.parametrize(
    "wrong",
    [
        '"elapsed_s": -1',
        '"elapsed_s": 1e999',
        '"elapsed_s": null',
        '"elapsed_s": 2, "attempt": 0',
        '"elapsed_s": 2, "cpu_s": -1',
        '"elapsed_s": 2, "cpu_s": 1e308',
        '"elapsed_s": 1e15',
        '"elapsed_s": 2, "memory_bytes": 99999999999999999999999',
        '"elapsed_s": 2, "disk_bytes": 99999999999999999999999',
        '"elapsed_s": 2, "memory_bytes": 1.5',
        '"elapsed_s": 2, "disk_bytes": "much"',
        '"elapsed_s": 2, "gpus": [{"used_share": 1.5}]',
        '"elapsed_s": 2, "gpus": {}',
    ],
)
def test_a_sample_of_usage_that_makes_no_sense_is_left_out(tmp_path: Path, wrong: str) -> None:
    run = RunDir(tmp_path)
    run.recorded("usage").write_text(f'{{"elapsed_s": 1}}\n{{{wrong}}}\n{{"elapsed_s": 3, "cpu_s": null}}\n')
    found = logs.read_recorded(run).usage
    assert [one["elapsed_s"] for one in found.records] == [1.0, 3.0]
    assert found.troubles == ("1 line of usage.jsonl can't be read: cut, damaged or of a newer version",)


@pytest.mark.parametrize("what", ["fifo", "link", "folder"])
def test_what_is_no_file_is_not_opened(tmp_path: Path, what: str) -> None:
    path = tmp_path / "training.jsonl"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "link":
        (tmp_path / "else").write_bytes(b"")
        path.symlink_to(tmp_path / "else")
    else:
        path.mkdir()
    found = read(path)
    assert not found.records and not found.present and len(found.troubles) == 1


def test_long_files_are_thinned_and_huge_ones_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "training.jsonl"
    write(path, *(point(float(i), step=i) for i in range(1000)))
    monkeypatch.setattr(logs, "MAX_LINES", 300)
    thinned = read(path, thin=True)
    assert [one.step for one in thinned.records] == [*range(0, 1000, 4), 999] and thinned.every == 4
    assert thinned.troubles == ("training.jsonl is long: of its lines every 4th was read",)
    assert len(read(path).records) == 1000  # where every line counts, all are read
    monkeypatch.setattr(logs, "MAX_BYTES", 2000)
    cut = read(path)
    assert 0 < len(cut.records) < 50 and "only the first 2000 were read" in cut.troubles[-1]


def test_a_line_without_an_end_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "CHUNK_BYTES", 1 << 10)
    path = tmp_path / "training.jsonl"
    path.write_bytes(b"x" * (1 << 20))
    assert read(path).records == ()


def test_the_log_by_time(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    run.agent_log.write_bytes(b"first\nsecond\nthird\n")
    run.agent_times.write_bytes(b"6 10.0 x\nnonsense\n13 nan x\n13 20.0 x\n5 30.0 x\n19 40.0 x\n")
    log = AgentLog(run.agent_log, run.agent_times)
    (found,) = log.excerpts(10.0, 25.0)
    assert (found.offset, found.text) == (6, "second\n")
    assert log.excerpts(0.0, 5.0) == ()
    (end,) = log.whole()
    assert end.text == "first\nsecond\nthird\n"
    run.agent_log.unlink()
    assert log.excerpts(10.0, 25.0) == () and log.size() == 0
    os.mkfifo(run.agent_log)
    assert read_part(run.agent_log, 0, 10) == b""


@pytest.mark.parametrize("bound", [telling_log.MAX_SCANNED_BYTES, 400_000])
def test_a_traceback_far_from_the_end_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int) -> None:
    monkeypatch.setattr(telling_log, "SCAN_CHUNK_BYTES", 100_000)
    monkeypatch.setattr(telling_log, "MAX_SCANNED_BYTES", bound)
    trace = b'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\nKeyError: 1\n'
    filler = b"step\n" * 19_995
    head = b"[rank0]: " + trace + filler  # the second lies across two chunks
    run = RunDir(tmp_path)
    run.logs.mkdir()
    run.agent_log.write_bytes(head[: 100_000 - 10] + b"\n" + trace + filler * 6)
    found = AgentLog(run.agent_log, run.agent_times).whole()
    assert [(one.offset, one.only_tracebacks) for one in found[:-1]] == [(0, True), (99_991, True)]
    assert found[0].text.startswith("[rank0]: Traceback") and "KeyError: 1" in found[1].text
    assert not found[-1].only_tracebacks and len(found[-1].text) <= telling_log.MAX_EXCERPT_BYTES


def test_the_rows_of_the_last_training(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    said = b"***** Running training *****\n  Num examples = 1,200\n***** Running training *****\n  Num examples = 7\n"
    said += b"***** Running Evaluation *****\n  Num examples = 3\n"
    run.agent_log.write_bytes(said)
    run.agent_times.write_bytes(b"52 10.0 x\n%d 20.0 x\n" % len(said))
    log = AgentLog(run.agent_log, run.agent_times)
    assert (log.rows(0.0, 10.0), log.rows(10.0, 20.0), log.rows(20.0, 30.0)) == (1200, 7, None)


def test_events_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        b'{"event": "agent_started"}\nx\n[]\n{"event": 3}\n' + b"[" * 50_000 + b'\n{"event": "given_back"}'
    )
    assert [event["event"] for event in read_events(path)] == ["agent_started", "given_back"]
    assert read_events(tmp_path / "absent") == []


def test_figures_that_no_machine_has_are_not_believed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    start = b'{"at": "x", "kind": "usage", "source": "agent.log", "offset": 0, "format": "codex", "elapsed_s": '
    many = b"9" * 23
    bad = (b'1, "tokens_in": ' + many, b'1, "cost_usd": 1e300', b'1, "calls": ' + many, b"1e15")
    run.recorded("trace").write_bytes(b"".join(start + line + b"}\n" for line in (*bad, b'1, "tokens_in": 7')))
    found = logs.read_recorded(run).trace
    assert [one.tokens_in for one in found.records] == [7] and found.troubles[0].startswith("4 lines of trace.jsonl")
    sound, damaged = UsageLine(elapsed_s=10.0, cpu_s=80.0), UsageLine(elapsed_s=5.0, cpu_s=1e9)
    assert usage_of([damaged, sound], {1: (0.0, 20.0)}).cpu_hours == 80.0 / 3600


def test_a_link_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "usage.jsonl").symlink_to("/etc/passwd")
    assert logs.read_lines(tmp_path / "usage.jsonl", UsageLine).troubles == ("usage.jsonl is a link",)
