"""Judge the raw results of a pair of processes: clocks, lags, races and locks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autorl_hpc.doctor.finding import Finding, note, ok, problem, span, unknown, warning
from autorl_hpc.doctor.pair import WATCH_S, offset

Raw = Mapping[str, Any]

CLOCK_NOTE_S = 1.0
CLOCK_WARNING_S = 60.0
NOT_SO_FAR = "the pair did not come so far"
SHARED = "use a file system that all nodes share (--root)"

WAYS = {"listed": ("new file, by listing", 5.0), "renamed_over": ("renamed over, by open()", 10.0)}
"""Name and slowest time without a warning: a submission waits for some four listings; heartbeats are judged after a minute."""


def judge(a: Raw | None, b: Raw | None) -> list[Finding]:
    """Return every finding of a pair of nodes, as far as it came; `a` and `b` are the messages `result` of the sides, or None."""
    if a is None or b is None:
        return [unknown("the pair", f"side {'a' if a is None else 'b'} left no result")]
    nodes = f"{a['node']} and {b['node']}"
    found = [ok("the two nodes", nodes)]
    if a["boot"] == b["boot"]:
        so_what = "they share one cache and one clock: what is measured between them says nothing of two machines"
        advice = "name a partition with several machines in the cluster's profile, if there is one"
        found = [note("the two nodes", f"{nodes} are one machine (same boot id)", so_what, advice)]
    if stopped := a["stopped"] or b["stopped"]:
        so_what = "files that one side made did not reach the other, or hang"
        found.append(problem("the pair", f"it stopped: {stopped}", so_what, SHARED))
    return [*found, clocks("clocks, node to node", a.get("rounds") or []), *_lags(a, b), _race(a, b), _lock(a, b)]


def clocks(name: str, rounds: list[list[float]]) -> Finding:
    """Judge the difference of two clocks by messages there and back."""
    clock = offset(rounds)
    if clock is None:
        return unknown(name, "no answer came back")
    ahead, unsure = clock
    told = f"{ahead:+.1f} s" if abs(ahead) >= 1 else f"{1000 * ahead:+.0f} ms"
    value = f"{told}, give or take {span(unsure)}"
    if abs(ahead) - unsure > CLOCK_WARNING_S:
        so_what = "nothing here is ordered by clocks, but logins (munge, TLS) fail when they differ by minutes"
        return warning(name, value, so_what, "tell the site's people")
    if abs(ahead) - unsure > CLOCK_NOTE_S:
        so_what = "nothing here is ordered by clocks; times of different nodes in logs don't line up"
        return note(name, value, so_what, "add the difference when you compare times of two nodes")
    return ok(name, value)


def _lags(a: Raw, b: Raw) -> list[Finding]:
    clock, acted, seen = offset(a.get("rounds") or []), a.get("acted"), b.get("seen")
    found, wait = [], "the suite's processes wait for each other this way: "
    for way, (name, slow_s) in WAYS.items():
        if clock is None or acted is None or seen is None:
            found.append(unknown(name, NOT_SO_FAR))
        elif seen[way] is None:
            found.append(problem(name, f"not within {WATCH_S:.0f} s", f"{wait}nothing will be scored", SHARED))
        else:
            lag = max(0.0, seen[way] - clock[0] - acted[way])
            value = f"seen after {span(lag)} (+- {span(clock[1])})"
            so_what = f"{wait}scores come late, living graders may look dead"
            advice = "mount with a shorter actimeo, or use another file system (--root)"
            found.append(warning(name, value, so_what, advice) if lag > slow_s else ok(name, value))
    return found


def _race(a: Raw, b: Raw) -> Finding:
    name, mine, theirs = "link, raced", a.get("race"), b.get("race")
    if mine is None or theirs is None:
        return unknown(name, NOT_SO_FAR)
    outcomes = list(zip(mine, theirs, strict=False))
    errors = sorted({word for pair in outcomes for word in pair} - {"won", "lost"})
    double, nobody = outcomes.count(("won", "won")), sum("won" not in pair for pair in outcomes)
    value = f"{len(outcomes)} names, {mine.count('won')} to one side, {theirs.count('won')} to the other"
    if double or errors or not outcomes:
        value += f"; refused: {', '.join(errors)}" if errors else ""
        value += f"; {double} won by both" if double else ""
        so_what = "a ledger's entry and a claim are made this way: they would be lost or made twice"
        return problem(name, value, so_what, "use another file system (--root)")
    if nobody:
        so_what = "refused to both, or a reply was lost: no harm, the suite counts links and tries again"
        return note(name, f"{value}; {nobody} to nobody", so_what)
    return ok(name, value)


def _lock(a: Raw, b: Raw) -> Finding:
    held, tried, again = a.get("held"), b.get("tried"), b.get("again")
    if held is None or tried is None:
        return unknown("flock", NOT_SO_FAR)
    if (held, tried, again) == ("granted", "refused", "granted"):
        return ok("flock", "excludes between nodes")
    so_what = (
        "the suite doesn't use it; other programs (pip, conda, Hugging Face's cache) do, and may damage their caches"
    )
    value = f"refused while held ({tried}), then {again}"
    if (held, tried) == ("granted", "granted"):
        value = "granted to both nodes"
    elif held != "granted":
        value = "refused to everybody" if held == "refused" else f"not there: {held}"
    advice = "give each job caches of its own, or ask for a mount with locks (lustre: -o flock)"
    return note("flock", value, so_what, advice)
