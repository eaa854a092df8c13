"""What is known of an experiment's chains outside the account that holds them, and whether the chains still fit it.

A chain only grows. So an anchor holds if the entry that was its head then still stands at its number; what came after it is
named, not blamed.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.job_table import read_submitted
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.ledger import heads_of, now_text, read_heads, run_head
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.exchange import SHORT_HEX, Anchor, Heads, RunHead
from autorl_hpc.report.find import experiments_in, runs_on_disk

Hashes = Mapping[str, Sequence[str]]
"""Of each run, the hash of run.json and those of its entries in order."""

MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 4096
MAX_ANCHORS_BYTES = 1 << 30


@dataclass(frozen=True)
class KnownHeads:
    """What the caller of `verify` knows from elsewhere."""

    expected: tuple[str, ...] = ()
    anchors: tuple[Anchor, ...] = ()


@dataclass(frozen=True)
class AnchorFit:
    """How the chains fit heads that were known before.

    Attributes:
        problems: by run, what doesn't fit.
        since: by run that fits, how many entries came after.
    """

    problems: dict[str, str]
    since: dict[str, int]


def fit(heads: Heads, chains: Hashes, source: str) -> AnchorFit:
    """Whether each chain still has, at its number, the entry that was its head."""
    problems, since = {}, {}
    for known in heads.runs:
        hashes = chains.get(known.run_id)
        if hashes is None:
            problems[known.run_id] = f"{source} names it with {known.entries} entries, and it is not here"
        elif len(hashes) <= known.entries:
            problems[known.run_id] = (
                f"{source} knows {known.entries} entries, and {len(hashes) - 1} are here: those after "
                f"{len(hashes) - 1:06d} are missing"
            )
        elif hashes[known.entries] != known.head:
            where = f"entry {known.entries:06d}" if known.entries else "run.json"
            problems[known.run_id] = (
                f"{source} knows another {where}: the chain up to it was altered since, or written anew"
            )
        else:
            since[known.run_id] = len(hashes) - 1 - known.entries
    return AnchorFit(problems, since)


def present(experiment: ExperimentDir, chains: Hashes) -> Heads:
    """The heads of these chains as they are now."""
    return heads_of(
        experiment,
        (RunHead(run_id=run_id, entries=len(hashes) - 1, head=hashes[-1]) for run_id, hashes in chains.items()),
    )


def written_heads(experiment: ExperimentDir) -> tuple[Heads | None, str | None]:
    """heads.json, and what is wrong with it."""
    try:
        return read_heads(experiment), None
    except (AutorlError, OSError, ValueError) as error:
        return None, f"heads.json can't be read: {error.what if isinstance(error, AutorlError) else error}"


@dataclass(frozen=True)
class SlurmWord:
    """What the comment of the report job says of the experiment: that it fits, that it doesn't, or why nobody knows."""

    fits: str | None = None
    problem: str | None = None
    note: str | None = None


def slurm_word(experiment: ExperimentDir, now: Heads, before: Heads | None) -> SlurmWord:
    """Asks the scheduler, where the experiment had jobs and its clients are here.

    Args:
        before: heads.json, if the chains fit it.
    """
    try:
        jobs = read_submitted(experiment)
        if jobs is None or not slurm.available():
            return SlurmWord()
        found = slurm.told(jobs)
    except (AutorlError, OSError, ValueError) as error:
        return SlurmWord(note=f"Slurm could not be asked: {error.what if isinstance(error, AutorlError) else error}")
    if not found:
        return SlurmWord(note="no job comment that Slurm still knows names its head")
    last = found[-1]
    if last.short in {heads.short for heads in (now, before) if heads is not None}:
        return SlurmWord(fits=f"the comment of Slurm job {last.job_id} (which the same user may write again)")
    reports = [job.number for job in jobs.submitted if job.role == "report" and not job.taken_back]
    text = f"the comment of Slurm job {last.job_id} names the head {last.short}..., and these chains don't give it"
    if last.number == max(reports, default=0):
        return SlurmWord(problem=text)
    return SlurmWord(note=f"{text}; a later launch may have added runs")


def normal_head(text: str) -> str:
    """A head as a person gives it, whole or its first digits.

    Raises:
        AutorlError: it is none, or too short to prove anything.
    """
    head = text.strip().lower()
    if not re.fullmatch(rf"[0-9a-f]{{{SHORT_HEX},64}}", head):
        raise AutorlError(
            f"--expect {text[:80]!r}: a head has 64 hexadecimal digits, of which the first {SHORT_HEX} are enough",
            next_step="give it as a job's log, its comment, `autorl-hpc status` or `autorl-hpc verify` printed it",
        )
    return head


def read_key_file(path: Path) -> bytes:
    """The key of anchors: a file with the key alone, for its owner alone.

    Raises:
        AutorlError: it can't be read, is open to others, or holds no key. No error shows any of it.
    """
    make = f"make one: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise AutorlError(f"the key can't be read: {error.strerror}", where=path, next_step=make) from None
    if stat.S_IMODE(mode) & 0o077:
        raise AutorlError(
            f"others may read the key (mode {stat.S_IMODE(mode):04o})",
            where=path,
            next_step=f"run: chmod 600 {path}; if others may have read it, make another",
        )
    key = data.strip()
    if len(key) < MIN_KEY_BYTES or len(data) > MAX_KEY_BYTES:
        raise AutorlError(f"a key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes", where=path, next_step=make)
    return key


def make_anchors(paths: Sequence[Path], key: bytes) -> list[Anchor]:
    """The heads of the runs in `paths`, signed: one anchor an experiment.

    Raises:
        AutorlError: there is nothing there, or a chain is damaged: it is not signed.
    """
    found: dict[ExperimentDir, list[RunDir]] = {}
    for path in paths:
        if (path / "run.json").is_file():
            found.setdefault(ExperimentDir(path.absolute().parent), []).append(RunDir(path.absolute()))
            continue
        for one in experiments_in([path]):
            experiment = ExperimentDir(one.path.absolute())
            found.setdefault(experiment, []).extend(experiment.run(run_id) for run_id in runs_on_disk(experiment))
    return [_sign(heads_of(experiment, map(run_head, dict.fromkeys(runs))), key) for experiment, runs in found.items()]


def _sign(heads: Heads, key: bytes) -> Anchor:
    blank = Anchor(heads=heads, made_at=now_text(), hmac_sha256="0" * 64)
    return blank.model_copy(update={"hmac_sha256": hmac.new(key, blank.signed_bytes(), sha256).hexdigest()})


def add_anchors(path: Path, anchors: Sequence[Anchor]) -> None:
    """Adds lines to an anchors file: the earlier ones stay, they prove more.

    Raises:
        AutorlError: what stands there is no anchors file.
        OSError: it can't be written.
    """
    before = b""
    if path.exists():
        before = reading.read_bytes(path, max_bytes=MAX_ANCHORS_BYTES)
        parse_anchors(before, path)
        before = before if before.endswith(b"\n") or not before else before + b"\n"
    atomic.write_bytes(path, before + b"".join(anchor.canonical() + b"\n" for anchor in anchors))


def parse_anchors(data: bytes, path: Path) -> list[Anchor]:
    """The lines of an anchors file, signatures unchecked.

    Raises:
        AutorlError: a line is no anchor.
    """
    found = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise AutorlError(
                "this is no anchors file", where=f"{path}:{number}", next_step="give one that `autorl-hpc anchor` wrote"
            ) from None
        found.append(parse_record(Anchor, value, f"{path}:{number}", next_step="take an unaltered copy"))
    return found


def read_anchors(path: Path, key: bytes) -> tuple[Anchor, ...]:
    """The anchors in a file, each with its signature checked.

    Raises:
        AutorlError: it can't be read, or a line is not signed by this key.
    """
    try:
        data = reading.read_bytes(path, max_bytes=MAX_ANCHORS_BYTES)
    except (OSError, ValueError) as error:
        raise AutorlError(
            f"the anchors can't be read: {error}", where=path, next_step="give a file that `autorl-hpc anchor` wrote"
        ) from None
    anchors = parse_anchors(data, path)
    for number, anchor in enumerate(anchors, 1):
        if not hmac.compare_digest(hmac.new(key, anchor.signed_bytes(), sha256).hexdigest(), anchor.hmac_sha256):
            raise AutorlError(
                f"anchor {number}, of {anchor.heads.experiment}, is not signed by this key: it is another key's, or was altered",
                where=path,
                next_step="give the key that it was signed with, or an unaltered copy of the file",
                exit_code=Exit.FAILED,
            )
    return tuple(anchors)
