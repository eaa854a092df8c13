"""What a recorder left, read back: absent, damaged, cut, newer, long and hostile files; and the figures made of it, by hand."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import recordmaker as make
from treemaker import Tree

from autorl_hpc.files.layout import RunDir
from autorl_hpc.recorder.watch import LineWriter
from autorl_hpc.records.entries import Fingerprint
from autorl_hpc.records.recorded import GpuSample, TrainingPoint, UsageSample
from autorl_hpc.report.run_folder import Items
from autorl_hpc.report.run_story import logs
from autorl_hpc.report.run_story.context import MAX_LINES, Code
from autorl_hpc.report.run_story.logs import (
    AgentLog,
    RecordedLines,
    UsageLine,
    read_events,
    read_lines,
    read_recorded,
)
from autorl_hpc.report.run_story.resources import UsageSeries, reference_metrics, trained_by, usage_of
from autorl_hpc.report.run_story.story import feedback_gain
from autorl_hpc.report.scores import PairedItems
from autorl_hpc.report.story_records import ReferenceMetrics
from autorl_hpc.report.summary import Point
from autorl_hpc.scoring import stats
from autorl_hpc.states import Fault, SubmissionState

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
    assert not found.records and not found.present and found.troubles == ("training.jsonl is not a regular file",)
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
    shown = [["too much" not in str(change.diff) for change in pair] for pair in found]
    assert shown == [[True, False], [True, False], [False, False]] and time.process_time() - begun < 30.0
    assert [pair[1].added for pair in found] == [1, 1, 1]


IDS = tuple("abcdef")
CLUSTERS = ("x", "x", "y", "y", "z", "z")
AT = "2026-01-01T00:00:00.000+00:00"


def submitted(number: int, at_s: float, score: float | None = None, **more: Any) -> Point:
    status = more.pop("status", SubmissionState.SCORED if score is not None else SubmissionState.REFUSED)
    return Point(submission_id=number, manifest_id=f"m{number}", elapsed_s=at_s, status=status, score=score, **more)


def metrics(*points: Point, **more: Any) -> ReferenceMetrics:
    given: dict[str, Any] = {"base_score": 20.0, "elapsed_s": 900.0, "allowed_s": 1000.0, "ended": True}
    return reference_metrics(points, **{**given, **more})


def test_rollbacks_are_submissions_that_go_back_to_an_earlier_one() -> None:
    def made(number: int, parent: int | None, **more: Any) -> Point:
        print_ = Fingerprint(submission_id=number, content_hash="0" * 64, parent=parent)
        return submitted(number, 10.0 * number, 20.0, fingerprint=print_, **more)

    # 2 goes on from 1; 3 back to 1; 5 begins at the base model, which is none; 6 hands 1 in again; 7 goes on from it
    found = metrics(
        made(1, None), made(2, 1), made(3, 1), submitted(4, 35.0), made(5, None), made(6, None, same_as=1), made(7, 1)
    )
    assert found.rollbacks == 2
    assert metrics(made(1, None)).rollbacks == 0 and metrics().rollbacks is None
    assert metrics(submitted(1, 5.0, 10.0), submitted(2, 9.0, 12.0)).rollbacks is None  # no fingerprints: unknown


def test_reference_metrics_of_a_whole_run() -> None:
    flagged = Fingerprint(submission_id=6, content_hash="0" * 64, flags=("untrained_copy",))
    found = metrics(
        submitted(1, 50.0),
        submitted(2, 100.0, 20.0, is_base=True),
        submitted(3, 200.0, 15.0),
        submitted(4, 300.0, 30.0),
        submitted(5, 400.0, status=SubmissionState.FAILED, fault=Fault.ARTIFACT),
        submitted(6, 500.0, 30.0, fingerprint=flagged),
        submitted(7, 600.0, 20.0, same_as=2),
        submitted(8, 700.0, 25.0),
        submitted(9, 750.0, status=SubmissionState.FAILED, fault=Fault.GRADER),
        submitted(10, 800.0, status=SubmissionState.ACCEPTED),
        refused_unrecorded=2,
    )
    # Six scored of: six scored, one refused, two refused and not kept, one that failed by its own fault.
    assert found.valid_submission_rate == pytest.approx(6 / 10)
    assert found.first_valid_idx == 2 and found.first_valid_delay == 100.0
    assert found.time_to_first_improvement == 300.0  # 20 is the base model's score, and 15 is below it
    assert found.time_to_best == 300.0  # the earlier of two equal ones
    assert found.monotonic_ratio == pytest.approx(2 / 5)  # 20 15 30 30 20 25: up twice in five steps
    assert found.copy_model_count == 3  # the base, what equals it, and what is only noise away
    assert found.time_used_ratio == pytest.approx(0.9) and found.last_submit_gap == 100.0


def sample(at_s: float, attempt: int = 1, cpu_s: float | None = None, *shares: float | None, **more: Any) -> UsageLine:
    """As the recorder writes it and the report reads it."""
    gpus = tuple(GpuSample(index=i, name="H100", used_share=share) for i, share in enumerate(shares))
    written = UsageSample(elapsed_s=at_s, at=AT, attempt=attempt, cpu_s=cpu_s, gpus=gpus, **more).model_dump_json()
    return UsageLine.model_validate_json(written)


def test_gpu_hours_are_gpus_times_time_over_attempts() -> None:
    attempts = {1: (0.0, 3600.0), 2: (3600.0, 5400.0), 3: (5400.0, 7200.0)}
    found = usage_of([sample(5.0, 1, None, 0.5, 0.5), sample(3700.0, 2, None, 0.5)], attempts)
    assert found.gpus == {1: 2, 2: 1} and found.gpu_model == "H100"
    assert found.gpu_hours() == pytest.approx(2 * 1.0 + 1 * 0.5)  # nobody looked in the third attempt
    assert found.gpu_hours(1800.0) == pytest.approx(1.0) and found.gpu_hours(4500.0) == pytest.approx(2.25)
    crowd = [sample(0.0, 1, None, *[0.5] * 8), sample(5.0, 1, None, *[0.5] * 8), sample(3700.0, 2, None, 0.5)]
    of_job = usage_of(crowd, attempts, given={1: 1, 2: 0})  # seven are a node's; of the eighth nobody knows what it did
    assert (of_job.gpus, of_job.gpu_use, of_job.gpu_hours()) == ({1: 1, 2: 0}, None, pytest.approx(1.0))
    assert usage_of(crowd[2:], attempts, given={2: 0}).gpu_model is None
    assert usage_of([sample(5.0)], attempts).gpu_hours() is None  # no GPU was seen: not zero
    assert UsageSeries().gpu_hours() is None and UsageSeries().idle_s(()) is None


def test_gpu_use_cpu_and_peaks() -> None:
    found = usage_of(
        [
            sample(0.0, 1, 0.0, 0.0, memory_bytes=5, disk_bytes=70),
            sample(10.0, 1, 20.0, 0.5, memory_bytes=9),
            sample(40.0, 1, 50.0, 0.9, memory_bytes=7, disk_bytes=60),
            sample(500.0, 1, 60.0, 0.1),  # nobody looked for 460 s: the share says nothing of them
            sample(500.0, 2, 3.0, 0.1),
            sample(510.0, 2, 36.0, None),
        ],
        {1: (0.0, 500.0), 2: (500.0, 510.0)},
    )
    assert found.gpu_use == pytest.approx((10 * 0.5 + 30 * 0.9) / 40)
    assert found.cpu_hours == pytest.approx((60 + 36) / 3600)
    assert (found.memory_peak_bytes, found.disk_peak_bytes) == (9, 70)


def test_idle_is_when_nothing_works_and_no_driver_is_waited_for() -> None:
    samples = [
        sample(0.0, 1, 0.0, 0.0),
        sample(10.0, 1, 0.1, 0.0),  # idle: a hundredth of a core
        sample(20.0, 1, 9.0, 0.0),  # a core works
        sample(30.0, 1, 9.1, 0.8),  # a GPU works
        sample(40.0, 1, 9.2, 0.0),  # idle
        sample(50.0, 1, 9.3, 0.0),  # idle
    ]
    found = usage_of(samples, {1: (0.0, 50.0)})
    assert found.idle_s(()) == pytest.approx(30.0)
    assert found.idle_s(((5.0, 32.0), (45.0, 60.0))) == pytest.approx(5.0 + 8.0 + 5.0)
    assert usage_of([sample(0.0), sample(10.0)], {}).idle_s(()) is None  # CPU was not measured
    apart = [sample(0.0, 1, 0.0, 0.0), sample(100.0, 1, 1.0, 0.0)]
    assert usage_of(apart, {}).idle_s(()) is None and usage_of(apart, {}, every=2).idle_s(()) == 100.0


def trained(at_s: float, step: int | None, source: str = "a", **more: Any) -> TrainingPoint:
    return TrainingPoint(elapsed_s=at_s, at=AT, step=step, source=source, **more)


def test_training_steps_between_submissions() -> None:
    points = [
        trained(10.0, 10, loss=2.0),
        trained(20.0, 50, loss=1.0, reward=0.1),
        trained(30.0, 60),  # the same training goes on after the submission at 25
        trained(35.0, 5, loss=3.0),  # a new one in the same place
        trained(36.0, 7, "b"),
        trained(37.0, None, "b", loss=0.5),
    ]
    first, second, third = trained_by(points, [25.0, 40.0, 50.0])
    assert (first.steps, first.last_loss, first.last_reward) == (50, 1.0, 0.1)
    assert (second.steps, second.last_loss, second.last_reward) == (10 + 5 + 7, 0.5, None)
    assert (third.steps, third.last_loss) == (None, None) and third.points == ()


def items(*outcomes: float) -> Items:
    return Items(tuple(f"q{i}" for i in range(len(outcomes))), outcomes, 0.1)


def test_feedback_gains_have_the_noise_of_the_items() -> None:
    base, new = [1.0] * 10 + [0.0] * 30, [0.0] * 2 + [1.0] * 18 + [0.0] * 20
    found = feedback_gain(PairedItems(items(*base), items(*new)))
    assert found is not None and (found.won, found.lost) == (10, 2)
    assert found.difference == pytest.approx(20.0)
    expected = stats.tango(10, 2, 40)
    assert (found.low, found.high) == (pytest.approx(100 * expected.low), pytest.approx(100 * expected.high))
    graded = feedback_gain(PairedItems(items(0.0, 0.5, 0.2, 0.1), items(0.5, 0.5, 0.6, 0.4)))
    assert graded is not None and graded.won is None
    # Differences 0.5, 0, 0.4, 0.3: mean 0.3, standard deviation 0.21602, t(3) = 3.18245.
    assert graded.difference == pytest.approx(30.0)
    assert graded.low == pytest.approx(30.0 - 3.182446 * 21.60247 / 2, abs=1e-3)


def test_clusters_count_as_one_observation_each() -> None:
    # Three clusters of two; sums of differences 2, 0, 1; mean 0.5; deviations of sums 1, -1, 0: variance 3/2 * 2 / 36.
    base, new = Items(IDS, (0.0,) * 6, 0.1, clusters=CLUSTERS), Items(IDS, (1.0, 1.0, 0.0, 0.0, 1.0, 0.0), 0.1)
    found = feedback_gain(PairedItems(base, new))
    half = 4.302653 * (1.5 * 2 / 36) ** 0.5  # t with two degrees of freedom
    assert found is not None and found.difference == pytest.approx(50.0) and (found.won, found.lost) == (3, 0)
    assert found.low == pytest.approx(100 * (0.5 - half), abs=1e-3) and found.high == 100.0
