"""What the raw results of a pair mean. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from autorl_hpc.doctor.finding import Finding, note, ok, problem, span, unknown, warning
from autorl_hpc.doctor.pair import WATCH_S
from autorl_hpc.doctor.post import offset

Raw = Mapping[str, Any]

SLOW_LIST_S = 5.0
"""Intake, graders and supervisors wait by listing: a submission makes some four such steps, and a minute is given back."""

SLOW_READ_S = 10.0
"""Heartbeats are counters that are read anew; they are judged after a minute."""

CLOCK_NOTE_S = 1.0
CLOCK_WARNING_S = 60.0


def judge(a: Raw | None, b: Raw | None, *, two_nodes: bool) -> list[Finding]:
    """Every finding of a pair, as far as it came.

    Args:
        a, b: the messages `result` of the sides, or None.
        two_nodes: whether they ran as jobs on two nodes, rather than as two processes here.
    """
    if a is None or b is None:
        return [unknown("the pair", f"side {'a' if a is None else 'b'} left no result")]
    found = [_where(a, b)] if two_nodes else []
    stopped = a.get("stopped") or b.get("stopped")
    if stopped:
        found.append(
            problem(
                "the pair",
                f"it stopped: {stopped}",
                "files that one side made did not reach the other, or hang",
                "use a folder that all nodes share (--root)" if two_nodes else "use another folder (--root)",
            )
        )
    clock = offset(a.get("rounds") or [])
    if two_nodes:
        found += [_clock("clocks, node to node", clock)]
        found += _seen(a, b, clock)
    return [*found, *races(a, b), *locks(a, b, two_nodes=two_nodes)]


def _where(a: Raw, b: Raw) -> Finding:
    nodes = f"{a.get('node')} and {b.get('node')}"
    if a.get("boot") and a.get("boot") == b.get("boot"):
        return note(
            "the two nodes",
            f"{nodes} are one machine (same boot id)",
            "they share one cache and one clock: what is measured between them says nothing of two machines",
            "name a partition with several machines in the cluster's profile, if there is one",
        )
    return ok("the two nodes", nodes)


def _clock(name: str, clock: tuple[float, float] | None) -> Finding:
    """The difference of two clocks."""
    if clock is None:
        return unknown(name, "no answer came back")
    ahead, unsure = clock
    told = f"{ahead:+.1f} s" if abs(ahead) >= 1 else f"{1000 * ahead:+.0f} ms"
    value = f"{told}, give or take {span(unsure)}"
    least = abs(ahead) - unsure
    if least > CLOCK_WARNING_S:
        return warning(
            name,
            value,
            "nothing here is ordered by clocks, but logins (munge, TLS) fail when they differ by minutes",
            "tell the site's people",
        )
    if least > CLOCK_NOTE_S:
        return note(
            name,
            value,
            "nothing here is ordered by clocks; times of different nodes in logs don't line up",
            "add the difference when you compare times of two nodes",
        )
    return ok(name, value)


def login_clock(rounds: list[list[float]], node: str) -> Finding:
    """This host's clock against a node's."""
    return _clock(f"clocks, here to {node}", offset(rounds))


WAYS = {
    "listed": "new file, by listing",
    "looked_for": "missed name, by exists()",
    "tried_to_open": "missed name, by open()",
    "size_by_stat": "size, by stat()",
    "size_by_open": "size, by open()",
    "renamed_over": "renamed over, by open()",
    "removed": "removed, by exists()",
}


def _seen(a: Raw, b: Raw, clock: tuple[float, float] | None) -> list[Finding]:
    """How long B went without seeing what A did."""
    found = [_round_trip(a)]
    acted, seen, early = a.get("acted"), b.get("seen"), a.get("early") or []
    missed = b.get("missed") or {}
    if clock is None or not isinstance(acted, Mapping) or not isinstance(seen, Mapping):
        return [*found, *(unknown(name, "the pair did not come so far") for name in WAYS.values())]
    for way, name in WAYS.items():
        if way in early:
            found.append(unknown(name, "the name was there before it was made"))
            continue
        when = seen.get(way)
        lag_s, sure_s = (
            None if at is None else max(0.0, at - clock[0] - acted[way]) for at in (when, missed.get(way, when))
        )
        found.append(_lag(way, name, lag_s, 0.0 if sure_s is None else sure_s, clock[1]))
    return found


def _round_trip(a: Raw) -> Finding:
    rounds = [r[3] - r[0] for r in a.get("rounds") or []]
    if not rounds:
        return unknown("message there and back", "no answer came back")
    value = f"{span(median(rounds))} (worst {span(max(rounds))} of {len(rounds)}), by listing"
    if median(rounds) > 2 * SLOW_LIST_S:
        return warning(
            "message there and back",
            value,
            "each step of a submission takes that long: scores come late",
            "mount with a shorter actimeo, or use another file system (--root)",
        )
    return ok("message there and back", value)


def _lag(way: str, name: str, lag_s: float | None, sure_s: float, unsure_s: float) -> Finding:
    """By `sure_s`, when it was last looked for in vain: what came between that and `lag_s` may be a pause of the node."""
    value = f"not within {WATCH_S:.0f} s" if lag_s is None else f"seen after {span(lag_s)} (+- {span(unsure_s)})"
    slow = lag_s is None or sure_s > 1.0
    needed = way in ("listed", "renamed_over", "size_by_open")
    if lag_s is None and needed:
        return problem(
            name,
            value,
            "the suite's processes wait for each other this way: nothing will be scored",
            "use a file system that all nodes share (--root)",
        )
    if needed and sure_s > (SLOW_LIST_S if way == "listed" else SLOW_READ_S):
        return warning(
            name,
            value,
            "the suite's processes wait for each other this way: scores come late, living graders may look dead",
            "mount with a shorter actimeo, or use another file system (--root)",
        )
    if slow and not needed:
        return note(
            name,
            value,
            "the suite doesn't wait this way; a script of your own that does waits as long",
            "list the folder, or open the file, in the place of testing a name",
        )
    return ok(name, value)


RACES = {"link": "link, raced", "mkdir": "mkdir, raced", "create": "O_EXCL, raced"}


def races(a: Raw, b: Raw) -> list[Finding]:
    """Whether a name that both made at once had one maker."""
    mine, theirs = a.get("race"), b.get("race")
    if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
        return [unknown(name, "the pair did not come so far") for name in RACES.values()]
    return [_race(kind, name, a, mine.get(kind) or [], theirs.get(kind) or []) for kind, name in RACES.items()]


def _race(kind: str, name: str, a: Raw, mine: list[str], theirs: list[str]) -> Finding:
    outcomes = list(zip(mine, theirs, strict=False))
    errors = sorted({word for pair in outcomes for word in pair} - {"won", "lost"})
    double = sum(pair == ("won", "won") for pair in outcomes)
    nobody = [number for number, pair in enumerate(outcomes) if "won" not in pair]
    value = f"{len(outcomes)} names, {mine.count('won')} to one side, {theirs.count('won')} to the other"
    if errors:
        value += f"; refused: {', '.join(errors)}"
    needed = kind != "create"
    if double or not outcomes or (errors and needed):
        value += f"; {double} won by both" if double else ""
        if not needed:
            return note(name, value, "the suite doesn't claim this way; lock files of other programs may fail")
        return problem(
            name,
            value,
            "a ledger's entry and a claim are made this way: they would be lost or made twice",
            "use another file system (--root)",
        )
    holders = a.get("holders") or []
    if kind == "link" and nobody and all(holders[n : n + 1] in (["a"], ["b"]) for n in nobody):
        return note(
            name,
            f"{value}; {len(nobody)} made, but reported as taken",
            "a reply was lost and the request repeated; the suite counts links and knows its own",
        )
    if nobody:
        words = "each name was refused to both at least once: no harm, the suite tries again"
        return note(name, f"{value}; {len(nobody)} to nobody", words)
    return ok(name, value)


def locks(a: Raw, b: Raw, *, two_nodes: bool) -> list[Finding]:
    """Whether a lock that one holds is refused to the other."""
    held, tried, again = a.get("held"), b.get("tried"), b.get("again") or {}
    if not isinstance(held, Mapping) or not isinstance(tried, Mapping):
        return [unknown(kind, "the pair did not come so far") for kind in ("flock", "lockf")]
    return [
        _lock(kind, held.get(kind), tried.get(kind), again.get(kind), "nodes" if two_nodes else "processes")
        for kind in ("flock", "lockf")
    ]


def _lock(kind: str, held: str | None, tried: str | None, again: str | None, between: str) -> Finding:
    no_use = "the suite doesn't use it; other programs (pip, conda, Hugging Face's cache) do"
    if held == "refused":
        return note(kind, "refused to everybody", no_use, "keep their caches on another file system")
    if held != "granted":
        return note(kind, f"not there: {held}", no_use, "keep their caches on another file system")
    if tried == "granted":
        return note(
            kind,
            f"granted to both {between}",
            f"it excludes nobody; {no_use}, and may damage their caches",
            "give each job caches of its own, or ask for a mount with locks (lustre: -o flock; nfs: without nolock)",
        )
    if tried == "refused" and again == "granted":
        return ok(kind, f"excludes between {between}")
    return note(kind, f"refused while held ({tried}), then {again}", no_use, "keep their caches on another file system")
