"""Add up an agent's trace: tokens, cost, calls, tools, and when its driver and its tools were working.

All values are the agent's own claims. A format has the usage of single calls, or totals since the session's start, or both;
see `_Session.total`. Null means that no session reported the value; a cost of 0 counts as not reported.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from autorl_hpc.records.recorded import TraceEvent

# --- spans of time as pairs of seconds (from, to): join, subtract, add up

Span = tuple[float, float]


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the same moments as sorted spans that don't touch; empty and reversed spans are dropped."""
    found: list[Span] = []
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return tuple(found)


def without(spans: Sequence[Span], taken: Sequence[Span]) -> tuple[Span, ...]:
    """Return the moments of `spans` that are not in `taken`; both must be joined."""
    found: list[Span] = []
    at = 0
    for begin, end in spans:
        while at < len(taken) and taken[at][1] <= begin:
            at += 1
        here, look = begin, at
        while look < len(taken) and taken[look][0] < end:
            if here < taken[look][0]:
                found.append((here, taken[look][0]))
            here = max(here, taken[look][1])
            look += 1
        if here < end:
            found.append((here, end))
    return tuple(found)


def seconds_of(spans: Iterable[Span]) -> float:
    """Return the sum of the lengths in seconds."""
    return sum(end - begin for begin, end in spans)


FIGURES = ("tokens_in", "tokens_out", "tokens_cached", "cost_usd", "calls")
PRIMARY = ("tokens_in", "tokens_out", "cost_usd")
"""The first of these in a total shows whether it continues the total before."""

BEGIN_ANEW = frozenset({"gemini-cli"})
"""Formats whose totals are those of one process, even in a resumed session, and that report no calls that would show it."""

ROUNDING = 1e-6
"""Relative. Costs are sums of fractions, and the agent may have added them in another order."""

MOST_MODELS = 100
"""Limit of model names per session."""

_NONE_TOLD: dict[str, float] = {}

DRIVER = frozenset({"usage", "message", "tool_call"})
"""Kinds of events that only an answer of the driver causes."""


@dataclass(frozen=True)
class SessionTotals:
    """Totals of one session of an agent's program."""

    format: str
    session: str | None
    models: tuple[str, ...]
    first_s: float
    last_s: float
    tokens_in: int | None
    tokens_out: int | None
    tokens_cached: int | None
    cost_usd: float | None
    driver_calls: int | None
    tool_calls: int
    tool_failures: int
    errors: int
    ended_ok: bool | None


@dataclass(frozen=True)
class TraceTotals:
    """Totals of all sessions of a run.

    Attributes:
        points: (elapsed_s, tokens in and out so far, cost so far), rising; see `tokens_at`.
        tool_spans: when at least one tool call was open, in seconds of budget.
        driver_spans: when a session waited for its driver: from one of its events to the next one that the driver caused,
            without the time in which that session's tools ran.
        skipped: number of lines of the log that were too long to read.
    """

    sessions: tuple[SessionTotals, ...] = ()
    tokens_in: int | None = None
    tokens_out: int | None = None
    tokens_cached: int | None = None
    cost_usd: float | None = None
    driver_calls: int | None = None
    tool_calls: int | None = None
    tool_failures: int | None = None
    errors: int = 0
    points: tuple[tuple[float, int, float], ...] = ()
    tool_spans: tuple[Span, ...] = ()
    driver_spans: tuple[Span, ...] = ()
    last_driver_s: float | None = None
    skipped: int = 0

    @property
    def tool_s(self) -> float:
        """Return the seconds in which at least one tool ran."""
        return seconds_of(self.tool_spans)

    @property
    def driver_s(self) -> float:
        """Return the seconds in which the agent waited for its driver."""
        return seconds_of(self.driver_spans)

    def tokens_at(self, elapsed_s: float) -> int | None:
        """Return the tokens in and out reported until then; None if the trace reports no tokens at all."""
        if self.tokens_in is None and self.tokens_out is None:
            return None
        at = bisect_right(self._times, elapsed_s)
        return self.points[at - 1][1] if at else 0

    def cost_at(self, elapsed_s: float) -> float | None:
        """Return the dollars reported until then; None if the trace reports no cost."""
        if self.cost_usd is None:
            return None
        at = bisect_right(self._times, elapsed_s)
        return self.points[at - 1][2] if at else 0.0

    @cached_property
    def _times(self) -> list[float]:
        return [point[0] for point in self.points]


def events_in(path: Path) -> Iterator[TraceEvent]:
    """Yield the events of a trace.jsonl in order, one at a time, because a full one holds 300,000. Damaged lines are skipped."""
    try:
        with open(path, "rb") as file:
            for line in file:
                try:
                    event = TraceEvent.model_validate_json(line)
                except ValidationError:
                    continue
                yield event
    except OSError:
        return


def read_events(path: Path) -> list[TraceEvent]:
    """Return all events as a list, which takes 2 kB of memory per event."""
    return list(events_in(path))


def add_up(events: Iterable[TraceEvent], ended_s: float | None = None) -> TraceTotals:
    """Return the totals of a run's events, given in the order in which they were recorded.

    Args:
        ended_s: budget used when the agent ended; a call without an answer counts until then.
    """
    adding = _Adding()
    for event in events:
        adding.add(event)
    return adding.totals(ended_s)


@dataclass
class _Figure:
    """One figure of one session: the sum of earlier counts, the current count's last total, and the calls since then."""

    base: float = 0
    last: float = 0
    since: float = 0
    known: bool = False

    @property
    def value(self) -> float:
        return self.base + self.last + self.since


@dataclass
class _Session:
    format: str
    name: str | None
    first_s: float
    attempt: int
    last_s: float = 0.0
    reached_s: float | None = None
    """Time of its last event; None before the first one and after its end."""

    figures: dict[str, _Figure] = field(default_factory=lambda: {name: _Figure() for name in FIGURES})
    told: dict[str, dict[str, float]] = field(default_factory=dict)
    models: dict[str, None] = field(default_factory=dict)
    process: int = 0
    open: dict[object, float] = field(default_factory=dict)
    calls: set[object] = field(default_factory=set)
    failed: set[object] = field(default_factory=set)
    total_calls: int = 0
    total_failures: int = 0
    earlier_calls: int = 0
    earlier_failures: int = 0
    errors: int = 0
    ended_ok: bool | None = None
    tools: list[Span] = field(default_factory=list)
    drives: list[Span] = field(default_factory=list)
    spent: tuple[float, float] = (0.0, 0.0)
    """Tokens and dollars as of its last usage."""

    def add(self, event: TraceEvent, kind: str, now: float) -> None:
        """Add an event. `kind` and `now` are the event's; they are passed because reading a record's fields is slow."""
        if event.attempt != self.attempt:  # an attempt's end ends its open calls, and elapsed_s has no gap after it
            self.close(now)
            self.attempt = event.attempt
        if kind == "session":
            self.close(now)
            self.process += 1
            if self.format in BEGIN_ANEW:
                self._begin_anew()
        if kind in DRIVER and self.reached_s is not None and not self.open and not event.is_total:
            self.drives.append((self.reached_s, now))
        if (model := event.model) is not None and model not in self.models and len(self.models) < MOST_MODELS:
            self.models[model] = None
        if kind == "usage":
            self._usage(event)
        elif kind == "tool_call":
            self._called(event, now)
        elif kind == "tool_result":
            self._answered(event, now)
        elif kind == "error":
            self.errors += 1
        self.last_s = max(self.last_s, now)
        self.reached_s = now
        if kind == "end":
            self.ended_ok = event.ok
            self.close(now)

    def _begin_anew(self) -> None:
        for figure in self.figures.values():
            figure.base, figure.last, figure.since = figure.value, 0, 0
        self.earlier_calls, self.total_calls = self.earlier_calls + self.total_calls, 0
        self.earlier_failures, self.total_failures = self.earlier_failures + self.total_failures, 0

    def close(self, now: float) -> None:
        """End all open calls."""
        self.tools += [(began, now) for began in self.open.values()]
        self.open.clear()
        self.reached_s = None

    def _usage(self, event: TraceEvent) -> None:
        values: dict[str, float] = {}
        for name in FIGURES:
            if (value := getattr(event, name)) is not None:
                values[name] = value
        if event.is_total:
            self.total(values)
            self.total_calls = max(self.total_calls, event.tool_calls or 0)
            self.total_failures = max(self.total_failures, event.tool_failures or 0)
            return
        values["calls"] = 1
        call_id = event.call_id
        before = self.told.get(call_id, _NONE_TOLD) if call_id is not None else _NONE_TOLD
        for name, value in values.items():  # a repeated call has the same values or newer ones
            figure = self.figures[name]
            figure.since += max(0, value - before[name]) if name in before else value
            figure.known = True
        if call_id is not None:
            self.told[call_id] = {**before, **{k: max(v, before.get(k, 0)) for k, v in values.items()}}

    def total(self, values: dict[str, float]) -> None:
        """Replace the last total and the calls since then by a new total since the session's start. A resumed session
        continues its total or starts again, depending on format and version. A total smaller than the last total plus the
        calls since then can't continue it. One smaller than the calls alone is wrong (a crash leaves zeros) and is ignored."""
        primary = next((name for name in PRIMARY if name in values), None)
        if primary is None:
            return
        figure, value = self.figures[primary], values[primary] * (1 + ROUNDING)
        goes_on = value >= figure.last + figure.since
        if not goes_on and value < figure.since:
            return
        for name, new in values.items():
            figure = self.figures[name]
            figure.known = True
            if not goes_on:
                figure.base, figure.last = figure.base + figure.last, 0
            figure.last = max(new, figure.last + figure.since)
            figure.since = 0

    def _called(self, event: TraceEvent, now: float) -> None:
        key = self._key(event)
        if key not in self.calls:
            self.calls.add(key)
            self.open[key] = now

    def _answered(self, event: TraceEvent, now: float) -> None:
        key = self._key(event)
        if self.open and event.call_id is None:
            key = next(iter(self.open))
        self.calls.add(key)
        if event.ok is False:
            self.failed.add(key)
        began = self.open.pop(key, now)
        if (duration_s := event.duration_s) is not None:
            began = min(began, max(0.0, now - duration_s))
        self.tools.append((began, now))

    def _key(self, event: TraceEvent) -> object:
        """Return the key of a tool call. Codex's ids are unique only within one process; a call without an id gets its own."""
        call_id = event.call_id
        if call_id is None:
            return len(self.calls)
        return (self.process, call_id) if self.format == "codex" else call_id

    def whole(self, name: str) -> int | None:
        """Return a figure as a whole number; None if it was not reported."""
        figure = self.figures[name]
        return int(figure.value) if figure.known else None

    def totals(self) -> SessionTotals:
        cost = self.figures["cost_usd"]
        return SessionTotals(
            format=self.format,
            session=self.name,
            models=tuple(self.models),
            first_s=self.first_s,
            last_s=self.last_s,
            tokens_in=self.whole("tokens_in"),
            tokens_out=self.whole("tokens_out"),
            tokens_cached=self.whole("tokens_cached"),
            cost_usd=cost.value or None,  # programs report 0 if they don't know a price
            driver_calls=self.whole("calls"),
            tool_calls=max(len(self.calls), self.earlier_calls + self.total_calls),
            tool_failures=max(len(self.failed), self.earlier_failures + self.total_failures),
            errors=self.errors,
            ended_ok=self.ended_ok,
        )


class _Adding:
    def __init__(self) -> None:
        self.sessions: dict[tuple[str, str], _Session] = {}
        self.present: dict[tuple[str, str], str] = {}
        self.points: list[tuple[float, int, float]] = []
        self.tokens = 0.0
        self.cost = 0.0
        self.last_driver_s: float | None = None
        self.skipped = 0
        self.begun = 0
        self.named: dict[tuple[str, str, str | None], _Session] = {}
        """By format, source and session as events name them; cleared when a session begins."""

    def add(self, event: TraceEvent) -> None:
        kind, now = event.kind, event.elapsed_s
        if kind == "position":
            self.skipped += event.skipped
            return
        session = self._session(event, kind)
        if kind in DRIVER and (self.last_driver_s is None or now > self.last_driver_s):
            self.last_driver_s = max(now, 0.0)
        session.add(event, kind, now)
        if kind != "usage":  # other events don't change what was spent
            return
        before, after = session.spent, self._spent(session)
        if after != before:
            session.spent = after
            self.tokens += after[0] - before[0]
            self.cost += after[1] - before[1]
            at = max(now, self.points[-1][0]) if self.points else now
            self.points.append((at, int(self.tokens), self.cost))

    def _spent(self, session: _Session) -> tuple[float, float]:
        figures = session.figures
        return figures["tokens_in"].value + figures["tokens_out"].value, figures["cost_usd"].value

    def _session(self, event: TraceEvent, kind: str) -> _Session:
        """Return the session that the event names, or else the one that began last in its source."""
        named = event.format, event.source, event.session
        if kind == "session":
            self.begun += 1
            self.present[named[:2]] = named[2] or f"#{self.begun}"
            self.named.clear()
        elif (known := self.named.get(named)) is not None:
            return known
        name = named[2] or self.present.get(named[:2]) or f"in {named[1]}"
        key = (named[0], name)
        if key not in self.sessions:
            shown = None if name.startswith(("#", "in ")) and named[2] is None else name
            self.sessions[key] = _Session(named[0], shown, event.elapsed_s, event.attempt)
        self.named[named] = self.sessions[key]
        return self.sessions[key]

    def totals(self, ended_s: float | None) -> TraceTotals:
        for session in self.sessions.values():
            session.close(session.last_s if ended_s is None else max(ended_s, session.last_s))
        sessions = tuple(session.totals() for session in self.sessions.values())
        if not sessions:
            return TraceTotals(skipped=self.skipped)
        costs = [each.cost_usd for each in sessions if each.cost_usd is not None]
        tools = {id(each): joined(each.tools) for each in self.sessions.values()}
        drives = [span for each in self.sessions.values() for span in without(joined(each.drives), tools[id(each)])]
        return TraceTotals(
            sessions=sessions,
            tokens_in=_sum(each.tokens_in for each in sessions),
            tokens_out=_sum(each.tokens_out for each in sessions),
            tokens_cached=_sum(each.tokens_cached for each in sessions),
            cost_usd=sum(costs) if costs else None,
            driver_calls=_sum(each.driver_calls for each in sessions),
            tool_calls=_sum(each.tool_calls for each in sessions),
            tool_failures=_sum(each.tool_failures for each in sessions),
            errors=sum(each.errors for each in sessions),
            points=tuple(self.points),
            tool_spans=joined(span for spans in tools.values() for span in spans),
            driver_spans=joined(drives),
            last_driver_s=self.last_driver_s,
            skipped=self.skipped,
        )


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
