"""The trace's page: turns as JSON in scripts beside it that the page loads one by one, since a page can't fetch files.

It shows texts of an agent: scripts hold JSON without `<`, and the page's own script puts them in as text alone.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from autorl_hpc.files.layout import RunDir
from autorl_hpc.recorder.traces.turns import LOG, TracePart, TraceTurn, read_turns
from autorl_hpc.records.recorded import TraceEvent, TrajectoryMessage
from autorl_hpc.report import format as fmt
from autorl_hpc.report.hidden_items import IN_WORKSPACE, hidden_of
from autorl_hpc.report.run_folder import read_chain
from autorl_hpc.report.run_story.logs import read_lines
from autorl_hpc.report.summary import Point, RunSummary

TRACE_PAGE, TRACE_FOLDER = "trace.html", "trace"
PAGE_CHARS, PAGE_TURNS = 400_000, 100
"""Of one script: it is loaded and laid out in a tenth of a second."""

SUBMITS = re.compile(r"\bsubmi(?:t|ssion)", re.IGNORECASE)
SUBMIT_WINDOW_S = 60.0
"""A call that speaks of submitting made a submission if it began within this time before it; else the turn of that time did."""

INTAKE_S = 5.0
"""A submission is stamped when it is found: a call may be printed so much later, when it has ended."""


@dataclass(frozen=True)
class TraceLink:
    """What a run's page says of its trace.

    Attributes:
        href: the trace's page, beside the run's.
        failures: number of tools that failed, and errors.
        submissions: address of the turn that made each submission.
    """

    href: str
    turns: int
    tools: int
    failures: int
    tokens: int | None
    submissions: dict[int, str]
    _offsets: Sequence[tuple[int, int]] = field(repr=False, default=())
    _times: Sequence[tuple[float, int]] = field(repr=False, default=())

    def at(self, where: str) -> str | None:
        """Return the address of the entry for a place such as `agent.log, byte 77` or `process at 3 s`; None for others."""
        match = re.fullmatch(rf"{re.escape(LOG)}, byte (\d{{1,18}})|process at (\d{{1,12}}) s", where)
        if match is None:
            return None
        known: Sequence[tuple[float, int]] = self._offsets if match[1] else self._times
        place = bisect_right(known, (float(match[1] or match[2]), 1 << 62))
        return f"{self.href}#e{known[max(0, place - 1)][1]}" if known else None


def turns_of(run: RunSummary, home: RunDir) -> list[TraceTurn]:
    """Read a run's trace. If held-out items were found, only figures are left, as everywhere in a report."""
    if run.imported is not None:
        names = (
            "agent.log",
            "agent.jsonl",
            "run.log",
        )  # of AutoRL-Bench's workspaces: the first two have the same lines
        log = next((path for name in names if (path := home.path / name).is_file()), home.path / names[0])
        return read_turns(log, home.agent_times)
    kept = read_lines(home.recorded("trajectories"), TrajectoryMessage).records
    told = read_lines(home.recorded("trace"), TraceEvent).records if kept or home.agent_log.is_file() else ()
    turns = read_turns(home.agent_log, home.agent_times, kept, told)
    if turns and hidden_of(read_chain(home).view.contaminations).found:
        for turn in turns:
            turn.model = None
            for part in turn.parts:
                part.text, part.output = IN_WORKSPACE, None if part.output is None else IN_WORKSPACE
                part.tool = None if part.tool is None else "tool"
    return turns


def trace_data(run: RunSummary, home: RunDir) -> tuple[TraceLink, dict[str, str]] | None:
    """Return what the run's page says of its trace, and the trace's scripts as JSON by name; None if there is none."""
    turns = turns_of(run, home)
    if not turns:
        return None
    places = submitting(turns, run.trajectory)
    link = TraceLink(
        href=TRACE_PAGE,
        turns=sum(turn.number is not None for turn in turns),
        tools=sum(part.kind == "tool" for turn in turns for part in turn.parts),
        failures=sum(part.failed for turn in turns for part in turn.parts),
        tokens=_tokens(run),
        submissions={number: f"{TRACE_PAGE}#e{place}" for number, place in places.items()},
        _offsets=sorted((turn.offset, n) for n, turn in enumerate(turns) if turn.offset is not None),
        _times=[(turn.elapsed_s, n) for n, turn in enumerate(turns) if turn.elapsed_s is not None],
    )
    pages = list(_pages(turns))
    made: dict[int, list[str]] = {}
    for point in run.trajectory:
        if point.submission_id in places:
            made.setdefault(places[point.submission_id], []).append(_of_submission(point))
    index = {
        "pages": [first for first, _ in pages],
        "count": len(turns),
        "failed": [n for n, turn in enumerate(turns) if any(part.failed for part in turn.parts)],
        "submissions": made,
    }
    return link, {"index": _script(index), **{f"p{n}": _script(each) for n, (_, each) in enumerate(pages)}}


def _tokens(run: RunSummary) -> int | None:
    used = run.story.resources
    return (
        None if used.tokens_in is None and used.tokens_out is None else (used.tokens_in or 0) + (used.tokens_out or 0)
    )


def submitting(turns: Sequence[TraceTurn], points: Sequence[Point]) -> dict[int, int]:
    """Return the place of the turn that made each submission: of a call that speaks of submitting, or that of its time."""
    timed = [(turn.elapsed_s, n) for n, turn in enumerate(turns) if turn.elapsed_s is not None]
    calls = [
        (elapsed_s, n)
        for elapsed_s, n in timed
        if any(part.kind == "tool" and SUBMITS.search(part.text[:20_000]) for part in turns[n].parts)
    ]
    found = {}
    for point in points:
        call = bisect_right(calls, (point.elapsed_s + INTAKE_S, len(turns)))
        if call and calls[call - 1][0] >= point.elapsed_s - SUBMIT_WINDOW_S:
            found[point.submission_id] = calls[call - 1][1]
        elif timed:
            found[point.submission_id] = timed[max(0, bisect_right(timed, (point.elapsed_s, len(turns))) - 1)][1]
    return found


def _of_submission(point: Point) -> str:
    score = "no score" if point.score is None else f"{fmt.points(point.score)} {fmt.between(point.low, point.high)}"
    return f"Submission {point.submission_id}: {score} ({point.status})"


def _pages(turns: Sequence[TraceTurn]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield the turns of each script, with the place of the first."""
    first, size, page = 0, 0, list[dict[str, Any]]()
    for place, turn in enumerate(turns):
        chars = sum(part.chars for part in turn.parts)
        if page and (size + chars > PAGE_CHARS or len(page) >= PAGE_TURNS):
            yield first, page
            first, size, page = place, 0, []
        page.append(_of_turn(turn))
        size += chars
    yield first, page


def _of_turn(turn: TraceTurn) -> dict[str, Any]:
    figures = turn.figures
    shown = [
        *(f"{fmt.amount('count', figures[key])} {words}" for key, words in FIGURES.items() if key in figures),
        *([f"{figures['cost_usd']:.4f} USD"] if "cost_usd" in figures else []),
    ]
    head = {
        "n": turn.number,
        "at": None if turn.elapsed_s is None else fmt.duration(turn.elapsed_s),
        "by": " ".join(each for each in (turn.format, turn.model or "") if each),
        "used": ", ".join(shown) + (" so far" if turn.is_total else ""),
        "attempt": turn.attempt if turn.attempt > 1 else None,
        "where": None if turn.offset is None else f"{LOG}, byte {turn.offset}",
    }
    return {**{key: value for key, value in head.items() if value}, "parts": [_of_part(part) for part in turn.parts]}


FIGURES = {"tokens_in": "in", "tokens_out": "out", "tokens_cached": "cached"}


def _of_part(part: TracePart) -> dict[str, Any]:
    fields = ("kind", "text", "tool", "output", "exit_code", "ok", "duration_s")
    return {name: value for name in fields if (value := getattr(part, name)) not in (None, "")}


def _script(value: Any) -> str:
    """Return JSON that ends no script element, whatever a text holds."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
