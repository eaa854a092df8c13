"""What broke in a stretch of time: tracebacks and ends of programs, by the log, the processes and the agent's own trace."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TypeVar

from autorl_hpc.records.recorded import TraceEvent
from autorl_hpc.report.failures.facts import Exit, LogExcerpt
from autorl_hpc.report.story import RouteTold
from autorl_hpc.report.telling.known import Known
from autorl_hpc.states import Route

SeenT = TypeVar("SeenT")
_time = attrgetter("elapsed_s")

MAX_FAILED = 20
"""Failed programs of one stretch that are looked at: an agent that tries again a thousand times fails in one way."""

AGENT_LOG = "agent.log"

_SAMPLING = frozenset({Route.GRPO, Route.PPO, Route.RL, Route.SFT_RL, Route.REJECTION_SAMPLING, Route.DISTILLATION})
"""Routes on which a model is sampled from."""


def exits_between(known: Known, begin_s: float, end_s: float) -> list[Exit]:
    """The last programs that failed in a stretch of time, and the last calls of tools that did."""
    if not known.failed_programs and not known.failed_calls:  # most often
        return []
    seen = _between(known.failed_programs, begin_s, end_s, _time)
    exits = [Exit(p.command, p.exit_code, p.elapsed_s) for p in seen[-MAX_FAILED:]]
    calls = _between(known.failed_calls, begin_s, end_s, _time_of_call)
    exits += [Exit(command, e.exit_code, e.elapsed_s, e.ok) for e, command in calls[-MAX_FAILED:]]
    return sorted(exits, key=_time)


def _between(seen: Sequence[SeenT], begin_s: float, end_s: float, time: Callable[[SeenT], float]) -> Sequence[SeenT]:
    """Those after `begin_s`, up to `end_s`; `seen` in the order of their times."""
    return seen[bisect_right(seen, begin_s, key=time) : bisect_right(seen, end_s, key=time)]


def _time_of_call(call: tuple[TraceEvent, str]) -> float:
    return call[0].elapsed_s


def logs_between(known: Known, begin_s: float, end_s: float) -> tuple[LogExcerpt, ...]:
    """What the agent's log and traces tell of what broke in a stretch of time."""
    return (*_of_traces(known, begin_s, end_s), *known.log.excerpts(begin_s, end_s))


def whole_log(known: Known, end_s: float) -> tuple[LogExcerpt, ...]:
    """The same of the whole run; the log's times need not be known."""
    return (*_of_traces(known, -1.0, end_s), *known.log.whole())


def _of_traces(known: Known, begin_s: float, end_s: float) -> list[LogExcerpt]:
    """Tracebacks that tools returned, by traces that are files of their own; those in the log are read there, and whole."""
    events = [
        e
        for e, _ in _between(known.failed_calls, begin_s, end_s, _time_of_call)
        if e.source != AGENT_LOG and e.text and "Traceback" in e.text
    ]
    return [_excerpt(event) for event in events[-MAX_FAILED:]]


def _excerpt(event: TraceEvent) -> LogExcerpt:
    text = (event.text or "").replace("\\n", "\n")  # as the recorder escapes it
    return LogExcerpt(event.source, event.offset, text, only_tracebacks=True)


def samples(route: RouteTold) -> bool | None:
    """Whether a route samples from a model; None: it is not known."""
    if route.planned in _SAMPLING or route.executed in _SAMPLING:
        return True
    return None if Route.UNKNOWN in (route.planned, route.executed) else False


def any_samples(routes: Iterable[RouteTold]) -> bool | None:
    """The same of several routes together."""
    each = [samples(route) for route in routes]
    return True if True in each else None if None in each or not each else False
