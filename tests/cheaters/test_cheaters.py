"""Every cheat at every sandbox level that works here: its exploit fails and the report says so, or it is known not to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
from cheating import Seen, World, exploits
from helpers import Cluster

CHEATS = exploits()
LEVELS = tuple(os.environ.get("AUTORL_CHEATER_LEVELS", "bwrap,landlock").split(","))
"""`none` and `namespaces` too, by this variable: the first is no promise, the second differs from bwrap by who makes the mounts."""

NEVER = "not ranked: sandbox none"

# In one group: a mark of a parameter does not keep its tests together, and every worker would make every world.
pytestmark = [pytest.mark.timeout(5400), pytest.mark.xdist_group("cheats")]


DIFFER = {
    "landlock": {"ends-its-forwarder"} | {name for name, cheat in CHEATS.items() if "landlock" in cheat.uncovered}
}
"""Cheats whose outcome at a level is another one than at bwrap; at levels not named here: those that succeed."""


def every(level: str) -> list[Any]:
    """Return the cheats of a level as parameters; those that end as at bwrap are soak tests."""
    differ = DIFFER.get(level, {name for name, cheat in CHEATS.items() if level in cheat.uncovered})
    return [
        pytest.param(level, name, marks=[] if level == "bwrap" or name in differ else pytest.mark.soak)
        for name in sorted(CHEATS)
    ]


@pytest.fixture(scope="module")
def worlds(
    request: pytest.FixtureRequest, staged: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], World]]:
    """All cheats of one level whose tests were chosen, run once."""
    from autorl_hpc.doctor import host

    made: dict[str, World] = {}
    clusters: list[Cluster] = []

    def of(level: str) -> World:
        if level not in made:
            works = {str(finding.check): finding for finding in host.check_sandbox()}
            if level != "none" and str(works[level].state) != "ok":
                needs.skip(level, f"level {level}: {works[level].value}")
            clusters.append(Cluster(staged, tmp_path_factory.mktemp(f"cheats-{level}")))
            params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
            names = {each["name"] for each in params if each.get("world") == level and "name" in each}
            cheats = {name: cheat for name, cheat in CHEATS.items() if name in names}
            made[level] = World(clusters[-1], level, cheats)
        return made[level]

    try:
        yield of
    finally:
        for cluster in clusters:
            cluster.end()


@pytest.fixture
def world(request: pytest.FixtureRequest, worlds: Callable[[str], World]) -> World:
    """The world of a test's level. Of function scope, since a parameter beside it would make a wider one be built for each test."""
    return worlds(str(request.param))


@pytest.mark.parametrize(("world", "name"), [each for level in LEVELS for each in every(level)], indirect=["world"])
def test_cheat(world: World, name: str) -> None:
    cheat, seen = CHEATS[name], world.seen[name]
    known = cheat.uncovered.get(world.level)
    if known is not None:
        assert seen.won, (
            f"{name} is said to succeed at level {world.level} ({known}), and did not: correct the list\n{seen.log[-1500:]}"
        )
        if world.level == "none":
            assert NEVER in seen.page or "damaged" in seen.page or not seen.was_sealed(), seen.page
        hole = cheat.hole.get(world.level)
        assert hole is None or hole in seen.page, f"the report does not name the hole:\n{seen.page}"
        return
    assert not seen.won, f"{name} at level {world.level}: {seen.won}"
    cheat.check(seen)
    if cheat.says is not None:
        assert cheat.says in seen.page, f"the report does not say {cheat.says!r}:\n{seen.page}"


@pytest.mark.parametrize("world", LEVELS, indirect=True)
def test_the_honest_run_is_untouched(world: World) -> None:
    seen: Seen = world.seen["honest"]
    assert len(seen.accepted()) == 1 and seen.view.scores[1].evaluation.score is not None
    assert seen.summary["counted"] and str(seen.sealed.ended_by) == "agent_exit" and seen.sealed.exit_code == 0
    assert seen.summary["sandbox"] == world.level and (world.level != "none" or NEVER in seen.page)
