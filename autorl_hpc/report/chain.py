"""A run's ledger as far as it can be believed: what stands before any damage, and what the damage is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.ledger import Ledger, sha256_hex
from autorl_hpc.files.view import RunView
from autorl_hpc.files.wholeledger import Read, read_whole
from autorl_hpc.records.base import NewerVersion
from autorl_hpc.records.recorded import RECORDED

LOOK = "look at the run's folder and its permissions, and report again; `autorl-hpc verify` says more"
EMPTIED = "the ledger has no entry, but the run went on: {} is there"


@dataclass(frozen=True)
class Chain:
    """The readable part of a ledger.

    Attributes:
        damage: what is wrong, None for a whole chain. A damaged run is shown and never counted.
        hashes: of the entries, in order: two copies of one run begin alike.
        entries: with writer and time of each.
    """

    view: RunView
    damage: str | None
    genesis: str
    hashes: tuple[str, ...]
    entries: tuple[Read, ...] = ()


def genesis_of(run: RunDir) -> str:
    """What the chain begins with: the hash of run.json.

    Raises:
        AutorlError: it can't be read.
    """
    try:
        return sha256_hex(reading.read_bytes(run.record))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise AutorlError(f"run.json can't be read: {why}", where=run.record, next_step=LOOK) from None


def read_chain(run: RunDir) -> Chain:
    """Reads the ledger, damaged or not.

    Raises:
        AutorlError: run.json can't be read, so that not even the chain's beginning is known; or a newer autorl-hpc wrote
            the ledger, which is no damage.
    """
    ledger, genesis = Ledger(run), genesis_of(run)
    whole = read_whole(run, genesis)
    if whole == [] and (left := left_of_a_run(run)) is not None:
        whole = read_whole(run, genesis)  # it may have begun between the two looks
        if whole == []:
            return _chain([], EMPTIED.format(left), genesis)
    if whole is not None:
        return _chain(whole, None, genesis)
    damage = None
    try:
        ledger.read()
    except NewerVersion:
        raise
    except AutorlError as error:
        damage = error.what
    except (OSError, ValueError) as error:
        damage = f"the ledger can't be read: {error}"
    entries = [Read(one.kind, one.entry.at, one.entry.writer, one.body, one.sha256) for one in ledger.entries]
    damage = damage or _shorter_than_sealed(run, tuple(entry.sha256 for entry in entries))
    return _chain(entries, damage, genesis)


def left_of_a_run(run: RunDir) -> str | None:
    """The name of something that only comes after the first entry; None: there is nothing of it."""
    for path in (run.items, run.code_git, *map(run.recorded, RECORDED)):
        try:
            there = bool(reading.list_names(path)) if path == run.items else path.exists()
        except OSError:
            continue
        if there:
            return str(path.relative_to(run.path))
    return None


def _chain(entries: Sequence[Read], damage: str | None, genesis: str) -> Chain:
    hashes = tuple(entry.sha256 for entry in entries)
    return Chain(RunView.of(entries), damage, genesis, hashes, tuple(entries))


def _shorter_than_sealed(run: RunDir, hashes: tuple[str, ...]) -> str | None:
    """Entries missing at the end break no link: the copy written at the run's end tells."""
    try:
        lines = [line + b"\n" for line in reading.read_bytes(run.sealed_ledger).split(b"\n") if line]
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"ledger.jsonl can't be read: {error}"
    if not lines:
        return "ledger.jsonl is empty: it was altered"
    sealed = tuple(map(sha256_hex, lines))
    if sealed == hashes[: len(sealed)]:
        return None
    if hashes == sealed[: len(hashes)]:
        return f"ledger.jsonl has {len(sealed)} entries and ledger/ only {len(hashes)}: entries were removed"
    return "ledger/ and its sealed copy ledger.jsonl differ: one of them was altered"
