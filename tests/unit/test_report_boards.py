"""Leaderboards: what is never mixed, ranks that intervals support, marks, costs, scaling; and the published results."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import re
import statistics as plain
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recordmaker import usage
from scipy import stats as scipy_stats
from treemaker import RECIPE, Tree, outcomes, sha
from typer.testing import CliRunner

from autorl_hpc.cli import app
from autorl_hpc.records.driver import DriverScience
from autorl_hpc.records.entries import SandboxUsed
from autorl_hpc.records.experiment import Budget
from autorl_hpc.records.run import FeedbackPart, Science
from autorl_hpc.records.task import SplitPin
from autorl_hpc.report import leaderboard, pages, tables
from autorl_hpc.report import report as api
from autorl_hpc.report.axes import steps
from autorl_hpc.report.charts import figures_of
from autorl_hpc.report.conditions import unlike
from autorl_hpc.report.story_records import Failure, Iteration, ReferenceMetrics, ResourcesUsed, RouteTold, Story
from autorl_hpc.report.summary import Board, BoardRow, Gain, MergedReport, PaperTable, RunSummary, read_paper
from autorl_hpc.states import FailureKind, Network, Protocol, Route, SandboxLevel, Split
from autorl_hpc.tasks.loader import load_task


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


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

    def varied(gain: float | None = 10.0, half: float = 1.5, **update: Any) -> RunSummary:
        number = next(numbers)
        gained = None if gain is None else {"difference": gain, "low": gain - half, "high": gain + half}
        improvement = None if gained is None else Gain(**gained, how="paired_items")
        update = {"seed": number, "run_id": f"r{number:04d}", "improvement": improvement, "marks": {}, **update}
        task = update.get("task", one.task)
        return one.model_copy(update={"split_hashes": {"report": sha(task)}, **update})

    return varied


def only(merged: MergedReport) -> Board:
    assert len(merged.boards) == 1
    return merged.boards[0]


def told(kind: FailureKind) -> Story:
    return Story(failure=Failure(kind=kind))


def test_a_static_shortcut_is_seen_over_tasks_alone(make: Make) -> None:
    """The paper's name was given to copies and contamination; it means static competence that does not carry to interaction."""
    static = {"task": "gsm8k", "level": 1, "gain": 10.0}
    for more, kind in (
        ({}, "static shortcut without transfer"),
        ({"driver": "other"}, "no gain beyond noise"),
        ({"base_model_content_hash": sha("other")}, "no gain beyond noise"),
        ({"story": told(FailureKind.EARLY_CODING)}, "early coding failure"),
        ({"story": told(FailureKind.WORSE)}, "static shortcut without transfer"),
        ({"level": 2}, "no gain beyond noise"),
    ):
        there = {"task": "alfworld", "level": 3, "gain": 1.0, "story": told(FailureKind.NO_GAIN), **more}
        merged = report([make(**static), make(**there)])
        again = report(list(merged.runs))
        for runs in (merged.runs, again.runs):
            (run,) = (one for one in runs if one.task == "alfworld")
            assert run.story.failure is not None and run.story.failure.kind == kind
            assert sum(note.startswith("static shortcut") for note in run.notes) == (
                kind == "static shortcut without transfer"
            )
    merged = report(
        [
            make(**{**static, "gain": 3.0}, half=5.0),
            make(task="alfworld", level=3, gain=1.0, story=told(FailureKind.NO_GAIN)),
        ]
    )
    assert merged.runs[1].story.failure == Failure(kind=FailureKind.NO_GAIN)  # 3.0 [-2.0, 8.0] is no competence


def test_the_papers_rates_by_cell_and_results_by_level(make: Make) -> None:
    """Improve, exec and coding success (the paper's tables 8, 11 and 20), and results by level: none were there."""
    one = make()
    above, copied = one.trajectory, tuple(point.model_copy(update={"score": 20.0}) for point in one.trajectory)
    trains = Story(route=RouteTold(planned=Route.GRPO), metrics=ReferenceMetrics(rollbacks=3))
    none = Story(
        route=RouteTold(planned=Route.NONE, executed=Route.NONE),
        metrics=ReferenceMetrics(copy_model_count=2, rollbacks=0),
    )
    merged = report(
        [
            make(10.0, task="gsm8k", level=1, story=trains, trajectory=above),
            make(0.0, task="gsm8k", level=1, story=none, trajectory=copied),
            make(-4.0, task="gsm8k", level=1, story=Story(), trajectory=()),
            make(None, task="gsm8k", level=1, counted=False, excluded="infrastructure"),
            make(8.0, task="humaneval", level=1),
            make(1.0, task="alfworld", level=3),
        ]
    )
    board = only(merged)
    cell = board.rows[0].cells[[task.task for task in board.tasks].index("gsm8k")]
    assert cell is not None
    rates = cell.rates
    assert (rates.of, rates.improved, rates.cycles, rates.coded, rates.coded_of) == (3, 1, 1, 1, 2)
    assert rates.rollbacks == 1.5
    levels = {one.level: (one.tasks, one.mean, one.rates.of) for one in board.rows[0].levels}
    assert levels == {1: (2, pytest.approx(5.0), 4), 3: (1, 1.0, 1)}
    (text,) = [text for text in [tables.leaderboard_csv(merged)] if text]
    (mine,) = [r for r in csv.DictReader(io.StringIO(text)) if r["task"] == "gsm8k"]
    assert [mine[f"runs_{name}"] for name in ("of", "improved", "cycles", "coded", "rollbacks")] == [
        "3",
        "1",
        "1",
        "1",
        "1.5",
    ]


def test_summary_csv_has_the_process_metrics(make: Make) -> None:
    metrics = ReferenceMetrics(valid_submission_rate=0.5, time_to_best=60.0, rollbacks=2, time_used_ratio=0.9)
    (mine,) = csv.DictReader(io.StringIO(tables.as_csv(report([make(story=Story(metrics=metrics), level=3)]))))
    wanted = {"level": "3", "valid_submission_rate": "0.5", "time_to_best": "60.0", "time_to_first_improvement": ""}
    assert wanted.items() <= mine.items() and (mine["rollbacks"], mine["time_used_ratio"]) == ("2", "0.9")


def row(board: Board, agent: str, mode: str = "free") -> BoardRow:
    return next(r for r in board.rows if (r.agent, r.mode) == (agent, mode))


def report(runs: list[RunSummary]) -> MergedReport:
    return leaderboard.assemble(runs, ["exp"])


H100 = {"gpus": "1", "gpu_model": "NVIDIA H100"}
UNLIKE: list[dict[str, Any]] = [
    {"budget_s": 7.0},
    {"limits": {"max_submissions": 3.0}},
    {"network": "open"},
    {"sandbox": "bwrap"},
    *({name: sha("other")} for name in ("engine_hash", "base_model_content_hash", "environment_hash", "recipe_hash")),
    {"split_hashes": {"report": sha("other")}},
    {"gpus": "2"},
    {"gpu_model": "NVIDIA A100"},
    {"gpus": "0", "gpu_model": None},
]


def test_unlike_runs_never_share_a_column(make: Make) -> None:
    for other in UNLIKE:
        boards = report([make(**H100), make(**H100), make(**{**H100, **other})]).boards
        assert sum(len(board.tasks) for board in boards) == 2, other
        cells = [cell for b in boards for r in b.rows for cell in r.cells if cell]
        assert sorted(cell.improvement.n for cell in cells) == [1, 2]


SPEC = DriverScience(kind="api", host="api.example.org", model="m")
REQUESTED: dict[str, Any] = {
    **{"agent": "grpo", "driver": "other", "mode": "rl-only", "task": "other"},
    **{
        "protocol": Protocol.PAPER,
        "reprompts": 2,
        "evaluate_script": True,
        "recipe": RECIPE.model_copy(update={"version": 2}),
    },
    **{name: sha("other") for name in ("base_model_content_hash", "base_model_prompting_hash", "environment_hash")},
    "splits": {
        str(split): SplitPin(n=n, sha256=sha("other")) for split, n in ((Split.FEEDBACK, 40), (Split.REPORT, 100))
    },
    "feedback_part": FeedbackPart(items=10, seed=1, n=10, sha256=sha("part")),
    "driver_spec": SPEC.model_copy(update={"tools": ("web_search",)}),
}
OF_BUDGET: dict[str, Any] = {
    **{"wall_clock_s": 2400, "give_back_after_s": 5, "give_back_cap_s": 9, "max_submissions": 3, "memory_gib": 8},
    **{"disk_gib": 8, "processes": 9, "gpu_hours": 4, "tokens": 1000, "cost_usd": 2, "grace_s": 1},
}
SAME = {"seed", "base_model", "budget", "network"}
"""What makes no other condition: a base model is known by its content, of the network the ledger says what was enforced."""


def test_everything_requested_that_changes_what_an_agent_could_do_is_in_a_cells_key(tmp_path: Path) -> None:
    """Drivers with other tools, more starts after an early end, a longer grace shared a cell of the leaderboard."""
    assert REQUESTED.keys() | SAME == Science.model_fields.keys() and OF_BUDGET.keys() == Budget.model_fields.keys()
    tree = Tree(tmp_path / "exp")
    plain = {"driver": "d", "driver_spec": SPEC}
    tree.finished(seed=0, solved=40, **plain)
    tree.finished(seed=1, solved=40, **plain, base_model="org/called-otherwise")
    changes = [({name: value}, name) for name, value in REQUESTED.items()]
    changes += [({"budget": Budget(**{"wall_clock_s": 1200, name: value})}, name) for name, value in OF_BUDGET.items()]
    for number, (change, _) in enumerate(changes, 2):
        tree.run(seed=number, **{**plain, **change}).start().seal().close(outcomes(100, range(40)))
    merged = api.build([tree.path])
    places = {
        run.seed: (g, c)
        for g, group in enumerate(merged.groups)
        for c, cell in enumerate(group.cells)
        for run in map(merged.runs.__getitem__, cell.places)
    }
    assert places[0] == places[1], "one base model under two names"
    for number, (_, name) in enumerate(changes, 2):
        assert places[number] != places[0], name
    group, _ = places[0]
    assert merged.groups[group].comparable.base_model == "org/called-otherwise = org/tiny"
    labels = {row.label for board in merged.boards for row in board.rows}
    assert {'sft · d · tools ["web_search"]', "sft · d · the driver by default"} <= labels
    words = {what for g in merged.groups for what in unlike(g.comparable, merged.groups[group].comparable)}
    assert ("grace", "grace after the budget 1 s", "grace after the budget by default") in words
    assert ("further starts", "2 starts again after an early end", "no starts again after an early end") in words


UNKNOWN: list[dict[str, Any]] = [
    {"gpus": None, "gpu_model": None},
    {"gpu_model": None},
    {"sandbox": "untried", "network": "none", "engine_hash": None},
    {"engine_hash": None, "gpus": None, "gpu_model": None},
    {"engine_hash": sha("other"), "improvement": Gain(difference=0.0, how="base_kept")},
]


@pytest.mark.parametrize("lacking", UNKNOWN, ids=" ".join)
def test_what_a_ledger_does_not_tell_is_that_of_its_like(make: Make, lacking: dict[str, Any]) -> None:
    """A run that came to nothing stays in its agent's mean: of its agent's runs rather than of another agent's, or of another site's."""
    a100 = {"gpus": "1", "gpu_model": "NVIDIA A100", "agent": "other"}
    known = [make(31.8, **H100), make(31.8, **H100)]
    others = [make(5.0, **a100) for _ in range(3)] + [make(5.0, **H100, sandbox="bwrap", experiment="far")]
    failed = make(0.0, **{**H100, **lacking})
    boards = report([*known, failed, *others]).boards
    assert len(boards) == 3
    cells = [
        cell for b in boards for r in b.rows for cell in r.cells if cell and r.agent == "sft" and cell.improvement.n > 1
    ]
    assert [(cell.improvement.n, cell.improvement.mean) for cell in cells] == [(3, pytest.approx(21.2))]
    assert len(report([failed, make(0.0, **{**H100, **lacking})]).boards) == 1, "unknown joins unknown"


def test_a_failed_run_in_an_experiment_of_its_own_stays_in_its_agents_mean(make: Make) -> None:
    """Runs of another agent on other GPUs made it leave: unknown was only taken where all other experiments agree."""
    good = [make(gain, **H100, experiment=f"x{number}") for number, gain in enumerate((30.0, 31.0, 32.0))]
    failed = make(0.0, **{**H100, "gpus": None, "gpu_model": None}, experiment="x3")
    others = [make(5.0, gpus="1", gpu_model="NVIDIA A100", agent="other", experiment="y") for _ in range(3)]
    cells = [
        c for b in report([*good, failed, *others]).boards for r in b.rows for c in r.cells if c and r.agent == "sft"
    ]
    assert [(cell.improvement.n, cell.improvement.mean) for cell in cells] == [(4, pytest.approx(23.25))]


def test_of_other_experiments_only_what_they_agree_on_is_taken(make: Make) -> None:
    unknown = make(gpus=None, gpu_model=None, experiment="old")
    new = [make(**H100, experiment="new"), make(**{**H100, "gpu_model": "NVIDIA A100"}, experiment="new")]
    assert len(report([unknown, new[0]]).boards) == 1 and len(report([unknown, *new]).boards) == 3


def test_no_file_without_a_chain_decides_who_is_compared(tmp_path: Path) -> None:
    """A run that ended before its first GPU sample, or whose samples were cut out: by the ledger all three had one GPU."""
    tree = Tree(tmp_path / "exp")
    for seed in range(3):
        run = tree.run(seed=seed).start(gpus=1, gpu_model="NVIDIA H100")
        if seed < 2:
            run.submit(100.0, outcomes(40, range(20)))
            sample = usage(5.0, 1.0, (0.5,)).model_dump(mode="json")
            run.dir.recorded("usage").write_text(json.dumps(sample) + "\n")
        run.seal(gpu_hours=1 / 6).close(outcomes(100, range(56)) if seed < 2 else None)
    old = tree.run(seed=3).start()  # an earlier version's ledger
    old.submit(100.0, outcomes(40, range(20)))
    old.seal(gpu_hours=1 / 6).close(outcomes(100, range(57)))

    def boards() -> list[dict[str, Any]]:
        done = CliRunner().invoke(app, ["report", str(tree.path), "--no-figures", "--json"])
        assert done.exit_code == 0, done.output
        found: list[dict[str, Any]] = json.loads(done.stdout)["boards"]
        return found

    (board,) = before = boards()
    assert (board["conditions"]["gpus"], board["conditions"]["gpu_model"]) == ("1", "NVIDIA H100")
    (row,) = board["rows"]
    assert (row["cells"][0]["improvement"]["n"], row["cells"][0]["improvement"]["mean"]) == (4, (31 + 31 + 0 + 32) / 4)
    samples = tree.runs[1].dir.recorded("usage")
    samples.write_text(samples.read_text().replace('"gpus"', '"seen"'))
    tree.runs[0].dir.recorded("usage").unlink()
    assert [(one["conditions"], one["rows"][0]["cells"]) for one in boards()] == [
        (one["conditions"], one["rows"][0]["cells"]) for one in before
    ]


def test_a_later_attempt_in_a_weaker_sandbox_neither_leaves_the_mean_nor_ranks(make: Make) -> None:
    levels = (SandboxLevel.LANDLOCK, SandboxLevel.NONE)
    used = tuple(SandboxUsed(attempt=n, level=level, network=Network.NONE) for n, level in enumerate(levels, 1))
    moved = make(99.0, sandbox="none", sandboxes=used, ranked=False)
    cell = only(report([*(make(g) for g in (1.0, 2.0, 3.0)), moved])).rows[0].cells[0]
    assert cell is not None and cell.improvement.n == 4 and cell.rank is None
    assert cell.unranked == "1 of 4 runs had another sandbox in a later attempt"


def test_the_mean_over_tasks_has_welchs_interval(make: Make) -> None:
    a, b = (1.0, 2.0, 6.0), (11.0, 12.0, 16.0)  # equal spreads: Satterthwaite's degrees of freedom are whole
    board = only(report([make(g, task=task) for task, gains in (("a", a), ("b", b)) for g in gains]))
    welch = scipy_stats.ttest_ind(a, [-x for x in b], equal_var=False).confidence_interval()
    overall = board.rows[0].overall
    assert overall is not None
    assert (overall.low, overall.high) == (pytest.approx(welch.low / 2), pytest.approx(welch.high / 2))


def test_means_intervals_and_p_values_are_scipys(make: Make) -> None:
    gains = {"one": (1.0, 4.0, 6.0), "two": (3.0, 3.5, 5.0, 9.0), "three": (-2.0, 1.0, 0.5)}
    board = only(report([make(gain, agent=agent) for agent, values in gains.items() for gain in values]))
    p_values = {a: float(scipy_stats.ttest_1samp(v, 0.0).pvalue) for a, v in gains.items()}
    order = sorted(p_values, key=lambda a: p_values[a])
    holm, least = {}, 0.0
    for rank, agent in enumerate(order):
        least = max(least, min(1.0, (3 - rank) * p_values[agent]))
        holm[agent] = least
    for agent, values in gains.items():
        cell = row(board, agent).cells[0]
        assert cell is not None
        low, high = scipy_stats.t.interval(0.95, len(values) - 1, plain.fmean(values), scipy_stats.sem(values))
        assert cell.improvement.mean == pytest.approx(plain.fmean(values))
        assert (cell.improvement.low, cell.improvement.high) == (pytest.approx(low), pytest.approx(high))
        assert cell.p_value == pytest.approx(p_values[agent]) and cell.p_holm == pytest.approx(holm[agent])


def test_ranks_are_shared_where_intervals_overlap(make: Make) -> None:
    gains = {"high": (20.0, 21.0, 22.0), "near": (19.0, 21.0, 24.0), "low": (1.0, 2.0, 3.0), "two": (50.0, 51.0)}
    board = only(report([make(gain, agent=agent) for agent, values in gains.items() for gain in values]))
    cells = {agent: row(board, agent).cells[0] for agent in gains}
    found = {agent: (cell.rank, cell.last_rank) for agent, cell in cells.items() if cell is not None}
    assert found == {"high": (1, 2), "near": (1, 2), "low": (3, 3), "two": (None, None)}
    assert cells["two"] is not None and cells["two"].unranked == "2 counted runs, 3 are needed"


def test_ranks_are_welchs_by_holm(make: Make) -> None:
    """Intervals 18.5 to 23.5 and 13.2 to 21.5 overlap, Welch tells them apart; among four agents Holm doesn't."""
    gains = {"high": (20.0, 21.0, 22.0), "low": (16.0, 17.0, 19.0)}
    welch = float(scipy_stats.ttest_ind(*gains.values(), equal_var=False).pvalue)
    runs = [make(gain, agent=agent) for agent, values in gains.items() for gain in values]
    merged = report(runs)
    (pair,) = merged.groups[0].comparisons
    assert pair.p_value == pair.p_holm == pytest.approx(welch) and 0.02 < welch < 0.05
    assert pair.test == "Welch" and pair.p_permutation is None
    assert [cell.rank for agent in gains if (cell := row(only(merged), agent).cells[0])] == [1, 2]
    more = [make(gain, agent=agent) for agent in ("x", "y") for gain in (10.0, 20.0, 30.0)]
    board = only(report([*runs, *more]))
    assert [(cell.rank, cell.last_rank) for r in board.rows if (cell := r.cells[0])] == [(1, 4)] * 4


def kept_base(make: Make, agent: str = "kept") -> RunSummary:
    """A run of which nothing valid was submitted."""
    return make(agent=agent, selected=None, improvement=Gain(difference=0.0, how="base_kept"))


def test_the_page_begins_with_the_answer(make: Make) -> None:
    """A best agent whose gain may be noise, or that is not told from the next, must not read as a winner."""
    for gains, words in (
        (
            {"a": (60, 61, 62), "b": (10, 11, 12)},
            ("a gained most, +61.0", "more than noise", "50.0 points ahead of b, told apart"),
        ),
        ({"a": (10, 12, 14), "b": (9, 11, 13)}, ("a gained most, +12.0", "1.0 points ahead of b, not told apart")),
        ({"a": (0, 1, 30), "b": (-1, -2, -3)}, ("a gained most, +10.3", "not told from no gain")),
        ({"a": (12.0,)}, ("three runs are needed",)),
        ({"a": (-4, -5, -6)}, ("no agent gained; the best, a, is at \N{MINUS SIGN}5.0",)),
    ):
        runs = [
            make(gain=float(gain), agent=agent, agent_hash=sha(agent)) for agent, each in gains.items() for gain in each
        ]
        (said,) = pages.answers(leaderboard.assemble(runs, ["exp"], []))
        assert all(word in said for word in words), said


def test_an_agent_that_kept_the_base_is_a_known_constant(make: Make) -> None:
    """(0, 0, 0) against 61 [58.5, 63.5]: a one-sample t test."""
    high = [make(gain, agent="high") for gain in (60.0, 61.0, 62.0)]
    merged = report([*high, *(kept_base(make) for _ in range(3))])
    (pair,) = merged.groups[0].comparisons
    assert (pair.a, pair.b, pair.test) == ("high", "kept", "one-sample t against 0: the second kept the base")
    assert pair.p_value == pytest.approx(float(scipy_stats.ttest_1samp((60, 61, 62), 0).pvalue))
    assert [(r.agent, r.cells[0].rank) for r in only(merged).rows if r.cells[0]] == [("high", 1), ("kept", 2)]
    told = "one-sample t against 0: the second kept the base"
    assert told in pages.index_md(merged) and told in pages.index_html(merged, {})
    both = report([*(kept_base(make) for _ in range(3)), *(kept_base(make, "idle") for _ in range(3))])
    assert [one.p_value for one in both.groups[0].comparisons] == [None]


def unscored(make: Make, gain: float, agent: str) -> RunSummary:
    """A run whose items can't be used: nothing tells their noise."""
    return make(agent=agent, improvement=Gain(difference=gain, how="scores_only"))


def test_no_variance_is_below_the_noise_of_the_items(make: Make) -> None:
    """+40 three times was never told from 0.1, 0.3 and 0.2. Items of which one run's gain is known by +-5 make a variance of 6.5."""
    noise = (5 / 1.959964) ** 2
    for a, b, half, told in (
        ((40.0, 40.0, 40.0), (0.1, 0.3, 0.2), 5.0, True),
        ((2.0, 2.0, 2.0), (0.1, 0.3, 0.2), 5.0, False),
        ((2.0, 2.0, 2.0), (0.0, 0.0, 0.0), 5.0, False),
        ((40.0, 44.0, 52.0), (0.0, 0.0, 0.0), 5.0, True),
    ):
        runs = [make(gain, half, agent=agent) for agent, gains in (("a", a), ("b", b)) for gain in gains]
        merged = report(runs)
        (pair,) = merged.groups[0].comparisons
        squares = [max(noise, plain.variance(side)) / 3 for side in (a, b)]
        df = sum(squares) ** 2 / sum(v * v / 2 for v in squares)
        t = (plain.fmean(a) - plain.fmean(b)) / math.sqrt(sum(squares))
        assert pair.p_value == pytest.approx(2 * scipy_stats.t.sf(t, df)) and pair.test == "Welch"
        assert (only(merged).rows[0].cells[0].rank, only(merged).rows[1].cells[0].rank) == ((1, 2) if told else (1, 1))
    kept = [kept_base(make) for _ in range(3)]
    for make_one, p_value, test in (
        (lambda: make(31.8, agent="same"), 0.25, "one-sample t"),
        (lambda: unscored(make, 31.8, "same"), 0.25, "sign flips"),
    ):
        (pair,) = report([*(make_one() for _ in range(3)), *kept]).groups[0].comparisons
        assert pair.test == f"{test} against 0: the first kept the base" and (pair.p_value == p_value) is (
            test[0] == "s"
        )
    bare = [unscored(make, gain, agent) for agent, gain in (("a", 40.0), ("b", 1.0)) for _ in range(3)]
    assert report(bare).groups[0].comparisons[0].p_value is None


def test_holm_counts_the_pairs_that_can_rank(make: Make) -> None:
    """Two agents that may not rank made three ranked ones' tests dearer, so that nobody was told apart."""
    gains = {"high": (20.0, 21.0, 22.0), "low": (16.0, 17.0, 19.0)}
    runs = [make(gain, agent=agent) for agent, values in gains.items() for gain in values]
    idle = [make(g, agent=a, flags=("untrained_copy",), ranked=False) for a in ("x", "y") for g in (10.0, 20.0, 30.0)]
    merged = report([*runs, *idle])
    of_pairs = {(one.a, one.b): one for one in merged.groups[0].comparisons}
    assert of_pairs["high", "low"].p_holm == of_pairs["high", "low"].p_value
    others = [one for pair, one in of_pairs.items() if pair != ("high", "low")]
    assert len(others) == 5 and all(one.p_holm > one.p_value or one.p_holm == 1.0 for one in others)
    assert {r.agent: r.cells[0].rank for r in only(merged).rows} == {"high": 1, "low": 2, "x": None, "y": None}


def test_permutation_stands_beside_from_five_runs_a_side_on(make: Make) -> None:
    for n, known in ((4, False), (5, True)):
        runs = [make(shift + gain, agent=a) for a, shift in (("a", 0.0), ("b", 50.0)) for gain in range(n)]
        (pair,) = report(runs).groups[0].comparisons
        assert pair.test == "Welch" and (pair.p_permutation is not None) is known
    assert pair.p_permutation == pytest.approx(2 / 252)


def test_a_gain_that_is_not_counted_enters_no_mean_over_tasks(make: Make) -> None:
    """A run that the cluster cut short shows its gain all the same."""
    runs = [make(gain, task=task) for task in ("a", "b") for gain in (1.0, 2.0, 3.0)]
    cut_short = make(90.0, task="a", counted=False, excluded="infrastructure")
    overall = only(report([*runs, cut_short])).rows[0].overall
    assert overall is not None and overall.mean == 2.0


def test_a_task_with_two_splits_is_not_counted_twice(make: Make) -> None:
    other = {"split_hashes": {"report": sha("other")}}
    runs = [make(g, task=task) for task in ("a", "b", "c") for g in (1.0, 2.0, 3.0)]
    board = only(report([*runs, *(make(g, task="c", **other) for g in (50.0, 51.0, 52.0))]))
    overall = board.rows[0].overall
    assert board.ambiguous_tasks == ("c",) and len(board.tasks) == 4 and len({t.pins() for t in board.tasks}) == 4
    assert overall is not None and overall.mean == 2.0 and overall.tasks == 2
    two = only(report([*runs[:3], *runs[6:], *(make(g, task="c", **other) for g in (50.0, 51.0, 52.0))]))
    assert two.rows[0].overall is None, "one task is left"


def test_only_what_ranks_ranks(make: Make) -> None:
    bare = only(report([make(gain, sandbox="none", ranked=False) for gain in (1.0, 2.0, 3.0)]))
    assert not bare.ranks and bare.rows[0].cells[0].rank is None  # type: ignore[union-attr]
    copies = [make(gain, ranked=False, flags=("untrained_copy",)) for gain in (0.0, 0.1)]
    flagged = only(report([make(5.0), make(6.0), *copies])).rows[0].cells[0]
    assert flagged is not None and flagged.rank is None and "2 of 4 runs do not rank" in str(flagged.unranked)
    assert flagged.improvement.n == 4  # left out, runs that did nothing would flatter their agent


def test_tasks_that_the_public_script_makes_again_never_rank(make: Make) -> None:
    """99.2 was reached by training on the held-out items of `arithmetic`, made with the package's own prepare.py."""
    names = (
        "arithmetic",
        *(f"{name}-mini" for name in ("alfworld", "alpacaeval", "deepsearchqa", "humaneval", "webshop")),
    )
    report_splits = {name: load_task(name).file.splits["report"].sha256 for name in (*names, "gsm8k")}
    runs = [
        make(g, task=name, split_hashes={"report": report_splits[name]})
        for name in report_splits
        for g in (1.0, 2.0, 3.0)
    ]
    merged = report(runs)
    for cell, task in zip(only(merged).rows[0].cells, only(merged).tasks, strict=True):
        assert cell is not None
        if task.task == "gsm8k":
            assert cell.rank == 1 and cell.unranked is None
        else:
            assert cell.rank is None and cell.unranked == "made by the public script"
    assert any("18 of 21 runs are of tasks whose held-out items" in note for note in merged.notes)


def test_lost_runs_stand_apart(make: Make) -> None:
    lost = {"counted": False, "excluded": "infrastructure"}
    cancelled = {"counted": False, "excluded": "cancelled"}
    runs = [*(make(g) for g in (1.0, 2.0, 3.0)), make(99.0, **lost), make(None, **lost), make(99.0, **cancelled)]
    cell = only(report(runs)).rows[0].cells[0]
    assert cell is not None and (cell.improvement.n, cell.lost, cell.not_counted) == (3, 2, 1)
    assert cell.improvement.mean == pytest.approx(2.0)


def test_costs_and_what_a_point_costs(make: Make) -> None:
    def spent(usd: float | None, gain: float) -> RunSummary:
        return make(gain, story=Story(resources=ResourcesUsed(cost_usd=usd, tokens_in=90, tokens_out=10)))

    costs = only(report([spent(2.0, 4.0), spent(4.0, 8.0), spent(None, 100.0)])).rows[0].costs
    assert (costs.cost_usd.n, costs.cost_usd.of, costs.cost_usd.mean) == (2, 3, 3.0)
    assert costs.cost_usd.per_point == pytest.approx(6.0 / 12.0)
    assert costs.tokens.mean == 100.0 and costs.gpu_hours.n == 0 and costs.gpu_hours.mean is None
    assert only(report([spent(2.0, -4.0)])).rows[0].costs.cost_usd.per_point is None


def test_routes_and_failures_by_agent(make: Make) -> None:
    turned = Story(route=RouteTold(planned=Route.GRPO, executed=Route.SFT), mode_kept=False)
    kept = Story(route=RouteTold(planned=Route.SFT, executed=Route.SFT), mode_kept=True)
    failed = Story(failure=Failure(kind=FailureKind.TRAINING_COLLAPSE))
    one = only(report([make(story=s) for s in (turned, turned, kept, failed)])).rows[0]
    assert one.planned == {"grpo": 2, "sft": 1, "unknown": 1} and one.executed == {"sft": 3, "unknown": 1}
    assert (one.turned, one.modes_kept, one.modes_broken) == (2, 1, 2)
    assert one.failures == {"training collapse": 1}


def test_scaling_curves_step_up_and_stay(make: Make) -> None:
    run = make()  # submissions at 100 s and 400 s of 1,200; feedback 30 % and 50 % on a base of 25 %
    cell = report([run, run.model_copy(update={"run_id": "x"})]).groups[0].cells[0]
    curves = {curve.axis: curve for curve in cell.scaling}
    points = {p.x: p.mean for p in curves["time_s"].points}
    assert points[0.0] == 0.0 and points[112.5] == pytest.approx(5.0) and points[1200.0] == pytest.approx(25.0)
    assert [(p.x, p.mean) for p in curves["submissions"].points] == [(0.0, 0.0), (1.0, 5.0), (2.0, 25.0)]
    assert curves["tokens"].n == 0 and curves["tokens"].unknown == 2  # unknown is no zero


def test_scaling_over_tokens(make: Make) -> None:
    run = make()
    told = tuple(
        Iteration(submission_id=p.submission_id, status=p.status, elapsed_s=p.elapsed_s, duration_s=0, tokens=t)
        for p, t in zip(run.trajectory, (1000, 3000), strict=True)
    )
    story = Story(iterations=told, resources=ResourcesUsed(tokens_in=3500, tokens_out=500))
    found = steps(run.model_copy(update={"story": story}), "tokens")
    assert found is not None and found.end == 4000 and [x for x, _ in found.steps] == [1000.0, 3000.0]
    half = story.model_copy(update={"iterations": told[:1]})
    assert steps(run.model_copy(update={"story": half}), "tokens") is None


def test_leaderboard_csv(make: Make) -> None:
    merged = report([make(g, agent=a) for a in ("a", "b") for g in (1.0, 2.0, 4.0)])
    rows = list(csv.DictReader(io.StringIO(tables.leaderboard_csv(merged))))
    assert [r["agent"] for r in rows] == ["a", "b"] and {r["rank"] for r in rows} == {"1"}
    assert float(rows[0]["improvement"]) == pytest.approx(7 / 3) and rows[0]["n"] == "3"
    assert rows[0]["gpus"] == "" and rows[0]["network"] == merged.runs[0].network


# --- in words


def test_where_interval_and_test_contradict_each_other_the_line_says_which_decides(tmp_path: Path) -> None:
    """4 won, 0 lost of 82: Tango's interval begins above 0, McNemar's mid-p is 0.0625. 9 won, 0 lost: both agree."""
    tree = Tree(tmp_path / "exp", n_report=82, base_solved={Split.REPORT: outcomes(82, range(40))})
    tree.finished(seed=0, solved=44)
    tree.finished(seed=1, solved=49)
    done = CliRunner().invoke(app, ["report", str(tree.path), "--no-figures"], env={"COLUMNS": "160"})
    why = "p decides: the test is exact for the few items that changed, the interval an approximation"
    assert why in " ".join(done.stdout.split())
    told = [line for line in done.stdout.splitlines() if line.startswith("arithmetic sft")]
    assert ["0.062 decides" in line for line in told if "+4.9 [+0.2, +11.9]" in line] == [True] and len(told) >= 2
    assert not any("decides" in line for line in told if "+11.0" in line)
    report, run = tree.path / "report", tree.runs[0].dir.report
    for path in (
        report / "index.html",
        report / "summary.md",
        run / "run.html",
        run / "run.md",
        report / "summary.csv",
    ):
        assert why in path.read_text(), path
    assert "decides" not in (tree.runs[1].dir.report / "run.md").read_text()
    assert 'class="clear">+4.9' not in (report / "index.html").read_text()


def cells(page: str) -> list[str]:
    """The cells of the first leaderboard, as they stand in the page."""
    table = page[page.index('id="b"') :]
    return re.findall(r'<td class="n[^>]*data-v[^>]*>(.*?)</td>', table[: table.index("</table>")])


def test_one_lucky_run_never_heads_the_table(make: Make) -> None:
    lucky = [make(60.0, agent="lucky", task="a")]
    some = [make(gain, agent="some", task="a") for gain in (30.0, 31.0, 32.0)]
    broad = [make(gain, agent="broad", task=task) for task in ("a", "b") for gain in (3.0, 4.0, 5.0)]
    (board,) = report([*lucky, *some, *broad]).boards
    assert [row.agent for row in board.rows] == ["broad", "some", "lucky"]
    (unranked,) = report([run.model_copy(update={"sandbox": "none"}) for run in (*lucky, *some)]).boards
    assert [row.agent for row in unranked.rows] == ["some", "lucky"] and not unranked.ranks


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
    heads = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', page[page.index('id="b"') :])[1:3]
    assert len(set(heads)) == 2
    assert {panel.title for panel in figures_of(merged, board, 1)[0].panels} == set(names)


PAPERS_CELLS = {
    "Table 8": ("alfworld", 3, (11.12, 16.50, 38.00, 55.0, 70.0)),
    "Table 9": ("gsm8k", 2, (1.89, 4.56, 5.70)),
    "Table 10": ("deepsearchqa", 1, (9.50, 12.00, 13.10)),
    "Table 14": ("humaneval", 0, ("SFT", 195, 28, 336, 23, 26, "SFT, model averaging, task arithmetic")),
    "Table 20": ("webshop", 0, (10, 5, 1, 4, 70, 10)),
    "Table 21": ("webshop", 0, (1400, 72000, 12000000, 34)),
    "Table 22": ("deepsearchqa", 1, (56, 168, 91, 0, -0.25)),
}


def test_the_papers_tables_with_several_figures_a_cell(make: Make, tmp_path: Path) -> None:
    paper = read_paper()
    found = {table.name.split(":")[0]: table for table in paper.tables}
    assert found.keys() >= PAPERS_CELLS.keys()
    for name, (column, place, cell) in PAPERS_CELLS.items():
        table = found[name]
        assert table.rows[place].cells[table.columns.index(column)] == cell, name
        assert table.caveats, name
    assert found["Table 16"].rows[1].cells == ((83.40,), (86.59,), (33.19,), (96.27,), (88.00,), (14.50,))
    # the caveats are true of the tables: Table 2 has not the best mode of Table 3, and totals are not sums
    panel, modes = paper.tables[0].rows[-1], paper.tables[2].rows[1:]
    best = [max(row.cells[place] or () for row in modes) for place in range(6)]
    assert [task for task, one, top in zip(paper.tasks, panel.cells, best, strict=True) if one != top] == [
        "gsm8k",
        "webshop",
    ]
    costs = found["Table 21"].rows[0].cells
    sums = [sum(float(cell[place] or 0) for cell in costs[:-1] if cell) for place in range(4)]
    assert sums == [15200, 1467000, 290000000, 774] and costs[-1] == (36000, 1467000, 290000000, 796)
    plain = report([make()])
    merged = plain.model_copy(update={"paper": paper})
    page = pages.write_merged(merged, [tmp_path], tmp_path / "out").read_text()
    assert (
        merged.boards == plain.boards
        and "another protocol and engine" in page
        and "in no statistic" in pages.index_md(merged)
    )
    assert "93.28" in page and "93.28" in pages.index_md(merged) and "93.28" not in pages.index_html(plain, {})
    assert "11.12 / 16.5 / 38.0 / 55.0 / 70.0" in page and "1.89 / 4.56 / 5.7" in page and "0.12 / \N{EN DASH}" in page
    with pytest.raises(ValueError, match="2 figures for the 3"):
        PaperTable.model_validate(
            {**found["Table 9"].model_dump(), "columns": ["a"], "rows": [{"agent": "x", "cells": [[1, 2]]}]}
        )
