"""Anchors: heads of chains recorded outside the account that holds them (signed files, `--expect`, Slurm job comments).

A chain only grows, so an anchor holds if its head is still the entry at its number. Entries added later are no fault.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.job_table import read_submitted
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.ledger import heads_of, now_text, run_head
from autorl_hpc.files.store import MAX_KEY_BYTES, read_private
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.exchange import SHORT_HEX, Anchor, Heads
from autorl_hpc.report.find import experiments_in, runs_on_disk

Hashes = Mapping[str, Sequence[str]]  # By run_id: the hash of run.json, then those of its entries in order

MIN_KEY_BYTES = 16
MAX_ANCHORS_BYTES = 1 << 30


@dataclass(frozen=True)
class KnownHeads:
    """Heads that the caller of `verify` supplies: `--expect` and signed anchors."""

    expected: tuple[str, ...] = ()
    anchors: tuple[Anchor, ...] = ()


def fit(heads: Heads, chains: Hashes, source: str) -> tuple[dict[str, str], dict[str, int]]:
    """Check that each chain still has, at the recorded number, the entry that was its head. Return by run_id what doesn't fit,
    and, for those that fit, the number of entries added since."""
    problems, since = {}, {}
    for known in heads.runs:
        run_id, hashes = known.run_id, chains.get(known.run_id)
        if hashes is None:
            problems[run_id] = f"{source} names it with {known.entries} entries, and it is not here"
        elif (here := len(hashes) - 1) < known.entries:
            missing = f"{here} are here: those after {here:06d} are missing"
            problems[run_id] = f"{source} knows {known.entries} entries, and {missing}"
        elif hashes[known.entries] != known.head:
            where = f"entry {known.entries:06d}" if known.entries else "run.json"
            problems[run_id] = f"{source} knows another {where}: the chain up to it was altered since, or written anew"
        else:
            since[run_id] = here - known.entries
    return problems, since


def slurm_word(experiment: ExperimentDir, heads: Sequence[Heads]) -> tuple[str, str] | None:
    """Compare with the report job's comment; None if the experiment had no Slurm jobs or there are no Slurm clients here.

    Args:
        heads: of the chains now, and those of heads.json if the chains fit them.

    Returns:
        `fits`, `problem` or `note`, and its text.
    """
    try:
        jobs = read_submitted(experiment)
        if jobs is None or not slurm.available():
            return None
        found = slurm.told(jobs)
    except (AutorlError, OSError, ValueError) as error:
        return "note", f"Slurm could not be asked: {error.what if isinstance(error, AutorlError) else error}"
    if not found:
        return "note", "no job comment that Slurm still knows names its head"
    last = found[-1]
    if last.short in {one.short for one in heads}:
        return "fits", f"the comment of Slurm job {last.job_id} (which the same user may write again)"
    reports = [job.number for job in jobs.submitted if job.role == "report" and not job.taken_back]
    text = f"the comment of Slurm job {last.job_id} names the head {last.short}..., and these chains don't give it"
    if last.number == max(reports, default=0):
        return "problem", text
    return "note", f"{text}; a later launch may have added runs"


def normal_head(text: str) -> str:
    """Return a head that a person typed, in lower case: all 64 digits or the first ones. Raises AutorlError: it is not
    a head, or too short to prove anything."""
    head = text.strip().lower()
    if not re.fullmatch(rf"[0-9a-f]{{{SHORT_HEX},64}}", head):
        what = f"a head has 64 hexadecimal digits, of which the first {SHORT_HEX} are enough"
        advice = "give it as a job's log, its comment, `autorl-hpc status` or `autorl-hpc verify` printed it"
        raise AutorlError(f"--expect {text[:80]!r}: {what}", next_step=advice)
    return head


def read_key_file(path: Path) -> bytes:
    """Read the key of anchors: a file that holds only the key, readable by its owner only. Raises AutorlError: it can't
    be read, others may read it, or it is no key. No error shows any of the key."""
    make = f"make one: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
    data = read_private(path, "the anchors'", make)
    if len(key := data.strip()) < MIN_KEY_BYTES or len(data) > MAX_KEY_BYTES:
        raise AutorlError(f"a key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes", where=path, next_step=make)
    return key


def make_anchors(paths: Sequence[Path], key: bytes) -> list[Anchor]:
    """Return the signed heads of the runs in `paths`, one anchor per experiment. Raises AutorlError: nothing is there,
    or a chain is damaged (then it is not signed)."""
    found: dict[Path, set[RunDir]] = {}
    for path in map(Path.absolute, paths):
        if (path / "run.json").is_file():
            found.setdefault(path.parent, set()).add(RunDir(path))
            continue
        for experiment in experiments_in([path]):
            runs = (experiment.run(run_id) for run_id in runs_on_disk(experiment))
            found.setdefault(experiment.path, set()).update(runs)
    anchors = []
    for folder, several in found.items():
        blank = Anchor(
            heads=heads_of(ExperimentDir(folder), map(run_head, several)), made_at=now_text(), hmac_sha256="0" * 64
        )
        anchors.append(blank.model_copy(update={"hmac_sha256": _hmac(blank, key)}))
    return anchors


def _hmac(anchor: Anchor, key: bytes) -> str:
    return hmac.new(key, anchor.signed_bytes(), sha256).hexdigest()


def add_anchors(path: Path, anchors: Sequence[Anchor]) -> None:
    """Append to an anchors file; earlier lines stay, because they prove more. Raises AutorlError: the existing file is
    not an anchors file. OSError: it can't be written."""
    before = b""
    if path.exists():
        before = reading.read_bytes(path, max_bytes=MAX_ANCHORS_BYTES)
        parse_anchors(before, path)
        before = before if before.endswith(b"\n") or not before else before + b"\n"
    atomic.write_bytes(path, before + b"".join(anchor.canonical() + b"\n" for anchor in anchors))


def parse_anchors(data: bytes, path: Path) -> list[Anchor]:
    """Parse the lines of an anchors file without checking signatures. Raises AutorlError: a line is not an anchor."""
    found = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                advice = "give one that `autorl-hpc anchor` wrote"
                raise AutorlError("this is not an anchors file", where=where, next_step=advice) from None
            found.append(parse_record(Anchor, value, where, next_step="take an unaltered copy"))
    return found


def read_anchors(path: Path, key: bytes) -> tuple[Anchor, ...]:
    """Read the anchors in a file and check each signature. Raises AutorlError: it can't be read, or a line is not
    signed with this key."""
    try:
        data = reading.read_bytes(path, max_bytes=MAX_ANCHORS_BYTES)
    except (OSError, ValueError) as error:
        advice = "give a file that `autorl-hpc anchor` wrote"
        raise AutorlError(f"the anchors can't be read: {error}", where=path, next_step=advice) from None
    anchors = parse_anchors(data, path)
    for number, anchor in enumerate(anchors, 1):
        if not hmac.compare_digest(_hmac(anchor, key), anchor.hmac_sha256):
            raise AutorlError(
                f"anchor {number}, of {anchor.heads.experiment}, is not signed by this key: it is another key's, or was altered",
                where=path,
                next_step="give the key that it was signed with, or an unaltered copy of the file",
                exit_code=Exit.FAILED,
            )
    return tuple(anchors)
