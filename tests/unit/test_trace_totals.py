"""Figures of calls and totals of sessions are joined right: each case added up by hand."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from autorl_hpc.recorder.traces.totals import add_up, joined, without
from autorl_hpc.records.recorded import TraceEvent


def event(kind: str, elapsed_s: float = 0.0, **told: Any) -> TraceEvent:
    values = {"source": "agent.log", "offset": 0, "format": "claude-code", "at": "", **told}
    return TraceEvent.model_validate({"kind": kind, "elapsed_s": elapsed_s, **values})


def call(tokens_in: int, tokens_out: int = 0, **told: Any) -> TraceEvent:
    return event("usage", tokens_in=tokens_in, tokens_out=tokens_out, **told)


def whole(tokens_in: int, tokens_out: int = 0, **told: Any) -> TraceEvent:
    return call(tokens_in, tokens_out, is_total=True, **told)


START, A, B = event("session", session="s"), event("session", session="a"), event("session", session="b")
SECOND = {"attempt": 2, "session": "b"}
GEMINI = event("session", format="gemini-cli", session="g")


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        ([call(100, 10), call(200, 20)], (300, 30)),
        # A call that is told again counts once, as the most that was told.
        ([call(100, 1, call_id="m"), call(100, 1, call_id="m"), call(100, 9, call_id="m"), call(5, 5)], (105, 14)),
        # A total takes the place of its calls: hidden calls of subagents are in it. Calls after it come on top.
        ([call(100, 1), call(200, 2), whole(350, 80)], (350, 80)),
        ([call(100, 1), whole(150, 50), call(200, 2)], (350, 52)),
        # A resumed session goes on: 400 in all; or begins anew: 250 can't hold 150 and the call of 200.
        ([START, whole(150, 50), START, call(200, 2), whole(400, 90)], (400, 90)),
        ([START, whole(150, 50), START, call(200, 2), whole(250, 40)], (400, 90)),
        # Two turns of one process, each told for itself; totals alone that fall.
        ([call(100), whole(100, 10), call(120), whole(120, 12)], (220, 22)),
        ([whole(100, 10), whole(300, 30), whole(50, 5), whole(60, 6)], (360, 36)),
        # Nothing but the format tells that the second process's larger total does not go on.
        ([GEMINI, whole(100, format="gemini-cli"), GEMINI, whole(300, format="gemini-cli")], (400, 0)),
        # Zeros of a crash are no total.
        ([call(100, 1), whole(0, 0)], (100, 1)),
        ([whole(100, 9), call(50, 1), whole(0, 0)], (150, 10)),
        # Sessions by name, by the one that began last, and without names.
        ([A, whole(100, session="a"), B, whole(30, session="b"), whole(120, session="a")], (150, 0)),
        ([A, whole(100), B, whole(30), A, whole(120)], (150, 0)),
        ([event("session"), whole(100), event("session"), whole(30)], (130, 0)),
        # The first attempt left calls and no total; the second, a new session, told both.
        (
            [A, call(100, 5, session="a"), event("session", **SECOND), call(40, 1, **SECOND), whole(45, 9, **SECOND)],
            (145, 14),
        ),
    ],
)
def test_calls_and_totals(events: list[TraceEvent], tokens: tuple[int, int]) -> None:
    totals = add_up(events)
    assert (totals.tokens_in, totals.tokens_out) == tokens


def test_costs_that_differ_by_rounding_go_on_and_zero_is_a_price_that_is_not_known() -> None:
    costs = [0.1, 0.2, 0.3, 0.7, 1e-6]
    events = [event("usage", cost_usd=cost) for cost in costs]
    events.append(event("usage", cost_usd=sum(sorted(costs)) * (1 - 1e-12), calls=5, is_total=True))
    totals = add_up(events)
    assert totals.cost_usd == pytest.approx(1.300001) and totals.driver_calls == 5
    assert add_up([event("usage", tokens_in=5, cost_usd=0.0)]).cost_usd is None


def test_codex_counts_items_anew_in_each_process() -> None:
    start = event("session", format="codex", session="t")
    item = [event(kind, format="codex", call_id="item_0", ok=False) for kind in ("tool_call", "tool_result")]
    totals = add_up([start, *item, start, *item])
    assert (totals.tool_calls, totals.tool_failures) == (2, 2)


def test_tools_are_counted_by_call() -> None:
    """Called twice and answered once, answered without a call, called and answered without an id, never answered."""
    events = [
        event("tool_call", 1.0, call_id="a"),
        event("tool_call", 2.0, call_id="a"),
        event("tool_result", 3.0, call_id="a", ok=True),
        event("tool_result", 4.0, call_id="b", ok=False),
        event("tool_call", 5.0),
        event("tool_result", 7.0, ok=False),
        event("tool_call", 8.0, call_id="c"),
    ]
    totals = add_up(events, ended_s=10.0)
    assert (totals.tool_calls, totals.tool_failures) == (4, 2)
    assert totals.driver_spans == ((4.0, 5.0), (7.0, 8.0))


def test_parallel_tools_and_sessions() -> None:
    """Tools run from 10 to 30 and from 20 to 40; another session's driver works from 15 to 50."""
    mine: dict[str, Any] = {"session": "mine"}
    other: dict[str, Any] = {"session": "other"}
    events = [
        event("session", 5.0, **mine),
        event("tool_call", 10.0, call_id="a", **mine),
        event("session", 15.0, **other),
        event("tool_call", 20.0, call_id="b", **mine),
        event("tool_result", 30.0, call_id="a", **mine),
        event("tool_result", 40.0, call_id="b", **mine),
        event("message", 50.0, **other),
        event("message", 60.0, **mine),
        event("end", 60.0, **mine),
        event("message", 90.0, **mine),
    ]
    # Between `a` at 10 and `b` at 20 a tool was open: no driver there. 90 follows an end: nobody waited.
    assert add_up(events).driver_spans == ((5.0, 10.0), (15.0, 60.0))


def test_tokens_and_cost_over_time() -> None:
    events = [
        event("usage", 10.0, tokens_in=100, tokens_out=5, cost_usd=0.5),
        event("usage", 30.0, tokens_in=200, tokens_out=10, cost_usd=0.25),
        event("usage", 40.0, tokens_in=300, tokens_out=100, cost_usd=1.0, is_total=True),
    ]
    totals = add_up(events)
    assert [totals.tokens_at(s) for s in (9.9, 10.0, 29.0, 30.0, 39.0, 40.0, 1e6)] == [0, 105, 105, 315, 315, 400, 400]
    assert [totals.cost_at(s) for s in (0.0, 10.0, 35.0, 50.0)] == [0.0, 0.5, 0.75, 1.0]


def test_totals_never_fall_and_are_never_negative() -> None:
    chance = random.Random(5)
    for _ in range(60):
        events = []
        for n in range(40):
            kind = chance.choice(["usage", "usage", "session", "tool_call", "tool_result", "end", "message"])
            told: dict[str, Any] = {
                "session": chance.choice([None, "a", "b"]),
                "call_id": chance.choice([None, "x", "y"]),
            }
            if kind == "usage":
                told |= {"tokens_in": chance.randrange(100), "tokens_out": chance.choice([None, 3, 50])}
                told |= {"is_total": chance.random() < 0.4, "cost_usd": chance.choice([None, 0.5, 0.001])}
            told["duration_s"] = chance.choice([None, 500.0, 0.1])
            events.append(event(kind, float(n // chance.choice([1, 1, 2])), attempt=1 + n // 25, **told))
        totals = add_up(events, ended_s=chance.choice([None, 60.0]))
        times, tokens, costs = zip(*totals.points, strict=True)
        assert list(times) == sorted(times) and list(tokens) == sorted(tokens)
        assert all(b >= a - 1e-9 for a, b in itertools.pairwise(costs))
        assert tokens[-1] == (totals.tokens_in or 0) + (totals.tokens_out or 0)
        assert totals.cost_usd is None or costs[-1] == pytest.approx(totals.cost_usd)
        assert (totals.tool_failures or 0) <= (totals.tool_calls or 0)


def test_spans_as_sets_of_moments() -> None:
    assert joined([(5, 6), (1, 2), (2, 3), (1.5, 1.7), (9, 9), (8, 7)]) == ((1, 3), (5, 6))
    chance = random.Random(3)

    def some() -> list[tuple[float, float]]:
        return [(chance.randrange(40), chance.randrange(40)) for _ in range(chance.randrange(8))]

    def moments(spans: Any) -> set[int]:
        return {n for begin, end in spans for n in range(int(begin), int(end))}

    for _ in range(100):
        one, two = joined(some()), joined(some())
        assert moments(without(one, two)) == moments(one) - moments(two)
