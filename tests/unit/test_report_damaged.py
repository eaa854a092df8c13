"""Trees that are live, half-written, damaged or hostile: the report is made, counts no damaged run, and says what is not in it."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bigtree import BigTree
from rich.console import Console
from treemaker import Tree, outcomes

from autorl_hpc.evidence import verify
from autorl_hpc.files import faults, reading
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.report import report
from autorl_hpc.report.run_folder import read_chain
from autorl_hpc.report.summary import LeftOut, MergedReport, RunSummary
from autorl_hpc.report.terminal import print_summary


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(faults, "PAUSE_S", 0.0)
    monkeypatch.setattr(reading, "UNSEEN_PATIENCE_S", 0.0)
    monkeypatch.setattr(reading, "UNSEEN_PAUSE_S", 0.0)


def build(path: Path) -> Tree:
    """Three finished runs, which gain 5, 20 and 25, and one that goes on."""
    tree = Tree(path / "runs" / "exp")
    for seed, solved in enumerate((30, 45, 50)):
        tree.finished(seed=seed, solved=solved)
    tree.run(seed=3).start().submit(5.0, outcomes(40, range(15)))
    tree.runs[3].clock(40.0)
    return tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return build(tmp_path)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, RunSummary]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        tree = build(tmp_path_factory.mktemp("pristine"))
        yield tree.path, {run.genesis: run for run in report.build([tree.path]).runs}


def left(merged: MergedReport) -> LeftOut:
    """The one thing that was left out."""
    (one,) = merged.left_out
    assert one.why and one.next_step
    return one


def counted(merged: MergedReport) -> list[float]:
    return [run.improvement.difference for run in merged.runs if run.counted and run.improvement]


def write(path: Path, data: bytes) -> None:
    if path.exists():
        path.chmod(0o644)
    path.write_bytes(data)


DAMAGED = (b"", b"[]", b'{"run_id": "x"', b"null", b"\xff\xfe", b"[" * 200_000, b'{"at":NaN}')


@pytest.mark.parametrize("name", ["run.json", "000001.json", "000004.json", "000008.json", "ledger.jsonl"])
def test_a_damaged_file_costs_its_run(pristine: tuple[Path, Any], tmp_path: Path, name: str) -> None:
    path = tmp_path / "exp"
    shutil.copytree(pristine[0], path)
    run = RunDir(min(p.parent for p in path.glob("*/run.json")))
    file = {"run.json": run.record, "ledger.jsonl": run.sealed_ledger}.get(name, run.ledger / name)
    for data in DAMAGED:
        write(file, data)
        merged = report.build([path])
        assert counted(merged) == [20, 25], data[:20]
        if name == "run.json":
            assert left(merged).what == f"exp/{run.run_id}"
        else:
            assert merged.runs[0].damage and merged.runs[0].excluded == "damaged"


def test_experiment_json_damaged_or_lost(pristine: tuple[Path, Any], tmp_path: Path) -> None:
    path = tmp_path / "runs" / "exp"
    shutil.copytree(pristine[0], path)
    for data in DAMAGED:
        write(ExperimentDir(path).resolved, data)
        merged = report.build([path])
        assert counted(merged) == [5, 20, 25] and left(merged).what == "exp", data[:20]
        assert "would not be noticed" in left(merged).why
    other = Tree(path.with_name("other"))
    other.finished(seed=8, solved=60)
    ExperimentDir(path).resolved.unlink()
    merged = report.build([path.parent])
    assert counted(merged) == [5, 20, 25, 35] and left(merged).what == "exp"


def test_an_empty_ledger_and_none_at_all(tree: Tree) -> None:
    shutil.rmtree(tree.runs[0].dir.ledger)
    for path in tree.runs[3].dir.ledger.iterdir():
        path.unlink()
    merged = report.build([tree.path])
    assert counted(merged) == [5, 20, 25], "the sealed copy of the first holds all of it"
    emptied, run = merged.runs[3], tree.runs[3]
    assert emptied.excluded == "damaged" and "items is there" in (emptied.damage or ""), "its items tell that it began"
    assert any("no entry" in problem for problem in verify.verify_run(tree.experiment, run.dir).problems)
    shutil.rmtree(run.dir.items)
    assert report.build([tree.path]).runs[3].state == "queued", "as it was before its first entry"
    run.dir.recorded("usage").touch()
    assert report.build([tree.path]).runs[3].excluded == "damaged"
    for one in tree.runs[:2]:
        write(one.dir.sealed_ledger, b"")
    merged = report.build([tree.path])
    assert counted(merged) == [25] and [one.excluded for one in merged.runs[:2]] == ["damaged", "damaged"]


def test_a_sealed_copy_that_says_more_or_less_is_damage(pristine: tuple[Path, Any], tmp_path: Path) -> None:
    """And alone it is the whole chain."""
    shutil.copytree(pristine[0], tmp_path / "exp")
    run = RunDir(min(p.parent for p in (tmp_path / "exp").glob("*/run.json")))
    whole, true = read_chain(run), run.sealed_ledger.read_bytes()
    for data in (true + b"{}\n", true[:-5]):
        write(run.sealed_ledger, data)
        assert read_chain(run).damage is not None
    write(run.sealed_ledger, true)
    shutil.rmtree(run.ledger)
    assert whole.damage is None and read_chain(run) == whole
    write(run.sealed_ledger, b"")
    assert report.build([tmp_path / "exp"]).runs[0].excluded == "damaged"


def test_big_trees_of_the_benchmarks_are_as_the_ledger_writes_them(tmp_path: Path) -> None:
    BigTree(tmp_path / "runs", submissions=4, n_feedback=20, n_report=30).grow(12)
    chains = [read_chain(RunDir(path)) for path in (tmp_path / "runs" / "exp000").glob("gsm8k*")]
    assert len(chains) == 12 and all(chain.damage is None and chain.entries for chain in chains)


def test_items_missing_cut_or_of_another(tree: Tree) -> None:
    one, two, three = (run.dir.items / "000002.report.jsonl.gz" for run in tree.runs[:3])
    one.unlink()
    two.write_bytes(two.read_bytes()[:-30])
    three.write_bytes(one.with_name("000002.feedback.jsonl.gz").read_bytes())
    merged = report.build([tree.path])
    assert counted(merged) == [5, 20, 25]
    for run in merged.runs[:3]:
        assert run.improvement is not None and run.improvement.how == "scores_only" and run.improvement.low is None
        assert any("no interval" in note for note in run.notes)


def test_newer_versions(tree: Tree) -> None:
    for path in (tree.runs[0].dir.record, tree.runs[1].dir.ledger / "000005.json"):
        write(path, json.dumps({**json.loads(path.read_bytes()), "schema_version": 99, "new": [1]}).encode())
    merged = report.build([tree.path])
    assert counted(merged) == [25] and len(merged.left_out) == 2
    for one in merged.left_out:
        assert "newer autorl-hpc" in one.why and "newer" in (one.next_step or "")


def test_links_to_runs_and_copies(tree: Tree, tmp_path: Path) -> None:
    run = tree.runs[0].dir.path
    run.with_name("linked").symlink_to(run)
    run.with_name("nowhere").symlink_to(tmp_path / "nothing")
    run.with_name("loop").symlink_to("loop")
    shutil.copytree(tree.runs[1].dir.path, run.with_name("copied"))
    merged = report.build([tree.path])
    assert counted(merged) == [5, 20, 25]
    why = {one.what: one.why for one in merged.left_out}
    assert "counted once" in why.pop("exp/linked", why.pop(f"exp/{run.name}", ""))
    assert "counted once" in why.pop("exp/copied", why.pop(f"exp/{tree.runs[1].dir.run_id}", ""))
    assert list(why) == ["exp/loop"] and "symbolic links" in why["exp/loop"]


def test_names_in_no_encoding(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "runs" / "exp")
    tree.finished(seed=0, solved=30)
    tree.runs[0].dir.path.rename(tree.path / os.fsdecode(b"run-\xff"))
    (tree.path / os.fsdecode(b"junk-\xfe")).mkdir()
    tree.experiment.resolved.unlink()
    tree.path.rename(tree.path.with_name(os.fsdecode(b"caf\xe9")))
    done = report.refresh([tmp_path / "runs"])
    assert done.merged is not None and counted(done.merged) == [5]
    assert b'href="../caf%E9/run-%FF/report/run.html"' in done.index.read_bytes()
    again = report.refresh([tmp_path / "runs"])
    out = io.StringIO()
    print_summary(again.load(), Console(file=out, width=80), again.index)
    assert again.merged is None and "report:" in out.getvalue()


# --- file systems that answer late or not, and writers that go on meanwhile


def refusing(monkeypatch: pytest.MonkeyPatch, below: Path, number: int, times: int = 10**9) -> None:
    """Every look below a folder fails so many times: what another user's folder, or a file server, answers."""
    left = [times]

    def refuse(real: Callable[..., object]) -> Callable[..., object]:
        def look(path: object, *rest: object, **more: object) -> object:
            if isinstance(path, (str, os.PathLike)) and Path(path).is_relative_to(below) and left[0] > 0:
                left[0] -= 1
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *rest, **more)

        return look

    for name in ("listdir", "open", "stat"):
        monkeypatch.setattr(os, name, refuse(getattr(os, name)))


def test_a_run_that_may_not_be_opened(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, tree.runs[0].dir.path, errno.EACCES)
    merged = report.build([tree.path])
    assert counted(merged) == [20, 25]
    assert "Permission denied" in left(merged).why and "owner" in (left(merged).next_step or "")


def test_a_stale_handle_passes(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("path", "ledger", "items", "record"):
        with monkeypatch.context() as patched:
            refusing(patched, getattr(tree.runs[0].dir, where), errno.ESTALE, times=2)
            merged = report.build([tree.path])
        assert counted(merged) == [5, 20, 25] and merged.left_out == (), where


def test_entries_that_come_during_the_read(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer links entries between the report's listing and its reads: what is read is a whole chain."""
    real, live = os.listdir, tree.runs[3]

    def then_more(path: object) -> list[str]:
        names = real(path)  # type: ignore[call-overload]
        if path == live.dir.ledger and len(names) < 8:
            monkeypatch.setattr(os, "listdir", real)
            live.submit(50.0)
            monkeypatch.setattr(os, "listdir", then_more)
        return list(names)

    monkeypatch.setattr(os, "listdir", then_more)
    merged = report.build([tree.path])
    assert merged.runs[3].damage is None and merged.runs[3].state == "running"
    assert (live.dir.ledger / "000005.json").exists()


def test_unfinished_writes_strangers_and_fifos(tree: Tree) -> None:
    run = tree.runs[0].dir
    for folder in (run.ledger, run.items, run.path, tree.path, tree.experiment.baselines):
        (folder / ".tmp-000009.json.77.ab").write_bytes(b"{")
        (folder / "core.1234").write_bytes(b"\0" * 100)
        (folder / "junk").mkdir()
        os.mkfifo(folder / "pipe.json") if folder != run.ledger else None
    assert counted(report.build([tree.path])) == [5, 20, 25]
    for path in (run.record, tree.runs[3].dir.clock, tree.runs[1].dir.items / "000002.report.jsonl.gz"):
        path.unlink()
        os.mkfifo(path)
    merged = report.build([tree.path])
    assert counted(merged) == [20, 25] and "is not a file" in left(merged).why


def test_a_defect_of_ours_costs_one_run_and_one_that_goes_no_other(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    real = report.digest

    def defect(run: object, *rest: object, **more: bool) -> RunSummary:
        shutil.rmtree(tree.runs[2].dir.path, ignore_errors=True)  # while the first is read
        if run == tree.runs[0].dir:
            raise ZeroDivisionError("division by zero")
        return real(run, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(report, "digest", defect)
    done = report.refresh([tree.path])
    assert done.merged is not None and counted(done.merged) == [20]
    why = {one.what.split("-")[-2][-1]: one.why for one in done.merged.left_out}
    assert set(why) == {"0", "2"} and "defect of autorl-hpc" in why["0"] and "ZeroDivisionError" in why["0"]


# --- random damage: one file of a small tree, one change a seed


def _flip(rng: random.Random, path: Path, data: bytes) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]


def _other(rng: random.Random, path: Path, data: bytes) -> bytes:
    """The bytes of another file of the folder: entries swapped, items of another submission."""
    others = sorted(other for other in path.parent.iterdir() if other.is_file() and other != path)
    return rng.choice(others).read_bytes() if others else data


DAMAGE: tuple[Callable[[random.Random, Path, bytes], bytes | None], ...] = (
    *(_flip, _other),
    lambda rng, path, data: data[: rng.randrange(len(data))],
    lambda rng, path, data: None,
)


@pytest.mark.parametrize("kept", [False, True], ids=["all is read", "digests are kept"])
@pytest.mark.parametrize("seed", range(12))
def test_random_damage(pristine: tuple[Path, dict[str, RunSummary]], tmp_path: Path, seed: int, kept: bool) -> None:
    source, good = pristine
    path = tmp_path / "runs" / "exp"
    shutil.copytree(source, path)
    if kept:
        report.refresh([path])
    rng = random.Random(seed + 100 * kept)
    victims = [p for p in path.rglob("*") if p.is_file() and "report" not in p.relative_to(path).parts]
    victim = rng.choice(sorted(victims))
    before = victim.read_bytes()
    after = rng.choice(DAMAGE)(rng, victim, before) if before else before
    victim.unlink() if after is None else write(victim, after)
    merged = report.build([path]) if not kept else report.refresh([path]).load()
    for run in merged.runs:
        if run.counted:
            same = good[run.genesis]
            assert run.improvement is not None and same.improvement is not None
            assert run.improvement.difference == same.improvement.difference
            assert run.selected == same.selected and run.ledger_head == same.ledger_head
    inside = victim.relative_to(path).parts
    of_chain = len(inside) > 1 and (inside[1] in ("run.json", "ledger.jsonl") or inside[1] == "ledger")
    if not of_chain or after == before or kept or (inside[1] == "ledger.jsonl" and not victim.exists()):
        return  # that copy may be missing: the chain itself is whole
    assert all(run.run_id != inside[0] for run in merged.runs if run.counted), f"{victim} was damaged, its run counts"
    if inside[1] != "ledger" or (path / inside[0] / "ledger.jsonl").exists():
        notes = [one for run in merged.runs for one in (*run.notes, run.damage or "")]
        assert "".join([*(one.why for one in merged.left_out), *notes])  # else missing last entries can't be told
