"""`report` again: what changed is read again and nothing else, and what was kept is used only where it holds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from treemaker import ENGINE, Tree, outcomes

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic
from autorl_hpc.report import report
from autorl_hpc.report.cache import DIGEST_NAME
from autorl_hpc.report.report import STATE_NAME, Options, Refreshed, in_processes, watch_report
from autorl_hpc.states import Split


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path / "runs" / "exp")
    for seed, solved in enumerate((30, 45, 50)):
        tree.finished(seed=seed, solved=solved)
    live = tree.run(seed=3).start()
    live.submit(5.0, outcomes(40, range(15)))
    return tree


def again(tree: Tree, **options: bool | int | None) -> Refreshed:
    return report.refresh([tree.path], None, Options(**options))  # type: ignore[arg-type]


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("report/*"))
        if p.is_file() and not p.name.startswith(".")
    }


def test_it_gives_what_reading_all_gives_and_reads_what_changed(tree: Tree) -> None:
    first = again(tree)
    assert (first.read, len(first.folders), first.live) == (4, 4, 1)
    second = again(tree)
    assert (second.read, len(second.folders), second.live, second.merged) == (0, 4, 1, None)
    assert first.merged is not None and second.load().runs == first.merged.short().runs
    assert json.loads(second.json_text())["runs"][0]["task"] == "arithmetic"
    tree.runs[3].seal().close(outcomes(100, range(40)))
    done = again(tree)
    assert (done.read, len(done.folders), done.live) == (1, 4, 0)
    mixed = files(tree.path)
    again(tree, fresh=True)
    assert files(tree.path) == mixed
    over_all = report.refresh([tree.path.parent])
    assert (over_all.read, over_all.index) == (0, tree.path.parent / "report" / "index.html")
    tree.finished(seed=9, solved=60)
    assert again(tree).read == 1
    shutil.rmtree(tree.runs[0].dir.path)
    done = again(tree)
    assert (done.read, len(done.folders), done.left_out) == (0, 4, 1)
    assert again(tree).merged is None


def in_place(old: bytes, new: bytes) -> Callable[[Path], object]:
    """Other bytes in a file that keeps its length and time."""

    def change(path: Path) -> None:
        path.chmod(0o644)
        times, data = path.stat(), path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    return change


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def moved(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def test_whatever_changes_is_read_again(tree: Tree) -> None:
    """In a run, in what runs share, in pages and digests: and it is then what reading all gives."""
    run = tree.runs[0].dir
    digest, forged = run.report / DIGEST_NAME, b'"improvement":{"difference":'
    bases = [p for p in tree.experiment.baselines.iterdir() if p.suffix == ".json"]
    other_engine = ENGINE.model_copy(update={"dtype": "bfloat16"})
    changes: list[tuple[str, Callable[[], object], int]] = [
        ("what was recorded", lambda: run.recorded("trace").write_text("{}\n"), 1),
        ("the clock", lambda: tree.runs[0].clock(77.0), 1),
        ("a page", lambda: (run.report / "run.html").write_text("<p>99</p>"), 1),
        ("a page gone", (run.report / "run.md").unlink, 1),
        ("base model", lambda: [in_place(b'"grader":"g"', b'"grader":"h"')(path) for path in bases], 4),
        ("another engine", lambda: tree.baseline(tree.runs[0].science, Split.REPORT, other_engine), 4),
        ("digest gone", digest.unlink, 1),
        ("digest empty", lambda: digest.write_bytes(b""), 1),
        ("digest without end", lambda: digest.write_bytes(b"x" * 10**6), 1),
        ("digest forged", lambda: in_place(forged, forged + b"5")(tree.runs[1].dir.report / DIGEST_NAME), 1),
        ("digest a link", lambda: moved(digest), 1),
        ("digest a fifo", lambda: fifo(digest), 1),
        ("an entry", lambda: tree.runs[3].submit(700.0), 1),
        ("items gone", (tree.runs[1].dir.items / "000002.report.jsonl.gz").unlink, 1),
        ("run.json", lambda: run.record.write_bytes(run.record.read_bytes() + b"\n"), 1),
        ("the last entry", lambda: in_place(b'"grader":"g"', b'"grader":"h"')(max(run.ledger.iterdir())), 1),
        ("sealed copy", lambda: tree.runs[1].dir.sealed_ledger.write_bytes(b"{}\n"), 1),
        ("an entry gone", (tree.runs[2].dir.ledger / "000003.json").unlink, 1),
    ]
    damaged = len(again(tree).folders) - 4
    for name, change, count in changes:
        change()
        done = again(tree)
        assert done.merged is not None and count <= done.read <= count + damaged, name
        damaged = done.merged.excluded.get("damaged", 0)  # these are read each time
        kept = files(tree.path)
        again(tree, fresh=True)
        assert files(tree.path) == kept, name


def test_digests_of_others_of_copies_and_of_other_code_are_not_used(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again(tree)
    shutil.copytree(tree.path, tmp_path / "copy" / "exp", copy_function=shutil.copy2)
    assert report.refresh([tmp_path / "copy" / "exp"]).read == 4
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 12345)
        assert again(tree).read == 4
    monkeypatch.setattr("autorl_hpc.report.cache.code_stamp", lambda: "other")
    assert again(tree).read == 4


def test_a_merged_file_that_is_gone_is_written_again(tree: Tree) -> None:
    """And a damaged state costs nothing but time."""
    again(tree)
    first, state = files(tree.path), tree.path / "report" / STATE_NAME
    for name in ("index.html", "summary.json", "summary.csv", STATE_NAME):
        (tree.path / "report" / name).unlink()
        done = again(tree)
        assert done.merged is not None and done.read == 0 and files(tree.path) == first, name
    for data in (b"", b"[]", b'{"key":1}', b"[" * 100_000, b"\xff"):
        state.write_bytes(data)
        assert again(tree).merged is not None, data[:9]


def test_a_damaged_run_that_is_repaired_in_place_counts_again(tree: Tree) -> None:
    path = tree.runs[0].dir.ledger / "000003.json"
    good = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(good[:-9])
    done = again(tree)
    assert done.merged is not None and done.merged.excluded == {"unfinished": 1, "damaged": 1}
    assert again(tree).read == 1
    path.write_bytes(good)
    done = again(tree)
    assert done.read == 1 and done.merged is not None and done.merged.excluded == {"unfinished": 1}
    # what the key can't see: an older entry altered in place shows what the chain said before, until --fresh
    path.write_bytes(good.replace(b"output/v1", b"output/v9"))
    assert again(tree).merged is None
    done = again(tree, fresh=True)
    assert done.merged is not None and done.merged.excluded["damaged"] == 1


def test_a_run_that_changes_while_it_is_read_is_not_kept(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    real = report.digest

    def slow(run: object, *rest: object, **more: bool) -> object:
        found = real(run, *rest, **more)  # type: ignore[arg-type]
        if run == tree.runs[3].dir:
            tree.runs[3].submit(9.0)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(report, "digest", slow)
        again(tree)
    done = again(tree)
    assert done.read == 1 and done.merged is not None
    assert max(len(run.trajectory) for run in done.merged.runs) == 2


def failing(monkeypatch: pytest.MonkeyPatch, number: int, fails: Callable[[Path], bool]) -> None:
    """Writing fails for some paths, as on a full or a read-only disk."""
    write = atomic.write_bytes

    def refuse(path: Path, data: bytes, **more: bool) -> None:
        if fails(path):
            raise OSError(number, os.strerror(number), str(path))
        write(path, data, **more)

    monkeypatch.setattr(atomic, "write_bytes", refuse)


def test_a_full_disk_is_said_and_costs_no_run(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        failing(patched, 28, lambda path: path.name in (DIGEST_NAME, STATE_NAME))
        again(tree)
        assert again(tree).read == 4
    tree.runs[3].submit(9.0)
    failing(monkeypatch, 28, lambda path: True)
    with pytest.raises(AutorlError, match="No space left"):
        again(tree)


def test_trees_that_are_not_ours_to_write(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, 30, lambda path: tree.path in path.parents)
    out = tmp_path / "out"
    first = report.refresh([tree.path], out)
    assert first.read == 4 and len(list((out / "runs").iterdir())) == 4
    assert report.refresh([tree.path], out).merged is None
    tree.runs[3].submit(9.0)
    assert report.refresh([tree.path], out).read == 1


def test_watch_until_all_is_over(tree: Tree) -> None:
    lines: list[str] = []
    index = tree.path / "report" / "index.html"

    def pause(seconds: float) -> None:
        assert seconds == 7 and b'http-equiv="refresh" content="7"' in index.read_bytes()
        if len(lines) == 3:
            tree.runs[3].seal().close(outcomes(100, range(40)))

    watch_report([tree.path], None, Options(), 7, lines.append, pause)
    assert [line.split("  ", 1)[-1] for line in lines[1:]] == [
        "4 runs, 1 not over, 4 read again",
        "4 runs, 1 not over, nothing changed",
        "4 runs, 0 not over, 1 read again",
    ]
    assert b'http-equiv="refresh"' not in index.read_bytes()
    assert again(tree).merged is None


def test_watch_ends_by_ctrl_c_and_bears_a_tree_that_is_away(tree: Tree, tmp_path: Path) -> None:
    lines: list[str] = []
    away = tree.path.with_name("away")

    def pause(_: float) -> None:
        if len(lines) == 2:
            tree.path.rename(away)
        elif len(lines) == 3:
            away.rename(tree.path)
        else:
            raise KeyboardInterrupt

    watch_report([tree.path], None, Options(), 1, lines.append, pause)
    assert "not refreshed" in lines[2] and "1 not over" in lines[3] and "no longer watched" in lines[4]
    assert b'http-equiv="refresh"' not in (tree.path / "report" / "index.html").read_bytes()
    (tmp_path / "empty").mkdir()
    with pytest.raises(AutorlError):
        watch_report([tmp_path / "empty"], None, Options(), 1, print, lambda _: None)


# --- worker processes

PIECES = 300


def gone(pids: set[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_answers_of_workers_come_in_order_whatever_becomes_of_one() -> None:
    here = os.getpid()

    def work(number: int) -> tuple[int, int]:
        if number == 3:
            time.sleep(0.3)  # the others overtake it
        if number == 150 and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return number, os.getpid()

    found = list(in_processes(work, PIECES, 3))
    assert [number for number, _ in found] == list(range(PIECES))
    workers = {pid for _, pid in found} - {here}
    assert workers and gone(workers) and found[-1][1] == here


def test_workers_end_with_the_process_that_asks() -> None:
    """Killed, it can tell them nothing."""
    reading, writing = os.pipe()
    asking = os.fork()
    if not asking:
        try:
            answers = in_processes(lambda number: str(os.getpid()).encode(), PIECES, 2)
            os.write(writing, b" ".join({next(answers) for _ in range(20)}))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as pipe:  # it ends when the last of them has gone, for each holds the other end
        told = pipe.read()
    assert os.waitpid(asking, 0)[1] == signal.SIGKILL
    assert told


def test_the_report_by_workers_is_the_report_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the runs one that nobody can read, and one whose worker is killed."""
    tree = Tree(tmp_path / "runs" / "exp", n_feedback=20, n_report=30)
    for seed in range(12):
        run = tree.run(seed=seed).start()
        run.submit(10.0, [1.0] * (seed + 1) + [0.0] * (19 - seed))
        run.seal().close([1.0] * (2 * seed) + [0.0] * (30 - 2 * seed))
    tree.save()
    runs = sorted(path.parent for path in tree.path.glob("*/run.json"))
    (runs[2] / "run.json").write_text("{")
    here, real = os.getpid(), report.digest

    def digest(run: report.RunDir, *rest: object, **more: bool) -> object:
        if os.getpid() != here and run.path == runs[5]:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(run, *rest, **more)  # type: ignore[arg-type]

    def made(cores: int) -> dict[str, bytes]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
        done = report.refresh([tmp_path / "runs"], None, Options(fresh=True))
        assert done.read == 11 and done.left_out == 1
        return files(tmp_path)

    by_one = made(1)
    monkeypatch.setattr(report, "digest", digest)
    assert len(by_one) > 3 * 11 and made(2) == by_one
    assert report.refresh([tmp_path / "runs"]).read == 0
