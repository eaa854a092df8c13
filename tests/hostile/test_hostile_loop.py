"""The whole loop on two nodes with a hostile file system: launch, supervisors, agents, graders, report; nothing lost, nothing twice."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from helpers import SUBMITS_ONE
from hostile_world import SITS, THREE, Jobs, World, answers_kept, assert_all_once

from autorl_hpc.files.ledger import Ledger
from autorl_hpc.states import EntryKind

pytestmark = pytest.mark.xdist_group("hostile")

SUITE = "^/(runs|store|vault)/|^/scratch/.*/(submissions|results|models|data)"
"""What the suite itself reads and writes; the agents' own output is their trouble."""

LOOP: dict[str, Any] = {"matrix": {"task": "mini"}}
GRADER = {"stale_after_s": 6, "idle_exit_s": 3600}
"""Nobody starts a grader over that left because the agents were slow."""

LOOKS = ["open", "read", "getattr", "readdir"]
STALE = [
    {"errno": "ESTALE", "ops": LOOKS, "match": "^/runs/|/(submissions|results)", "every": 11, "burst": 2},
    {"errno": "ESTALE", "ops": LOOKS, "match": "^/(store|vault)/|^/scratch/.*/(models|data)", "every": 59, "burst": 2},
]
FULL = [{"errno": "ENOSPC", "ops": ["create", "write", "mkdir", "link", "fsync"], "match": "^/runs/"}]
FULL_S = 3.0
LONG = "1h"
"""The budget where its end is not what is tried: a slow machine must not end the agents while the faults last."""
# A submission costs about twenty of these calls: with many more faults none would ever come to its end, only later and later.
BROKEN = [
    {"errno": "EIO", "ops": ["fsync", "fsyncdir", "rename", "link"], "match": SUITE, "every": 17},
    {"errno": "EIO", "ops": ["rename", "link"], "match": SUITE, "every": 29, "after": True},
]


def begin(world: World, *, budget: str = LONG, stale_after_s: float = 6) -> tuple[Jobs, list[str]]:
    """Three runs, two on node A and one on B; a grader on A, and one on B with its clock ahead."""
    for name, script in (("three", THREE), ("twin", THREE), ("sits", SITS)):
        world.agent(name, script)
    grader = {**GRADER, "stale_after_s": stale_after_s}
    run_ids = world.prepare(["three", "sits", "twin"], **LOOP, grader=grader, budget={"wall_clock": budget})
    jobs = Jobs(world)
    jobs.grader("a")
    jobs.grader("b", ahead_s=90)
    for number, run_id in enumerate(run_ids):
        jobs.agent("ab"[number % 2], run_id)
    return jobs, run_ids


def over(world: World, run_id: str) -> None:
    """Tells the agent SITS to end."""
    (world.workspace(run_id) / "code" / "over").touch()


def end(world: World, jobs: Jobs, run_ids: list[str], attempts: int | None = None) -> None:
    """To the end, and nothing lost or twice. Faults may cost an attempt."""
    over(world, run_ids[1])
    jobs.to_the_end(run_ids)
    world.faulty()
    assert_all_once(world, run_ids, attempts=attempts)
    assert all(answers_kept(world, run_id) for run_id in run_ids)


@pytest.mark.soak
def test_plain_lag(world: World) -> None:
    # No node is lost here: a grader that is slow for a while must not look dead, or the base model is measured once more.
    jobs, run_ids = begin(world, budget="60s", stale_after_s=60)
    jobs.until(lambda: world.view(run_ids[1]).sealed is not None)
    assert str(world.view(run_ids[1]).sealed.ended_by) == "budget"  # type: ignore[union-attr]
    end(world, jobs, run_ids, attempts=1)
    assert min(len(answers_kept(world, run_id)) for run_id in run_ids) >= 3
    measured = world.logs_of("grader").count("measuring the base model")
    assert measured == 2, "a name that was missed before another node measured it is no reason to measure again"
    assert world.injected() == {}


@pytest.mark.soak
def test_stale_handles_now_and_then(world: World) -> None:
    jobs, run_ids = begin(world)
    world.faulty(*STALE)
    jobs.until(
        lambda: min(world.injected()[f"ESTALE {op}"] for op in LOOKS) > 20 and len(answers_kept(world, run_ids[1])) > 2
    )
    # A closing needs more calls than lie between two of them, and waits two minutes for its next try: now they come less often.
    world.faulty(*({**fault, "every": 6 * int(str(fault["every"]))} for fault in STALE))
    end(world, jobs, run_ids)


@pytest.mark.soak
def test_a_full_disk_for_some_seconds(world: World) -> None:
    jobs, run_ids = begin(world)
    jobs.until(lambda: bool(world.view(run_ids[1]).accepted()))
    world.faulty(*FULL)
    ends_at = time.monotonic() + FULL_S
    jobs.until(lambda: time.monotonic() > ends_at and sum(world.injected().values()) > 20)
    world.faulty()
    end(world, jobs, run_ids)


def test_writes_that_fail_now_and_then_some_of_them_done(world: World) -> None:
    jobs, run_ids = begin(world)
    world.faulty(*BROKEN)
    calls = ("fsync", "fsyncdir", "rename", "link")
    jobs.until(
        lambda: min(world.injected()[f"EIO {op}"] for op in calls) > 5 and len(answers_kept(world, run_ids[1])) > 2
    )
    end(world, jobs, run_ids)


def test_a_grader_lost_with_its_node_is_taken_over_by_the_other(world: World) -> None:
    world.agent("one", SUBMITS_ONE)
    (run_id,) = world.prepare(["one"], matrix={"task": "arithmetic"}, grader=GRADER)
    jobs = Jobs(world)
    supervisor = jobs.agent("a", run_id)
    jobs.until(lambda: supervisor["process"].poll() == 0)  # not its seal alone: this node is lost, and what it owed too
    assert world.view(run_id).sealed is not None
    node = world.nodes["a"]
    # Its file server hangs when the score is committed: the grader holds the claim and gets no further.
    node.faulty({"errno": "EIO", "ops": ["link"], "match": "/ledger/", "held": True})
    first = world.start_on("a", "job", "grader", str(world.experiment.path))
    claim = f"f-{run_id}--000001.g0001"
    jobs.until(lambda: bool(node.injected()))
    assert claim in os.listdir(world.experiment.claims)
    first.kill()
    node.unmount()
    first.wait()
    assert world.view(run_id).scores == {}
    jobs.grader("b", ahead_s=90)
    jobs.to_the_end([run_id])
    assert_all_once(world, [run_id])
    assert world.view(run_id).scores[1].generation == 2


@pytest.mark.soak
def test_an_older_supervisor_on_another_node_steps_back(world: World) -> None:
    world.agent("sits", SITS)
    (run_id,) = world.prepare(["sits"], **LOOP, grader=GRADER, budget={"wall_clock": LONG})
    jobs = Jobs(world)
    jobs.grader("b")
    older = jobs.agent("a", run_id)
    jobs.until(lambda: len(world.view(run_id).accepted()) >= 2)
    jobs.agent("b", run_id)
    jobs.until(lambda: older["process"].poll() == 0)
    assert world.view(run_id).sealed is None, "it went without a word"
    over(world, run_id)
    jobs.to_the_end([run_id])
    assert_all_once(world, [run_id], attempts=2)
    entries = Ledger(world.run_dir(run_id)).read()
    attempts = [linked.body.attempt for linked in entries if hasattr(linked.body, "attempt")]
    assert attempts == sorted(attempts), "the older one wrote nothing after the newer one had begun"
    assert attempts.count(2) > 1
    assert [linked.entry.writer.host for linked in entries if linked.kind is EntryKind.SEALED] == ["node-b"]
