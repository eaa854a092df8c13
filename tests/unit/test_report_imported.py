"""Results folders of AutoRL-Bench, made up in the exact shape that its code writes; damaged and hostile ones too."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from treemaker import Tree

from autorl_hpc.errors import AutorlError
from autorl_hpc.report import report
from autorl_hpc.report.pages import write_versus
from autorl_hpc.report.summary import MergedReport, RunSummary
from autorl_hpc.report.terminal import print_comparison
from autorl_hpc.report.versus import compare

COLUMNS = (
    *("run_id", "timestamp", "task", "agent", "driver_model", "base_model", "baseline", "best_score", "improvement"),
    *("submissions", "duration_s", "success", "workspace"),
)
START = datetime(2026, 2, 3, 14, 30, 5)


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def entry(number: int, score: Any, minutes: float, baseline: float | None = 6.37, **more: Any) -> dict[str, Any]:
    """One object of scores.json."""
    return {
        "submission_id": number,
        "timestamp": (START + timedelta(minutes=minutes)).isoformat(),
        "model_path": f"output/v{number}",
        "score": score,
        "baseline_score": baseline,
        "improvement": None if baseline is None or not isinstance(score, float) else round(score - baseline, 6),
        "elapsed_seconds": 300.0,
        **more,
    }


def workspace(
    root: Path, scores: Any, *, task: str = "gsm8k", agent: str = "openhands", start: datetime = START
) -> Path:
    """A workspace as the reference leaves it: folders, links to the shared caches, logs, its two records."""
    folder = root / "workspace" / task / f"{start:%Y%m%dT%H%M%S}_{agent}"
    for name in ("code", "output", "reports", "models/Qwen"):
        (folder / name).mkdir(parents=True)
    (folder / "models" / "Qwen" / "Qwen2.5-0.5B").symlink_to("/nowhere/models/Qwen/Qwen2.5-0.5B")
    (folder / "data").symlink_to("/nowhere/datasets/gsm8k")
    (folder / "run.log").write_text("2026-02-03 14:30:05 | INFO | === AutoRL-Bench ===\n")
    (folder / "agent.log").write_text("...\n")
    meta = {"start_time": 1770129005, "timeout_s": 43200, "last_submit_time": 1770140000, "end_time": 1770165005}
    (folder / "run_meta.json").write_text(json.dumps(meta, indent=2))
    if scores is not None:
        (folder / "scores.json").write_text(scores if isinstance(scores, str) else json.dumps(scores, indent=2))
    return folder


def results(root: Path, rows: list[dict[str, Any]]) -> None:
    """results.csv beside workspace/."""
    with open(root / "results.csv", "a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def row(folder: Path, **more: Any) -> dict[str, Any]:
    run_id, _, agent = folder.name.partition("_")
    return {
        "run_id": run_id,
        "timestamp": START.strftime("%Y-%m-%d %H:%M:%S"),
        "task": folder.parent.name,
        "agent": agent,
        "driver_model": "gpt-5.2",
        "base_model": "Qwen/Qwen2.5-0.5B",
        "baseline": 6.37,
        "best_score": 41.2,
        "improvement": 34.83,
        "submissions": 3,
        "duration_s": 36000,
        "success": True,
        "workspace": str(folder),
        **more,
    }


GOOD = [entry(1, 31.5, 65), entry(2, 41.2, 185), entry(3, 38.0, 305)]


def one(merged: MergedReport) -> RunSummary:
    (run,) = merged.runs
    return run


def test_a_whole_results_folder(tmp_path: Path) -> None:
    root = tmp_path / "autorl_bench"
    folder = workspace(root, GOOD)
    results(root, [row(folder)])
    merged = report.build([root])
    run = one(merged)
    assert (run.imported, run.task, run.agent, run.driver) == ("AutoRL-Bench", "gsm8k", "openhands", "gpt-5.2")
    assert (run.base_model, run.protocol, run.sandbox, run.network) == ("Qwen/Qwen2.5-0.5B", "paper", "none", "open")
    assert (run.budget_s, run.elapsed_s, run.state, run.accepted) == (43200, 36000, "finished", 3)
    assert [point.elapsed_s for point in run.trajectory] == [3600, 10800, 18000]  # when dropped, not when answered
    assert run.selected == 2 and run.report is not None and run.report.score == 41.2 and run.report.low is None
    assert run.improvement is not None and run.improvement.how == "scores_only" and run.improvement.p_value is None
    assert run.improvement.difference == pytest.approx(34.83) and run.counted and not run.ranked
    assert any("never ranked" in note for note in run.notes) and any(
        note.startswith("imported") for note in merged.notes
    )


def test_any_folder_of_it(tmp_path: Path) -> None:
    workspace(tmp_path / "bench", GOOD)
    for given in ("", "workspace", "workspace/gsm8k", "workspace/gsm8k/20260203T143005_openhands"):
        run = one(report.build([tmp_path / "bench" / given]))
        assert run.run_id == "gsm8k-20260203T143005_openhands" and run.base_model == "Qwen/Qwen2.5-0.5B"
        assert run.driver == "unknown"


def test_never_in_one_group_with_ours_and_never_ranked(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "runs" / "exp")
    for seed in range(2):
        tree.finished(seed=seed, solved=40, task="gsm8k", agent="openhands", base_model="Qwen/Qwen2.5-0.5B")
    for second in range(2):
        workspace(tmp_path / "bench", GOOD, start=START + timedelta(seconds=second))
    merged = report.build([tmp_path / "runs", tmp_path / "bench"])
    kinds = [{merged.runs[place].imported for place in cell.places} for group in merged.groups for cell in group.cells]
    assert len(merged.groups) == 2 and sorted(map(str, kinds)) == ["{'AutoRL-Bench'}", "{None}"]
    assert all(not run.ranked for run in merged.runs if run.imported)
    assert all(run.site is None for run in merged.runs)


def test_rows_of_two_folders_of_results_are_not_mixed(tmp_path: Path) -> None:
    for site, driver in (("alps", "o3"), ("zay", "gpt-5.2")):
        folder = workspace(tmp_path / site, [entry(1, 60.0, 9)])
        results(tmp_path / site, [row(folder, driver_model=driver)])
    merged = report.build([tmp_path])
    assert {run.site: run.driver for run in merged.runs} == {"alps": "o3", "zay": "gpt-5.2"}
    assert len(merged.groups) == 2, "who knows whether the two measured alike"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"driver_model": "o3"}, {"driver_model": "gpt-5.2"}], "2 rows of this run that differ"),
        ([{"task": "math"}], "names another task"),
    ],
)
def test_rows_that_contradict_are_not_used(tmp_path: Path, rows: list[dict[str, Any]], said: str) -> None:
    folder = workspace(tmp_path, GOOD)
    results(tmp_path, [row(folder, **more) for more in rows])
    run = one(report.build([tmp_path]))
    assert (run.task, run.driver) == ("gsm8k", "unknown") and any(said in note for note in run.notes)


def test_two_imported_agents_are_not_tested(tmp_path: Path) -> None:
    for day in range(6):
        agent = "codex" if day % 2 else "openhands"
        for task in ("gsm8k", "math"):
            start = START + timedelta(days=day)
            workspace(tmp_path, [entry(1, 60.0 + day, 9)], agent=agent, task=task, start=start)
    merged = report.build([tmp_path])
    assert [cell.counted for group in merged.groups for cell in group.cells] == [3, 3, 3, 3]
    assert not merged.across_tasks and not any(group.comparisons for group in merged.groups)
    assert all(cell.p_value is None for group in merged.groups for cell in group.cells)
    versus = compare(merged, "codex", "openhands")
    assert [one.difference for one in versus.tasks] == [pytest.approx(1.0)] * 2
    assert all(one.p_value is None and one.p_holm is None and one.test is None for one in versus.tasks)
    assert not versus.over_tasks and [note for note in versus.notes if "no test" in note]
    write_versus(versus, tmp_path / "out")
    told = (tmp_path / "out" / "compare.md").read_text()
    assert "imported results are unproven" in told and "as they were told" in told and "without intervals" in told
    assert "on the report split" not in told and "95 %" not in told and "[" not in told
    assert all(one.probability_of_improvement is None for one in versus.tasks)
    shown = io.StringIO()
    print_comparison(versus, Console(file=shown, width=200), tmp_path)
    assert "report split" not in shown.getvalue() and "95 %" not in shown.getvalue()


def test_results_beside_our_own_are_taken(tmp_path: Path) -> None:
    Tree(tmp_path / "all" / "runs" / "exp").finished(seed=0, solved=40)
    for place in ("all/bench", "all/runs/bench", "all/store/bench"):
        workspace(tmp_path / place, GOOD, agent=place.replace("/", "-"))
    ours = tmp_path / "all" / "scratch"  # an agent's workspace: what it wrote there is nobody's results
    for name in ("submissions", "out/2026"):
        (ours / name).mkdir(parents=True)
    (ours / "run_meta.json").write_text("{}")
    (ours / "out/2026/scores.json").write_text(json.dumps(GOOD))
    agents = {run.agent for run in report.build([tmp_path / "all"]).runs if run.imported}
    assert agents == {"all-bench", "all-runs-bench"}
    merged = report.build([tmp_path / "all" / "runs"])
    assert {run.imported for run in merged.runs} == {None, "AutoRL-Bench"}
    assert not any(run.imported for run in report.build([tmp_path / "all" / "runs" / "exp"]).runs)


def test_failures_that_stand_as_zero(tmp_path: Path) -> None:
    scores = [entry(1, 0.0, 10, error="CUDA out of memory"), entry(2, 0.0, 20), entry(3, 12.5, 30)]
    workspace(tmp_path, scores)
    run = one(report.build([tmp_path]))
    first, second, third = run.trajectory
    assert (first.status, first.score, first.reason) == ("failed", None, "CUDA out of memory")
    assert (second.status, second.score, third.score) == ("scored", 0.0, 12.5)
    assert any("1 of 3 submissions have the score 0.0 and no error" in note for note in run.notes)
    assert (run.failed, run.accepted) == (1, 3)


def test_no_submission_keeps_the_base(tmp_path: Path) -> None:
    folder = workspace(tmp_path, None)
    assert one(report.build([tmp_path])).excluded == "incomplete"  # its base model's score is told nowhere
    results(tmp_path, [row(folder, best_score=0, improvement="", submissions=0)])
    run = one(report.build([tmp_path]))
    assert run.improvement is not None and (run.improvement.difference, run.improvement.how) == (0, "base_kept")


def test_only_the_table_is_left(tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {"best_score": 0, "submissions": 4},  # as a scores.json with four times 0.0
        {"best_score": "", "submissions": 4},  # four failed evaluations
        {"best_score": 9.0, "submissions": ""},
        {"baseline": "", "best_score": 9.0},
    ]
    rows = [row(Path(f"/gone/workspace/alfworld/20260203T15000{n}_codex{n}"), **more) for n, more in enumerate(kinds)]
    rows.append(row(Path("/gone/workspace/gsm8k/20260203T143005_openhands")))
    results(tmp_path, rows)
    runs = sorted(report.build([tmp_path]).runs, key=lambda run: run.run_id)
    told = [(run.report and run.report.score, run.improvement and run.improvement.difference) for run in runs]
    assert told == [(0.0, -6.37), (None, 0.0), (9.0, pytest.approx(2.63)), (9.0, None), (41.2, pytest.approx(34.83))]
    assert [run.excluded for run in runs] == [None, None, None, "incomplete", None], "a failed run stays in its mean"
    assert all(any("only its row" in note for note in run.notes) for run in runs)
    assert any("every evaluation may have failed" in note for note in runs[0].notes)


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    folder = workspace(tmp_path, GOOD[:1])
    meta = json.loads((folder / "run_meta.json").read_text())
    (folder / "run_meta.json").write_text(json.dumps({**meta, "end_time": None}))
    run = one(report.build([tmp_path]))
    assert (run.state, run.counted, run.excluded) == ("interrupted", False, "unfinished")
    assert run.elapsed_s == 3600


DAMAGED = ("", "{", "[", "{}", "null", "3", json.dumps(GOOD)[:-40], "[" * 100_000, '"' + "x" * 1000 + '"', "\ud800")


def test_damaged_scores(tmp_path: Path) -> None:
    folder = workspace(tmp_path, None)
    for scores in DAMAGED:
        (folder / "scores.json").write_bytes(scores.encode("utf-8", "surrogatepass"))
        run = one(report.build([tmp_path]))
        assert run.excluded == "damaged" and run.improvement is None, scores[:9]
        assert any(note.startswith("left out: scores.json") for note in run.notes)


def test_scores_and_entries_that_are_none(tmp_path: Path) -> None:
    path = workspace(tmp_path, GOOD) / "scores.json"
    for score in (None, True, "a lot", [], {}, -3.0, 100.5, 1e400, 10**400, math.nan, "12" * 100):
        path.write_text(json.dumps([entry(1, 20.0, 5), entry(2, score, 10)]))
        run = one(report.build([tmp_path]))
        assert run.trajectory[1].status == "failed" and run.trajectory[1].score is None and run.selected == 1
        RunSummary.model_validate_json(run.model_dump_json())
    for damage in (7, None, "x", [], {"submission_id": 1}):
        path.write_text(json.dumps([damage, *GOOD]))
        run = one(report.build([tmp_path]))
        assert len(run.trajectory) == 4 and run.selected == 3 and run.failed == 1


def test_hostile_folders(tmp_path: Path) -> None:
    folder = workspace(
        tmp_path, [entry(1, 20.0, 5, model_path="<script>\x1b[31m" * 50, error="=cmd()|<img src=x>\n# x")]
    )
    (folder / "loop").symlink_to(tmp_path)
    (folder.parent / "link").symlink_to(folder)
    other = workspace(tmp_path, GOOD, agent="b" * 180)
    (other / "scores.json").unlink()
    os.mkfifo(other / "scores.json")
    results(tmp_path, [row(folder, agent="<script>alert(1)</script>", task="../../etc", workspace="/x/..")])
    (tmp_path / "results.csv").open("a").write('"\n,,,,"\0bad\n')
    done = report.refresh([tmp_path], tmp_path / "out")
    assert done.merged is not None and len(done.merged.runs) >= 2
    for page in (tmp_path / "out").rglob("*.html"):
        text = page.read_text()
        assert text.count("<script") == 1  # its own
        assert "<script>alert" not in text and "<img" not in text and "\x1b" not in text
    inside = {path.relative_to(tmp_path / "out").parts[0] for path in (tmp_path / "out").rglob("*.html")}
    assert inside == {"index.html", "runs"}


def test_nothing_is_written_into_their_folders(tmp_path: Path) -> None:
    folder = workspace(tmp_path / "bench", GOOD)
    before = sorted(folder.rglob("*"))
    done = report.refresh([tmp_path / "bench"], tmp_path / "out")
    assert sorted(folder.rglob("*")) == before
    (page,) = (tmp_path / "out" / "runs").iterdir()
    assert {path.name for path in page.iterdir()} == {"summary.json", "run.md", "run.html", "trace.html", "trace"}
    assert f'href="runs/{page.name}/run.html"' in done.index.read_text()
    assert report.refresh([tmp_path / "bench"], tmp_path / "out").merged is None
    (folder / "scores.json").write_text(json.dumps(GOOD[:1]))
    again = report.refresh([tmp_path / "bench"], tmp_path / "out")
    assert again.merged is not None and len(again.merged.runs[0].trajectory) == 1


def test_our_own_workspace_and_other_tables_are_none_of_it(tmp_path: Path) -> None:
    ours = tmp_path / "scratch" / "w"
    for name in ("submissions", "results", "code"):
        (ours / name).mkdir(parents=True)
    (ours / "run_meta.json").write_text("{}")
    (ours / "agent.log").touch()
    (tmp_path / "results.csv").write_text("a,b\n1,2\n")
    with pytest.raises(AutorlError, match="no run below"):
        report.build([tmp_path])


def test_a_base_score_of_zero_is_kept_and_the_mode_is_read(tmp_path: Path) -> None:
    """Qwen3-8B-Base scores 0.0 on webshop, and every run on it fell out of the statistics; all modes were one agent."""
    root = tmp_path / "bench"
    for second, (agent, meta, mode) in enumerate(
        (
            ("claude-sft-only", {}, "sft-only"),
            ("claude_rl_only", {}, "rl-only"),
            ("claude", {"mode": "Multi"}, "multi"),
            ("claude", {}, "unknown"),
        )
    ):
        start = START + timedelta(seconds=second)
        folder = workspace(root, [entry(1, 67.0, 65, 0.0)], task="webshop", agent=agent, start=start)
        told = json.loads((folder / "run_meta.json").read_text())
        (folder / "run_meta.json").write_text(json.dumps({**told, **meta}))
        (run,) = (r for r in report.build([root]).runs if folder.name in r.run_id)
        assert (run.mode, run.level, run.counted, run.excluded) == (mode, 3, True, None)
        assert run.improvement is not None and run.improvement.difference == 67.0
        assert any("0.0, which the reference also writes" in note for note in run.notes)
