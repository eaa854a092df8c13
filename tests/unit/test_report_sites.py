"""Trees of several sites in one report."""

from __future__ import annotations

import csv
import os
import shutil
from pathlib import Path

import pytest
from treemaker import Tree

from autorl_hpc.report import report
from autorl_hpc.report.find import sites_of
from autorl_hpc.report.terminal import head_lines


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


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
    done = report.refresh([tmp_path / "alps" / "runs", tmp_path / "jean-zay" / "runs"], tmp_path / "out")
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
    import re
    from urllib.parse import unquote

    return [unquote(link) for link in re.findall(r'href="([^"#]+)"', index.read_text())]


def test_read_only_sites_with_equal_run_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autorl_hpc.files import atomic

    write = atomic.write_bytes
    site(tmp_path / "alps", range(2), 30, "2026-02-01")
    site(tmp_path / "jean-zay", range(2), 40, "2026-03-01")
    out = tmp_path / "out"

    def theirs(path: Path, data: bytes, **more: bool) -> None:
        if out not in path.parents:
            raise OSError(30, "Read-only file system", str(path))
        write(path, data, **more)

    monkeypatch.setattr(atomic, "write_bytes", theirs)
    done = report.refresh([tmp_path / "alps" / "runs", tmp_path / "jean-zay" / "runs"], out)
    pages = [link for link in _links(done.index) if link.endswith("run.html")]
    assert len(set(pages)) == 4 and all(link.startswith("runs/") and (out / link).is_file() for link in pages)


def test_unlike_sites_are_not_pooled(tmp_path: Path) -> None:
    site(tmp_path / "a", range(2), 30, "2026-02-01")
    other = Tree(tmp_path / "b" / "runs" / "exp", n_report=80)
    other.finished(seed=0, solved=30)
    merged = report.build([tmp_path / "a" / "runs", tmp_path / "b" / "runs"])
    assert len(merged.groups) == 2 and {run.site for run in merged.runs} == {"a", "b"}


def test_a_site_copied_to_another_counts_once(tmp_path: Path) -> None:
    site(tmp_path / "a", range(2), 30, "2026-02-01")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    merged = report.build([tmp_path / "a" / "runs", tmp_path / "b" / "runs"])
    assert (
        len(merged.runs) == 2
        and [one.why for one in merged.left_out] == ["a copy of a run that is in the report: counted once"] * 2
    )
    assert all(one.what.startswith(("a/exp/", "b/exp/")) for one in merged.left_out)


def test_one_site_has_no_name(tmp_path: Path) -> None:
    site(tmp_path / "a", range(1), 30, "2026-02-01")
    assert [run.site for run in report.build([tmp_path / "a"]).runs] == [None]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (("/x/alps/runs/e/r", "/x/zay/runs/e/r"), ("alps", "zay")),
        (("/x/runs/e/r", "/x/a/runs/e/r"), ("runs", "a")),
        (("/a/b/runs/e/r", "/c/d/runs/e/r"), ("a/b", "c/d")),
        (("/x/runs1/e/r", "/x/runs2/e/r"), ("runs1", "runs2")),
        (("/x/runs/e/r", "/x/runs/e/q"), ()),
        (("/s/\x1b[31m/runs/e/r", "/s/b/runs/e/r"), ("(no name)", "b")),
    ],
)
def test_names(paths: tuple[str, ...], names: tuple[str, ...]) -> None:
    found = sites_of(map(Path, paths))
    assert tuple(found[Path(path).parent.parent] for path in paths if found) == names
