"""A run's ledger as far as it can be believed: what stands before any damage, and what the damage is."""

from __future__ import annotations

from dataclasses import dataclass

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.ledger import Ledger, sha256_hex
from autorl_hpc.files.view import RunView
from autorl_hpc.records.base import NewerVersion


@dataclass(frozen=True)
class Chain:
    """The readable part of a ledger.

    Attributes:
        damage: what is wrong, None for a whole chain. A damaged run is shown and never counted.
        hashes: of the entries, in order: two copies of one run begin alike.
    """

    view: RunView
    damage: str | None
    genesis: str
    hashes: tuple[str, ...]


def read_chain(run: RunDir) -> Chain:
    """Reads the ledger, damaged or not.

    Raises:
        AutorlError: run.json can't be read, so that not even the chain's beginning is known; or a newer autorl-hpc wrote
            the ledger, which is no damage.
    """
    ledger = Ledger(run)
    try:
        genesis = ledger.genesis()
    except (OSError, ValueError) as error:
        raise AutorlError(f"run.json can't be read: {error}", where=run.record) from None
    damage = None
    try:
        ledger.read()
    except NewerVersion:
        raise
    except AutorlError as error:
        damage = error.what
    except OSError as error:
        damage = f"the ledger can't be listed: {error.strerror}"
    hashes = tuple(linked.sha256 for linked in ledger.entries)
    damage = damage or _shorter_than_sealed(run, hashes)
    return Chain(RunView.of(ledger.entries), damage, genesis, hashes)


def _shorter_than_sealed(run: RunDir, hashes: tuple[str, ...]) -> str | None:
    """Entries missing at the end break no link: the copy written at the run's end tells."""
    try:
        lines = [line + b"\n" for line in reading.read_bytes(run.sealed_ledger).split(b"\n") if line]
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"ledger.jsonl can't be read: {error}"
    sealed = tuple(map(sha256_hex, lines))
    if sealed == hashes[: len(sealed)]:
        return None
    if hashes == sealed[: len(hashes)]:
        return f"ledger.jsonl has {len(sealed)} entries and ledger/ only {len(hashes)}: entries were removed"
    return "ledger/ and its sealed copy ledger.jsonl differ: one of them was altered"
