"""`verify` names what was done to a finished experiment: each test does one alteration, and nothing else."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from pathlib import Path

import pytest
from treemaker import Tree

from autorl_hpc.evidence.verify import SHARED, as_lines, verify_paths
from autorl_hpc.files.ledger import sha256_hex
from autorl_hpc.records import canonical_json, readable_json
from autorl_hpc.report import report


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


class Place:
    """An experiment of two closed runs, with reports."""

    def __init__(self, path: Path) -> None:
        self.tree = Tree(path)
        self.tree.experiment.code.rmdir()
        self.run, self.other = self.tree.finished(seed=0, solved=60), self.tree.finished(seed=1, solved=30)
        for run in (self.run, self.other):
            (self.tree.experiment.finished / run.dir.run_id).touch()
        report.write_all(report.build([path]), None)

    def entry(self, number: int) -> Path:
        return self.run.dir.ledger / f"{number:06d}.json"

    def last(self) -> int:
        return len(list(self.run.dir.ledger.iterdir()))

    def write(self, path: Path, data: bytes) -> None:
        os.chmod(path, 0o644) if path.exists() else None
        path.write_bytes(data)

    def alter(self, number: int, **fields: object) -> None:
        """Another body, as this suite would write it."""
        value = json.loads(self.entry(number).read_bytes())
        value["body"] |= fields
        self.write(self.entry(number), canonical_json(value) + b"\n")

    def chain_anew(self, first: int = 1, *, count: int | None = None) -> None:
        """Links all entries from `first` on again, as one would who may write everything; and the copy of them."""
        count = count or self.last()
        before = self.run.dir.record if first == 1 else self.entry(first - 1)
        prev = sha256_hex(before.read_bytes())
        for number in range(first, count + 1):
            value = json.loads(self.entry(number).read_bytes()) | {"prev": prev, "seq": number}
            data = canonical_json(value) + b"\n"
            self.write(self.entry(number), data)
            prev = sha256_hex(data)
        lines = [self.entry(number).read_bytes() for number in range(1, count + 1)]
        self.write(self.run.dir.sealed_ledger, b"".join(lines))

    def problems(self) -> list[str]:
        """Of the run that was altered; the other one must be whole."""
        found = {v.run_id: v.problems for v in verify_paths([self.tree.path])}
        assert found[self.other.dir.run_id] == []
        return found[self.run.dir.run_id]

    def shared(self) -> list[str]:
        return next(v.problems for v in verify_paths([self.tree.path]) if v.run_id == SHARED)

    def unseen(self) -> list[str]:
        """All that is neither damaged nor whole; then not all verdicts are `whole`."""
        verdicts = verify_paths([self.tree.path])
        found = [text for verdict in verdicts for text in verdict.unseen]
        assert all(verdict.whole for verdict in verdicts) == (not found and not any(v.problems for v in verdicts))
        return found

    def edit(self, path: Path, **fields: object) -> None:
        """Other fields of a report's summary, as this suite would write it."""
        path.write_bytes(readable_json(json.loads(path.read_text()) | fields))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path / "exp")
    assert made.problems() == [] and made.shared() == []
    return made


ALTERED = {1: {"elapsed_s": 1.0}, 2: {"holes": ["x"]}, 3: {"note": "x"}, 6: {"generation": 9}}


@pytest.mark.parametrize("number", ALTERED)
@pytest.mark.parametrize("copy", [True, False])
def test_an_altered_entry(place: Place, number: int, copy: bool) -> None:
    if not copy:
        place.run.dir.sealed_ledger.unlink()
    place.alter(number, **ALTERED[number])
    (problem,) = place.problems()
    at_the_end = "ledger.jsonl, written at the end of the run, is"
    assert problem.endswith(f"{at_the_end if copy else 'it was'} entry {number:06d}"), problem


def test_a_deleted_middle(place: Place) -> None:
    place.entry(3).unlink()
    assert place.problems() == ["ledger entry 000003.json is missing, though 000004.json is there"]
    last = place.last() + 1
    for number in range(4, last + 1):  # the gap closed
        place.entry(number).rename(place.entry(number - 1))
    assert place.problems() == ["ledger entry 000003 calls itself number 4: the order was changed"]


def test_an_inserted_entry(place: Place) -> None:
    for number in range(place.last(), 2, -1):
        place.entry(number).rename(place.entry(number + 1))
    place.write(place.entry(3), place.entry(2).read_bytes())
    assert place.problems() == ["ledger entry 000003 calls itself number 2: the order was changed"]
    value = json.loads(place.entry(2).read_bytes()) | {"seq": 3, "prev": sha256_hex(place.entry(2).read_bytes())}
    place.write(place.entry(3), canonical_json(value) + b"\n")
    assert place.problems() == ["ledger entry 000004 calls itself number 3: the order was changed"]


@pytest.mark.parametrize("kind", ["score", "closed", "sealed", "submission"])
def test_an_entry_appended_after_the_end(place: Place, kind: str) -> None:
    last = place.last()
    value = next(v for n in range(1, last + 1) if (v := json.loads(place.entry(n).read_bytes()))["kind"] == kind)
    value |= {"seq": last + 1, "prev": sha256_hex(place.entry(last).read_bytes())}
    place.write(place.entry(last + 1), canonical_json(value) + b"\n")
    named = f"ledger entry {last + 1:06d} ({kind}) was added after the closing entry {last:06d}"
    assert place.problems() == [named]


def test_run_json_changed(place: Place) -> None:
    record = json.loads(place.run.dir.record.read_text())
    place.run.dir.record.write_text(json.dumps(record | {"sandbox": "apptainer"}))
    (problem,) = place.problems()
    assert problem.endswith("says that it was run.json")
    place.run.dir.sealed_ledger.unlink()
    (problem,) = place.problems()
    assert problem.endswith("it was run.json")
    record["science"]["seed"] = 7
    place.run.dir.record.write_text(json.dumps(record))
    assert place.problems()[0].startswith("run.json doesn't belong to this folder")


def test_items_edited_or_of_another_run(place: Place) -> None:
    path = place.run.dir.items / "000002.report.jsonl.gz"
    before = path.read_bytes()
    lines = gzip.decompress(before).replace(b'"outcome":0.0', b'"outcome":1.0', 1)
    named = "items/000002.report.jsonl.gz was altered: its hash is not the one in the record of its score"
    for data in (gzip.compress(lines, mtime=0), (place.other.dir.items / path.name).read_bytes(), b"", before[:-1]):
        place.write(path, data)
        assert place.problems() == [named]
    path.unlink()
    assert place.problems() == ["items/000002.report.jsonl.gz is missing"]


def test_items_that_unpack_to_too_much(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from autorl_hpc.files import reading

    monkeypatch.setattr(reading.gunzip, "__kwdefaults__", {"max_bytes": 1000})
    assert any("no items file" in problem for v in verify_paths([place.tree.path]) for problem in v.problems)


def test_a_baseline_changed(place: Place) -> None:
    for path in place.tree.experiment.baselines.glob("*.json"):
        value = json.loads(path.read_bytes())
        if value["evaluation"]["split"] == "report":
            value["evaluation"]["score"] = 1.0
            place.write(path, canonical_json(value) + b"\n")
    found = {v.run_id: v.problems for v in verify_paths([place.tree.path]) if v.of == "run"}
    assert all(any("baselines/" in p and "doesn't give the recorded score" in p for p in ps) for ps in found.values())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("trajectory", 0, "score"), 77.5),
        (("trajectory", 0, "elapsed_s"), 77.5),
        (("baseline_report", "low"), 77.5),
        (("story", "resources", "tokens_in"), 77),
        (("accepted",), 77),
        (("notes",), ["all is well"]),
        (("trajectory",), []),
        (("x",), 1),
    ],
)
@pytest.mark.parametrize("merged", [False, True])
def test_any_figure_of_a_summary_changed(
    place: Place, path: tuple[str | int, ...], value: object, merged: bool
) -> None:
    """Each value of a record is compared, not only the results that every version of it has."""
    summary = (place.tree.experiment if merged else place.run.dir).report / "summary.json"
    record = json.loads(summary.read_text())
    within = next(r for r in record["runs"] if r["run_id"] == place.run.dir.run_id) if merged else record
    for part in path[:-1]:
        within = within[part]
    within[path[-1]] = value
    summary.write_text(json.dumps(record))
    (problem,) = place.shared() if merged else place.problems()
    assert problem.startswith("report/summary.json was altered: ") and str(path[-1]) in problem


@pytest.mark.parametrize(
    ("field", "share", "altered"), [("low", 0.04, 0), ("low", 0.06, 1), ("p_value", 0.02, 0), ("p_value", 0.04, 1)]
)
def test_other_resamples_are_no_alteration(place: Place, field: str, share: float, altered: int) -> None:
    """Another release of scipy may draw others: an interval's end may be off by 5 % of its width, a p value by 0.03."""
    summary = place.run.dir.report / "summary.json"
    gain = json.loads(summary.read_text())["improvement"]
    gain[field] += share * (gain["high"] - gain["low"] if field == "low" else 1.0)
    place.edit(summary, improvement=gain)
    assert len(place.problems()) == altered


@pytest.mark.parametrize(("name", "column"), [("summary.csv", "improvement"), ("leaderboard.csv", None)])
def test_a_figure_changed_in_a_table(place: Place, name: str, column: str | None) -> None:
    path = place.tree.experiment.report / name
    true = path.read_text()
    rows = list(csv.DictReader(io.StringIO(true)))
    column = column or next(c for c in rows[0] if c.endswith("mean") or c == "improvement")
    assert float(rows[0][column]) != 77
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(out.getvalue())  # the same cells with other ends of lines
    assert place.shared() == [] and place.unseen() == []
    path.write_text(out.getvalue().replace(rows[0][column], "77", 1))
    (problem,) = place.shared()
    assert problem.startswith(f"report/{name} was altered: ") and "77" in problem
    for text in (true + "x,1\n", true.split("\n", 1)[0], ""):
        path.write_text(text)
        assert len(place.shared()) == 1
    path.unlink()
    assert place.shared() == [f"report/{name} is missing or can't be read"]


@pytest.mark.parametrize("version", ["0.0.1", None, 7])
def test_a_report_of_another_version_is_not_called_whole(place: Place, version: object) -> None:
    place.edit(place.run.dir.report / "summary.json", tool_version=version)
    assert place.problems() == []
    (summary,) = place.unseen()
    assert summary.startswith("report/summary.json is of another version") and "only its results" in summary
    lines = as_lines(verify_paths([place.tree.path]))
    assert any(line.startswith(f"PARTLY   {place.run.dir.run_id}") for line in lines) and "1 seen in part" in lines[-1]
    place.edit(place.tree.experiment.report / "summary.json", tool_version=version)
    assert any(text.startswith("report/summary.csv is of another version") for text in place.unseen()[:-2])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("flags", ["untrained_copy"]),
        ("contaminated", [{"split": "report", "items": 3, "of": 100, "submission_id": None}]),
        ("contamination_end", {"items": {"report": 3}}),
        ("network", "open"),
        ("sandbox", "bwrap"),
        ("fault", "agent"),
        ("excluded", "foreign_weights"),
    ],
)
def test_what_stands_beside_a_score_is_compared_whatever_the_version(place: Place, name: str, value: object) -> None:
    place.edit(place.run.dir.report / "summary.json", tool_version="0.0.1", **{name: value})
    (problem,) = place.problems()
    assert problem.startswith(f"report/summary.json was altered: `{name}")


def test_a_report_of_a_run_that_goes_on_is_seen_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock moves between two entries."""
    tree = Tree(tmp_path / "exp")
    tree.experiment.code.rmdir()
    run = tree.run().start().clock(30.0)
    report.write_all(report.build([tree.path]), None)
    assert all(verdict.whole for verdict in verify_paths([run.dir.path]))
    run.clock(700.0)
    (verdict,) = verify_paths([run.dir.path])
    assert verdict.problems == [] and not verdict.whole and "not compared" in verdict.unseen[0]


def test_a_chain_written_anew_is_whole_and_the_text_says_so(place: Place) -> None:
    """What nobody can see without an anchor: so the verdict doesn't claim it."""
    place.alter(3, note="another past")
    place.chain_anew(4)
    report.write_all(report.build([place.tree.path]), None)
    assert place.problems() == [] and place.shared() == []
    text = "\n".join(as_lines(verify_paths([place.tree.path])))
    assert "0 anchored" in text and "whoever can write here can also write a new chain" in text
