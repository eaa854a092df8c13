"""`report` again: what changed is read again and nothing else, and what was kept is used only where it holds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from treemaker import ENGINE, Tree, TreeRun, evaluation, outcomes, save_items

from autorl_hpc.errors import AutorlError
from autorl_hpc.report import report
from autorl_hpc.report.cache import DIGEST_NAME, HEAD_BYTES
from autorl_hpc.report.pages import write_all
from autorl_hpc.report.report import STATE_NAME, Options, Refreshed, watch_report
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


def test_nothing_changed_reads_nothing(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    first = again(tree)
    assert (first.read, first.runs, first.live, first.changed) == (4, 4, 1, True)

    def never(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(report, "digest", never)
    monkeypatch.setattr(report, "merge_found", never)
    second = again(tree)
    assert (second.read, second.runs, second.live, second.changed) == (0, 4, 1, False)


def test_it_gives_what_reading_all_gives(tree: Tree, tmp_path: Path) -> None:
    again(tree)
    tree.runs[3].seal().close(outcomes(100, range(40)))
    done = again(tree)
    assert (done.read, done.runs, done.live) == (1, 4, 0)
    mixed = files(tree.path)
    write_all(report.build([tree.path]), tree.path / "report")
    assert files(tree.path) == mixed
    again(tree, fresh=True)
    assert files(tree.path) == mixed


def _submit(run: TreeRun) -> None:
    run.submit(700.0)


def _run_json(run: TreeRun) -> None:
    run.dir.record.write_bytes(run.dir.record.read_bytes() + b"\n")


def _base(run: TreeRun) -> None:
    for path in run.tree.experiment.baselines.glob("*.json"):
        path.chmod(0o644)
        path.write_text(path.read_text().replace('"grader":"g"', '"grader":"h"'))


def _another_engine(run: TreeRun) -> None:
    run.tree.baseline(run.science, Split.REPORT, ENGINE.model_copy(update={"dtype": "bfloat16"}))


def _page(run: TreeRun) -> None:
    (run.dir.report / "run.html").write_text("<p>99</p>")


def _digest_cut(run: TreeRun) -> None:
    path = run.dir.report / DIGEST_NAME
    path.write_bytes(path.read_bytes()[:-100])


def _digest_forged(run: TreeRun) -> None:
    """A better score in what was kept."""
    path = run.dir.report / DIGEST_NAME
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"improvement":{"difference":', b'"improvement":{"difference":5'))
    assert path.read_bytes() != data


def _last(run: TreeRun) -> None:
    path = sorted(run.dir.ledger.iterdir())[-1]
    path.chmod(0o644)
    times = path.stat()
    path.write_bytes(path.read_bytes().replace(b"best_feedback", b"BEST_feedback"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


CHANGES: dict[str, tuple[Callable[[TreeRun], object], int]] = {
    "an entry": (_submit, 1),
    "run.json": (_run_json, 1),
    "items": (lambda run: (run.dir.items / "000002.report.jsonl.gz").write_bytes(b"x"), 1),
    "items gone": (lambda run: (run.dir.items / "000002.report.jsonl.gz").unlink(), 1),
    "sealed copy": (lambda run: run.dir.sealed_ledger.write_bytes(b"{}\n"), 1),
    "an entry gone": (lambda run: (run.dir.ledger / "000003.json").unlink(), 1),
    "the last entry in place": (_last, 1),
    "what was recorded": (lambda run: run.dir.recorded("trace").write_text("{}\n"), 1),
    "the clock": (lambda run: run.clock(77.0), 1),
    "a page": (_page, 1),
    "a page gone": (lambda run: (run.dir.report / "run.md").unlink(), 1),
    "base model": (_base, 4),
    "another engine": (_another_engine, 4),
    "digest gone": (lambda run: (run.dir.report / DIGEST_NAME).unlink(), 1),
    "digest empty": (lambda run: (run.dir.report / DIGEST_NAME).write_bytes(b""), 1),
    "digest a list": (lambda run: (run.dir.report / DIGEST_NAME).write_bytes(b"[]\n"), 1),
    "digest deep": (lambda run: (run.dir.report / DIGEST_NAME).write_bytes(b"[" * (HEAD_BYTES - 2) + b"\n"), 1),
    "digest without end": (lambda run: (run.dir.report / DIGEST_NAME).write_bytes(b"x" * 10**6), 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_changes_is_read_again(tree: Tree, name: str) -> None:
    again(tree)
    change, count = CHANGES[name]
    change(tree.runs[0])
    done = again(tree)
    assert (done.read, done.changed) == (count, True)
    kept = files(tree.path)
    again(tree, fresh=True)
    assert files(tree.path) == kept


@pytest.mark.parametrize("forge", [_digest_cut, _digest_forged])
def test_a_digest_that_does_not_hold_is_not_used(tree: Tree, forge: Callable[[TreeRun], None]) -> None:
    again(tree)
    first = files(tree.path)
    forge(tree.runs[0])
    tree.runs[3].clock(50.0)  # something else changed, so that digests are loaded
    done = again(tree)
    assert done.read == 2 and done.merged is not None
    assert [run.improvement.difference for run in done.merged.runs if run.improvement] == [5, 20, 25]
    name = f"{tree.runs[0].dir.run_id}/report/summary.json"
    assert files(tree.path)[name] == first[name]


def test_nobody_elses_digests_are_used(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    again(tree)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert again(tree).read == 4


def test_a_link_or_a_fifo_is_no_digest(tree: Tree) -> None:
    again(tree)
    for run, other in ((tree.runs[0], tree.runs[1]),):
        path = run.dir.report / DIGEST_NAME
        path.rename(run.dir.report / "moved")
        path.symlink_to("moved")
        path = other.dir.report / DIGEST_NAME
        path.unlink()
        os.mkfifo(path)
    assert again(tree).read == 2


def test_a_copied_tree_is_read(tree: Tree, tmp_path: Path) -> None:
    again(tree)
    shutil.copytree(tree.path, tmp_path / "copy" / "exp", copy_function=shutil.copy2)
    assert report.refresh([tmp_path / "copy" / "exp"]).read == 4


def test_other_code_reads_all(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    from autorl_hpc.report import cache

    again(tree)
    monkeypatch.setattr(cache, "code_stamp", lambda: "other")
    assert again(tree).read == 4


def test_the_report_over_all_finds_what_each_experiment_read(tree: Tree) -> None:
    again(tree)
    done = report.refresh([tree.path.parent])
    assert (done.read, done.runs) == (0, 4) and done.index == tree.path.parent / "report" / "index.html"


@pytest.mark.parametrize("name", ["index.html", "summary.json", "summary.csv", STATE_NAME])
def test_a_merged_file_that_is_gone_is_written_again(tree: Tree, name: str) -> None:
    again(tree)
    first = files(tree.path)
    (tree.path / "report" / name).unlink()
    done = again(tree)
    assert (done.read, done.changed) == (0, True) and files(tree.path) == first


@pytest.mark.parametrize("state", [b"", b"[]", b'{"key":1}', b"[" * 100_000, b"\xff"])
def test_a_damaged_state_costs_nothing_but_time(tree: Tree, state: bytes) -> None:
    again(tree)
    (tree.path / "report" / STATE_NAME).write_bytes(state)
    assert again(tree).changed


def test_a_run_that_came_and_one_that_went(tree: Tree) -> None:
    again(tree)
    tree.finished(seed=9, solved=60)
    done = again(tree)
    assert (done.read, done.runs) == (1, 5)
    shutil.rmtree(tree.runs[0].dir.path)
    done = again(tree)
    assert (done.read, done.runs, done.left_out) == (0, 4, 1)
    assert again(tree).changed is False


def test_a_damaged_run_that_is_repaired_in_place_counts_again(tree: Tree) -> None:
    path = tree.runs[0].dir.ledger / "000003.json"
    good = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(good[:-9])
    done = again(tree)
    assert done.merged is not None and done.merged.excluded == {"unfinished": 1, "damaged": 1}
    assert again(tree).changed is False
    path.write_bytes(good)
    done = again(tree)
    assert done.read == 1 and done.merged is not None and done.merged.excluded == {"unfinished": 1}


def test_the_same_entry_rewritten_inside_shows_the_older_truth_until_fresh(tree: Tree) -> None:
    """What stamps can't see: an older entry altered in place. The ranking stays that of the entries before."""
    again(tree)
    path = tree.runs[0].dir.ledger / "000003.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"output/v1", b"output/v9"))
    assert again(tree).changed is False
    done = again(tree, fresh=True)
    assert done.merged is not None and done.merged.excluded["damaged"] == 1


def test_a_run_that_changes_while_it_is_read_is_not_kept(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    real = report.digest

    def slow(run: object, *rest: object) -> object:
        found = real(run, *rest)  # type: ignore[arg-type]
        if run == tree.runs[3].dir:
            tree.runs[3].submit(9.0)
        return found

    monkeypatch.setattr(report, "digest", slow)
    again(tree)
    monkeypatch.setattr(report, "digest", real)
    done = again(tree)
    assert done.read == 1 and done.merged is not None
    assert max(len(run.trajectory) for run in done.merged.runs) == 2


def test_no_room_for_digests(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    from autorl_hpc.files import atomic

    write = atomic.write_bytes

    def full(path: Path, data: bytes, **more: bool) -> None:
        if path.name in (DIGEST_NAME, STATE_NAME):
            raise OSError(28, "No space left on device", str(path))
        write(path, data, **more)

    monkeypatch.setattr(atomic, "write_bytes", full)
    again(tree)
    assert again(tree).read == 4


def test_a_full_disk_is_no_reason_to_leave_runs_out(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    from autorl_hpc.files import atomic

    def full(path: Path, data: bytes, **more: bool) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(atomic, "write_bytes", full)
    with pytest.raises(AutorlError, match="No space left"):
        again(tree)


def test_trees_that_are_not_ours_to_write(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autorl_hpc.files import atomic

    write = atomic.write_bytes

    def theirs(path: Path, data: bytes, **more: bool) -> None:
        if tree.path in path.parents:
            raise OSError(30, "Read-only file system", str(path))
        write(path, data, **more)

    monkeypatch.setattr(atomic, "write_bytes", theirs)
    out = tmp_path / "out"
    first = report.refresh([tree.path], out)
    assert first.read == 4 and len(list((out / "runs").iterdir())) == 4
    assert report.refresh([tree.path], out).changed is False
    tree.runs[3].submit(9.0)
    assert report.refresh([tree.path], out).read == 1


def test_text_is_kept(tree: Tree) -> None:
    first = again(tree).text("80", lambda merged: f"{len(merged.runs)} {len(merged.run_folders)}")
    assert first == "4 4"
    second = again(tree)
    assert second.text("80", lambda merged: "never") == first
    assert second.text("120", lambda merged: f"{len(merged.runs)} {len(merged.run_folders)}") == first
    assert json.loads(second.json_text())["runs"][0]["task"] == "arithmetic"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autorl_hpc", "report", *arguments],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=True,
    )


@pytest.mark.slow
def test_the_command_says_the_same_twice(tree: Tree) -> None:
    first, second = command(str(tree.path)), command(str(tree.path))
    assert first.stdout == second.stdout and f"report: {tree.path}/report/index.html" in first.stdout
    assert command(str(tree.path), "--quiet").stdout == f"{tree.path}/report/index.html\n"
    assert json.loads(command(str(tree.path), "--json").stdout)["runs"][1]["seed"] == 1


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
    assert again(tree).changed is False


def test_watch_ends_by_ctrl_c_and_bears_a_tree_that_is_away(tree: Tree) -> None:
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


def test_watch_says_at_once_that_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(AutorlError):
        watch_report([tmp_path], None, Options(), 1, print, lambda _: None)


def test_one_digest_names_the_items_of_a_copy(tree: Tree) -> None:
    """The selected submission may be equal to an earlier one: then the earlier one's items are what is read."""
    run = tree.run(seed=11).start()
    run.submit(5.0, outcomes(40, range(20)))
    first = run.ledger.entries[2].body
    run.submit(9.0, final=True, same_as=1, content_hash=first.content_hash)
    values = outcomes(100, range(50))
    items = save_items(run.dir.items / "000002.report.jsonl.gz", values)
    run.seal().close(
        report=evaluation(Split.REPORT, first.content_hash, values, items), selected=2, selected_by="final"
    )
    again(tree)
    (run.dir.items / "000001.feedback.jsonl.gz").write_bytes(b"x")
    assert again(tree).read == 1
