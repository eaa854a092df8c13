"""Which entry of a broken chain was altered. A link that doesn't fit has two sides; the copy, or the entries after it, tell."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from autorl_hpc.files import reading
from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.ledger import Ledger, sha256_hex

_BREAK = re.compile(r"the chain breaks before ledger entry (\d{6})")


@dataclass(frozen=True)
class _Raw:
    """An entry's file as it lies there."""

    sha256: str
    prev: object


def first_altered(run: RunDir, ledger: Ledger, said: str) -> str:
    """What is wrong with a chain that could not be read to its end, with the first altered entry named where it can be told.

    Args:
        said: what `Ledger.read` met; returned as it is where nothing more can be told.
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
    if len(copy) >= number:  # both sides are as they were: what the first one links to is not
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
