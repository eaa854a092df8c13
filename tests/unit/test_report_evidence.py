"""What stands beside a score: flags and lineage, contamination, the sandbox that was in force, and what follows from them."""

from __future__ import annotations

import csv
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_report_write import HOSTILE, Tags
from treemaker import Tree, TreeRun, outcomes, sha

from autorl_hpc.files.run_view import RunView
from autorl_hpc.records.entries import AttemptStarted, Contaminated, Contamination, Fingerprint, SandboxUsed
from autorl_hpc.report import report, status
from autorl_hpc.report.run_folder import UNSEEN
from autorl_hpc.report.run_summary import digest
from autorl_hpc.report.summary import RunSummary
from autorl_hpc.report.terminal import print_summary
from autorl_hpc.states import EntryKind, Network, SandboxLevel, Split


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "runs" / "exp")


def fingerprint(run: TreeRun, number: int, **fields: Any) -> None:
    """A fingerprint entry: honest, but for `fields`."""
    content = RunView.of(run.ledger.read()).submissions[number].content_hash
    honest: dict[str, Any] = {
        "relative_delta": 3e-4,
        "nearest_model": "org/tiny",
        "nearest_delta": 3e-4,
        "parent_delta": 3e-4,
        "commonest_output_share": 0.02,
        "base_output_share": 0.02,
        "grader": "g",
    }
    body = Fingerprint(submission_id=number, content_hash=content or sha("x"), **{**honest, **fields})
    run.write(EntryKind.FINGERPRINT, body)


def look(run: TreeRun, number: int | None, items: dict[Split, int] | None = None, **fields: Any) -> None:
    """A look at the workspace."""
    whole: dict[str, Any] = {
        "of": {Split.FEEDBACK: 40, Split.REPORT: 100},
        "files_scanned": 12,
        "bytes_scanned": 3_400_000,
        "bytes_skipped": 2_000_000_000,
        "bytes_unchanged": 700,
        "files_skipped": 3,
        "complete": True,
    }
    body = Contamination(submission_id=number, items=items or {}, **{**whole, **fields})
    run.write(EntryKind.CONTAMINATION, body)


def one_run(tree: Tree, solved: int = 40, seed: int = 0, **fields: Any) -> TreeRun:
    """A finished run whose selected checkpoint has this fingerprint."""
    run = tree.run(seed=seed).start()
    number = run.submit(100.0, outcomes(tree.n_feedback, range(tree.n_feedback // 2)))
    fingerprint(run, number, **fields)
    return run.seal().close(outcomes(tree.n_report, range(solved)))


def summary(run: TreeRun) -> RunSummary:
    return digest(run.dir)


def pages(tree: Tree) -> dict[str, str]:
    """Every page that is written, by name; the run's pages are those of the first run."""
    report.refresh([tree.path])
    folders = (tree.path / "report", tree.runs[0].dir.report)
    return {path.name: path.read_text() for folder in folders for path in folder.iterdir() if path.is_file()}


def on_terminal(tree: Tree, width: int = 120) -> str:
    out = io.StringIO()
    print_summary(report.build([tree.path]), Console(file=out, width=width), Path("index.html"))
    return out.getvalue()


def test_an_honest_run_ranks_and_has_no_note(tree: Tree) -> None:
    run = summary(one_run(tree))
    assert run.ranked and run.counted and run.flags == () and run.notes == ()
    assert run.trajectory[0].fingerprint is not None and run.trajectory[0].fingerprint.relative_delta == 3e-4


def test_foreign_weights_are_shown_and_enter_no_mean(tree: Tree) -> None:
    one_run(tree, solved=30, seed=1)
    fields = {"flags": ("foreign_weights",), "relative_delta": 0.05, "nearest_model": "org/inst", "nearest_delta": 1e-4}
    found = summary(one_run(tree, solved=90, seed=0, **fields))
    assert not found.ranked and not found.counted and found.excluded == "foreign_weights"
    assert found.improvement is not None and found.improvement.difference == 65, "shown all the same"
    assert any("nearer to the staged model org/inst (relative distance 1.0e-04)" in note for note in found.notes)
    (cell,) = report.build([tree.path]).groups[0].cells
    assert (cell.improvement.mean, cell.counted, cell.excluded) == (5, 1, {"foreign_weights": 1})


def test_a_flag_of_another_submission_is_shown_there_alone(tree: Tree) -> None:
    run = tree.run().start()
    copy = run.submit(50.0, outcomes(40, range(5)))
    best = run.submit(100.0, outcomes(40, range(20)))
    fingerprint(run, copy, flags=("untrained_copy",))
    fingerprint(run, best, parent=None)
    again = run.submit(120.0, content_hash=RunView.of(run.ledger.read()).submissions[copy].content_hash, same_as=copy)
    found = summary(run.seal().close(outcomes(100, range(40))))
    assert found.ranked and found.flags == () and found.notes == ()
    flags = {p.submission_id: p.fingerprint.flags for p in found.trajectory if p.fingerprint}
    assert flags == {copy: ("untrained_copy",), best: (), again: ("untrained_copy",)}


def test_flags_stand_in_every_page(tree: Tree) -> None:
    one_run(tree, flags=("untrained_copy",), relative_delta=5.5e-6)
    found = pages(tree)
    for name in ("run.html", "run.md", "index.html", "summary.md", "summary.csv", "summary.json"):
        text = found[name].replace("\\_", "_")
        assert "untrained_copy" in text, name
    assert '<p class="flag">untrained_copy · does not rank</p>' in found["run.html"]
    assert "**untrained\\_copy: does not rank**" in found["run.md"]
    assert "5.5e-06" in found["run.html"] and "5.5e-06" in found["run.md"]
    (row,) = csv.DictReader(io.StringIO(found["summary.csv"]))
    assert (row["flags"], row["relative_delta"], row["ranked"]) == ("untrained_copy", "5.5e-06", "no")
    assert "untrained_copy" in on_terminal(tree)
    facts = status.collect([tree.path])
    assert facts[0]["runs"][0]["flags"] == ["untrained_copy"]
    out = io.StringIO()
    Console(file=out, width=100).print(status.Screen(facts))
    assert re.search(r"s0.*\n  untrained_copy", out.getvalue())


def test_luck_grows_with_the_number_of_scored_checkpoints(tree: Tree) -> None:
    """Expected maxima of one, two and five standard normal values: 0, 0.564 and 1.163."""
    for seed, (queries, expected) in enumerate(((1, 0.0), (2, 0.5642), (5, 1.1630))):
        run = tree.run(seed=seed).start()
        for number in range(queries):
            run.submit(float(number), outcomes(40, range(20)))
        noise = summary(run).noise
        assert noise is not None and noise.queries == queries
        assert noise.expected_maximum == pytest.approx(expected * noise.standard_error, rel=1e-3)


def test_contamination_is_shown_and_not_punished(tree: Tree) -> None:
    run = tree.run().start()
    for number in (1, 2):
        run.submit(50.0 * number, outcomes(40, range(10 * number)))
        fingerprint(run, number)
    leak = Contaminated(file="code/leak.jsonl", split=Split.REPORT, how="ngram", items=7, first_items=("q1", "q2"))
    look(run, 1, {Split.REPORT: 7, Split.FEEDBACK: 1}, found=(leak,))
    look(run, 2, {Split.REPORT: 2}, complete=False, reason="time")
    look(run, None)
    found = summary(run.seal().close(outcomes(100, range(40))))
    assert found.ranked and found.counted and found.excluded is None
    told = {one.split: (one.items, one.of, one.submission_id) for one in found.contaminated}
    assert told == {Split.FEEDBACK: (1, 40, 1), Split.REPORT: (7, 100, 1)}, "what was deleted later was there"
    assert "contamination: text of 7 of 100 report items stood in the workspace at submission 1" in found.notes
    assert "contamination: 1 of 3 looks at the workspace were cut short" in found.notes
    written = pages(tree)
    for name in ("run.html", "run.md"):
        text = written[name]
        assert "code/leak.jsonl" in text and "3.4 MB" in text and "2.0 GB" in text and "cut short" in text, name
    plain = {name: text.replace("&#39;", "'") for name, text in written.items()}
    assert all(UNSEEN in plain[name] for name in ("run.html", "run.md", "index.html", "summary.md"))
    (row,) = csv.DictReader(io.StringIO(written["summary.csv"]))
    assert (row["contaminated_report"], row["contaminated_feedback"], row["looks_at_workspace"]) == ("7", "1", "3")
    assert any(note.startswith("contamination") for note in report.build([tree.path]).notes)
    assert status.collect([tree.path])[0]["runs"][0]["contaminated"] == {"feedback": 1, "report": 7}


def test_hostile_names_stay_text(tree: Tree) -> None:
    run = tree.run().start()
    number = run.submit(5.0, outcomes(40, range(15)))
    fingerprint(run, number, reason=HOSTILE, nearest_model=HOSTILE)
    leak = Contaminated(file=HOSTILE, split=Split.FEEDBACK, how="exact", items=1, first_items=("q1",))
    look(run, number, {Split.FEEDBACK: 1}, found=(leak,), reason=HOSTILE)
    run.seal().close(outcomes(100, range(30)))
    for name, text in pages(tree).items():
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f\u202a-\u202e]", text), name
        if name.endswith(".html"):
            tags = [tag for tag, _ in Tags(text).tags]
            assert "img" not in tags and tags.count("script") == 1, name
        elif name.endswith(".md"):
            assert "<script" not in text and "<img" not in text and not re.search(r"(?<!\\)\]\(", text), name


def started(run: TreeRun, level: SandboxLevel | None, network: Network = Network.DRIVER) -> None:
    """An attempt; None: an agent that a supervisor of an earlier version started."""
    attempt = RunView.of(run.ledger.read()).attempt + 1
    run.write(EntryKind.ATTEMPT_STARTED, AttemptStarted(attempt=attempt, elapsed_s=0.0, workspace="w"))
    if level is not None:
        used = SandboxUsed(attempt=attempt, level=level, network=network, holes=("sees other processes",))
        run.write(EntryKind.SANDBOX, used)


@pytest.mark.parametrize(
    ("levels", "weakest", "ranked"),
    [
        ([SandboxLevel.BWRAP], "bwrap", True),
        ([SandboxLevel.APPTAINER, SandboxLevel.LANDLOCK, SandboxLevel.BWRAP], "landlock", True),
        ([SandboxLevel.BWRAP, SandboxLevel.NONE], "none", False),
        ([None], "none", False),
    ],
)
def test_the_weakest_attempt_counts(tree: Tree, levels: list[SandboxLevel | None], weakest: str, ranked: bool) -> None:
    run = tree.run()
    for level in levels:
        started(run, level)
    run.submit(5.0, outcomes(40, range(20)))
    found = summary(run.seal().close(outcomes(100, range(40))))
    assert (found.sandbox, found.ranked) == (weakest, ranked)
    assert found.network == ("open" if None in levels else "driver")
    assert len(found.sandboxes) == sum(level is not None for level in levels)
    page = pages(tree)["run.html"]
    assert ("sees other processes" in page and "attempt 1</dt>" in page) == any(levels)
    assert any("different sandboxes" in note for note in found.notes) == (len(levels) > 1)
