"""What a leaderboard says in words: order of rows, what is bold, what an interval is, columns of one task, who is counted."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
from treemaker import Tree, sha

from autorl_hpc.report import leaderboard, pages
from autorl_hpc.report import report as api
from autorl_hpc.report.axes import limits_told
from autorl_hpc.report.charts import figures_of
from autorl_hpc.report.story_records import Failure, RouteTold, Story
from autorl_hpc.report.summary import Gain, MergedReport, RunSummary
from autorl_hpc.states import FailureKind, Route

Make = Callable[..., RunSummary]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A finished run's summary with other fields: one real digest, varied."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        tree = Tree(tmp_path_factory.mktemp("t") / "exp")
        tree.finished(seed=0, solved=40)
        one = api.build([tree.path]).runs[0]
    numbers = itertools.count()

    def varied(gain: float | None = 10.0, **update: Any) -> RunSummary:
        number = next(numbers)
        improvement = None if gain is None else Gain(difference=gain, low=gain - 1, high=gain + 1, how="paired_items")
        update = {"seed": number, "run_id": f"r{number:04d}", "improvement": improvement, **update}
        return one.model_copy(update={"split_hashes": {"report": sha(update.get("task", one.task))}, **update})

    return varied


def report(runs: list[RunSummary]) -> MergedReport:
    return leaderboard.assemble(runs, ["exp"])


def cells(page: str) -> list[str]:
    """The cells of the first leaderboard, as they stand in the page."""
    table = page[page.index('id="b1"') :]
    return re.findall(r'<td class="n[^>]*data-v[^>]*>(.*?)</td>', table[: table.index("</table>")])


def test_one_lucky_run_never_heads_the_table(make: Make) -> None:
    lucky = [make(60.0, agent="lucky", task="a")]
    some = [make(gain, agent="some", task="a") for gain in (30.0, 31.0, 32.0)]
    broad = [make(gain, agent="broad", task=task) for task in ("a", "b") for gain in (3.0, 4.0, 5.0)]
    (board,) = report([*lucky, *some, *broad]).boards
    assert [row.agent for row in board.rows] == ["broad", "some", "lucky"]
    (unranked,) = report([run.model_copy(update={"sandbox": "none"}) for run in (*lucky, *some)]).boards
    assert [row.agent for row in unranked.rows] == ["some", "lucky"] and not unranked.ranks


def test_limits_are_told_in_words() -> None:
    limits = {
        "given_back_at_most_s": 3600.0,
        "tokens": 2e7,
        "gpu_hours": 24.0,
        "cost_usd": 7.5,
        "max_submissions": 12.0,
    }
    assert limits_told(limits) == "24 GPU-hours, 20 M tokens, 7.5 USD, 12 submissions"
    assert limits_told({"given_back_at_most_s": 3600.0}) == ""


def test_bold_is_what_holm_leaves(make: Make) -> None:
    sure = [make(gain, agent="sure") for gain in (10.0, 10.1, 9.9, 10.05)]
    once = [make(10.0, agent="once")]
    twice = [make(gain, agent="twice") for gain in (10.0, 11.0)]
    page = pages.index_html(report([*sure, *once, *twice]), {})
    bold = [cell for cell in cells(page) if 'class="clear"' in cell]
    assert len(cells(page)) == 3 and len(bold) == 1 and "n&nbsp;4" in bold[0]
    near = [make(gain, agent="near") for gain in (9.0, 12.0, 15.0)]  # p 0.02 alone, and not among five
    others = [make(gain, agent=f"o{n}") for n in range(4) for gain in (-5.0, 0.0, 5.0)]
    alone, among = pages.index_html(report(near), {}), pages.index_html(report([*near, *others]), {})
    assert sum('class="clear"' in cell for cell in cells(alone)) == 1
    assert not any('class="clear"' in cell for cell in cells(among)) and "bold" in among


def test_what_is_no_interval_over_runs_says_so_in_its_cell(make: Make) -> None:
    merged = report([make(10.0, agent="once"), make(10.0, agent="twice"), make(14.0, agent="twice")])
    page, text = pages.index_html(merged, {}), pages.index_md(merged)
    twice, once = cells(page)
    assert "range of two" in twice and "items of one run" in once
    lines = {line.split(" |")[0]: line for line in text.splitlines() if line.startswith(("| once", "| twice"))}
    rows = [line for line in text.splitlines() if line.startswith(("| once", "| twice")) and "no rank: " in line]
    assert len(rows) == 2 and len(lines) == 2
    assert any("range of two" in row and "no rank: 2 counted runs" in row for row in rows)
    assert any("items of one run" in row and "no rank: 1 counted run," in row for row in rows)


def test_two_splits_of_one_recipe_are_two_columns_with_two_names(make: Make) -> None:
    runs = [make(gain, split_hashes={"report": sha(split)}) for split in "xy" for gain in (1.0, 2.0, 4.0)]
    merged = report(runs)
    (board,) = merged.boards
    names = [board.column(place) for place in range(2)]
    assert len(set(names)) == 2 and all(sha(split)[:8] in " ".join(names) for split in "xy")
    page = pages.index_html(merged, {})
    heads = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', page[page.index('id="b1"') :])[1:3]
    assert len(set(heads)) == 2
    assert {panel.title for panel in figures_of(merged, board, 1)[0].panels} == set(names)


def test_runs_that_are_not_counted_stand_beside(make: Make) -> None:
    told = Story(
        route=RouteTold(planned=Route.GRPO, executed=Route.SFT),
        mode_kept=False,
        failure=Failure(kind=FailureKind.NO_GAIN),
    )
    kept = [make(gain, story=told) for gain in (1.0, 2.0, 4.0)]
    lost = [
        make(None, story=told, counted=False, excluded=why) for why in ("infrastructure", "infrastructure", "cancelled")
    ]
    merged = report([*kept, *lost])
    (row,) = merged.boards[0].rows
    assert (row.runs, row.counted, row.excluded) == (6, 3, {"infrastructure": 2, "cancelled": 1})
    assert (row.planned, row.executed, row.turned) == ({"grpo": 3}, {"sft": 3}, 3)
    assert (row.modes_kept, row.modes_broken, sum(row.failures.values())) == (0, 3, 3)
    assert pages.index_html(merged, {}).count("<small>2 lost, 1 cancelled</small>") == 2
    assert "3 (2 lost, 1 cancelled)" in pages.index_md(merged)
