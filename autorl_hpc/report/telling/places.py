"""Where a run ran and with what: jobs, nodes, versions, and how long submissions waited, from its ledger."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from autorl_hpc.files.masking import masked
from autorl_hpc.records.exchange import Engine
from autorl_hpc.records.ledger import Writer
from autorl_hpc.records.recorded import TraceEvent
from autorl_hpc.records.run import RunRecord
from autorl_hpc.report.hiding import NOTHING, Hidden
from autorl_hpc.report.story import AGENT_PROGRAM, CHANGED
from autorl_hpc.report.text import clean
from autorl_hpc.states import EntryKind


class Written(Protocol):
    """A ledger entry as far as it is needed here."""

    @property
    def kind(self) -> EntryKind: ...
    @property
    def at(self) -> str: ...
    @property
    def writer(self) -> Writer: ...
    @property
    def body(self) -> Any: ...


AGENT_VERSION = "agent_version"
"""The event with what the agent's program says of its version, of each attempt."""

MAX_VERSIONS = 4
MAX_NAMED = 40
"""Of jobs, nodes and models; a run that was requeued for weeks is told by its last ones."""


def jobs_of(entries: Sequence[Written]) -> tuple[str, ...]:
    """`supervisor 123_4`, `grader 456`: each job that wrote into the ledger, in order."""
    return _named(f"{writer.role} {writer.job_id}" for writer in _writers(entries) if writer.job_id)


def nodes_of(entries: Sequence[Written]) -> tuple[str, ...]:
    """`supervisor on node7`: in order."""
    return _named(f"{writer.role} on {writer.host}" for writer in _writers(entries) if writer.host)


def _writers(entries: Sequence[Written]) -> Iterable[Writer]:
    """Who wrote the entries, in order; the same object, which hundreds of entries share, once."""
    return {id(e.writer): e.writer for e in entries}.values()


def _named(names: Iterable[str]) -> tuple[str, ...]:
    distinct = list(dict.fromkeys(clean(name) or "" for name in names))
    return tuple(distinct[-MAX_NAMED:])


def versions_of(
    record: RunRecord,
    engine: Engine | None,
    trace: Sequence[TraceEvent],
    events: Sequence[Mapping[str, Any]] = (),
    hidden: Hidden = NOTHING,
) -> dict[str, str]:
    """Of the suite and what it ran on, of the engine that scored, of the agent's program, and what the agent's trace says of itself.

    Args:
        events: lines of events.jsonl.
    """
    found = {clean(name) or "": clean(value) or "" for name, value in sorted(record.versions.items())}
    if engine is not None:
        found["engine"] = clean(f"{engine.backend}, {engine.dtype} on {engine.device}") or ""
        found |= {f"engine: {clean(name)}": clean(value) or "" for name, value in sorted(engine.versions.items())}
    told = [e["version"] for e in events if e["event"] == AGENT_VERSION and isinstance(e.get("version"), str)]
    if told:
        named = CHANGED.join(list(dict.fromkeys(told))[-MAX_VERSIONS:])
        found[AGENT_PROGRAM] = clean(hidden.said(masked(f"{record.science.agent} {named}"))) or ""
    models = sorted({event.model for event in trace if event.model})
    if models:
        found["driver's model, by the trace"] = clean(hidden.said(masked(", ".join(models)))) or ""
    formats = sorted({event.format for event in trace} - {""})
    if formats:
        found["trace"] = clean(", ".join(formats)) or ""
    return found


def waits_of(entries: Sequence[Written]) -> dict[int, float]:
    """Seconds from each submission's entry to its score's, by number.

    By the wall clocks of two nodes, which may differ by some seconds: shown, and nothing is decided by it.
    """
    taken: dict[int, str] = {}
    waits: dict[int, float] = {}
    for linked in entries:
        if linked.kind is EntryKind.SUBMISSION:
            taken.setdefault(linked.body.submission_id, linked.at)
        elif linked.kind is EntryKind.SCORE and linked.body.submission_id in taken:
            seconds = _between(taken[linked.body.submission_id], linked.at)
            if seconds is not None:
                waits.setdefault(linked.body.submission_id, max(0.0, seconds))
    return waits


def _between(begin: str, end: str) -> float | None:
    try:
        return (dt.datetime.fromisoformat(end) - dt.datetime.fromisoformat(begin)).total_seconds()
    except (ValueError, TypeError):
        return None
