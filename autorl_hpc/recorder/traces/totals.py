"""Add up an agent's trace: tokens, cost, calls, tools, and when its driver was working. All values are the agent's own claims.

A format has the usage of single calls, or totals since the session's start, or both; see `_Session.total`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autorl_hpc.records.recorded import TraceEvent

Span = tuple[float, float]  # of time, in seconds


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
    """Return the moments of `spans` that are not in `taken`."""
    found: list[Span] = []
    depth, begun = 0, 0.0
    edges = [(at, weight) for begin, end in joined(spans) for at, weight in ((begin, 1), (end, -1))]
    edges += [(at, weight) for begin, end in joined(taken) for at, weight in ((begin, -1), (end, 1))]
    for at, weight in sorted(edges):
        if depth == 1 and begun < at:
            found.append((begun, at))
        depth, begun = depth + weight, at
    return tuple(found)


def seconds_of(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


FIGURES = ("tokens_in", "tokens_out", "tokens_cached", "cost_usd", "calls", "tool_calls", "tool_failures")
# The first of these in a total shows whether it continues the total before.
PRIMARY = ("tokens_in", "tokens_out", "cost_usd")
# Formats whose totals are those of one process, even in a resumed session, and that report no calls that would show it.
BEGIN_ANEW = frozenset({"gemini-cli"})
ROUNDING = 1e-6  # Relative. Costs are sums of fractions, and the agent may have added them in another order.
DRIVER = frozenset({"usage", "message", "tool_call"})  # kinds of events that only an answer of the driver causes


@dataclass(frozen=True)
class TraceTotals:
    """Totals of all sessions of a run. Null: no session reported it; a cost of 0 counts as not reported.

    Attributes:
        points: (elapsed_s, tokens in and out so far, cost so far), rising; see `tokens_at`.
        driver_spans: from one event of a session to the next one that the driver caused, without the time of its tools.
        skipped: number of lines of the log that were too long to read.
    """

    sessions: int = 0
    tokens_in: int | None = None
    tokens_out: int | None = None
    tokens_cached: int | None = None
    cost_usd: float | None = None
    driver_calls: int | None = None
    tool_calls: int | None = None
    tool_failures: int | None = None
    points: tuple[tuple[float, int, float], ...] = ()
    driver_spans: tuple[Span, ...] = ()
    skipped: int = 0

    def tokens_at(self, elapsed_s: float) -> int | None:
        """Return the tokens in and out reported until then; None if the trace reports no tokens at all."""
        return None if self.tokens_in is None and self.tokens_out is None else int(self._point(elapsed_s)[1])

    def cost_at(self, elapsed_s: float) -> float | None:
        """Return the dollars reported until then; None if the trace reports no cost."""
        return None if self.cost_usd is None else self._point(elapsed_s)[2]

    def _point(self, elapsed_s: float) -> tuple[float, float, float]:
        at = bisect_right(self.points, elapsed_s, key=lambda point: point[0])
        return self.points[at - 1] if at else (0.0, 0, 0.0)


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
    attempt: int
    last_s: float = 0.0
    # Time of its last event; None before the first one and after its end.
    reached_s: float | None = None
    figures: dict[str, _Figure] = field(default_factory=lambda: {name: _Figure() for name in FIGURES})
    by_call: dict[str, dict[str, float]] = field(default_factory=dict)
    process: int = 0
    open: dict[object, float] = field(default_factory=dict)
    calls: set[object] = field(default_factory=set)
    failed: set[object] = field(default_factory=set)
    tools: list[Span] = field(default_factory=list)
    drives: list[Span] = field(default_factory=list)

    def add(self, event: TraceEvent) -> None:
        kind, now = event.kind, event.elapsed_s
        if event.attempt != self.attempt:  # an attempt's end ends its open calls, and elapsed_s has no gap after it
            self.close(now)
            self.attempt = event.attempt
        if kind == "session":
            self.close(now)
            self.process += 1
            if self.format in BEGIN_ANEW:
                for figure in self.figures.values():
                    figure.base, figure.last, figure.since = figure.value, 0, 0
        if kind in DRIVER and self.reached_s is not None and not self.open and not event.is_total:
            self.drives.append((self.reached_s, now))
        if kind == "usage":
            self._usage(event)
        elif kind in ("tool_call", "tool_result"):
            self._tool(event, now)
        self.last_s = max(self.last_s, now)
        self.reached_s = now
        if kind == "end":
            self.close(now)

    def close(self, now: float) -> None:
        self.tools += [(began, now) for began in self.open.values()]
        self.open.clear()
        self.reached_s = None

    def _usage(self, event: TraceEvent) -> None:
        values: dict[str, float] = {name: value for name in FIGURES if (value := getattr(event, name)) is not None}
        if event.is_total:
            self.total(values)
            return
        values["calls"] = 1
        before = self.by_call.get(event.call_id, {}) if event.call_id is not None else {}
        for name, value in values.items():  # a repeated call has the same values or newer ones
            figure = self.figures[name]
            figure.since += max(0, value - before[name]) if name in before else value
            figure.known = True
        if event.call_id is not None:
            self.by_call[event.call_id] = {**before, **{k: max(v, before.get(k, 0)) for k, v in values.items()}}

    def total(self, values: dict[str, float]) -> None:
        """Replace the last total and the calls since then by a new total since the session's start. A resumed session goes
        on from its total or begins anew; one smaller than the last total plus the calls since then began anew, and one
        smaller than these calls alone is wrong (a crash leaves zeros)."""
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

    def _tool(self, event: TraceEvent, now: float) -> None:
        # Codex's ids are unique only within one process; a call without an id gets its own.
        key: object = (self.process if self.format == "codex" else 0, event.call_id)
        if event.call_id is None:
            key = len(self.calls)
        if event.kind == "tool_call":
            if key not in self.calls:
                self.open[key] = now
            self.calls.add(key)
            return
        if self.open and event.call_id is None:
            key = next(iter(self.open))
        self.calls.add(key)
        if event.ok is False:
            self.failed.add(key)
        began = self.open.pop(key, now)
        self.tools.append((min(began, max(0.0, now - (event.duration_s or 0.0))), now))

    def spent(self) -> tuple[float, float]:
        return self.value("tokens_in") + self.value("tokens_out"), self.value("cost_usd")

    def value(self, name: str) -> float:
        return self.figures[name].value


def add_up(events: Iterable[TraceEvent], ended_s: float | None = None) -> TraceTotals:
    """Return the totals of a run's events, in the order in which they were recorded. A call without an answer counts until
    `ended_s`."""
    by_name: dict[tuple[str, str], _Session] = {}
    present: dict[tuple[str, str], str] = {}  # by format and source, the session that began last
    points: list[tuple[float, int, float]] = []
    tokens = cost = 0.0
    skipped = begun = 0
    for event in events:
        if event.kind == "position":
            skipped += event.skipped
            continue
        place = event.format, event.source
        if event.kind == "session":
            begun += 1
            present[place] = event.session or f"#{begun}"
        key = event.format, event.session or present.get(place) or f"in {event.source}"
        session = by_name.setdefault(key, _Session(event.format, event.attempt))
        before = session.spent()
        session.add(event)
        if (after := session.spent()) != before:
            tokens += after[0] - before[0]
            cost += after[1] - before[1]
            points.append((max(event.elapsed_s, points[-1][0] if points else 0.0), int(tokens), cost))
    sessions = list(by_name.values())
    for each in sessions:
        each.close(each.last_s if ended_s is None else max(ended_s, each.last_s))
    told = {name: [s.value(name) for s in sessions if s.figures[name].known] for name in FIGURES}
    whole = {name: sum(map(int, values)) if values else None for name, values in told.items()}
    return TraceTotals(
        sessions=len(sessions),
        tokens_in=whole["tokens_in"],
        tokens_out=whole["tokens_out"],
        tokens_cached=whole["tokens_cached"],
        cost_usd=sum(told["cost_usd"]) or None,  # programs report 0 if they don't know a price
        driver_calls=whole["calls"],
        tool_calls=sum(max(len(s.calls), int(s.value("tool_calls"))) for s in sessions) if sessions else None,
        tool_failures=sum(max(len(s.failed), int(s.value("tool_failures"))) for s in sessions) if sessions else None,
        points=tuple(points),
        driver_spans=joined(span for s in sessions for span in without(s.drives, s.tools)),
        skipped=skipped,
    )
