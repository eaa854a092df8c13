"""Finding runs, grouping them, and the statistics over runs of a group."""

from __future__ import annotations

import csv
import os
import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest
from treemaker import Tree, outcomes

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic
from autorl_hpc.records.experiment import Budget
from autorl_hpc.report import report as api
from autorl_hpc.report.find import sites_of
from autorl_hpc.report.terminal import head_lines
from autorl_hpc.states import EndedBy, Fault


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_one_run_two_runs_three_runs(runs: Path) -> None:
    tree = Tree(runs / "exp")
    tree.finished(seed=0, solved=30, agent="one")
    for seed, solved in enumerate((30, 40)):
        tree.finished(seed=seed, solved=solved, agent="two")
    for seed, solved in enumerate((30, 35, 40)):
        tree.finished(seed=seed, solved=solved, agent="three")
    (group,) = api.build([runs]).groups
    one, three, two = (cell.improvement for cell in group.cells)  # by name
    assert (one.n, one.mean, one.interval) == (1, 5, "items of one run, not over runs")
    assert one.low is not None and one.low < 5 < (one.high or 0)
    assert (two.n, two.mean, two.low, two.high, two.interval) == (2, 10, 5, 15, "range of two runs")
    assert three.interval == "t over runs" and three.mean == pytest.approx(10)
    half = 4.302652729911275 * 5 / 3**0.5  # t with 2 degrees of freedom, standard deviation 5
    assert (three.low, three.high) == pytest.approx((10 - half, 10 + half))
    report = group.cells[1].report
    assert report.mean == pytest.approx(35) and report.interval == "t over runs"
    assert group.cells[1].best_of == pytest.approx((10, 10, 10)), "equal on feedback: each is as likely chosen"
    (comparison,) = group.comparisons
    assert (comparison.a, comparison.b, comparison.difference) == ("three", "two", pytest.approx(0))
    assert comparison.p_value is None and comparison.test is None, "it takes three runs a side"


def test_nulls_by_fault(runs: Path) -> None:
    tree = Tree(runs / "exp")
    tree.finished(seed=0, solved=45)
    tree.run(seed=1).start().seal().close(fault=Fault.AGENT, reason="no submission")
    lost = tree.run(seed=2).start().seal(1.0, EndedBy.CRASHED, None, fault=Fault.CLUSTER)
    lost.close(selected_by="infrastructure", report=None, fault=Fault.CLUSTER, reason="node lost")
    tree.run(seed=3)
    merged = api.build([runs])
    ((cell,),) = [group.cells for group in merged.groups]
    assert (cell.counted, cell.base_kept, cell.improvement.mean) == (2, 1, 10)
    assert cell.excluded == {"unfinished": 1, "infrastructure": 1} and merged.excluded == cell.excluded
    assert [run.counted for run in merged.runs] == [True, True, False, False]


def test_runs_of_other_budgets_are_never_pooled(runs: Path) -> None:
    tree = Tree(runs / "exp")
    for number, more in enumerate(
        ({}, {"max_submissions": 2}, {"gpu_hours": 1.0}, {"tokens": 1000}, {"memory_gib": 8.0})
    ):
        tree.finished(seed=number, solved=30, budget=Budget(wall_clock_s=1200, **more))
    merged = api.build([runs])
    assert len(merged.groups) == 5
    assert all(cell.counted == 1 for group in merged.groups for cell in group.cells)


def test_paths(runs: Path) -> None:
    a, b = Tree(runs / "a"), Tree(runs / "b")
    first = a.finished(seed=0, solved=30)
    b.finished(seed=1, solved=30)
    (runs / "report").mkdir()
    for paths, count, out in (
        ([runs], 2, runs / "report"),
        ([runs / "a"], 1, runs / "a" / "report"),
        ([first.dir.path], 1, first.dir.report),
        ([runs.parent], 2, runs / "report"),
        ([runs / "a", runs / "b"], 2, runs / "report"),
        ([runs, runs / "a", first.dir.path], 2, None),
    ):
        merged = api.build(paths)
        assert len(merged.runs) == count and merged.left_out == ()
        assert out is None or merged.default_out == str(out)


def test_nothing_to_report(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(AutorlError) as caught:
            api.build([path])
        assert caught.value.next_step and "autorl-hpc launch" in caught.value.next_step
    with pytest.raises(AutorlError):
        api.build([])


def test_of_two_copies_the_whole_one_counts(runs: Path) -> None:
    """The damaged one holds more entries."""
    tree = Tree(runs / "exp")
    run = tree.run().start()
    run.submit(5.0, outcomes(40, range(15)))
    shutil.copytree(runs / "exp", runs / "whole")
    run.submit(6.0, outcomes(40, range(16)))
    last = sorted(run.dir.ledger.iterdir())[-1]
    last.chmod(0o644)
    last.write_bytes(b"{}")
    merged = api.build([runs])
    (one,) = merged.runs
    assert one.damage is None and len(one.trajectory) == 1
    assert [left.what.split("/")[0] for left in merged.left_out] == ["exp"]


# --- trees of several sites


def site(path: Path, seeds: range, solved: int, created: str) -> Tree:
    """The same experiment launched at a site of its own: equal run_ids, another run.json."""
    tree = Tree(path / "runs" / "exp")
    for seed in seeds:
        run = tree.run(seed=seed)
        data = run.dir.record.read_text().replace("2026-01-01", created)
        run.dir.record.write_text(data)
        run.start()
        run.submit(100.0, [1.0] * 12 + [0.0] * 28)
        run.seal().close([1.0] * solved + [0.0] * (100 - solved))
    return tree


def test_one_run_id_at_two_sites(tmp_path: Path) -> None:
    a = site(tmp_path / "alps", range(2), 30, "2026-02-01")
    b = site(tmp_path / "jean-zay", range(2), 40, "2026-03-01")
    assert [run.dir.run_id for run in a.runs] == [run.dir.run_id for run in b.runs]
    done = api.refresh([tmp_path / "alps" / "runs", tmp_path / "jean-zay" / "runs"], tmp_path / "out")
    merged = done.merged
    assert merged is not None and [run.site for run in merged.runs] == ["alps", "jean-zay", "alps", "jean-zay"]
    assert merged.experiments == ("exp",) and merged.left_out == ()
    (cell,) = merged.groups[0].cells  # equal hashes: comparable wherever they ran
    assert cell.counted == 4 and len(set(cell.places)) == 4
    assert any("more than once" in note for note in merged.notes)
    pages = [link for link in _links(done.index) if link.endswith("run.html")]
    assert len(set(pages)) == 4 and all((done.index.parent / link).is_file() for link in pages)
    rows = list(csv.DictReader((tmp_path / "out" / "summary.csv").open()))
    assert [row["site"] for row in rows] == ["alps", "jean-zay", "alps", "jean-zay"]
    assert [line.split(":")[0] for line in head_lines(merged)] == ["head of alps/exp", "head of jean-zay/exp"]


def _links(index: Path) -> list[str]:
    return [unquote(link) for link in re.findall(r'href="([^"#]+)"', index.read_text())]


def test_read_only_sites_with_equal_run_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, out = atomic.write_bytes, tmp_path / "out"
    sites = [site(tmp_path / name, range(2), 30, f"2026-0{n}-01").path.parent for n, name in enumerate("ab", 2)]

    def theirs(path: Path, data: bytes, **more: bool) -> None:
        if out not in path.parents:
            raise OSError(30, "Read-only file system", str(path))
        write(path, data, **more)

    monkeypatch.setattr(atomic, "write_bytes", theirs)
    pages = [link for link in _links(api.refresh(sites, out).index) if link.endswith("run.html")]
    assert len(set(pages)) == 4 and all(link.startswith("runs/") and (out / link).is_file() for link in pages)


def test_a_site_copied_to_another_counts_once(tmp_path: Path) -> None:
    site(tmp_path / "a", range(2), 30, "2026-02-01")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    merged = api.build([tmp_path / "a" / "runs", tmp_path / "b" / "runs"])
    assert (
        len(merged.runs) == 2
        and [one.why for one in merged.left_out] == ["a copy of a run that is in the report: counted once"] * 2
    )
    assert all(one.what.startswith(("a/exp/", "b/exp/")) for one in merged.left_out)


NAMES = (
    (("/x/alps/runs/e/r", "/x/zay/runs/e/r"), ("alps", "zay")),
    (("/x/runs/e/r", "/x/a/runs/e/r"), ("runs", "a")),
    (("/a/b/runs/e/r", "/c/d/runs/e/r"), ("a/b", "c/d")),
    (("/x/runs1/e/r", "/x/runs2/e/r"), ("runs1", "runs2")),
    (("/x/runs/e/r", "/x/runs/e/q"), ()),
    (("/s/\x1b[31m/runs/e/r", "/s/b/runs/e/r"), ("(no name)", "b")),
)


def test_names() -> None:
    for paths, names in NAMES:
        found = sites_of(map(Path, paths))
        assert tuple(found[Path(path).parent.parent] for path in paths if found) == names
