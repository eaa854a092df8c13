"""`verify`: recompute each ledger's chain and every hash that it names, and say what this proves."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError
from autorl_hpc.evidence.anchors import Hashes, KnownHeads, fit, slurm_word
from autorl_hpc.files import artifacts, reading
from autorl_hpc.files.checkpoint import EMBEDDING_NAMES, HEAD_NAME, folder_content_hash, hash_span, tensors_of
from autorl_hpc.files.frozen_records import baseline_key, read_baseline, read_experiment, read_run
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.ledger import Ledger, heads_of, read_heads, sha256_hex
from autorl_hpc.files.progress import tracked
from autorl_hpc.files.queue import claimed_entries, waiting
from autorl_hpc.files.reading import parse_yaml
from autorl_hpc.files.run_view import RunView
from autorl_hpc.files.store import frozen_is_whole
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.entries import Closed, Evaluation
from autorl_hpc.records.exchange import Heads, RunHead
from autorl_hpc.records.experiment import ExperimentSpec
from autorl_hpc.records.run import RunRecord, Science, ids_sha256
from autorl_hpc.report import tables
from autorl_hpc.report.find import experiments_in, nothing_in, runs_of, runs_on_disk
from autorl_hpc.report.leaderboard import MAX_TWINS
from autorl_hpc.report.pages import SUMMARY_NAME, merged_summary, run_summary
from autorl_hpc.report.report import build
from autorl_hpc.report.run_folder import (
    EMPTIED,
    IN_DOUBT,
    Marks,
    left_of_a_run,
    marks_of,
    read_chain,
    same_runs,
    unlike_the_seal,
)
from autorl_hpc.report.run_summary import digest
from autorl_hpc.report.summary import read_paper
from autorl_hpc.states import EntryKind, Network, Protocol, RunState, Split

NOTE = (
    "A whole chain shows that nothing was altered after the head was known elsewhere. It proves tampering only if this "
    "head was kept outside the account that holds the runs; whoever can write here can also write a new chain."
)
ANCHORED_NOTE = (
    "An anchor shows that what it covers is as it was when the anchor was made: as far as the account that holds the runs "
    "could not write the anchor too. It says nothing about what was done before."
)
SHARED = "experiment.json and code"  # The name of the verdict on what an experiment's runs share

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
    marks: Marks = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return not self.problems and not self.unseen

    def unreadable(self, error: OSError, where: Path) -> None:
        """Note what can't be read: another user's file is not checked, any other failure counts as damage."""
        what = f"{error.filename or where} can't be read: {error.strerror or error}"
        (self.unseen if isinstance(error, PermissionError) else self.problems).append(what)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of `--json`."""
        fields = ("of", "experiment", "run_id", "entries", "head", "whole", "problems", "unseen", "notes")
        return {
            **{name: getattr(self, name) for name in fields},
            "anchored": not self.problems and bool(self.anchored_by),
            "anchored_by": self.anchored_by,
            "note": ANCHORED_NOTE if self.anchored_by else NOTE,
        }


def as_lines(verdicts: list[VerifyResult]) -> list[str]:
    """Return the verdicts as text lines."""
    lines = []
    for verdict in verdicts:
        word = "DAMAGED" if verdict.problems else "whole  " if verdict.whole else "PARTLY "
        name = verdict.run_id if verdict.of == "run" else f"{verdict.experiment}: {verdict.run_id}"
        chain = f"  {verdict.entries} entries  head {verdict.head or '-'}"
        lines.append(f"{word}  {name}{chain if verdict.of == 'run' or verdict.head else ''}")
        anchored = [] if verdict.problems else [f"anchored by {by}" for by in verdict.anchored_by]
        lines += [f"         {text}" for text in (*verdict.problems, *verdict.unseen, *verdict.notes, *anchored)]
    runs = [verdict for verdict in verdicts if verdict.of == "run"]
    counts = f"{len(runs)} runs, {sum(bool(run.problems) for run in runs)} damaged"
    if shared := sum(bool(verdict.problems) for verdict in verdicts if verdict.of == "experiment"):
        counts += f"; {shared} damaged in {SHARED}"
    if partly := sum(bool(verdict.unseen) and not verdict.problems for verdict in verdicts):
        counts += f"; {partly} seen in part"
    anchored_runs = sum(not run.problems and bool(run.anchored_by) for run in runs)
    notes = [
        ANCHORED_NOTE if anchored_runs else NOTE,
        *([f"Of the others: {NOTE}"] if 0 < anchored_runs < len(runs) else []),
    ]
    return [*lines, "", f"{counts}. {anchored_runs} anchored. {' '.join(notes)}"]


# --- runs and experiments


def verify_paths(paths: Sequence[Path], known: KnownHeads = KnownHeads()) -> list[VerifyResult]:  # noqa: B008  frozen, and empty
    """Return the verdicts on all runs in `paths` (runs, experiments, or folders of them) and on what each experiment shares. What is
    closed to this user is named.

    Raises:
        AutorlError: a path does not exist or holds nothing to verify.
    """
    verdicts: list[VerifyResult] = []
    found: set[str] = set()
    for path in paths:
        before = len(verdicts)
        try:
            is_run = (path / "run.json").is_file()
        except PermissionError as error:
            verdicts.append(_closed(path, error))
            continue
        if is_run:
            experiment = ExperimentDir(path.absolute().parent)
            verdicts.append(verify_run(experiment, RunDir(path.absolute())))
            found |= _check_anchors(experiment, None, verdicts[-1:], known)
            continue
        with suppress(AutorlError):  # there is none: what is there may be closed
            for experiment in experiments_in([path]):
                verdicts += _verify_experiment(experiment, known, found)
        verdicts += _closed_in(path)
        if len(verdicts) == before:
            raise nothing_in(path)
    for head in sorted(set(known.expected) - found):
        problem = f"no run or experiment here has, or had, the head {head}: it was altered since, or is another one's"
        verdicts.append(VerifyResult(f"--expect {head[:16]}...", "experiment", "expected", problems=[problem]))
    name_same_runs(verdicts)
    return verdicts


def _closed_in(path: Path) -> Iterator[VerifyResult]:
    """Yield a verdict for each folder in `path`, a folder of experiments, that is closed to this user."""
    folders = [path]
    for folder in folders:
        try:
            names = reading.list_names(folder)
            if folder == path and "experiment.json" not in names:
                folders += [path / name for name in names]
        except NotADirectoryError:
            continue
        except OSError as error:
            yield _closed(folder, error)


def _closed(folder: Path, error: OSError) -> VerifyResult:
    verdict = VerifyResult(SHARED, "experiment", folder.absolute().name)
    verdict.unreadable(error, folder)
    return verdict


def name_same_runs(verdicts: Sequence[VerifyResult]) -> None:
    """Note at each run with which others it shares what only one run can have. Copies of one run.json are no other runs."""
    known = list({one.hashes[0]: one for one in reversed(verdicts) if one.hashes}.values())
    for one, twins in zip(known, same_runs([each.marks for each in known]), strict=True):
        for twin, shared in list(twins.items())[:MAX_TWINS]:
            other = f"{known[twin].experiment}/{known[twin].run_id}"
            one.notes.append(f"the same run twice: {', '.join(shared)} as {other}: neither ranks")


def _verify_experiment(experiment: ExperimentDir, known: KnownHeads, found: set[str]) -> list[VerifyResult]:
    """Check experiment.json, the frozen code and every run; add the heads of `known.expected` that were found to `found`."""
    run_ids, damage = runs_of(experiment)
    shared = VerifyResult(SHARED, "experiment", experiment.path.absolute().name)
    try:
        if damage is not None:
            shared.problems.append(damage)
        else:
            unlisted = sorted(set(runs_on_disk(experiment)) - set(run_ids))
            shared.problems += [f"{run_id} lies here, and experiment.json doesn't name it" for run_id in unlisted]
            run_ids = [*run_ids, *unlisted]
            _check_given(experiment, run_ids, shared)
            if experiment.code.is_dir():
                shared.problems += _code(experiment, run_ids)
            elif run_ids:
                shared.notes.append("code/ is not here, so the code that ran was not checked")
            else:
                return []
    except OSError as error:
        shared.unreadable(error, experiment.path)
    runs = [verify_run(experiment, experiment.run(run_id)) for run_id in tracked(run_ids, "verifying runs")]
    found |= _check_anchors(experiment, shared, runs, known)
    if damage is None and all(run.hashes and not run.problems for run in runs) and experiment.report.is_dir():
        _check_merged_report(experiment, shared, {run.run_id: run.hashes for run in runs})
    return [shared, *runs]


def _code(experiment: ExperimentDir, run_ids: list[str]) -> Iterator[str]:
    wanted = read_experiment(experiment).code_hash
    name = f"code/{wanted[:16]}..."
    if not (experiment.code / wanted).is_dir():
        yield f"{name} is missing"
        return
    if not frozen_is_whole(experiment, wanted):
        yield f"{name} was altered: its content no longer has the hash that it is named by"
    for run_id in run_ids:
        named = reading.read_json_or_none(experiment.run(run_id).record)
        if isinstance(named, dict) and named.get("code_hash") != wanted:
            yield f"experiment.json names {name}, and {run_id}/run.json names other code"


def verify_run(experiment: ExperimentDir, run: RunDir, *, exported: bool = False) -> VerifyResult:
    """Check one run: chain, run.json, sealed copy, items files, accepted copies, sketches, report. `exported`: the run
    comes from a bundle, which has no pages and lacks the inputs of the run's story."""
    verdict = VerifyResult(run.run_id, experiment=experiment.path.absolute().name)
    ledger = Ledger(run)
    try:
        _check_run(experiment, run, ledger, verdict, exported)
    except AutorlError as error:
        verdict.problems.append(_first_altered(run, error.what))
    except OSError as error:
        verdict.unreadable(error, run.path)
        if exported:
            verdict.problems += verdict.unseen
    verdict.entries = len(ledger.entries)
    with suppress(OSError, ValueError):  # run.json can't be read, which is reported above
        verdict.hashes = (ledger.genesis(), *(linked.sha256 for linked in ledger.entries))
    return verdict


def _check_run(experiment: ExperimentDir, run: RunDir, ledger: Ledger, verdict: VerifyResult, exported: bool) -> None:
    reading.list_names(run.path)  # raises if it is closed to this user
    record = read_run(run)
    if record.run_id != run.run_id or record.science.run_id() != run.run_id:
        what = f"run.json doesn't belong to this folder: its fields give {record.science.run_id()}"
        verdict.problems.append(what)
    ledger.read()
    if verdict.problems:
        return
    verdict.head = ledger.head()
    view = RunView.of(ledger.entries)
    verdict.problems += list(_end_of_chain(experiment, run, ledger)) or list(_outlived(experiment, run))
    if not exported:
        verdict.problems += [f"{one}: see the run's seal" for one in unlike_the_seal(run, view.sealed)]
    verdict.problems += _sealed_copy(run, ledger)
    verdict.problems += _Scores(experiment, run, view, record.science).problems()
    verdict.marks = marks_of(run, view, ledger.entries)
    _check_weights(experiment, run, view, verdict)
    if not verdict.problems:
        _check_run_report(run, verdict, exported)


# --- chains


def _end_of_chain(experiment: ExperimentDir, run: RunDir, ledger: Ledger) -> Iterator[str]:
    """A shortened chain is valid in itself, but the grader's mark of a finished run shows it; a lengthened one is too, but only
    a few kinds of entries are ever written after the closing."""
    closed = _place_of_closing(ledger)
    if closed is None:
        if run.run_id in reading.list_names(experiment.finished):
            last = f"entries after {len(ledger.entries):06d} are missing"
            yield f"finished, but its ledger has no closing entry: {last}"
        return
    late = next((linked for linked in ledger.entries[closed + 1 :] if linked.kind not in MAY_COME_LATE), None)
    if late is not None:
        yield f"ledger entry {late.entry.seq:06d} ({late.kind}) was added after the closing entry {closed + 1:06d}"


def _outlived(experiment: ExperimentDir, run: RunDir) -> Iterator[str]:
    """Yield items files that an open chain doesn't name, though no grader works on them: its end was cut off, with all that says so."""
    items = reading.list_names(run.items)
    due = {*waiting(experiment.queue), *claimed_entries(experiment.claims)}
    view = RunView.of(Ledger(run).read())  # last: what was committed meanwhile is no longer due
    if view.closed is not None:
        return
    scored = {(number, str(one.evaluation.split)) for number, one in view.scores.items()}
    closing = view.sealed is not None and f"c-{run.run_id}" in due
    for name in items:
        number, split, *_ = [*name.split("."), ""]
        works = f"f-{run.run_id}--{number}" in due or (closing and split == Split.REPORT)
        if number.isdigit() and (int(number), split) not in scored and not works:
            yield f"items/{name} is there, and the ledger has no score by it: its last entries are missing"


def _place_of_closing(ledger: Ledger) -> int | None:
    return next((place for place, linked in enumerate(ledger.entries) if linked.kind is EntryKind.CLOSED), None)


def _sealed_copy(run: RunDir, ledger: Ledger) -> Iterator[str]:
    if not ledger.entries and (left := left_of_a_run(run)) is not None:
        yield EMPTIED.format(left)
    if not run.sealed_ledger.exists() or (not reading.list_names(run.ledger) and ledger.entries):
        return  # there is no copy, or it was read in place of the entries
    lines, entries = _sealed_hashes(run), [linked.sha256 for linked in ledger.entries]
    closed = _place_of_closing(ledger)
    if not lines:
        yield "ledger.jsonl is empty"
    elif (place := _first_difference(lines, entries)) is not None:
        yield f"ledger.jsonl line {place} differs from ledger entry {place:06d}"
    elif len(lines) > len(entries):
        yield f"ledger entry {len(entries) + 1:06d} is in ledger.jsonl but missing from ledger/"
    elif closed is not None and closed >= len(lines):  # later entries are no damage
        yield f"ledger.jsonl lacks entry {len(lines) + 1:06d}"


def _sealed_hashes(run: RunDir) -> list[str]:
    return [sha256_hex(line + b"\n") for line in reading.read_bytes(run.sealed_ledger).split(b"\n") if line]


def _first_difference(one: Sequence[str], other: Sequence[str]) -> int | None:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False), 1) if a != b), None)


def _first_altered(run: RunDir, said: str) -> str:
    """Return `said`, the error of `Ledger.read`, with the side of a broken link that the sealed copy shows to be altered."""
    found = re.search(r"the chain breaks before ledger entry (\d{6})", said)
    with suppress(OSError, ValueError):
        copy = _sealed_hashes(run) if found is not None else []
        paths = [run.ledger / f"{place:06d}.json" for place in range(1, int(found[1]) + 1 if found else 1)]
        place = _first_difference(copy, [sha256_hex(reading.read_bytes(path)) for path in paths])
        if place is not None:
            return (
                f"{said}. The first that differs from ledger.jsonl, written at the end of the run, is entry {place:06d}"
            )
        if copy and len(paths) == 1:
            return f"{said}. ledger.jsonl, written at the end of the run, says that it was run.json"
    return said


# --- scores: each must belong to the weights that it is filed under, and follow from its items


@dataclass(frozen=True)
class _Scores:
    experiment: ExperimentDir
    run: RunDir
    view: RunView
    science: Science

    def problems(self) -> Iterator[str]:
        reading.list_names(self.experiment.baselines)  # raises if they are closed to this user
        for number, submission in self.view.submissions.items():
            if submission.is_base != (submission.content_hash == self.science.base_model_content_hash):
                called = "called the base model and has other"
                said = called if submission.is_base else "not called the base model and has its"
                yield f"submission {number:06d} is {said} content"
        for number, score in self.view.scores.items():
            yield from self._score(number, score.evaluation)
        if self.view.closed:
            yield from self._closing(self.view.closed)

    def _score(self, number: int, evaluation: Evaluation) -> Iterator[str]:
        """Check that a score is of the submission's content; a base model's must be the shared measurement, never one of its own."""
        submission = self.view.submissions.get(number)
        name = f"the score of submission {number:06d} on the {evaluation.split} split"
        if submission is None or submission.status != "accepted":
            yield f"a score is of submission {number:06d}, which was not accepted"
            return
        wanted = (submission.content_hash, self.science.recipe.hash())
        if (evaluation.content_hash, evaluation.recipe_hash) != wanted:
            yield f"{name} is one of other weights or of another recipe"
        elif not self._asked_alike(evaluation):
            yield f"{name} is one of other prompts than the base model's"
        elif submission.is_base:
            yield from self._of_base(evaluation, name)
        elif evaluation.items_sha256 is not None:
            scored = self.view.score_of(submission)  # the paper's protocol has one score, of the feedback split
            filed = scored.submission_id if scored and self.science.protocol is Protocol.PAPER else number
            path = self.run.items / f"{filed:06d}.{evaluation.split}.jsonl.gz"
            yield from self._items(path, f"items/{path.name}", evaluation)
        elif evaluation.score is not None:
            yield f"{name} names no items file"

    def _key(self, evaluation: Evaluation) -> str | None:
        """Return the key of the base model's record by the engine of this score; None if the score names none."""
        if evaluation.engine_hash is None or str(evaluation.split) not in self.science.splits:
            return None
        return baseline_key(self.science, evaluation.split, evaluation.engine_hash)

    def _asked_alike(self, evaluation: Evaluation) -> bool:
        """Return whether a score names prompts, and these are the ones that the same engine asked the base model. Older
        versions named none."""
        if evaluation.score is None or (key := self._key(evaluation)) is None:
            return True
        base = read_baseline(self.experiment.baselines, key)
        there = base.evaluation.prompts_sha256 if base and base.evaluation.split is evaluation.split else None
        if self.science.base_model_prompting_hash is None and None in (there, evaluation.prompts_sha256):
            return True  # launched by an older version, and perhaps gone on with by this one
        return evaluation.prompts_sha256 is not None and there in (None, evaluation.prompts_sha256)

    def _closing(self, closed: Closed) -> Iterator[str]:
        for key in sorted({key for key in (closed.baseline_feedback, closed.baseline_report) if key}):
            yield from self._baseline(key, closed.baseline_sha256.get(key))
        report = closed.report
        if report is None:
            if closed.selected is not None:
                yield "the closing entry selects a submission and has no score of it"
            return
        if report.split is not Split.REPORT:
            yield f"the closing entry's score is one of the {report.split} split"
        if closed.selected is not None:
            yield from self._score(closed.selected, report)
            submission = self.view.submissions.get(closed.selected)
            if not (submission and submission.is_base and self.science.protocol is not Protocol.PAPER):
                return
        # A run that ends with the base model has its score by the engine of the record named with it.
        name = "the closing entry's score of the base model"
        if closed.baseline_report is None:
            yield f"{name} is beside no record of the base model's score"
        elif closed.baseline_report != self._key(report):
            yield f"{name} is not of the record that is named beside it"
        elif closed.selected is None:
            yield from self._of_base(report, name)

    def _of_base(self, evaluation: Evaluation, name: str) -> Iterator[str]:
        """Check that a score of the base model equals, field by field, the record of its measurement by that engine."""
        if (key := self._key(evaluation)) is None:
            yield f"{name} names no measurement of the base model"
            return
        record = read_baseline(self.experiment.baselines, key)
        if record is None or record.evaluation == evaluation:
            yield from self._baseline(key, None)
        else:
            true = record.evaluation.score
            same = "that score, with other facts" if true == evaluation.score else true
            yield f"{name} is {evaluation.score}, and not what baselines/{key[:16]}... says: {same}"

    def _baseline(self, key: str, sha256: str | None) -> Iterator[str]:
        """Check a record of the base model's score: its hash in the closing entry, key and items."""
        record, name = read_baseline(self.experiment.baselines, key), f"baselines/{key[:16]}..."
        if record is None:
            yield f"{name} is missing or can't be read"
            return
        if sha256 is not None and record.digest() != sha256:
            yield f"{name} was altered: its hash is not the closing entry's"
            return
        evaluation, engine = record.evaluation, record.engine.digest()
        facts = (record.key, evaluation.engine_hash, evaluation.content_hash, evaluation.recipe_hash)
        wanted = (key, engine, self.science.base_model_content_hash, self.science.recipe.hash())
        if facts != wanted or self._key(evaluation) != key:
            yield f"{name} is not the measurement that its key names"
        yield from self._items(self.experiment.baselines / f"{key}.items.jsonl.gz", f"{name}items.jsonl.gz", evaluation)

    def _items(self, path: Path, name: str, evaluation: Evaluation) -> Iterator[str]:
        """Check an items file: it has the recorded hash, its outcomes give the score, and its items are the recorded part."""
        try:
            data = reading.read_bytes(path)
            if sha256_hex(data) != evaluation.items_sha256:
                yield f"{name} was altered: its hash is not the one in the record of its score"
                return
            rows = read_rows(name, data)
        except FileNotFoundError:
            yield f"{name} is missing"
            return
        except ValueError as error:
            yield str(error)
            return
        recorded = evaluation.metrics.get("mean_outcome", evaluation.score)
        counted = [row.outcome for row in rows if row.outcome is not None]
        mean = 100 * math.fsum(counted) / len(counted) if counted else math.nan
        if len(rows) != evaluation.n or recorded is None or not math.isclose(mean, recorded, abs_tol=1e-6):
            yield f"{name} doesn't give the recorded score {recorded}"
            return
        part = self.science.part(evaluation.split)
        if part is not None and ids_sha256([row.item_id for row in rows]) != part.sha256:
            yield f"{name} is not of the {part.n} items of the {evaluation.split} split that run.json names"


class ItemRow(NamedTuple):
    """One item of an items file."""

    item_id: str
    outcome: float | None  # None: its judge or metric failed
    output_sha256: str


def read_rows(name: str, data: bytes) -> list[ItemRow]:
    """Parse an items file. Raises ValueError: it is not an items file."""
    try:
        values = [json.loads(line) for line in reading.gunzip(data).splitlines()]
        return [
            ItemRow(
                str(row["id"]),
                None if row["outcome"] is None else float(row["outcome"]),
                str(row["output_sha256"]),
            )
            for row in values
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{name} is not an items file: {type(error).__name__}") from None


# --- weights: accepted copies and sketches
# The content hash leaves out a copy of a tied head, and no hash covers the manifest that lists omissions. So this code decides
# what may be left out, not the manifest.

BESIDE = (artifacts.READY_NAME, "refs")
"""Names in an accepted copy that are not weights: its manifest, and the names of the runs that need it."""


def _check_weights(experiment: ExperimentDir, run: RunDir, view: RunView, verdict: VerifyResult) -> None:
    selected = view.submissions.get(view.closed.selected) if view.closed and view.closed.selected else None
    for content in sorted({s.content_hash for s in view.accepted() if s.content_hash}):
        folder, name = experiment.artifacts / content, f"artifacts/{content[:16]}..."
        if artifacts.artifact_ready(experiment.artifacts, content):
            try:
                problem = _altered(folder, content)
            except PermissionError:
                raise
            except Exception as error:
                problem = f"can't be read: {error}"
            verdict.problems += [f"{name} {problem}"] if problem else []
        elif folder.exists():
            verdict.problems.append(f"{name} has lost its manifest")
        elif selected is not None and selected.content_hash == content:
            verdict.notes.append(f"{name}, the selected checkpoint, is not here: not checked")
    known = {f"{number:06d}": one.sketch_sha256 for number, one in view.fingerprints.items() if one.sketch_sha256}
    for name in reading.list_names(run.sketches):
        wanted = known.get(name.partition(".")[0])
        if wanted is not None and sha256_hex(reading.read_bytes(run.sketches / name)) != wanted:
            verdict.problems.append(f"sketches/{name} was altered: its hash is not the one in its fingerprint")


def _altered(folder: Path, content: str) -> str | None:
    """Return what is wrong with an accepted copy. Only a head equal to the embedding, bit by bit, may be left out of its hash."""
    strange = [n for n in reading.list_names(folder) if n not in BESIDE and not n.endswith(".safetensors")]
    if strange:
        return f"was altered: it holds {min(strange)[:100]!r}, which no accepted copy has"
    left_out = not_in_hash(folder)
    if other := set(left_out) - {HEAD_NAME}:
        return f"was altered: its manifest leaves tensor {min(other)[:100]!r} out of the content hash"
    if left_out:
        tensors = {tensor.name: tensor for tensor in tensors_of(folder)}
        embedding = next((name for name in EMBEDDING_NAMES if name in tensors), None)
        if embedding is None or HEAD_NAME not in tensors:
            missing = "embedding" if HEAD_NAME in tensors else HEAD_NAME
            return f"was altered: its manifest leaves out {HEAD_NAME}, and it holds no {missing}"
        facts = []
        for tensor in (tensors[HEAD_NAME], tensors[embedding]):
            with open(folder / tensor.file, "rb") as file:
                facts.append((tensor.dtype, tensor.shape, hash_span(file.fileno(), tensor.begin, tensor.end)))
        if facts[0] != facts[1]:
            return f"was altered: {HEAD_NAME}, which the content hash leaves out, is not {embedding}"
    found = folder_content_hash(folder, drop=frozenset(left_out))
    return None if found == content else f"was altered: its content hash is {found[:16]}..."


def not_in_hash(folder: Path) -> tuple[str, ...]:
    """Return the tensors that the manifest of an accepted copy leaves out of the content hash."""
    value = reading.read_json_or_none(folder / artifacts.READY_NAME)
    names = value.get("not_in_hash", []) if isinstance(value, dict) else []
    return tuple(str(name) for name in names) if isinstance(names, list) else ()


# --- reports on disk against the ledgers
# A report is what most readers see, and anybody can edit it. summary.json and tables are compared value by value; pages, which are
# made of it, are not.

RESULTS = (
    *("task", "agent", "base_model", "seed", "protocol", "state", "selected", "selected_by", "counted", "excluded"),
    *("ranked", "sandbox", "network", "flags", "contaminated", "contamination_end.items", "fault", "ended_by"),
    *("damage", "accepted", "failed"),
    *("best_feedback.score", "report.score", "baseline_report.score", "baseline_feedback.score"),
    *("improvement.difference", "improvement.low", "improvement.high", "improvement.p_value"),
)
"""Fields compared whichever version wrote the report. Other fields, and wording, may differ between versions of the package."""

AGAIN = "write it again: autorl-hpc report"
MAX_BYTES = 1 << 30
TOLERANCE = 1e-6  # Relative: another machine's arithmetic may differ in the last digit

RESAMPLED_WIDTHS, RESAMPLED_P = 0.05, 0.03
"""How far an interval's end (in widths of the interval) and a p value may be off: another release of numpy or scipy may draw
other resamples, and 10,000 of them leave ends and p values that uncertain (four standard errors)."""


def _summary(folder: Path, verdict: VerifyResult) -> dict[str, Any] | None:
    """Return the content of summary.json; None if there is none to compare."""
    try:
        value = json.loads(reading.read_bytes(folder / SUMMARY_NAME, max_bytes=MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        left = sorted(path.name for path in folder.glob("*") if path.suffix in (".csv", ".html"))
        verdict.problems += [f"report/{SUMMARY_NAME} is missing, though report/{left[0]} is there"] if left else []
        return None
    except PermissionError as error:
        verdict.unreadable(error, folder)
        return None
    except (OSError, ValueError, RecursionError) as error:
        value = str(error)
    if isinstance(value, dict):
        return value
    verdict.problems.append(f"report/{SUMMARY_NAME} was altered: it is no report")
    return None


def _compare(name: str, told: Any, now: Any, verdict: VerifyResult, *, final: bool) -> None:
    """Compare all values of a file. `final`: the report's inputs can't change any more."""
    if (found := difference(told, now)) is not None and final:
        verdict.problems.append(f"report/{name} was altered: {found}")
    elif found is not None:
        what = "is not what the ledgers give here and now: not compared"
        verdict.unseen.append(f"report/{name} {what}; {AGAIN}")


def _cells(text: str) -> list[dict[str, Any]]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    return [{str(name): _number(cell) for name, cell in row.items()} for row in rows]


def _number(cell: Any) -> Any:
    try:
        return float(cell)
    except (TypeError, ValueError):
        return cell


def _results_differ(told: dict[str, Any], now: dict[str, Any], verdict: VerifyResult, where: str = "") -> bool:
    """Compare what no version may tell otherwise; say so if another version wrote the rest, and return whether to stop there."""
    found, version = difference(told, now, RESULTS), told.get("tool_version")
    if found is not None:
        verdict.problems.append(f"report/{SUMMARY_NAME} was altered: {where}{found}")
    elif version != __version__:
        word = repr(version)[:40] if version is not None else "none that it names"
        what = f"report/{SUMMARY_NAME} is of another version, {word}: only its results were compared; {AGAIN}"
        verdict.unseen.append(what)
    return found is not None or version != __version__


def _check_run_report(run: RunDir, verdict: VerifyResult, exported: bool) -> None:
    if (told := _summary(run.report, verdict)) is None:
        return
    chain = read_chain(run)
    now = json.loads(run_summary(digest(run, chain, unpacked=exported)))
    if told.get("ledger_head") == now["ledger_head"]:
        if exported:  # no score depends on the story, which a bundle lacks; a doubt may rest on it
            verdict.notes += [f"{IN_DOUBT}{doubt}" for doubt in now["doubts"]]
            excused = now["doubts"] and told.get("ranked") is False
            told |= {name: now[name] for name in ("story", "doubts", *(("notes", "ranked") if excused else ()))}
        if not _results_differ(told, now, verdict):
            _compare(SUMMARY_NAME, told, now, verdict, final=chain.view.closed is not None and not exported)
    elif told.get("ledger_head") in (chain.genesis, *chain.hashes):
        verdict.unseen.append(f"report/{SUMMARY_NAME} was written before the last entries: not compared; {AGAIN}")
    else:
        what = "names a head that this ledger never had: one of them was altered"
        verdict.problems.append(f"report/{SUMMARY_NAME} {what}")


def _check_merged_report(experiment: ExperimentDir, verdict: VerifyResult, chains: Hashes) -> None:
    if (told := _summary(experiment.report, verdict)) is None:
        return
    rows = {str(row.get("run_id")): row for row in told.get("runs") or () if isinstance(row, dict)}
    strange = [name for name in rows.keys() & chains.keys() if rows[name].get("ledger_head") not in chains[name]]
    if strange:
        what = f"names a head of {min(strange)} that its ledger never had: one of them was altered"
        verdict.problems.append(f"report/{SUMMARY_NAME} {what}")
        return
    try:
        merged = build([experiment.path])
    except AutorlError as error:
        verdict.unseen.append(f"report/ was not compared: {error.what}")
        return
    if told.get("paper") is not None:
        merged = merged.model_copy(update={"paper": read_paper()})
    now = json.loads(merged_summary(merged))
    if any(rows.get(run["run_id"], {}).get("ledger_head") != run["ledger_head"] for run in now["runs"]):
        verdict.unseen.append(f"report/{SUMMARY_NAME} was written before the last entries: not compared; {AGAIN}")
        return
    if any(_results_differ(rows[run["run_id"]], run, verdict, f"{run['run_id']}: ") for run in now["runs"]):
        return
    final = all(run.state is RunState.FINISHED for run in merged.runs)
    _compare(SUMMARY_NAME, told, now, verdict, final=final)
    for name, text in (("summary.csv", tables.as_csv(merged)), ("leaderboard.csv", tables.leaderboard_csv(merged))):
        try:
            rows_told = _cells(reading.read_bytes(experiment.report / name, max_bytes=MAX_BYTES).decode())
        except (OSError, ValueError, csv.Error):
            verdict.problems.append(f"report/{name} is missing or can't be read")
        else:
            _compare(name, rows_told, _cells(text), verdict, final=final)


def difference(told: Any, now: Any, fields: tuple[str, ...] = ()) -> str | None:
    """Return the first value that differs, in words; None if all are equal. `fields`: dotted names of the only ones compared."""
    there, here = dict(_flat(told)), dict(_flat(now))
    for path in dict.fromkeys((*here, *there)):
        if fields and not any(re.match(rf"{re.escape(name)}([.\[]|$)", path) for name in fields):
            continue
        if not _equal(there.get(path), here.get(path), _slack(here, path)):
            return f"`{ascii(path)[1:-1]:.120}` is {there.get(path)!r:.40}, and the ledger gives {here.get(path)!r:.40}"
    return None


def _flat(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested objects and lists with their paths, such as `groups[0].mean`; nothing for what is empty."""
    waiting = [("", value)]
    while waiting:
        path, here = waiting.pop()
        if isinstance(here, dict):
            waiting += [(f"{path}.{name}" if path else str(name), inner) for name, inner in reversed(here.items())]
        elif isinstance(here, list):
            waiting += [(f"{path}[{place}]", inner) for place, inner in reversed(list(enumerate(here)))]
        else:
            yield path, here


def _slack(now: dict[str, Any], path: str) -> float:
    """Return how far a figure may be off because of other resamples."""
    if re.search(r"(^|[._])p(_value|_holm)?$", path):
        return RESAMPLED_P
    if not path.endswith(("low", "high")):
        return 0.0
    low, high = (now.get(re.sub(r"(low|high)$", end, path)) for end in ("low", "high"))
    width = high - low if isinstance(low, float) and isinstance(high, float) else 0.0
    return RESAMPLED_WIDTHS * width if math.isfinite(width) else 0.0


def _equal(told: Any, now: Any, slack: float) -> bool:
    if isinstance(now, float) and isinstance(told, int | float) and not isinstance(told, bool):
        return math.isclose(told, now, rel_tol=TOLERANCE, abs_tol=max(slack, 1e-9))
    return type(told) is type(now) and bool(told == now)


# --- experiment.json against experiment.yaml and run.json
# No chain covers experiment.json, but each chain begins with run.json. What an earlier launch could explain is only a note.

EARLIER = "of an earlier launch, or experiment.json was altered; the chain holds what run.json says"


def _check_given(experiment: ExperimentDir, run_ids: Sequence[str], verdict: VerifyResult) -> None:
    record = read_experiment(experiment)
    _check_yaml(experiment, record.spec, record.spec_sha256, verdict)
    if record.grader != record.spec.grader:
        verdict.problems.append("experiment.json was altered: its `grader` is not that of its `spec`")
    runs = []
    for run_id in run_ids:
        with suppress(AutorlError, OSError):  # reported when that run is verified
            runs.append(read_run(experiment.run(run_id)))
    others = [run.run_id for run in runs if not _as_asked(record.spec, run)]
    if runs and len(others) == len(runs):
        verdict.problems.append("experiment.json was altered: no run has its budget, protocol and network")
    elif others:  # each launch adds runs with its own ones
        what = "run.json has another budget, protocol or network than experiment.json"
        verdict.notes.append(f"{others[0]}: {what}: {EARLIER}")
    level = record.spec.sandbox.level
    other = next((run for run in runs if run.sandbox != level), None)  # not part of a run's identity
    if other is not None:
        what = f"run.json asks for sandbox {other.sandbox}, experiment.json for {level}"
        verdict.notes.append(f"{other.run_id}: {what}: {EARLIER}")


def _check_yaml(experiment: ExperimentDir, given: ExperimentSpec, sha256: str, verdict: VerifyResult) -> None:
    try:
        data = reading.read_bytes(experiment.given)
        if sha256_hex(data) != sha256:
            what = "one of them was altered, or a launch was cut short"
            verdict.problems.append(f"experiment.yaml has not the hash that experiment.json names: {what}")
            return
        spec = parse_record(ExperimentSpec, parse_yaml(data, experiment.given, strict=False), experiment.given)
    except (FileNotFoundError, AutorlError) as error:
        why = "can't be understood" if isinstance(error, AutorlError) else "is not here"
        verdict.notes.append(f"experiment.yaml {why}, so experiment.json was not held against it")
        return
    here, there = spec.model_dump(mode="json"), given.model_dump(mode="json")
    name = next((name for name in here if here[name] != there[name]), None)
    if name is not None:
        verdict.problems.append(f"experiment.json was altered: its `{name}` is not that of experiment.yaml")


def _as_asked(spec: ExperimentSpec, run: RunRecord) -> bool:
    science = run.science
    network = spec.sandbox.network or (Network.NONE if science.driver == "none" else Network.DRIVER)
    named = science.network if "network" in science.model_fields_set else network  # older records lack it
    return (science.budget, science.protocol, named) == (spec.budget, spec.protocol, network)


# --- anchors: outside records of heads, and heads.json


def _check_anchors(
    experiment: ExperimentDir, shared: VerifyResult | None, runs: list[VerifyResult], known: KnownHeads
) -> set[str]:
    """Compare with heads.json, Slurm's comment, signed anchors and expected heads; return the expected heads that were found.

    Args:
        shared: the experiment's own verdict; None if its runs are verified one by one.
    """
    chains = {run.run_id: run.hashes for run in runs if run.hashes}
    every = [*([shared] if shared else []), *runs]
    heads: list[Heads] = []
    try:
        before = read_heads(experiment)
        if before is not None and _hold(before, "heads.json", shared, runs):
            heads.append(before)
    except OSError as error:
        every[0].unreadable(error, experiment.heads)
    except (AutorlError, ValueError) as error:
        every[0].problems.append(f"heads.json can't be read: {error}")
    if shared is not None:
        present = (RunHead(run_id=name, entries=len(chain) - 1, head=chain[-1]) for name, chain in chains.items())
        heads.append(heads_of(experiment, present))
        shared.head, shared.entries = heads[-1].head, sum(run.entries for run in runs)
        kind, text = slurm_word(experiment, heads) or ("", "")
        shared.problems += [text] if kind == "problem" else []
        shared.notes += [text] if kind == "note" else []
        if kind == "fits":
            _prove(text, every)
    mine = [one for one in known.anchors if one.heads.experiment == experiment.path.absolute().name]
    for anchor in mine:
        source = f"the anchor of {anchor.made_at}"
        _hold(anchor.heads, source, shared, runs)
        held = fit(anchor.heads, chains, source)[1]
        _prove(f"{source} (second user's key)", [run for run in runs if run.run_id in held])
    if known.anchors and not mine:
        every[0].notes.append("the anchors file says nothing of it")
    found = set()
    for head in known.expected:
        by = f"the head that you gave, {head[:16]}..."
        if any(one.head.startswith(head) for one in heads):
            _prove(by, every)
            found.add(head)
            continue
        for run in runs:
            later = next((n for n, entry in enumerate(reversed(run.hashes)) if entry.startswith(head)), None)
            if later is not None:
                _prove(by, [run])
                run.notes += [f"{later} entries were added since the head that you gave"] if later else []
                found.add(head)
                break
    return found


def _hold(heads: Heads, source: str, shared: VerifyResult | None, runs: list[VerifyResult]) -> bool:
    """Add to each run's verdict whether it fits these heads; return True if all do."""
    by_id = {run.run_id: run for run in runs}
    problems, since = fit(heads, {run.run_id: run.hashes for run in runs if run.hashes}, source)
    for run_id, problem in problems.items():
        if run_id in by_id and (by_id[run_id].hashes or by_id[run_id].whole):
            by_id[run_id].problems.append(problem)
        elif run_id not in by_id and shared is not None:
            shared.problems.append(f"{run_id}: {problem}")
    for run_id, count in since.items():
        by_id[run_id].notes += [f"{count} entries were added since {source}"] if count else []
    return not (problems.keys() if shared is not None else problems.keys() & by_id.keys())


def _prove(by: str, verdicts: list[VerifyResult]) -> None:
    for verdict in verdicts:
        if by not in verdict.anchored_by:
            verdict.anchored_by.append(by)
