"""Entries that fail wait longer each time, over graders too; those at which graders die come last; status says why."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from treemaker import Tree

from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.queue import MAX_CHARS, read_trouble, read_troubles, write_trouble
from autorl_hpc.grading.schedule import MAX_RETRY_S, RETRY_AFTER_TROUBLE_S, Backoff, pause_s
from autorl_hpc.records.exchange import Trouble
from autorl_hpc.report import status
from autorl_hpc.states import Fault

ENTRY = "f-run--000001"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that graders see, in a list of one."""
    now = [1000.0]
    monkeypatch.setattr("autorl_hpc.grading.schedule.time.monotonic", lambda: now[0])
    return now


def test_the_pause_doubles_up_to_its_limit() -> None:
    assert [pause_s(n) for n in range(5)] == [0.0, 5.0, 10.0, 20.0, 40.0]
    assert pause_s(50) == MAX_RETRY_S


def test_the_next_grader_waits_as_long_as_the_last_one_would_have(tmp_path: Path, clock: list[float]) -> None:
    waits = []
    for number in range(6):  # each grader tries once and leaves
        backoff, begun = Backoff(tmp_path / "troubles", f"grader-{number}"), clock[0]
        while backoff.waits(ENTRY, 0):
            assert backoff.owes([ENTRY]), "it may leave before it has tried, and the wait would begin anew"
            clock[0] += 1.0
        waits.append(clock[0] - begun)
        backoff.failed(ENTRY, "no key", Fault.GRADER)
        assert backoff.waits(ENTRY, 0) and not backoff.owes([ENTRY]), "failing work would keep a grader"
    assert waits == [0.0, 5.0, 10.0, 20.0, 40.0, 80.0]
    note = read_trouble(tmp_path / "troubles", ENTRY)
    assert note == Trouble(entry=ENTRY, failures=6, fault=Fault.GRADER, problem="no key", grader="grader-5")


def test_what_comes_through_is_forgotten(tmp_path: Path, clock: list[float]) -> None:
    first, other = Backoff(tmp_path / "t", "a"), Backoff(tmp_path / "t", "b")
    assert not other.waits(ENTRY, 0)  # it saw the entry before anything failed
    first.failed(ENTRY, "x", Fault.CLUSTER)
    other.well(ENTRY)
    assert read_troubles(tmp_path / "t") == []
    assert not Backoff(tmp_path / "t", "c").waits(ENTRY, 0)


def test_an_entry_that_is_gone_keeps_no_grader(tmp_path: Path, clock: list[float]) -> None:
    Backoff(tmp_path / "t", "a").failed(ENTRY, "x", Fault.CLUSTER)
    backoff = Backoff(tmp_path / "t", "b")
    assert backoff.waits(ENTRY, 0) and backoff.owes([ENTRY]) and not backoff.owes([])


def test_where_graders_died_again_and_again_the_next_waits_and_does_others_first(
    tmp_path: Path, clock: list[float]
) -> None:
    backoff = Backoff(tmp_path / "t", "a")
    names = ["f-a--000001", "f-b--000001", "c-a"]
    assert backoff.order(names, {"f-a--000001": 1}) == names, "one death may be a preemption"
    assert backoff.order(names, {"f-a--000001": 2}) == ["f-b--000001", "c-a", "f-a--000001"]
    assert backoff.order(names, {"f-a--000001": 3, "f-b--000001": 2}) == ["c-a", "f-b--000001", "f-a--000001"]
    assert not backoff.waits("f-b--000001", 1)
    assert backoff.waits("f-a--000001", 2)
    clock[0] += RETRY_AFTER_TROUBLE_S
    assert not backoff.waits("f-a--000001", 2)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"entry": "x"}'])
def test_a_damaged_note_is_none_and_is_made_anew(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / f"{ENTRY}.json").write_bytes(damage)
    backoff = Backoff(tmp_path, "a")
    assert read_troubles(tmp_path) == [] and not backoff.waits(ENTRY, 0)
    backoff.failed(ENTRY, "x" * 9999, Fault.GRADER)
    (note,) = read_troubles(tmp_path)
    assert note.failures == 1 and len(note.problem) == MAX_CHARS


def test_a_folder_that_cant_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("a file")
    assert Backoff(tmp_path / "t", "a").failed(ENTRY, "x", Fault.GRADER) == RETRY_AFTER_TROUBLE_S


def test_status_says_whose_fault_it_is_that_a_run_waits(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "runs" / "exp")
    run, other = tree.run(seed=0).start(), tree.run(seed=1).start()
    folder = ExperimentDir(tree.path).troubles
    entries = (f"f-{run.dir.run_id}--000001", f"c-{run.dir.run_id}", "b1-arithmetic-autorl+tiny-01234567")
    for failures, entry in enumerate(entries, start=1):
        problem = "the environment of task t failed: KeyError\n  fault: grader"
        write_trouble(folder, Trouble(entry=entry, failures=failures, fault=Fault.GRADER, problem=problem, grader="g"))
    (facts,) = status.collect([tree.path])
    rows = {row["run_id"]: row for row in facts["runs"]}
    row = rows[run.dir.run_id]
    assert row["fault"] == "grader"
    assert row["reason"] == "failed 2 times, tried again: the environment of task t failed: KeyError"
    assert rows[other.dir.run_id]["fault"] is None
    assert [trouble["failures"] for trouble in facts["troubles"]] == [3, 2, 1]
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(status.render([facts]))
    text = console.export_text()
    assert "b1-arithmetic-autorl+tiny-01234567: grader: failed 3 times" in text and "failed 2 times" in text
