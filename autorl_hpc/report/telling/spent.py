"""Tokens, money and calls of a run's driver, so far and in all, from the events of its trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autorl_hpc.records.recorded import TraceEvent


@dataclass
class _Session:
    """One session of an agent's program: what its calls add up to, and what it says of itself in total."""

    calls: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)

    def take(self, event: TraceEvent) -> None:
        for name in AMOUNTS:
            value = getattr(event, name)
            if value is None:
                continue
            if event.is_total:
                self.totals[name] = max(self.totals.get(name, 0.0), value)
            else:
                self.calls[name] = self.calls.get(name, 0.0) + value

    def amount(self, name: str) -> float | None:
        """A total counts where it says more than the calls that were seen: not every trace tells each call."""
        known = [values[name] for values in (self.calls, self.totals) if name in values]
        return max(known, default=None)


AMOUNTS = ("tokens_in", "tokens_out", "tokens_cached", "cost_usd")


@dataclass(frozen=True)
class Spent:
    """What the driver cost up to some time. Null: no trace says it."""

    tokens_in: int | None = None
    tokens_out: int | None = None
    tokens_cached: int | None = None
    cost_usd: float | None = None
    driver_calls: int | None = None
    tool_calls: int | None = None
    tool_failures: int | None = None

    @property
    def tokens(self) -> int | None:
        """In and out together."""
        known = [n for n in (self.tokens_in, self.tokens_out) if n is not None]
        return sum(known) if known else None


def spent_by(trace: Sequence[TraceEvent], times: Sequence[float]) -> list[Spent]:
    """What was spent up to each of `times` (ascending seconds of budget)."""
    ledger, found, at = _Count(), [], 0
    events = sorted(trace, key=lambda e: e.elapsed_s)
    for time_s in times:
        while at < len(events) and events[at].elapsed_s <= time_s:
            ledger.take(events[at])
            at += 1
        found.append(ledger.spent() if events else Spent())
    return found


class _Count:
    """Adds up events."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[str, int], list[_Session]] = {}
        self._calls = self._tools = self._failures = 0

    def take(self, event: TraceEvent) -> None:
        sessions = self._sessions.setdefault((event.source, event.attempt), [_Session()])
        if event.kind == "session":
            sessions.append(_Session())
        sessions[-1].take(event)
        self._calls += event.kind == "usage" and not event.is_total
        self._tools += event.kind == "tool_call"
        self._failures += event.kind == "tool_result" and (event.ok is False or event.exit_code not in (None, 0))

    def spent(self) -> Spent:
        amounts: dict[str, float] = {}
        for sessions in self._sessions.values():
            for session in sessions:
                for name in AMOUNTS:
                    value = session.amount(name)
                    if value is not None:
                        amounts[name] = amounts.get(name, 0.0) + value
        counts = {name: int(amounts[name]) if name in amounts else None for name in AMOUNTS[:3]}
        return Spent(
            **counts,
            cost_usd=amounts.get("cost_usd"),
            driver_calls=self._calls,
            tool_calls=self._tools,
            tool_failures=self._failures,
        )
