"""What a recorder left, read back: absent, damaged, cut, newer, long and hostile files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autorl_hpc.files.layout import RunDir
from autorl_hpc.recorder.watch import Lines
from autorl_hpc.records.recorded import TrainingPoint
from autorl_hpc.report.telling import lines
from autorl_hpc.report.telling.log import AgentLog, read_events, read_part

AT = "2026-01-01T00:00:00.000+00:00"


def write(path: Path, *points: TrainingPoint) -> None:
    out = Lines(path)
    out.add(*points)
    out.close()


def point(at_s: float, **more: object) -> TrainingPoint:
    return TrainingPoint.model_validate({"elapsed_s": at_s, "at": AT, "source": "agent.log", **more})


def read(path: Path, *, thin: bool = False) -> lines.Lines[TrainingPoint]:
    return lines.read_lines(path, TrainingPoint, thin=thin)


def test_a_run_that_nobody_recorded_is_empty_and_says_nothing(tmp_path: Path) -> None:
    found = lines.read_recorded(RunDir(tmp_path))
    assert found == lines.Recorded() and not found.troubles and not found.usage.present


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
        b'{"elapsed_s": 1, "at": "' + b"x" * lines.MAX_LINE_BYTES + b'", "source": "y"}',
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
    found = lines.read_recorded(run)
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
        '"elapsed_s": 2, "memory_bytes": 1.5',
        '"elapsed_s": 2, "disk_bytes": "much"',
        '"elapsed_s": 2, "gpus": [{"used_share": 1.5}]',
        '"elapsed_s": 2, "gpus": {}',
    ],
)
def test_a_sample_of_usage_that_makes_no_sense_is_left_out(tmp_path: Path, wrong: str) -> None:
    run = RunDir(tmp_path)
    run.recorded("usage").write_text(f'{{"elapsed_s": 1}}\n{{{wrong}}}\n{{"elapsed_s": 3, "cpu_s": null}}\n')
    found = lines.read_recorded(run).usage
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
    monkeypatch.setattr(lines, "MAX_LINES", 300)
    thinned = read(path, thin=True)
    assert [one.step for one in thinned.records] == [*range(0, 1000, 4), 999] and thinned.every == 4
    assert thinned.troubles == ("training.jsonl is long: of its lines every 4th was read",)
    assert len(read(path).records) == 1000  # where every line counts, all are read
    monkeypatch.setattr(lines, "MAX_BYTES", 2000)
    cut = read(path)
    assert 0 < len(cut.records) < 50 and "only the first 2000 were read" in cut.troubles[-1]


def test_a_line_without_an_end_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "CHUNK_BYTES", 1 << 10)
    path = tmp_path / "training.jsonl"
    path.write_bytes(b"x" * (1 << 20))
    assert read(path).records == ()


def test_the_log_by_time(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    run.agent_log.write_bytes(b"first\nsecond\nthird\n")
    run.agent_times.write_bytes(b"6 10.0 x\nnonsense\n13 nan x\n13 20.0 x\n5 30.0 x\n19 40.0 x\n")
    log = AgentLog(run.agent_log, run.agent_times)
    found = log.excerpt(10.0, 25.0)
    assert found and (found.offset, found.text) == (6, "second\n")
    assert log.excerpt(0.0, 5.0) is None
    end = log.end()
    assert end and end.text == "first\nsecond\nthird\n"
    run.agent_log.unlink()
    assert log.excerpt(10.0, 25.0) is None and log.size() == 0
    os.mkfifo(run.agent_log)
    assert read_part(run.agent_log, 0, 10) == b""


def test_events_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        b'{"event": "agent_started"}\nx\n[]\n{"event": 3}\n' + b"[" * 50_000 + b'\n{"event": "given_back"}'
    )
    assert [event["event"] for event in read_events(path)] == ["agent_started", "given_back"]
    assert read_events(tmp_path / "absent") == []
