"""What a story is told from: one run's records, read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autorl_hpc.files.driver_log import DriverTotals, read_totals
from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.spans import Span
from autorl_hpc.files.trace_totals import TraceTotals, add_up
from autorl_hpc.files.view import RunView
from autorl_hpc.records.exchange import Engine
from autorl_hpc.records.ledger import Contamination, Submission
from autorl_hpc.records.recorded import ProcessSeen, TraceEvent
from autorl_hpc.records.run import RunRecord
from autorl_hpc.report.compare import Pair
from autorl_hpc.report.hiding import Hidden, hidden_of
from autorl_hpc.report.summary import Point, RunSummary
from autorl_hpc.report.telling.attempts import attempts_of
from autorl_hpc.report.telling.changes import Differ
from autorl_hpc.report.telling.code import Code
from autorl_hpc.report.telling.counted import with_counted
from autorl_hpc.report.telling.lines import Recorded, read_recorded
from autorl_hpc.report.telling.log import AgentLog, read_events
from autorl_hpc.report.telling.places import Written, waits_of
from autorl_hpc.report.telling.resources import Usage, usage_of
from autorl_hpc.report.telling.skill import failed
from autorl_hpc.states import EntryKind


@dataclass(frozen=True)
class Known:
    """One run.

    Attributes:
        summary: its figures, without the story.
        pair_of: base model and a submission on the feedback items; raises Unusable.
        engine: who scored it.
    """

    run: RunDir
    record: RunRecord
    view: RunView
    entries: Sequence[Written]
    summary: RunSummary
    pair_of: Callable[[Submission], Pair]
    engine: Engine | None = None

    @cached_property
    def recorded(self) -> Recorded:
        """What the recorder wrote."""
        return read_recorded(self.run)

    @cached_property
    def events(self) -> Sequence[dict[str, Any]]:
        """Lines of events.jsonl."""
        return read_events(self.run.events)

    @cached_property
    def log(self) -> AgentLog:
        """agent.log."""
        return AgentLog(self.run.agent_log, self.run.agent_times)

    @cached_property
    def code(self) -> Code:
        """The agent's code."""
        differ = Differ(self.hidden)
        return Code(self.run.code_git, self.recorded.revisions.records, differ)

    @cached_property
    def attempts(self) -> Mapping[int, Span]:
        """When each attempt ran."""
        return attempts_of(self.view, self.summary.elapsed_s)

    @cached_property
    def usage(self) -> Usage:
        """The samples of usage, taken together."""
        samples = self.recorded.usage
        return usage_of(samples.records, self.attempts, samples.every)

    @cached_property
    def counted(self) -> DriverTotals | None:
        """What the gateway counted; None: the agent asked its driver past one, or never."""
        return read_totals(self.run.driver_log)

    @cached_property
    def spent(self) -> TraceTotals:
        """What the driver cost, and when it and the tools were at work: counted by the gateway, else told by the agent."""
        told = add_up(self.recorded.trace.records, self.summary.elapsed_s if self.view.sealed else None)
        return with_counted(told, self.counted)

    @property
    def points(self) -> Sequence[Point]:
        """Every submission."""
        return self.summary.trajectory

    @cached_property
    def hidden(self) -> Hidden:
        """What must not be shown."""
        return hidden_of(self.view.contaminations)

    @cached_property
    def commands(self) -> Sequence[ProcessSeen | TraceEvent]:
        """Command lines that were really seen, in their order."""
        seen: list[ProcessSeen | TraceEvent] = [p for p in self.recorded.processes.records if p.what == "began"]
        seen += [e for e in self.recorded.trace.records if e.kind == "tool_call" and e.command]
        return sorted(seen, key=lambda one: one.elapsed_s)

    @cached_property
    def failed_programs(self) -> Sequence[ProcessSeen]:
        """Programs of the agent that ended with an error, in their order."""
        return sorted((p for p in self.recorded.processes.records if failed(p)), key=lambda p: p.elapsed_s)

    @cached_property
    def waits(self) -> Mapping[int, float]:
        """By submission, seconds from its entry to its score's."""
        return waits_of(self.entries)

    @cached_property
    def failed_calls(self) -> Sequence[tuple[TraceEvent, str]]:
        """Results of tools that failed by the agent's trace, with the command, in their order."""
        commands = {e.call_id: e.command for e in self.recorded.trace.records if e.kind == "tool_call" and e.command}
        results = [e for e in self.recorded.trace.records if e.kind == "tool_result"]
        failed_ones = [e for e in results if e.exit_code not in (0, None) or (e.exit_code is None and e.ok is False)]
        told = [(e, e.command or commands.get(e.call_id) or "") for e in failed_ones]
        return sorted(told, key=lambda pair: pair[0].elapsed_s)

    @cached_property
    def looks_at(self) -> Mapping[int | None, Sequence[Contamination]]:
        """By submission, the looks for held-out items that were made for it."""
        found: dict[int | None, list[Contamination]] = {}
        for look in self.view.contaminations:
            found.setdefault(look.submission_id, []).append(look)
        return found

    @cached_property
    def score_entries(self) -> Mapping[int, int]:
        """By submission, the number of the ledger entry that scored it."""
        scores = [(i, e.body) for i, e in enumerate(self.entries, 1) if e.kind is EntryKind.SCORE]
        return {body.submission_id: number for number, body in reversed(scores)}
