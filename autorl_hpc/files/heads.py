"""Heads of ledgers: what has to be kept outside the account that holds the runs."""

from __future__ import annotations

from collections.abc import Iterable

from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.canonical import readable_json
from autorl_hpc.records.evidence import Heads, RunHead


def run_head(run: RunDir) -> RunHead:
    """Where the run's chain stands.

    Raises:
        AutorlError: it is damaged.
        OSError: it can't be read now.
    """
    ledger = Ledger(run)
    ledger.read()
    return RunHead(run_id=run.run_id, entries=len(ledger.entries), head=ledger.head())


def heads_of(experiment: ExperimentDir, runs: Iterable[RunHead]) -> Heads:
    """The heads of these runs as one record."""
    return Heads(experiment=experiment.path.absolute().name, runs=tuple(sorted(runs, key=lambda head: head.run_id)))


def in_words(head: RunHead) -> str:
    """One line for logs and terminals."""
    return f"head of {head.run_id} after {head.entries} entries: {head.head}"


def write_heads(experiment: ExperimentDir, heads: Heads) -> None:
    """Replaces heads.json."""
    atomic.write_bytes(experiment.heads, readable_json(heads.model_dump(mode="json")))


def read_heads(experiment: ExperimentDir) -> Heads | None:
    """heads.json; None where there is none.

    Raises:
        AutorlError: it is damaged.
        ValueError, OSError: it can't be read.
    """
    try:
        return parse_record(Heads, reading.read_json(experiment.heads), experiment.heads)
    except FileNotFoundError:
        return None
