"""`verify`: re-computes each ledger's chain and every hash that it names, and says what the proof is worth."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.frozen import frozen_is_whole
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.records import read_experiment, read_run
from autorl_hpc.files.view import RunView
from autorl_hpc.records.evidence import Heads
from autorl_hpc.report.anchors import Known, fit, present, slurm_word, written_heads
from autorl_hpc.report.broken import first_altered
from autorl_hpc.report.chain import EMPTIED, left_of_a_run
from autorl_hpc.report.given import check_given
from autorl_hpc.report.places import experiments_in, nothing_in, runs_of, runs_on_disk
from autorl_hpc.report.results import check_results
from autorl_hpc.report.written import check_merged_report, check_run_report
from autorl_hpc.states import EntryKind

NOTE = (
    "A whole chain shows that nothing was altered after the head was known elsewhere. It proves tampering only if this "
    "head was kept outside the account that holds the runs; whoever can write here can also write a new chain."
)
ANCHORED_NOTE = (
    "An anchor shows that what it covers is as it was when the anchor was made: as far as the account that holds the runs "
    "could not write the anchor too. It says nothing about what was done before."
)
SHARED = "experiment.json and code"
"""The name of the verdict on what the runs of an experiment share."""

EXPECTED = "--expect"
"""The name of the verdict on a head that was given and not found."""

MAY_COME_LATE = (EntryKind.ATTEMPT_STARTED, EntryKind.ATTEMPT_ENDED, EntryKind.FINGERPRINT, EntryKind.CONTAMINATION)
"""Entries that may follow the closing: an attempt that Slurm started late, looks off the critical path."""


@dataclass
class Verdict:
    """The result for one run, or for what the runs of an experiment share.

    Attributes:
        unseen: what lies here and was not compared: neither damaged, as far as can be seen, nor whole.
        hashes: of a run, those of run.json and of each entry that could be read.
        anchored_by: what proves it from outside.
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
        """For people."""
        return self.run_id if self.of == "run" else f"{self.experiment}: {self.run_id}"

    @property
    def damaged(self) -> bool:
        return bool(self.problems)

    @property
    def whole(self) -> bool:
        return not self.problems and not self.unseen

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
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


def verify_paths(paths: Sequence[Path], known: Known = Known()) -> list[Verdict]:  # noqa: B008  frozen, and empty
    """Verdicts of all runs in `paths` (runs, experiments, or folders of them), and of what each experiment shares.

    Raises:
        AutorlError: one of the paths is not there or holds nothing to verify.
    """
    verdicts: list[Verdict] = []
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
            Verdict(f"{EXPECTED} {head[:16]}...", of="experiment", experiment="expected", problems=[problem])
        )
    return verdicts


def verify_experiment(
    experiment: ExperimentDir,
    known: Known = Known(),  # noqa: B008
    open_heads: set[str] | None = None,
) -> list[Verdict]:
    """Checks experiment.json, the frozen code and every run; one that is damaged hides no other.

    Args:
        open_heads: those of `known.expected` that nothing has had yet; what is met here is taken out.
    """
    run_ids, damage = runs_of(experiment)
    shared = Verdict(SHARED, of="experiment", experiment=experiment.path.absolute().name)
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


def _check_code(experiment: ExperimentDir, run_ids: list[str], verdict: Verdict) -> None:
    """The code that the jobs ran has the hash that it is named by, and every run.json names it."""
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


def verify_run(experiment: ExperimentDir, run: RunDir, *, exported: bool = False) -> Verdict:
    """Checks one run: chain, run.json, sealed copy, items files, accepted copies and sketches that are kept, its report.

    Args:
        exported: it comes out of a bundle, which has no pages.
    """
    verdict = Verdict(run.run_id, experiment=experiment.path.absolute().name)
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
        pass  # run.json can't be read, which was said
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


def _check_closing(experiment: ExperimentDir, run: RunDir, ledger: Ledger, verdict: Verdict) -> None:
    """A chain whose tail was cut is whole in itself: the mark that the grader left last tells. One that was lengthened is
    whole too: what nothing of ours writes after the closing tells."""
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


def _check_sealed(run: RunDir, ledger: Ledger, verdict: Verdict) -> None:
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
    """Entries after the closing (an attempt that came late) are no damage."""
    return RunView.of(ledger.entries[:count]).closed is not None


def _check_report(experiment: ExperimentDir, verdict: Verdict) -> None:
    from autorl_hpc.report.merge import merge

    if not experiment.report.is_dir():
        return
    try:
        merged = merge([experiment.path])
    except AutorlError as error:
        verdict.unseen.append(f"report/ was not compared: {error.what}")
        return
    look = check_merged_report(experiment, merged)
    verdict.problems += look.problems
    verdict.unseen += look.unseen


def _anchor(
    experiment: ExperimentDir, shared: Verdict | None, runs: list[Verdict], known: Known, open_heads: set[str]
) -> None:
    """Holds the chains against what is known of them elsewhere, heads.json included.

    Args:
        shared: the experiment's own verdict; None if its runs are looked at one by one.
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
    heads: Heads, source: str, chains: dict[str, tuple[str, ...]], shared: Verdict | None, runs: list[Verdict]
) -> bool:
    """Says of each run whether it fits these heads; True if all do."""
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


def _proven(by: str, shared: Verdict | None, runs: list[Verdict]) -> None:
    for verdict in (*([shared] if shared else []), *runs):
        if by not in verdict.anchored_by:
            verdict.anchored_by.append(by)


def _expected(head: str, now: Heads | None, before: Heads | None, shared: Verdict | None, runs: list[Verdict]) -> bool:
    """Whether a head that was given is, or was, the experiment's or a run's."""
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


def as_lines(verdicts: list[Verdict]) -> list[str]:
    """For people."""
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
