"""A real intake desk whose run, workspace and artifacts lie on a hostile file system."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import Desk, save
from nodes import Node

from autorl_hpc.files.ledger import Ledger
from autorl_hpc.states import EndedBy, EntryKind
from autorl_hpc.supervise.attempt_ledger import Seals
from autorl_hpc.supervise.budget import BudgetUsed

pytestmark = pytest.mark.xdist_group("hostile")


@pytest.fixture
def node(new_node: Callable[..., Node], tmp_path: Path) -> Node:
    (tmp_path / "backing").mkdir()
    return new_node("a", tmp_path / "backing", cache_s=0.2)


@pytest.fixture
def desk(node: Node) -> Desk:
    """With a checkpoint and a manifest that have not been looked at."""
    made = Desk(node.mount)
    save(made.workspace / "output" / "v1")
    made.drop("m1", {"model_path": "output/v1"})
    return made


@pytest.mark.parametrize(
    ("op", "match"),
    [("getattr", "/submissions/m1.json$"), ("open", "/submissions/m1.json$"), ("readdir", "/submissions$")],
)
def test_what_cannot_be_seen_at_the_end_is_not_taken_for_absent(node: Node, desk: Desk, op: str, match: str) -> None:
    time.sleep(0.3)  # past what the mount believes
    node.faulty({"errno": "ESTALE", "ops": [op], "match": match})
    try:
        assert desk.intake.poll(patient=False) == 1
        assert op == "open" and desk.answer("m1")["fault"] == "cluster", "an answer, and not the agent's fault"
        return
    except OSError as error:
        assert error.errno == errno.ESTALE
    assert desk.intake.left()
    node.faulty()
    assert desk.intake.poll(patient=False) == 1
    assert desk.answer("m1")["status"] == "accepted"


def test_a_copy_that_fails_now_and_then_is_made_again_at_once(node: Node, desk: Desk) -> None:
    node.faulty(
        {"errno": "EIO", "ops": ["fsync"], "match": "^/runs/exp/artifacts/", "every": 3},
        {"errno": "ESTALE", "ops": ["create"], "match": "^/runs/exp/artifacts/", "every": 7, "burst": 2, "after": True},
    )
    for number in range(3):
        assert desk.submit(f"n{number}", "output/v1")["status"] == "accepted", "by one poll"
    assert len(node.injected()) > 3
    assert len(desk.artifacts()) == 1, "no copy is left behind"


def test_a_seal_that_was_written_is_not_taken_for_another_ones(node: Node, desk: Desk) -> None:
    desk.intake.poll()
    chain = desk.intake.chain
    seals = Seals(desk.experiment, desk.record, chain)
    node.faulty({"errno": "ESTALE", "ops": ["readdir"], "match": "/ledger$", "every": 6, "burst": 5})
    with pytest.raises(OSError, match="Stale"):
        seals.seal(EndedBy.BUDGET, BudgetUsed(1.0), driver=None)
    node.faulty()
    seals.seal(EndedBy.BUDGET, BudgetUsed(1.0), driver=None)
    seals.queue_closing()
    kinds = [linked.kind for linked in Ledger(desk.run).read()]
    assert kinds.count(EntryKind.SEALED) == 1
    assert f"c-{desk.record.run_id}.json" in desk.queued()
