"""`verify`: recompute each ledger's chain and every hash that it names, and say what this proves.

Sections: experiment.json against experiment.yaml, the altered entry of a broken chain, reports on disk against the ledgers,
weights, scores, and the verdicts of runs and experiments (`verify_paths`, `VerifyResult`).
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError
from autorl_hpc.evidence.anchors import KnownHeads, fit, present, slurm_word, written_heads
from autorl_hpc.files import artifacts, reading
from autorl_hpc.files.checkpoint import (
    EMBEDDING_NAMES,
    HEAD_NAME,
    TensorSpec,
    folder_content_hash,
    hash_span,
    tensors_of,
)
from autorl_hpc.files.faults import again
from autorl_hpc.files.frozen_records import baseline_key, read_baseline, read_experiment, read_run
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.ledger import Ledger, sha256_hex
from autorl_hpc.files.reading import parse_yaml
from autorl_hpc.files.run_view import RunView
from autorl_hpc.files.store import frozen_is_whole
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.entries import Closed, Evaluation
from autorl_hpc.records.exchange import Heads
from autorl_hpc.records.experiment import ExperimentSpec
from autorl_hpc.records.run import ExperimentRecord, RunRecord, Science, ids_sha256
from autorl_hpc.report import tables
from autorl_hpc.report.find import experiments_in, nothing_in, runs_of, runs_on_disk
from autorl_hpc.report.pages import (
    COMPARE_NAME,
    INDEX,
    RUN_PAGE,
    SUMMARY_NAME,
    elsewhere_of,
    merged_summary,
    run_summary,
)
from autorl_hpc.report.run_folder import EMPTIED, left_of_a_run, read_chain
from autorl_hpc.report.run_summary import Library, digest
from autorl_hpc.report.summary import MergedReport, read_paper
from autorl_hpc.report.versus import compare
from autorl_hpc.states import EntryKind, Network, Protocol, RunState, Split

# --- experiment.json against experiment.yaml and run.json
# No chain covers experiment.json, but each chain begins with run.json. What an earlier launch could explain is only a note.

EARLIER = "of an earlier launch, or experiment.json was altered; the chain holds what run.json says"


def check_given(experiment: ExperimentDir, run_ids: Sequence[str], problems: list[str], notes: list[str]) -> None:
    """Add to `problems` what was altered, and to `notes` what could not be checked or has an innocent explanation.

    Raises:
        AutorlError: experiment.json can't be read.
    """
    record = read_experiment(experiment)
    _yaml(experiment, record, problems, notes)
    if record.grader != record.spec.grader:
        problems.append("experiment.json was altered: its `grader` is not that of its `spec`")
    runs = []
    for run_id in run_ids:
        try:
            runs.append(read_run(experiment.run(run_id)))
        except (AutorlError, OSError):
            continue  # reported when that run is verified
    _runs(record.spec, runs, problems, notes)


def _yaml(experiment: ExperimentDir, record: ExperimentRecord, problems: list[str], notes: list[str]) -> None:
    try:
        data = reading.read_bytes(experiment.given)
    except FileNotFoundError:
        notes.append("experiment.yaml is not here, so experiment.json was not held against it")
        return
    except (OSError, ValueError) as error:
        problems.append(f"experiment.yaml can't be read: {error}")
        return
    if hashlib.sha256(data).hexdigest() != record.spec_sha256:
        what = "one of them was altered, or a launch was cut short"
        problems.append(f"experiment.yaml has not the hash that experiment.json names: {what}")
        return
    try:
        spec = parse_record(ExperimentSpec, parse_yaml(data, experiment.given), experiment.given)
    except AutorlError:
        notes.append("experiment.yaml can't be understood, so experiment.json was not held against it")
        return
    here, there = spec.model_dump(mode="json"), record.spec.model_dump(mode="json")
    name = next((name for name in here if here[name] != there[name]), None)
    if name is not None:
        problems.append(f"experiment.json was altered: its `{name}` is not that of experiment.yaml")


def _runs(spec: ExperimentSpec, runs: Sequence[RunRecord], problems: list[str], notes: list[str]) -> None:
    """Compare budget, protocol, network and sandbox of the runs with experiment.json. Each launch adds runs with its own budget,
    protocol and network, so some run must match. The sandbox level is not part of a run's identity: run.json has the first."""
    others = [run.run_id for run in runs if not _as_asked(spec, run)]
    if runs and len(others) == len(runs):
        problems.append("experiment.json was altered: no run has its budget, protocol and network")
    elif others:
        notes.append(f"{others[0]}: run.json has another budget, protocol or network than experiment.json: {EARLIER}")
    level = next((run for run in runs if run.sandbox != spec.sandbox.level), None)
    if level is not None:
        notes.append(
            f"{level.run_id}: run.json asks for sandbox {level.sandbox}, experiment.json for {spec.sandbox.level}: {EARLIER}"
        )


def _as_asked(spec: ExperimentSpec, run: RunRecord) -> bool:
    science = run.science
    network = spec.sandbox.network or (Network.NONE if science.driver == "none" else Network.DRIVER)
    told = "network" in science.model_fields_set  # older records lack it
    return (science.budget, science.protocol, science.network if told else network) == (
        spec.budget,
        spec.protocol,
        network,
    )


# --- which entry of a broken chain was altered: the sealed copy, or the links of later entries, show it

_BREAK = re.compile(r"the chain breaks before ledger entry (\d{6})")


@dataclass(frozen=True)
class _Raw:
    """The file of an entry, unchecked."""

    sha256: str
    prev: object


def first_altered(run: RunDir, ledger: Ledger, said: str) -> str:
    """Return what is wrong with a chain that could not be read to its end, naming the first altered entry if it can be found.

    Args:
        said: the error of `Ledger.read`; returned unchanged if nothing more can be found out.
    """
    found = _BREAK.search(said)
    if found is None:
        return said
    number = int(found[1])
    copy = [sha256_hex(line + b"\n") for line in _sealed(run).split(b"\n") if line]
    entries = [_raw(run, place) for place in range(1, number + 2)]
    for place, (entry, line) in enumerate(zip(entries[:number], copy, strict=False), 1):
        if entry is not None and entry.sha256 != line:
            return (
                f"{said}. The first that differs from ledger.jsonl, written at the end of the run, is entry {place:06d}"
            )
    if len(copy) >= number:  # both entries are unaltered, so the thing that the first one links to was altered
        return (
            f"{said}. ledger.jsonl, written at the end of the run, says that it was run.json" if number == 1 else said
        )
    here, after = entries[number - 1], entries[number]
    if here is None or after is None:
        return said
    before = "run.json" if number == 1 else f"entry {number - 1:06d}"
    altered = before if after.prev == here.sha256 else f"entry {number:06d}"
    return f"{said}. By what entry {number + 1:06d} links to, it was {altered}"


def _sealed(run: RunDir) -> bytes:
    try:
        return reading.read_bytes(run.sealed_ledger)
    except (OSError, ValueError):
        return b""


def _raw(run: RunDir, number: int) -> _Raw | None:
    try:
        data = reading.read_bytes(run.ledger / f"{number:06d}.json")
        value = json.loads(data)
    except (OSError, ValueError, RecursionError):
        return None
    return _Raw(sha256_hex(data), value.get("prev") if isinstance(value, dict) else None)


# --- reports on disk against the ledgers
# A report is what most readers see, and anybody can edit it. Summaries and tables are compared value by value, pages not at all.

RESULTS = (
    *("task", "agent", "base_model", "seed", "protocol", "state", "selected", "selected_by", "counted", "excluded"),
    *("ranked", "sandbox", "network", "flags", "contaminated", "contamination_end.items", "fault", "ended_by"),
    *("damage", "accepted", "failed"),
    *("best_feedback.score", "report.score", "baseline_report.score", "baseline_feedback.score"),
    *("improvement.difference", "improvement.low", "improvement.high", "improvement.p_value"),
)
"""Fields compared whichever version wrote the report. Other fields, and wording, may differ between versions of the package."""

RUN_FILES = (SUMMARY_NAME, "run.md", RUN_PAGE)
MERGED_FILES = (SUMMARY_NAME, "summary.csv", "leaderboard.csv", "summary.md", INDEX)
AGAIN = "write it again: autorl-hpc report"
MAX_BYTES = 1 << 30
TOLERANCE = 1e-6
"""Relative: another machine's arithmetic may differ in the last digit."""


@dataclass
class ReportComparison:
    """The result of comparing a report.

    Attributes:
        unseen: what makes claims but was not compared, so that the report must not be called whole.
    """

    problems: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)


def check_run_report(run: RunDir, *, exported: bool = False) -> ReportComparison:
    """Compare `<run>/report/`, if it exists, of a run whose chain is whole.

    Args:
        exported: the run comes from a bundle, which lacks the inputs of its story; no score depends on these.
    """
    look = ReportComparison()
    told = _told(run.report, RUN_FILES, look)
    if told is None:
        return look
    chain = read_chain(run)
    now = json.loads(run_summary(digest(run, Library(), chain)))
    head, hashes = told.get("ledger_head"), (chain.genesis, *chain.hashes)
    if head != now["ledger_head"] and head in hashes:
        old = len(hashes) - 1 - hashes.index(head)
        look.unseen.append(f"report/{SUMMARY_NAME} was written {old} entries ago: not compared; {AGAIN}")
    elif head != now["ledger_head"]:
        what = "names a head that this ledger never had: one of them was altered"
        look.problems.append(f"report/{SUMMARY_NAME} {what}")
    else:
        if exported:
            told["story"] = now["story"]
        _compare_summary("report/", told, now, look, final=chain.view.closed is not None and not exported)
    return look


def check_merged_report(experiment: ExperimentDir, merged: MergedReport) -> ReportComparison:
    """Compare `report/` of an experiment, if it exists, with the present report of all its runs."""
    look, folder = ReportComparison(), experiment.report
    told = _told(folder, MERGED_FILES, look)
    if told is None:
        return look
    if told.get("paper") is not None:
        merged = merged.model_copy(update={"paper": read_paper()})
    now = json.loads(b"".join(merged_summary(merged)))
    heads = {str(row.get("run_id")): row.get("ledger_head") for row in _rows_of(told)}
    if any(heads.get(run["run_id"]) != run["ledger_head"] for run in now["runs"]):
        old = f"was written before the last entries of its runs: not compared; {AGAIN}"
        look.unseen.append(f"report/{SUMMARY_NAME} {old}")
        return look
    final = all(run.state is RunState.FINISHED for run in merged.runs)
    _compare_summary("report/", told, now, look, final=final)
    version = _version(told)
    for name, table in (("summary.csv", tables.as_csv), ("leaderboard.csv", tables.leaderboard_csv)):
        _compare_table(folder, name, table(merged), version, look, final=final)
    _compare_comparison(folder, merged, version, look, final=final)
    for place, run in enumerate(merged.runs):
        home = RunDir(Path(merged.run_folders[place]))
        elsewhere = elsewhere_of(folder, run.genesis, home)  # written by somebody who could not write into the run
        if elsewhere.is_dir():
            name = f"report/{elsewhere.relative_to(folder)}/"
            mine = _told(elsewhere, RUN_FILES, look, name)
            if mine is not None:
                _compare_summary(name, mine, json.loads(run_summary(run)), look, final=final)
        elif not (home.report / SUMMARY_NAME).exists():
            missing = f"{home.run_id}/report/{SUMMARY_NAME} is missing, though report/{SUMMARY_NAME} is there"
            look.problems.append(missing)
    return look


def _told(folder: Path, files: tuple[str, ...], look: ReportComparison, name: str = "report/") -> dict[str, Any] | None:
    """Return the content of summary.json; None if it does not exist or can't be read."""
    try:
        value = _read(folder / SUMMARY_NAME)
    except (FileNotFoundError, NotADirectoryError):
        left = [page for page in files if (folder / page).exists()]
        look.problems += [f"{name}{SUMMARY_NAME} is missing, though {name}{left[0]} is there"] if left else []
        return None
    except (OSError, ValueError) as error:
        look.problems.append(f"{name}{SUMMARY_NAME} can't be read: {error}")
        return None
    if isinstance(value, dict):
        return value
    look.problems.append(f"{name}{SUMMARY_NAME} was altered: it is no report")
    return None


def _read(path: Path) -> Any:
    try:
        return json.loads(reading.read_bytes(path, max_bytes=MAX_BYTES))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _compare_summary(
    name: str, told: dict[str, Any], now: dict[str, Any], look: ReportComparison, *, final: bool
) -> None:
    """Compare a summary: its results always, all other fields only if the same version wrote it.

    Args:
        final: the report's inputs can't change any more.
    """
    rows = {str(row.get("run_id")): row for row in _rows_of(told)}
    for run in now.get("runs", [now]):
        for result in RESULTS:
            was, is_ = _field(rows.get(run["run_id"], told), result), _field(run, result)
            difference = first_difference(was, is_, result)
            if difference is not None:
                where = f"{run['run_id']}: " if "runs" in now else ""
                look.problems.append(f"{name}{SUMMARY_NAME} was altered: {where}{difference}")
                return
    _say(f"{name}{SUMMARY_NAME}", first_difference(told, now), _version(told), look, final=final)


def _rows_of(told: dict[str, Any]) -> list[dict[str, Any]]:
    rows = told.get("runs")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _compare_table(folder: Path, name: str, text: str, version: object, look: ReportComparison, *, final: bool) -> None:
    """Compare a CSV file cell by cell."""
    try:
        told = _rows(reading.read_bytes(folder / name, max_bytes=MAX_BYTES).decode())
    except (OSError, ValueError, csv.Error):
        look.problems.append(f"report/{name} is missing or can't be read")
        return
    _say(f"report/{name}", first_difference(told, _rows(text)), version, look, final=final)


def _rows(text: str) -> list[dict[str, Any]]:
    return [
        {str(name): _number(cell) for name, cell in row.items()}
        for row in csv.DictReader(io.StringIO(text, newline=""))
    ]


def _number(cell: Any) -> Any:
    try:
        return float(cell)
    except (TypeError, ValueError):
        return cell


def _compare_comparison(
    folder: Path, merged: MergedReport, version: object, look: ReportComparison, *, final: bool
) -> None:
    """Recompute a comparison from the names of its sides and compare."""
    try:
        told = _read(folder / COMPARE_NAME)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        look.problems.append(f"report/{COMPARE_NAME} can't be read: {error}")
        return
    try:
        now = compare(merged, told["a"]["name"], told["b"]["name"])
    except (AutorlError, AttributeError, KeyError, TypeError, ValueError):
        look.unseen.append(f"report/{COMPARE_NAME} names sides that are not in this experiment: not compared")
        return
    _say(
        f"report/{COMPARE_NAME}",
        first_difference(told, json.loads(now.model_dump_json().encode())),
        version,
        look,
        final=final,
    )


def _say(name: str, difference: str | None, version: object, look: ReportComparison, *, final: bool) -> None:
    if version != __version__:
        word = repr(version)[:40] if version is not None else "none that it names"
        look.unseen.append(f"{name} is of another version, {word}: only its results were compared; {AGAIN}")
    elif difference is not None and final:
        look.problems.append(f"{name} was altered: {difference}")
    elif difference is not None:
        look.unseen.append(f"{name} is not what the ledgers give here and now: not compared; {AGAIN}")


def first_difference(told: Any, now: Any, path: str = "") -> str | None:
    """Return the first value that differs, in words; None if all are equal. Numbers are compared with `TOLERANCE`."""
    if isinstance(told, dict) and isinstance(now, dict):
        before = f"{path}." if path else ""
        pairs = [(told.get(name), value, f"{before}{name}") for name, value in now.items()]
        pairs += [(told[name], None, f"{before}{name!a:.60}") for name in told if name not in now]
    elif isinstance(told, list) and isinstance(now, list) and len(told) == len(now):
        pairs = [(a, b, f"{path}[{place}]") for place, (a, b) in enumerate(zip(told, now, strict=True))]
    elif _equal(told, now):
        return None
    else:
        return f"`{path}` is {told!r:.40}, and the ledger gives {now!r:.40}"
    return next((found for pair in pairs if (found := first_difference(*pair)) is not None), None)


def _equal(told: Any, now: Any) -> bool:
    if isinstance(now, float) and isinstance(told, int | float) and not isinstance(told, bool):
        return math.isclose(told, now, rel_tol=TOLERANCE, abs_tol=1e-9)
    return type(told) is type(now) and bool(told == now)


def _version(told: dict[str, Any]) -> object:
    """Return the version of the package that wrote a report; None if not every run in it names the same."""
    named = [one.get("tool_version") for one in (told, *_rows_of(told))]
    return named[0] if all(one == named[0] for one in named) else None


def _field(value: Any, name: str) -> Any:
    """Return a field by its dotted name; None if it is empty or an older version lacks it."""
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return None if value in ([], {}) else value


# --- weights: accepted copies and sketches
# The content hash leaves out a copy of a tied head, and no hash covers the manifest that lists omissions. So this code decides
# what may be left out, not the manifest.

BESIDE = (artifacts.READY_NAME, "refs")
"""Names in an accepted copy that are not weights: its manifest, and the names of the runs that need it."""


def check_kept(experiment: ExperimentDir, run: RunDir, view: RunView, problems: list[str], notes: list[str]) -> None:
    """Add to `problems` what was altered, and to `notes` what is gone and could not be checked."""
    for content in sorted({s.content_hash for s in view.accepted() if s.content_hash}):
        folder = experiment.artifacts / content
        if artifacts.artifact_ready(experiment.artifacts, content):
            problems += _artifact(folder, content)
        elif folder.exists():
            problems.append(f"artifacts/{content[:16]}... has lost its manifest")
        elif view.closed and view.closed.selected and view.submissions[view.closed.selected].content_hash == content:
            notes.append(f"artifacts/{content[:16]}..., the selected checkpoint, is not here: not checked")
    _sketches(run, view, problems, notes)


def _artifact(folder: Path, content: str) -> list[str]:
    name = f"artifacts/{content[:16]}..."
    try:
        strange = [n for n in reading.list_names(folder) if n not in BESIDE and not n.endswith(".safetensors")]
        if strange:
            return [f"{name} was altered: it holds {sorted(strange)[0][:100]!r}, which no accepted copy has"]
        left_out = not_in_hash(folder)
        problem = _left_out(folder, left_out)
        if problem:
            return [f"{name} was altered: {problem}"]
        digest = folder_content_hash(folder, drop=frozenset(left_out))
    except Exception as error:
        return [f"{name} can't be read: {error}"]
    return [] if digest == content else [f"{name} was altered: its content hash is {digest[:16]}..."]


def not_in_hash(folder: Path) -> tuple[str, ...]:
    """Return the tensors that the manifest of an accepted copy leaves out of the content hash."""
    value = reading.read_json_or_none(folder / artifacts.READY_NAME)
    names = value.get("not_in_hash", []) if isinstance(value, dict) else []
    return tuple(str(name) for name in names) if isinstance(names, list) else ()


def _left_out(folder: Path, names: tuple[str, ...]) -> str | None:
    """Return what is wrong with the tensors left out of the hash: only a head equal to the embedding, bit by bit, is allowed."""
    if not names:
        return None
    if set(names) != {HEAD_NAME}:
        other = sorted(set(names) - {HEAD_NAME})[0]
        return f"its manifest leaves tensor {other[:100]!r} out of the content hash"
    tensors = {tensor.name: tensor for tensor in tensors_of(folder)}
    head = tensors.get(HEAD_NAME)
    embedding = next((tensors[name] for name in EMBEDDING_NAMES if name in tensors), None)
    if head is None or embedding is None:
        return f"its manifest leaves out {HEAD_NAME}, and it holds no {HEAD_NAME if head is None else 'embedding'}"
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    if not same or _digest(folder, head) != _digest(folder, embedding):
        return f"{HEAD_NAME}, which the content hash leaves out, is not {embedding.name}"
    return None


def _digest(folder: Path, tensor: TensorSpec) -> str:
    return again(functools.partial(_span, folder / tensor.file, tensor))


def _span(path: Path, tensor: TensorSpec) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return hash_span(fd, tensor.begin, tensor.end)
    finally:
        os.close(fd)


def _sketches(run: RunDir, view: RunView, problems: list[str], notes: list[str]) -> None:
    """Check the sketches of weights that later submissions were compared with. Exported runs have none."""
    lying = reading.list_names(run.sketches)
    gone = 0
    for number, known in sorted(view.fingerprints.items()):
        if known.sketch_sha256 is None:
            continue
        names = [name for name in lying if name.startswith(f"{number:06d}.")]
        gone += not names
        for name in names:
            try:
                digest = hashlib.sha256(reading.read_bytes(run.sketches / name)).hexdigest()
            except (OSError, ValueError) as error:
                problems.append(f"sketches/{name} can't be read: {error}")
                continue
            if digest != known.sketch_sha256:
                problems.append(f"sketches/{name} was altered: its hash is not the one in its fingerprint")
    if gone and lying:
        notes.append(f"{gone} of the sketches that fingerprints name are not here: not checked")


# --- scores: each must belong to the weights that it is filed under, and follow from its items


def check_results(experiment: ExperimentDir, run: RunDir, view: RunView, problems: list[str], notes: list[str]) -> None:
    """Add to `problems` what was altered or is missing, and to `notes` what could not be checked."""
    science = read_run(run).science
    problems += [text for number in view.submissions for text in _is_base(number, view, science)]
    for number, score in view.scores.items():
        problems += _score(experiment, run, number, view, score.evaluation, science)
    if view.closed:
        problems += _closing(experiment, run, view, view.closed, science)
    check_kept(experiment, run, view, problems, notes)


def _is_base(number: int, view: RunView, science: Science) -> list[str]:
    """Check that a submission is marked as the base model if and only if it has the base model's content."""
    submission = view.submissions[number]
    if submission.is_base == (submission.content_hash == science.base_model_content_hash):
        return []
    said = (
        "is called the base model and has other" if submission.is_base else "is not called the base model and has its"
    )
    return [f"submission {number:06d} {said} content"]


def _score(
    experiment: ExperimentDir, run: RunDir, number: int, view: RunView, evaluation: Evaluation, science: Science
) -> list[str]:
    """Check that a score is of the submission's content; a base model's must be the shared measurement, never one of its own."""
    submission = view.submissions.get(number)
    if submission is None or submission.status != "accepted":
        return [f"a score is of submission {number:06d}, which was not accepted"]
    name = f"the score of submission {number:06d} on the {evaluation.split} split"
    if (evaluation.content_hash, evaluation.recipe_hash) != (submission.content_hash, science.recipe.hash()):
        return [f"{name} is one of other weights or of another recipe"]
    if submission.is_base:
        return _of_base(experiment, evaluation, science, name)
    if evaluation.items_sha256 is None:
        return [] if evaluation.score is None else [f"{name} names no items file"]
    scored = view.score_of(submission)  # under the paper's protocol the feedback score is also the report score
    filed = scored.submission_id if scored and science.protocol is Protocol.PAPER else number
    path = run.items / f"{filed:06d}.{evaluation.split}.jsonl.gz"
    return _items(path, f"items/{path.name}", evaluation, science)


def _closing(experiment: ExperimentDir, run: RunDir, view: RunView, closed: Closed, science: Science) -> list[str]:
    """Check the closing entry's score and the base model's scores that it names."""
    problems = []
    for key in sorted({key for key in (closed.baseline_feedback, closed.baseline_report) if key}):
        problems += _baseline(experiment, key, science, closed.baseline_sha256.get(key))
    report = closed.report
    if report is not None and report.split is not Split.REPORT:
        problems.append(f"the closing entry's score is one of the {report.split} split")
    if closed.selected is None:
        if report is None:
            return problems
        beside = _beside(closed, report, science)
        return problems + (
            beside or _of_base(experiment, report, science, "the closing entry's score of the base model")
        )
    if report is None:
        return [*problems, "the closing entry selects a submission and has no score of it"]
    problems += _score(experiment, run, closed.selected, view, report, science)
    submission = view.submissions.get(closed.selected)
    if (
        submission and submission.is_base and science.protocol is not Protocol.PAPER
    ):  # the paper's protocol has the feedback score
        problems += _beside(closed, report, science)
    return problems


def _beside(closed: Closed, report: Evaluation, science: Science) -> list[str]:
    """Check that a run that ends with the base model has its score by the engine of the record named with it."""
    name = "the closing entry's score of the base model"
    if closed.baseline_report is None:
        return [f"{name} is beside no record of the base model's score"]
    if report.engine_hash is None or closed.baseline_report != baseline_key(science, Split.REPORT, report.engine_hash):
        return [f"{name} is not of the record that is named beside it"]
    return []


def _of_base(experiment: ExperimentDir, evaluation: Evaluation, science: Science, name: str) -> list[str]:
    """Check that a score of the base model equals, field by field, the record of its measurement by that engine."""
    if evaluation.engine_hash is None or str(evaluation.split) not in science.splits:
        return [f"{name} names no measurement of the base model"]
    key = baseline_key(science, evaluation.split, evaluation.engine_hash)
    record = read_baseline(experiment.baselines, key)
    if record is None:
        return [f"{name} is of baselines/{key[:16]}..., which is missing or can't be read"]
    if record.evaluation != evaluation:
        same = (
            "that score, with other facts" if record.evaluation.score == evaluation.score else record.evaluation.score
        )
        return [f"{name} is {evaluation.score}, and not what baselines/{key[:16]}... says: {same}"]
    return _baseline(experiment, key, science, None)


def _items(path: Path, name: str, evaluation: Evaluation, science: Science) -> list[str]:
    """Check an items file: it has the recorded hash, its outcomes give the score, and its items are the recorded part."""
    try:
        data = reading.read_bytes(path)
    except FileNotFoundError:
        return [f"{name} is missing"]
    except (OSError, ValueError) as error:
        return [f"{name} can't be read: {error}"]
    if hashlib.sha256(data).hexdigest() != evaluation.items_sha256:
        return [f"{name} was altered: its hash is not the one in the record of its score"]
    try:
        rows = [json.loads(line) for line in reading.gunzip(data).splitlines()]
        outcomes = [float(row["outcome"]) for row in rows]
        ids = [str(row["id"]) for row in rows]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return [f"{name} is no items file: {type(error).__name__}"]
    recorded = evaluation.metrics.get("mean_outcome", evaluation.score)
    if (
        len(outcomes) != evaluation.n
        or not outcomes
        or recorded is None
        or not math.isclose(100 * math.fsum(outcomes) / len(outcomes), recorded, abs_tol=1e-6)
    ):
        return [f"{name} doesn't give the recorded score {recorded}"]
    part = science.part(evaluation.split)
    if part is not None and ids_sha256(ids) != part.sha256:
        return [f"{name} is not of the {part.n} items of the {evaluation.split} split that run.json names"]
    return []


def _baseline(experiment: ExperimentDir, key: str, science: Science, sha256: str | None) -> list[str]:
    """Check the base model's score that the run is compared with: hash in the closing entry, key and items."""
    record = read_baseline(experiment.baselines, key)
    if record is None:
        return [f"baselines/{key[:16]}... is missing or can't be read"]
    if sha256 is not None and record.digest() != sha256:
        return [f"baselines/{key[:16]}... was altered: its hash is not the closing entry's"]
    problems = []
    evaluation = record.evaluation
    if (
        record.key != key
        or str(evaluation.split) not in science.splits
        or baseline_key(science, evaluation.split, record.engine.digest()) != key
        or evaluation.engine_hash != record.engine.digest()
        or evaluation.content_hash != science.base_model_content_hash
        or evaluation.recipe_hash != science.recipe.hash()
    ):
        problems.append(f"baselines/{key[:16]}... is not the measurement that its key names")
    path = experiment.baselines / f"{key}.items.jsonl.gz"
    if not path.exists():
        return [*problems, f"baselines/{key[:16]}... has no items file"]
    return [*problems, *_items(path, f"baselines/{key[:16]}...items.jsonl.gz", evaluation, science)]


NOTE = (
    "A whole chain shows that nothing was altered after the head was known elsewhere. It proves tampering only if this "
    "head was kept outside the account that holds the runs; whoever can write here can also write a new chain."
)
ANCHORED_NOTE = (
    "An anchor shows that what it covers is as it was when the anchor was made: as far as the account that holds the runs "
    "could not write the anchor too. It says nothing about what was done before."
)
SHARED = "experiment.json and code"
"""The name of the verdict on what an experiment's runs share."""

EXPECTED = "--expect"
"""The name of the verdict on a head passed with `--expect` that was not found."""

MAY_COME_LATE = (EntryKind.ATTEMPT_STARTED, EntryKind.ATTEMPT_ENDED, EntryKind.FINGERPRINT, EntryKind.CONTAMINATION)
"""Entries that may follow the closing: an attempt that Slurm started late, and checks that run apart from scoring."""


@dataclass
class VerifyResult:
    """The verdict on one run, or on what an experiment's runs share.

    Attributes:
        unseen: what was not compared: not known to be damaged, but not whole either.
        hashes: of a run, the hashes of run.json and of each entry that could be read.
        anchored_by: outside records that prove the chain.
    """

    run_id: str
    of: Literal["run", "experiment"] = "run"
    experiment: str = ""
    entries: int = 0
    head: str | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    anchored_by: list[str] = field(default_factory=list)
    hashes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the run_id, or experiment and verdict name."""
        return self.run_id if self.of == "run" else f"{self.experiment}: {self.run_id}"

    @property
    def damaged(self) -> bool:
        return bool(self.problems)

    @property
    def whole(self) -> bool:
        return not self.problems and not self.unseen

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of `--json`."""
        return {
            "of": self.of,
            "experiment": self.experiment,
            "run_id": self.run_id,
            "entries": self.entries,
            "head": self.head,
            "whole": self.whole,
            "problems": self.problems,
            "unseen": self.unseen,
            "notes": self.notes,
            "anchored": not self.damaged and bool(self.anchored_by),
            "anchored_by": self.anchored_by,
            "note": ANCHORED_NOTE if self.anchored_by else NOTE,
        }


def verify_paths(paths: Sequence[Path], known: KnownHeads = KnownHeads()) -> list[VerifyResult]:  # noqa: B008  frozen, and empty
    """Return the verdicts on all runs in `paths` (runs, experiments, or folders of them) and on what each experiment shares.

    Raises:
        AutorlError: a path does not exist or holds nothing to verify.
    """
    verdicts: list[VerifyResult] = []
    open_heads = set(known.expected)
    for path in paths:
        if (path / "run.json").is_file():
            experiment = ExperimentDir(path.absolute().parent)
            verdict = verify_run(experiment, RunDir(path.absolute()))
            _anchor(experiment, None, [verdict], known, open_heads)
            verdicts.append(verdict)
            continue
        before = len(verdicts)
        for experiment in experiments_in([path]):
            verdicts += verify_experiment(experiment, known, open_heads)
        if len(verdicts) == before:
            raise nothing_in(path)
    for head in sorted(open_heads):
        problem = f"no run or experiment here has, or had, the head {head}: it was altered since, or is another one's"
        verdicts.append(
            VerifyResult(f"{EXPECTED} {head[:16]}...", of="experiment", experiment="expected", problems=[problem])
        )
    return verdicts


def verify_experiment(
    experiment: ExperimentDir,
    known: KnownHeads = KnownHeads(),  # noqa: B008
    open_heads: set[str] | None = None,
) -> list[VerifyResult]:
    """Check experiment.json, the frozen code and every run; a damaged run does not stop the others.

    Args:
        open_heads: heads of `known.expected` that no chain had so far; those found here are removed from it.
    """
    run_ids, damage = runs_of(experiment)
    shared = VerifyResult(SHARED, of="experiment", experiment=experiment.path.absolute().name)
    if damage is not None:
        shared.problems.append(damage)
    else:
        unlisted = sorted(set(runs_on_disk(experiment)) - set(run_ids))
        shared.problems += [f"{run_id} lies here, and experiment.json doesn't name it" for run_id in unlisted]
        run_ids = [*run_ids, *unlisted]
        check_given(experiment, run_ids, shared.problems, shared.notes)
        if experiment.code.is_dir():
            _check_code(experiment, run_ids, shared)
        elif run_ids:
            shared.notes.append("code/ is not here, so the code that ran was not checked")
        else:
            return []
    runs = [verify_run(experiment, experiment.run(run_id)) for run_id in run_ids]
    _anchor(experiment, shared, runs, known, open_heads if open_heads is not None else set(known.expected))
    if damage is None and not any(run.damaged for run in runs):
        _check_report(experiment, shared)
    return [shared, *runs]


def _check_code(experiment: ExperimentDir, run_ids: list[str], verdict: VerifyResult) -> None:
    """Check that the frozen code has the hash in its name, and that every run.json names it."""
    wanted = read_experiment(experiment).code_hash
    name = f"code/{wanted[:16]}..."
    if not (experiment.code / wanted).is_dir():
        verdict.problems.append(f"{name} is missing")
        return
    try:
        if not frozen_is_whole(experiment, wanted):
            verdict.problems.append(f"{name} was altered: its content no longer has the hash that it is named by")
    except OSError as error:
        verdict.problems.append(f"{name} can't be read: {error}")
    for run_id in run_ids:
        named = reading.read_json_or_none(experiment.run(run_id).record)
        if isinstance(named, dict) and named.get("code_hash") != wanted:
            verdict.problems.append(f"experiment.json names {name}, and {run_id}/run.json names other code")


def verify_run(experiment: ExperimentDir, run: RunDir, *, exported: bool = False) -> VerifyResult:
    """Check one run: chain, run.json, sealed copy, items files, accepted copies, sketches, report.

    Args:
        exported: the run comes from a bundle, which has no pages.
    """
    verdict = VerifyResult(run.run_id, experiment=experiment.path.absolute().name)
    ledger = Ledger(run)
    try:
        record = read_run(run)
        if record.run_id != run.run_id or record.science.run_id() != run.run_id:
            verdict.problems.append(
                f"run.json doesn't belong to this folder: its fields give {record.science.run_id()}"
            )
        ledger.read()
    except AutorlError as error:
        verdict.problems.append(first_altered(run, ledger, error.what))
    except OSError as error:
        verdict.problems.append(str(error))
    verdict.entries = len(ledger.entries)
    try:
        verdict.hashes = (ledger.genesis(), *(linked.sha256 for linked in ledger.entries))
    except (OSError, ValueError):
        pass  # run.json can't be read, which is reported above
    if not verdict.problems:
        verdict.head = ledger.head()
        _check_closing(experiment, run, ledger, verdict)
        _check_sealed(run, ledger, verdict)
        check_results(experiment, run, RunView.of(ledger.entries), verdict.problems, verdict.notes)
    if not verdict.problems:
        look = check_run_report(run, exported=exported)
        verdict.problems += look.problems
        verdict.unseen += look.unseen
    return verdict


def _check_closing(experiment: ExperimentDir, run: RunDir, ledger: Ledger, verdict: VerifyResult) -> None:
    """Check the end of the chain. A shortened chain is valid in itself, but the grader's mark of a finished run shows it; a
    lengthened one is too, but only a few kinds of entries are ever written after the closing."""
    closed = next((i for i, linked in enumerate(ledger.entries) if linked.kind is EntryKind.CLOSED), None)
    if closed is None:
        if run.run_id in reading.list_names(experiment.finished):
            verdict.problems.append(
                f"finished, but its ledger has no closing entry: entries after {len(ledger.entries):06d} are missing"
            )
        return
    for linked in ledger.entries[closed + 1 :]:
        if linked.kind not in MAY_COME_LATE:
            verdict.problems.append(
                f"ledger entry {linked.entry.seq:06d} ({linked.kind}) was added after the closing entry {closed + 1:06d}"
            )
            return


def _check_sealed(run: RunDir, ledger: Ledger, verdict: VerifyResult) -> None:
    if not ledger.entries and (left := left_of_a_run(run)) is not None:
        verdict.problems.append(EMPTIED.format(left))
    if not run.sealed_ledger.exists():
        return
    lines = [line for line in reading.read_bytes(run.sealed_ledger).split(b"\n") if line]
    if not lines:
        verdict.problems.append("ledger.jsonl is empty")
        return
    if not reading.list_names(run.ledger):
        return
    for number, (line, linked) in enumerate(zip(lines, ledger.entries, strict=False), 1):
        if hashlib.sha256(line + b"\n").hexdigest() != linked.sha256:
            verdict.problems.append(f"ledger.jsonl line {number} differs from ledger entry {number:06d}")
            return
    if len(lines) > len(ledger.entries):
        verdict.problems.append(
            f"ledger entry {len(ledger.entries) + 1:06d} stands in ledger.jsonl and is missing from ledger/"
        )
    elif RunView.of(ledger.entries).closed and len(lines) < len(ledger.entries) and not _only_late(ledger, len(lines)):
        verdict.problems.append(f"ledger.jsonl lacks entry {len(lines) + 1:06d}")


def _only_late(ledger: Ledger, count: int) -> bool:
    """Return whether the entries after the first `count` all follow the closing: late entries are no damage."""
    return RunView.of(ledger.entries[:count]).closed is not None


def _check_report(experiment: ExperimentDir, verdict: VerifyResult) -> None:
    from autorl_hpc.report.report import build

    if not experiment.report.is_dir():
        return
    try:
        merged = build([experiment.path])
    except AutorlError as error:
        verdict.unseen.append(f"report/ was not compared: {error.what}")
        return
    look = check_merged_report(experiment, merged)
    verdict.problems += look.problems
    verdict.unseen += look.unseen


def _anchor(
    experiment: ExperimentDir,
    shared: VerifyResult | None,
    runs: list[VerifyResult],
    known: KnownHeads,
    open_heads: set[str],
) -> None:
    """Compare the chains with outside records of their heads, including heads.json.

    Args:
        shared: the experiment's own verdict; None if its runs are verified one by one.
    """
    chains = {run.run_id: run.hashes for run in runs if run.hashes}
    now = present(experiment, chains)
    before, damage = written_heads(experiment)
    if damage is not None:
        (shared or runs[0]).problems.append(damage)
    fits = False
    if before is not None:
        fits = _hold(before, "heads.json", chains, shared, runs)
    if shared is not None:
        shared.head, shared.entries = now.head, sum(run.entries for run in runs)
        word = slurm_word(experiment, now, before if fits else None)
        shared.problems += [word.problem] if word.problem else []
        shared.notes += [word.note] if word.note else []
        if word.fits:
            _proven(word.fits, shared, runs)
    for head in known.expected:
        if _expected(head, now if shared is not None else None, before if fits else None, shared, runs):
            open_heads.discard(head)
    mine = [anchor for anchor in known.anchors if anchor.heads.experiment == experiment.path.absolute().name]
    for anchor in mine:
        source = f"the anchor of {anchor.made_at}"
        _hold(anchor.heads, source, chains, shared, runs)
        held = fit(anchor.heads, chains, source).since
        _proven(f"{source} (second user's key)", None, [run for run in runs if run.run_id in held])
    if known.anchors and not mine:
        (shared or runs[0]).notes.append("the anchors file says nothing of it")


def _hold(
    heads: Heads, source: str, chains: dict[str, tuple[str, ...]], shared: VerifyResult | None, runs: list[VerifyResult]
) -> bool:
    """Add to each run's verdict whether it fits these heads; return True if all do."""
    by_id = {run.run_id: run for run in runs}
    found = fit(heads, chains, source)
    for run_id, problem in found.problems.items():
        if run_id in by_id:
            by_id[run_id].problems.append(problem)
        elif shared is not None:
            shared.problems.append(f"{run_id}: {problem}")
    for run_id, count in found.since.items():
        if count:
            by_id[run_id].notes.append(f"{count} entries were added since {source}")
    looked_at = set(by_id) if shared is None else {run.run_id for run in heads.runs}
    return not looked_at & set(found.problems)


def _proven(by: str, shared: VerifyResult | None, runs: list[VerifyResult]) -> None:
    for verdict in (*([shared] if shared else []), *runs):
        if by not in verdict.anchored_by:
            verdict.anchored_by.append(by)


def _expected(
    head: str, now: Heads | None, before: Heads | None, shared: VerifyResult | None, runs: list[VerifyResult]
) -> bool:
    """Return whether a head passed by the user is, or was, that of the experiment or of a run; mark the verdicts it anchors."""
    by = f"the head that you gave, {head[:16]}..."
    if any(heads is not None and heads.head.startswith(head) for heads in (now, before)):
        _proven(by, shared, runs)
        return True
    for run in runs:
        place = next((i for i, entry in enumerate(run.hashes) if entry.startswith(head)), None)
        if place is not None:
            _proven(by, None, [run])
            if place < len(run.hashes) - 1:
                run.notes.append(f"{len(run.hashes) - 1 - place} entries were added since the head that you gave")
            return True
    return False


def as_lines(verdicts: list[VerifyResult]) -> list[str]:
    """Return the verdicts as text lines."""
    lines = []
    for verdict in verdicts:
        chain = (
            f"  {verdict.entries} entries  head {verdict.head or '-'}" if verdict.of == "run" or verdict.head else ""
        )
        word = "DAMAGED" if verdict.damaged else "whole  " if verdict.whole else "PARTLY "
        lines.append(f"{word}  {verdict.name}{chain}")
        anchored = [] if verdict.damaged else [f"anchored by {by}" for by in verdict.anchored_by]
        lines += [f"         {text}" for text in (*verdict.problems, *verdict.unseen, *verdict.notes, *anchored)]
    runs = [verdict for verdict in verdicts if verdict.of == "run"]
    counts = f"{len(runs)} runs, {sum(verdict.damaged for verdict in runs)} damaged"
    shared = sum(verdict.damaged for verdict in verdicts if verdict.of == "experiment")
    counts += f"; {shared} damaged in {SHARED}" if shared else ""
    partly = sum(not verdict.damaged and not verdict.whole for verdict in verdicts)
    counts += f"; {partly} seen in part" if partly else ""
    anchored_runs = sum(not run.damaged and bool(run.anchored_by) for run in runs)
    worth = f"{anchored_runs} anchored. {ANCHORED_NOTE if anchored_runs else NOTE}"
    if 0 < anchored_runs < len(runs):
        worth += f" Of the others: {NOTE}"
    lines += ["", f"{counts}. {worth}"]
    return lines
