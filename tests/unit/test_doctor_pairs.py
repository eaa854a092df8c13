"""What the results of a pair of nodes mean: clocks, lags, races and locks."""

from __future__ import annotations

from typing import Any

import pytest
from patients import by_name, state

from autorl_hpc.doctor import visibility
from autorl_hpc.doctor.finding import Finding


def raw() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two nodes, B's clock 100 s ahead, everything seen after 0.1 s."""
    ways = list(visibility.WAYS)
    a = {
        "node": "n1",
        "boot": "1",
        "stopped": "",
        "rounds": [[0.0, 100.01, 100.02, 0.03]] * 8,
        "acted": dict.fromkeys(ways, 10.0),
        "race": ["won", "lost"] * 15,
        "holders": ["a", "b"] * 15,
        "held": "granted",
    }
    b = {
        "node": "n2",
        "boot": "2",
        "stopped": "",
        "seen": dict.fromkeys(ways, 110.1),
        "race": ["lost", "won"] * 15,
        "tried": "refused",
        "again": "granted",
    }
    return a, b


def judged(a: Any, b: Any) -> dict[str, Finding]:
    return by_name(visibility.judge(a, b, two_nodes=True))


def test_a_good_pair_and_its_clocks() -> None:
    found = judged(*raw())
    clock = found.pop("clocks, node to node")
    assert state(clock) == "warning" and "+100.0 s, give or take 10 ms" in clock.value
    assert {state(f) for f in found.values()} == {"ok"}
    assert "100 ms" in found["new file, by listing"].value


def test_a_pair_with_lags() -> None:
    a, b = raw()
    b["seen"] = {"listed": 120.0, "renamed_over": None}
    found = judged(a, b)
    assert state(found["new file, by listing"]) == "warning" and "10 s" in found["new file, by listing"].value
    assert state(found["renamed over, by open()"]) == "problem"
    assert "not within" in found["renamed over, by open()"].value


def test_a_node_that_was_held_up_and_looked_late_is_no_lag() -> None:
    a, b = raw()
    b["seen"] = dict.fromkeys(b["seen"], 125.0)
    b["missed"] = {"listed": 109.9, "renamed_over": 124.9}
    found = judged(a, b)
    assert state(found["new file, by listing"]) == "ok" and "15 s" in found["new file, by listing"].value
    assert state(found["renamed over, by open()"]) == "warning"


def test_a_race_with_two_winners() -> None:
    a, b = raw()
    a["race"] = ["won"] * 30
    b["race"] = ["won"] + ["lost"] * 29
    found = judged(a, b)["link, raced"]
    assert state(found) == "problem" and "1 won by both" in found.value


def test_a_race_whose_winner_was_told_otherwise() -> None:
    a, b = raw()
    a["race"] = ["lost", *a["race"][1:]]
    assert state(judged(a, b)["link, raced"]) == "note" and "reported as taken" in judged(a, b)["link, raced"].value
    a["holders"] = [""] * 30
    assert "to nobody" in judged(a, b)["link, raced"].value


def test_links_that_are_refused() -> None:
    a, b = raw()
    for side in (a, b):
        side["race"] = ["Operation not permitted"] * 30
    assert state(judged(a, b)["link, raced"]) == "problem"


@pytest.mark.parametrize(
    ("held", "tried", "words"),
    [
        ("granted", "granted", "granted to both"),
        ("refused", "refused", "refused to everybody"),
        ("Function not implemented", "Function not implemented", "not there"),
        ("granted", "No locks available", "No locks available"),
    ],
)
def test_locks_that_do_not_lock(held: str, tried: str, words: str) -> None:
    a, b = raw()
    a["held"], b["tried"] = held, tried
    found = judged(a, b)["flock"]
    assert state(found) == "note" and words in found.value


def test_pairs_that_came_to_nothing() -> None:
    a, b = raw()
    assert [state(f) for f in visibility.judge(a, None, two_nodes=True)] == ["unknown"]
    stopped = judged({"node": "n1", "stopped": "the other side did not start"}, {"node": "n2", "stopped": ""})
    assert state(stopped["the pair"]) == "problem"
    assert (
        state(stopped["flock"]) == state(stopped["link, raced"]) == state(stopped["new file, by listing"]) == "unknown"
    )
    b["boot"] = "1"
    assert state(judged(a, b)["the two nodes"]) == "note"
