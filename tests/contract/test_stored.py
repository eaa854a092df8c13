"""Stored experiments of schema version 1 are read, verified and reported as they were when they were made."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable
from typing import Any

import pytest
from contract import HERE, Place, Stored, listing, rows, split_text, visible, without_routes

NAMES = ("finished", "damaged", "interrupted", "slurm", "driver")
each = pytest.mark.parametrize(
    "stored", [pytest.param(name, marks=pytest.mark.xdist_group(f"contract-{name}")) for name in NAMES], indirect=True
)
Check = Callable[[str, Any], None]


def masked(stored: Stored, value: Any) -> Any:
    return json.loads(stored.place.mask(json.dumps(value, ensure_ascii=False)))


@each
def test_status(stored: Stored, check: Check) -> None:
    """States, scores, budget left, heads, faults and flags of each run; what waits; what is damaged."""
    check(f"{stored.name}/status.json", masked(stored, stored.status))


@each
def test_verify(stored: Stored, check: Check) -> None:
    check(f"{stored.name}/verify.json", masked(stored, stored.verdicts))


@each
def test_summary(stored: Stored, check: Check) -> None:
    """Every figure of summary.json, which `report --json` prints too."""
    written = json.loads((stored.folder / "report" / "summary.json").read_text())
    assert written == stored.reported
    routes: dict[str, Any] = {}
    if stored.name == "damaged":  # its whole runs are those of `finished`
        runs = {
            run["run_id"]: [run["state"], run["counted"], run["excluded"], run["damage"]] for run in written["runs"]
        }
        boards = without_routes(written["boards"], routes)
        written = {"runs": runs, "boards": boards, "excluded": written["excluded"], "left_out": written["left_out"]}
    check(f"{stored.name}/summary.json", masked(stored, without_routes(written, routes)))
    check(f"{stored.name}/routes/summary.json", routes)


@each
def test_tables(stored: Stored, check: Check) -> None:
    for name in ("leaderboard", "summary")[: 1 if stored.name == "damaged" else 2]:
        routes: dict[str, Any] = {}
        check(f"{stored.name}/{name}.csv.json", without_routes(rows(stored.folder / "report" / f"{name}.csv"), routes))
        check(f"{stored.name}/routes/{name}.csv.json", routes)


@each
def test_pages(stored: Stored, check: Check) -> None:
    """What a reader sees: the merged page as HTML and Markdown, and each run's page as Markdown. One run's HTML says the same."""
    report = stored.folder / "report"
    texts = {"index.html": visible((report / "index.html").read_text()), "summary.md": lines(report / "summary.md")}
    pages = sorted(stored.folder.glob("*/report/run.md"))
    for number, page in enumerate(pages):
        if stored.name != "damaged" and not re.search(r"-s[2-9]-", page.parts[-3]):
            name = re.sub(r"-[0-9a-f]{8}$", "", page.parts[-3])
            texts[f"{name}.md"] = lines(page)
            if number == len(pages) - 1:
                texts[f"{name}.html"] = visible(page.with_suffix(".html").read_text())
    for name, text in texts.items():
        rest, routes = split_text([stored.place.mask(line) for line in text])
        check(f"{stored.name}/{name}.txt", rest)
        check(f"{stored.name}/routes/{name}.txt", routes)


def lines(path: Any) -> list[str]:
    """The lines of a Markdown file, white space folded, without empty ones and rules of tables."""
    found = [" ".join(line.split()) for line in path.read_text().splitlines()]
    return [line for line in found if line.strip("|:- ")]


@each
def test_what_a_report_writes(stored: Stored, check: Check) -> None:
    """The report's files, and nothing else in the experiment's folder is added, changed or removed."""
    with tarfile.open(HERE / "experiments" / f"{stored.name.replace('damaged', 'finished')}.tar.xz") as packed:
        was = {m.name: packed.extractfile(m) for m in packed.getmembers() if m.isfile() and m.name.startswith("runs/")}
        for name, file in was.items() if stored.name != "damaged" else ():
            assert file is not None and (stored.place.path / name).read_bytes() == file.read(), name
    check(f"{stored.name}/written.json", sorted(set(listing(stored.folder)) - set(stored.before)))
    assert set(stored.before) <= set(listing(stored.folder))


@pytest.mark.parametrize("stored", ["slurm"], indirect=True)
@pytest.mark.xdist_group("contract-slurm")
def test_reported_again(stored: Stored, check: Check) -> None:
    """A second report says the same, with nothing changed and with all read again; `verify` compares it and prints what it saw."""
    for option in ((), ("--fresh",)):
        assert stored.place.facts("report", stored.folder, "--quiet", "--no-figures", *option) == stored.reported, (
            option
        )
    check("slurm/verify-reported.json", masked(stored, stored.place.facts("verify", stored.folder)))
    for command in ("status", "verify", "report"):
        done = stored.place.run(command, stored.folder, *(["--no-figures"] if command == "report" else []))
        assert done.returncode == 0, done.stderr
        check(f"slurm/printed/{command}.txt", stored.place.mask(done.stdout + done.stderr))
    summary = next(stored.folder.glob("*/report/summary.json"))
    before = summary.read_bytes()
    summary.write_bytes(re.sub(rb'"attempts": \d+', b'"attempts": 77', before, count=1))
    altered = stored.place.facts("verify", stored.folder, code=1)
    summary.write_bytes(before)  # other tests read it
    assert [verdict["run_id"] for verdict in altered if not verdict["whole"]] == [summary.parts[-3]], altered


@pytest.mark.parametrize("stored", ["finished"], indirect=True)
@pytest.mark.xdist_group("contract-finished")
@pytest.mark.parametrize("sides", [("sft", "stumbler"), ("copycat", "null")])
def test_compare(stored: Stored, check: Check, sides: tuple[str, str]) -> None:
    """Two agents against each other: differences, intervals and tests, as JSON and Markdown."""
    out = stored.place.path / "-".join(sides)
    found = stored.place.facts("report", stored.folder, "--compare", *sides, "--out", out, "--no-figures")
    assert json.loads((out / "compare.json").read_text()) == found
    routes: dict[str, Any] = {}
    check(f"finished/compare/{out.name}.json", masked(stored, without_routes(found, routes)))
    rest, _ = split_text(lines(out / "compare.md"))
    check(f"finished/compare/{out.name}.md.txt", rest)
    assert "compare.html" in listing(out)


def test_several_experiments(place: Place, check: Check) -> None:
    """Runs of several experiments in one report: one leaderboard for each set of conditions."""
    for name in ("slurm", "driver", "interrupted"):
        place.unpack(name)
    place.facts("report", "runs", "--quiet", "--no-figures", "--out", "all")
    found: dict[str, Any] = {}
    check("several/leaderboard.csv.json", without_routes(rows(place.path / "all" / "leaderboard.csv"), found))
    summary = json.loads((place.path / "all" / "summary.json").read_text())
    check("several/boards.json", [each["conditions"] for each in without_routes(summary, found)["boards"]])


def test_heads_and_anchors(place: Place) -> None:
    """A head that was kept and a signature still prove the stored ledgers, and no others."""
    folder = place.unpack("slurm")
    head = place.facts("status", folder)[0]["head"]
    (place.path / "key").write_text("0123456789abcdef0123456789abcdef")
    (place.path / "key").chmod(0o600)
    assert place.run("verify", folder, "--expect", head).returncode == 0
    assert place.run("verify", folder, "--expect", "0" * 64).returncode == 1
    assert place.run("anchor", folder, "--key", "key", "--out", "anchors").returncode == 0
    verdicts = place.facts("verify", folder, "--anchors", "anchors", "--key", "key")
    assert all(verdict["anchored"] for verdict in verdicts if verdict["of"] == "run"), verdicts
    last = max((folder / "heads.json").parent.glob("*sparse*s0*/ledger/0*.json"))
    last.unlink()
    assert place.run("verify", folder, "--anchors", "anchors", "--key", "key").returncode == 1
