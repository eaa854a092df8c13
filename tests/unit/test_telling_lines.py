"""What a recorder left, read back: absent, damaged, cut, newer, long and hostile files; and an agent's code by lines."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest
import recordmaker as make
from treemaker import Tree

from autorl_hpc.files.layout import RunDir
from autorl_hpc.recorder.watch import LineWriter
from autorl_hpc.records.recorded import TrainingPoint
from autorl_hpc.report.run_story import logs
from autorl_hpc.report.run_story.context import MAX_LINES, Code
from autorl_hpc.report.run_story.logs import AgentLog, RecordedLines, UsageLine, read_events, read_lines, read_recorded
from autorl_hpc.report.run_story.resources import usage_of

AT = "2026-01-01T00:00:00.000+00:00"


def write(path: Path, *points: TrainingPoint) -> None:
    out = LineWriter(path)
    out.add(*points)
    out.close()


def point(at_s: float, **more: object) -> TrainingPoint:
    return TrainingPoint.model_validate({"elapsed_s": at_s, "at": AT, "source": "agent.log", **more})


def run_with_log(folder: Path, log: bytes, times: bytes = b"") -> AgentLog:
    run = RunDir(folder)
    run.logs.mkdir()
    run.agent_log.write_bytes(log)
    run.agent_times.write_bytes(times)
    return AgentLog(run.agent_log, run.agent_times)


def test_damaged_lines_cost_only_themselves(tmp_path: Path) -> None:
    assert read_recorded(RunDir(tmp_path)) == logs.Recorded()
    path = tmp_path / "training.jsonl"
    wrote = point(1.0, step=1, loss=0.5, more={"entropy": 0.1})
    write(path, wrote)
    assert read_lines(path, TrainingPoint) == RecordedLines((wrote,), True)
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
        b"x" * (1 << 20),
    ]
    with path.open("ab") as file:
        file.write(b"\n".join(bad) + b"\n\n")
    write(path, point(3.0, step=3))
    with path.open("ab") as file:
        file.write(b'{"elapsed_s": 4.0, "at": "2026')  # the recorder was killed here
    found = read_lines(path, TrainingPoint)
    assert [one.step for one in found.records] == [1, 3]
    words = f"{len(bad) + 1} lines of training.jsonl can't be read: cut, damaged or of a newer version"
    assert found.troubles == (words,)


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
    found = read_recorded(run)
    (line,) = found.usage.records
    assert [gpu.name for gpu in line.gpus or ()] == ["H100"]
    assert len(found.trace.records) == 1 and "1 line of trace.jsonl" in found.troubles[0]


def test_figures_that_no_machine_has_are_not_believed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    start = b'{"at": "x", "kind": "usage", "source": "agent.log", "offset": 0, "format": "codex", "elapsed_s": '
    many = b"9" * 23
    bad = (b'1, "tokens_in": ' + many, b'1, "cost_usd": 1e300', b'1, "calls": ' + many, b"1e15")
    run.recorded("trace").write_bytes(b"".join(start + line + b"}\n" for line in (*bad, b'1, "tokens_in": 7')))
    odd = ["-1}", "1e999}", "null}", '2, "attempt": 0}', '2, "cpu_s": -1}', '2, "cpu_s": 1e308}', "1e15}"]
    odd += ['2, "memory_bytes": %s9}' % ("9" * 20), '2, "disk_bytes": "much"}', '2, "gpus": [{"used_share": 1.5}]}']
    usage = "".join(f'{{"at": "x", "elapsed_s": {line}\n' for line in ("1}", *odd, '3, "cpu_s": null}'))
    run.recorded("usage").write_text(usage)
    found = read_recorded(run)
    assert [one.tokens_in for one in found.trace.records] == [7]
    assert [one.elapsed_s for one in found.usage.records] == [1.0, 3.0]
    assert [trouble.split()[0] for trouble in found.troubles] == ["4", str(len(odd))]
    sound, damaged = UsageLine(elapsed_s=10.0, at=AT, cpu_s=80.0), UsageLine(elapsed_s=5.0, at=AT, cpu_s=1e9)
    assert usage_of([damaged, sound], {1: (0.0, 20.0)}).cpu_hours == 80.0 / 3600


@pytest.mark.parametrize("what", ["fifo", "link", "folder"])
def test_what_is_no_file_is_not_opened(tmp_path: Path, what: str) -> None:
    path = tmp_path / "training.jsonl"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to("/etc/passwd")
    else:
        path.mkdir()
    found = read_lines(path, TrainingPoint)
    assert not found.records and not found.present and found.troubles == ("training.jsonl is no regular file",)
    assert logs.read_part(path, 0, 10) == b""


def test_long_files_are_thinned_and_huge_ones_cut(tmp_path: Path) -> None:
    path = tmp_path / "training.jsonl"
    write(path, *(point(float(i), step=i) for i in range(1000)))
    thinned = read_lines(path, TrainingPoint, max_lines=300)
    assert [one.step for one in thinned.records] == [*range(0, 1000, 4), 999] and thinned.every == 4
    assert thinned.troubles == ("training.jsonl is long: of its lines every 4th was read",)
    assert len(read_lines(path, TrainingPoint).records) == 1000  # where every line counts, all are read
    cut = read_lines(path, TrainingPoint, max_bytes=2000)
    assert 0 < len(cut.records) < 50 and "only the first 2000 were read" in cut.troubles[-1]


def test_the_log_by_time(tmp_path: Path) -> None:
    said = b"***** Running training *****\n  Num examples = 1,200\n***** Running training *****\n  Num examples = 7\n"
    said += b"***** Running Evaluation *****\n  Num examples = 3\n"
    log = run_with_log(tmp_path, said, b"52 10.0 x\nnonsense\n52 nan x\n%d 20.0 x\n" % len(said))
    assert (log.rows(0.0, 10.0), log.rows(10.0, 20.0), log.rows(20.0, 30.0)) == (1200, 7, None)
    (found,) = log.excerpts(10.0, 25.0)
    assert (found.offset, found.text) == (52, said[52:].decode()) and log.excerpts(0.0, 5.0) == ()
    (end,) = log.whole()
    assert end.text == said.decode()
    RunDir(tmp_path).agent_log.unlink()
    assert log.excerpts(10.0, 25.0) == () and log.size() == 0


@pytest.mark.parametrize("bound", [logs.MAX_SCANNED_BYTES, 400_000])
def test_a_traceback_far_from_the_end_is_found(tmp_path: Path, bound: int) -> None:
    trace = b'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\nKeyError: 1\n'
    filler = b"step\n" * 19_995
    head = b"[rank0]: " + trace + filler
    run_with_log(tmp_path, head[: 100_000 - 10] + b"\n" + trace + filler * 6)
    run = RunDir(tmp_path)
    found = AgentLog(run.agent_log, run.agent_times, bound).whole()
    assert [(one.offset, one.only_tracebacks) for one in found[:-1]] == [(0, True), (99_991, True)]
    assert found[0].text.startswith("[rank0]: Traceback") and "KeyError: 1" in found[1].text
    assert not found[-1].only_tracebacks and len(found[-1].text) <= logs.MAX_EXCERPT_BYTES


def test_events_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        b'{"event": "agent_started"}\nx\n[]\n{"event": 3}\n' + b"[" * 50_000 + b'\n{"event": "given_back"}'
    )
    assert [event["event"] for event in read_events(path)] == ["agent_started", "given_back"]
    assert read_events(tmp_path / "absent") == []


def test_texts_made_to_be_slow_are_counted_and_not_shown(tmp_path: Path) -> None:
    """An agent's texts must not hold a report for hours: neither a long one nor many of them."""
    run = Tree(tmp_path / "runs" / "exp").run().start()
    long = "".join(f"{number}\n" for number in range(MAX_LINES + 1))
    slow = [
        "".join(f"{(number * step + turn) % 103}\n" for number in range(MAX_LINES))
        for step, turn in ((1, 0), (50, 0), (50, 1), (50, 2))
    ]
    names = [
        make.code(run, 1.0 + place, {"code/f": text, "code/l": long + "x\n" * place}) for place, text in enumerate(slow)
    ]
    recorded = read_recorded(run.dir).revisions.records
    code, begun = Code(run.dir.code_git, recorded, lines=3 * MAX_LINES), time.process_time()
    trees = [code.tree(name) or {} for name in names]
    found = [
        [code.file_change(path, before[path], after[path]) for path in ("code/f", "code/l")]
        for before, after in itertools.pairwise(trees)
    ]
    shown = [["too much" not in str(lines) for _, lines in pair] for pair in found]
    assert shown == [[True, False], [True, False], [False, False]] and time.process_time() - begun < 30.0
    assert [pair[1][0].added for pair in found] == [1, 1, 1]
