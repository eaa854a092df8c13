"""`verify` names what was done to a finished experiment: each case does one alteration to a copy of one experiment."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from treemaker import Tree

from autorl_hpc.evidence.verify import SHARED, as_lines, verify_paths
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.ledger import Ledger, sha256_hex
from autorl_hpc.records import canonical_json, readable_json
from autorl_hpc.records.entries import AttemptStarted
from autorl_hpc.report import report
from autorl_hpc.states import EntryKind


@pytest.fixture(autouse=True, scope="module")
def no_fsync() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment of two closed runs (seeds 0 and 1), with reports."""
    tree = Tree(tmp_path_factory.mktemp("pristine") / "exp")
    tree.experiment.code.rmdir()
    for seed, solved in ((0, 60), (1, 30)):
        (tree.experiment.finished / tree.finished(seed=seed, solved=solved).dir.run_id).touch()
    report.refresh([tree.path])
    return tree.path


class Place:
    """A copy of the experiment, in which the first run is altered."""

    def __init__(self, path: Path) -> None:
        self.path, self.experiment = path, ExperimentDir(path)
        self.run, self.other = (self.experiment.run(p.parent.name) for p in sorted(path.glob("*-s?-*/run.json")))
        self.own, self.merged = self.run.report / "summary.json", self.experiment.report / "summary.json"

    def entry(self, number: int) -> Path:
        return self.run.ledger / f"{number:06d}.json"

    def last(self) -> int:
        return len(list(self.run.ledger.iterdir()))

    def write(self, path: Path, data: bytes) -> None:
        os.chmod(path, 0o644) if path.exists() else None
        path.write_bytes(data)

    def alter(self, number: int, **fields: object) -> None:
        """Another body, as this suite would write it."""
        value = json.loads(self.entry(number).read_bytes())
        value["body"] |= fields
        self.write(self.entry(number), canonical_json(value) + b"\n")

    def chain_anew(self, first: int, *, count: int | None = None) -> None:
        """Links all entries from `first` on again, as one would who may write everything; and the copy of them."""
        count = count or self.last()
        prev = sha256_hex((self.run.record if first == 1 else self.entry(first - 1)).read_bytes())
        for number in range(first, count + 1):
            data = canonical_json(json.loads(self.entry(number).read_bytes()) | {"prev": prev}) + b"\n"
            self.write(self.entry(number), data)
            prev = sha256_hex(data)
        self.write(self.run.sealed_ledger, b"".join(self.entry(n).read_bytes() for n in range(1, count + 1)))

    def start_late(self) -> None:
        """Another attempt of the run, after its end."""
        late = AttemptStarted(attempt=2, elapsed_s=0.0, workspace="/scratch/w")
        Ledger(self.run).append(EntryKind.ATTEMPT_STARTED, late, role="supervisor")

    def verdicts(self) -> tuple[list[str], list[str], list[str]]:
        """Problems of the altered run and of what the runs share, and what was seen in part; the other run must be whole."""
        verdicts = verify_paths([self.path])
        found = {v.run_id: v.problems for v in verdicts}
        unseen = [text for verdict in verdicts for text in verdict.unseen]
        assert found[self.other.run_id] == []
        assert all(verdict.whole for verdict in verdicts) == (not unseen and not any(found.values()))
        return found[self.run.run_id], found[SHARED], unseen

    def problems(self) -> list[str]:
        return self.verdicts()[0]

    def shared(self) -> list[str]:
        return self.verdicts()[1]

    def edit(self, path: Path, **fields: object) -> None:
        """Other fields of a report's summary, as this suite would write it."""
        path.write_bytes(readable_json(json.loads(path.read_text()) | fields))


@pytest.fixture
def place(pristine: Path, tmp_path: Path) -> Place:
    shutil.copytree(pristine, tmp_path / "exp")
    return Place(tmp_path / "exp")


def test_an_experiment_that_nobody_altered(place: Place) -> None:
    assert place.verdicts() == ([], [], [])
    # layout of a record, pages and pictures are no figures: another machine may write other bytes of the same ones
    for summary in (place.own, place.merged):
        summary.write_text(json.dumps(json.loads(summary.read_text()), indent=7))
        for page in (*summary.parent.glob("*.html"), *summary.parent.glob("*.md")):
            page.write_text(page.read_text() + "\n")
    place.edit(place.own, elapsed_s=json.loads(place.own.read_text())["elapsed_s"] * (1 + 1e-9))
    assert place.verdicts() == ([], [], [])


# --- the ledger

ALTERED = {1: {"elapsed_s": 1.0}, 2: {"holes": ["x"]}, 3: {"note": "x"}, 6: {"generation": 9}}


def test_an_altered_entry(place: Place) -> None:
    for number, fields in ALTERED.items():
        before = place.entry(number).read_bytes()
        place.alter(number, **fields)
        (problem,) = place.problems()
        named = f"differs from ledger.jsonl, written at the end of the run, is entry {number:06d}"
        assert problem.endswith(named), problem
        place.write(place.entry(number), before)
    last = place.last()
    place.alter(last, grader="another")
    assert place.problems() == [f"ledger.jsonl line {last} differs from ledger entry {last:06d}"]
    place.run.sealed_ledger.unlink()
    place.alter(3, note="x")
    assert "the chain breaks before ledger entry 000004: entry 000003 or this" in place.problems()[0]


def test_an_entry_appended_after_the_end(place: Place) -> None:
    last = place.last()
    values = {(v := json.loads(place.entry(n).read_bytes()))["kind"]: v for n in range(1, last + 1)}
    for kind in ("score", "closed", "sealed", "submission"):
        linked = values[kind] | {"seq": last + 1, "prev": sha256_hex(place.entry(last).read_bytes())}
        place.write(place.entry(last + 1), canonical_json(linked) + b"\n")
        named = f"ledger entry {last + 1:06d} ({kind}) was added after the closing entry {last:06d}"
        assert place.problems() == [named]


def test_run_json_changed(place: Place) -> None:
    record = json.loads(place.run.record.read_text())
    place.run.record.write_text(json.dumps(record | {"sandbox": "apptainer"}))
    (problem,) = place.problems()
    assert problem.endswith("says that it was run.json")
    record["science"]["seed"] = 7
    place.run.record.write_text(json.dumps(record))
    assert place.problems()[0].startswith("run.json doesn't belong to this folder")


def test_a_chain_written_anew_is_whole_and_the_text_says_so(place: Place) -> None:
    """What nobody can see without an anchor: so the verdict doesn't claim it."""
    place.alter(3, note="another past")
    place.chain_anew(4)
    report.refresh([place.path], None, report.Options(fresh=True))
    assert place.verdicts()[:2] == ([], [])
    text = "\n".join(as_lines(verify_paths([place.path])))
    assert "0 anchored" in text and "whoever can write here can also write a new chain" in text


def test_items_edited_or_of_another_run(place: Place) -> None:
    path = place.run.items / "000002.report.jsonl.gz"
    before = path.read_bytes()
    lines = gzip.decompress(before).replace(b'"outcome":0.0', b'"outcome":1.0', 1)
    named = "items/000002.report.jsonl.gz was altered: its hash is not the one in the record of its score"
    for data in (gzip.compress(lines, mtime=0), (place.other.items / path.name).read_bytes(), b""):
        place.write(path, data)
        assert place.problems() == [named]
    path.unlink()
    assert place.problems() == ["items/000002.report.jsonl.gz is missing"]


def test_a_baseline_changed(place: Place) -> None:
    for path in place.experiment.baselines.glob("*.json"):
        value = json.loads(path.read_bytes())
        if value["evaluation"]["split"] == "report":
            value["evaluation"]["score"] = 1.0
            place.write(path, canonical_json(value) + b"\n")
    found = [v.problems for v in verify_paths([place.path]) if v.of == "run"]
    assert all(any("baselines/" in p and "doesn't give the recorded score" in p for p in ps) for ps in found)


# --- reports: every figure, whatever the version


def within(record: Any, path: str) -> tuple[Any, Any]:
    """The object that holds a place such as `trajectory.0.score`, and the last key."""
    *parts, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parts:
        record = record[part]
    return record, last


FIGURES: dict[str, object] = {
    "report.score": 77,
    "improvement.difference": 77,
    "selected": 77,
    "counted": 77,
    "trajectory.0.score": 77.5,
    "trajectory.0.elapsed_s": 77.5,
    "baseline_report.low": 77.5,
    "story.resources.tokens_in": 77,
    "accepted": 77,
    "notes": ["all is well"],
    "trajectory": [],
    "x": 1,
}


def test_any_figure_of_a_summary_changed(place: Place) -> None:
    true, merged = place.own.read_bytes(), place.merged.read_bytes()
    for path, value in FIGURES.items():
        record = json.loads(true)
        holder, last = within(record, path)
        holder[last] = value
        place.own.write_text(json.dumps(record))
        found = verify_paths([place.run.path])[0].problems
        assert len(found) == 1 and found[0].startswith("report/summary.json was altered: ") and str(last) in found[0], (
            path
        )
    place.own.write_bytes(true)
    for path in ("report.score", "trajectory.0.score"):
        record = json.loads(merged)
        holder, last = within(next(r for r in record["runs"] if r["run_id"] == place.run.run_id), path)
        holder[last] = 77.5
        place.merged.write_text(json.dumps(record))
        (problem,) = place.shared()
        assert problem.startswith("report/summary.json was altered: ") and str(last) in problem, path


BESIDE_A_SCORE: dict[str, object] = {
    "flags": ["untrained_copy"],
    "contaminated": [{"split": "report", "items": 3, "of": 100, "submission_id": None}],
    "contamination_end": {"items": {"report": 3}},
    "network": "open",
    "sandbox": "bwrap",
    "fault": "agent",
    "excluded": "foreign_weights",
}


def test_a_report_of_another_version_is_not_called_whole(place: Place) -> None:
    true, merged = place.own.read_bytes(), place.merged.read_bytes()
    for version in ("0.0.1", None, 7):
        place.edit(place.own, tool_version=version)
        found, _, (summary,) = place.verdicts()
        assert found == [] and summary.startswith("report/summary.json is of another version")
        assert "only its results" in summary
    lines = as_lines(verify_paths([place.path]))
    assert any(line.startswith(f"PARTLY   {place.run.run_id}") for line in lines) and "1 seen in part" in lines[-1]
    for name, value in BESIDE_A_SCORE.items():
        place.edit(place.own, tool_version="0.0.1", **{name: value})
        (problem,) = verify_paths([place.run.path])[0].problems
        assert problem.startswith(f"report/summary.json was altered: `{name}")
        place.own.write_bytes(true)
    rows = [{**row, "tool_version": "0.0.1"} for row in json.loads(merged)["runs"]]
    place.edit(place.merged, runs=rows)
    assert place.verdicts()[2][0].startswith("report/summary.json is of another version")


@pytest.mark.parametrize(
    ("field", "share", "altered"), [("low", 0.04, 0), ("low", 0.06, 1), ("p_value", 0.02, 0), ("p_value", 0.04, 1)]
)
def test_other_resamples_are_no_alteration(place: Place, field: str, share: float, altered: int) -> None:
    """Another release of scipy may draw others: an interval's end may be off by 5 % of its width, a p value by 0.03."""
    gain = json.loads(place.own.read_text())["improvement"]
    gain[field] += share * (gain["high"] - gain["low"] if field == "low" else 1.0)
    place.edit(place.own, improvement=gain)
    assert len(verify_paths([place.run.path])[0].problems) == altered


def test_a_merged_report_changed(place: Place) -> None:
    """A mean over runs, and a run that is none added."""
    true = place.merged.read_bytes()
    value = json.loads(true)
    value["groups"][0]["cells"][0]["improvement"]["mean"] += 0.1
    place.edit(place.merged, **value)
    (problem,) = place.shared()
    assert "`groups[0].cells[0].improvement.mean` is" in problem
    rows = json.loads(true)["runs"]
    for more in ([*rows, {**rows[0], "run_id": "another"}], [{**rows[0], "accepted": 77}, *rows], [*rows, 7]):
        place.merged.write_bytes(true)
        place.edit(place.merged, runs=more)
        assert len(place.shared()) == 1


def test_a_report_of_a_run_that_goes_on_is_seen_in_part(tmp_path: Path) -> None:
    """Its clock moves between two entries."""
    tree = Tree(tmp_path / "exp")
    tree.experiment.code.rmdir()
    run = tree.run().start().clock(30.0)
    report.refresh([tree.path])
    assert all(verdict.whole for verdict in verify_paths([run.dir.path]))
    run.clock(700.0)
    (verdict,) = verify_paths([run.dir.path])
    assert verdict.problems == [] and not verdict.whole and "not compared" in verdict.unseen[0]


def test_a_report_that_is_older_than_its_ledger_is_no_damage(place: Place) -> None:
    place.start_late()
    problems, shared, unseen = place.verdicts()
    assert (problems, shared) == ([], [])
    assert any("report/summary.json was written before the last entries: not compared" in text for text in unseen)
    place.edit(place.own, ledger_head="0" * 64)
    assert "names a head that this ledger never had" in place.problems()[0]


def test_a_report_that_is_none(place: Place) -> None:
    for data in (b"{", b"[]", b"[" * 200_000):
        place.own.write_bytes(data)
        assert len(verify_paths([place.run.path])[0].problems) == 1
