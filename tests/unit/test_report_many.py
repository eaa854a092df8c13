"""A report over many runs: what it holds of each, how it is written, how large its page is."""

from __future__ import annotations

from pathlib import Path

import demotree
import pytest

from autorl_hpc.report import cache, leaderboard, pages
from autorl_hpc.report.pages import merged_summary
from autorl_hpc.report.summary import MergedReport

PAGE_BYTES = 5_000_000
"""A page that a phone still opens."""


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> MergedReport:
    return demotree.report_on(demotree.demo(tmp_path_factory.mktemp("demo") / "demo", seeds=3))


@pytest.mark.slow
def test_the_page_of_a_thousand_runs_is_small(merged: MergedReport) -> None:
    runs = demotree.many(merged.runs, 1000)
    big = leaderboard.assemble(runs, ["demo"])
    page = pages.index_html(big, {place: f"../{run.run_id}/report/run.html" for place, run in enumerate(runs)})
    assert page.count('data-name="best feedback"') == 1000
    assert len(page.encode()) < PAGE_BYTES


@pytest.mark.parametrize("count", [0, 1, 5])
def test_the_summary_written_run_by_run_is_that_of_the_whole(merged: MergedReport, count: int) -> None:
    some = leaderboard.assemble(merged.runs[:count], ["demo", 'odd\n "runs": []'])
    assert b"".join(merged_summary(some)) == some.short().model_dump_json(indent=1).encode() + b"\n"


def test_short_forms_say_the_same_read_back(merged: MergedReport) -> None:
    for run in merged.runs:
        short = run.short()
        again = type(run).model_validate_json(short.model_dump_json())
        assert again == short == again.packed() and again.packed().model_dump_json() == short.model_dump_json()


@pytest.mark.parametrize("name", ["run.html.j2", "run.css", "index.js", "index/runs.html.j2"])
def test_a_changed_template_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = tmp_path / "templates" / "report" / name
    path.parent.mkdir(parents=True)
    path.write_text("a")
    monkeypatch.setattr(cache, "share", lambda folder: tmp_path / folder)
    seen = []
    for text in ("a", "a longer one"):
        path.write_text(text)
        cache.code_stamp.cache_clear()
        seen.append(cache.code_stamp())
    cache.code_stamp.cache_clear()
    assert seen[0] != seen[1]
