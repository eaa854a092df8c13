"""The file protocol's single steps on a hostile file system: each promise where it was seen to break."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import wait_for
from nodes import Node

from autorl_hpc.files import artifacts, atomic, reading
from autorl_hpc.files.frozen_records import read_baseline
from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.ledger import Ledger, Linked
from autorl_hpc.records.entries import AttemptStarted, Evaluation
from autorl_hpc.records.exchange import Baseline, Engine
from autorl_hpc.states import EntryKind, Split

pytestmark = pytest.mark.xdist_group("hostile")
CACHE_S = 1.0
LONG_CACHE_S = 60.0
"""Longer than a busy machine may take for what must not wait for it."""

HASH = "0" * 64
STALE_NOW_AND_THEN = {
    "errno": "ESTALE",
    "ops": ["open", "read", "getattr", "readdir", "create"],
    "every": 7,
    "burst": 2,
}


@pytest.fixture
def two(new_node: Callable[..., Node], tmp_path: Path) -> tuple[Node, Node]:
    """Two nodes over an experiment with one run."""
    backing = tmp_path / "backing"
    (backing / "run" / "ledger").mkdir(parents=True)
    (backing / "run" / "run.json").write_text("{}")
    (backing / "artifacts").mkdir()
    return new_node("a", backing, cache_s=CACHE_S), new_node("b", backing, cache_s=CACHE_S)


def append(ledger: Ledger, number: int) -> Linked:
    body = AttemptStarted(attempt=number, elapsed_s=0.0, workspace="w")
    written = ledger.append(EntryKind.ATTEMPT_STARTED, body, role="supervisor")
    assert written is not None
    return written


@pytest.mark.parametrize("error", ["EIO", "ESTALE"])
def test_a_link_or_rename_whose_answer_is_lost_was_made(two: tuple[Node, Node], error: str) -> None:
    a, b = two
    a.faulty({"errno": error, "ops": ["link", "rename"], "after": True})
    assert atomic.publish_bytes(a.mount / "published", b"1")
    assert not atomic.publish_bytes(a.mount / "published", b"2")
    atomic.write_bytes(a.mount / "written", b"1")
    atomic.write_bytes(a.mount / "written", b"2")
    assert reading.list_names(b.mount) == ["artifacts", "published", "run", "written"]
    assert ((b.mount / "published").read_bytes(), (b.mount / "written").read_bytes()) == (b"1", b"2")
    assert [name for name in os.listdir(b.mount) if name.startswith(atomic.TEMPORARY_PREFIX)] == []
    os.unlink(a.mount / "published")  # the node that made it sees it


def test_a_file_that_could_not_be_synced_is_written_anew(two: tuple[Node, Node]) -> None:
    a, _ = two
    a.faulty({"errno": "EIO", "ops": ["fsync"], "every": 3, "burst": 2})
    for number in range(4):
        assert atomic.publish_bytes(a.mount / f"p{number}", b"1")
        atomic.write_bytes(a.mount / "w", b"%d" % number)
    assert len(a.injected()) > 8
    assert (a.mount / "w").read_bytes() == b"3"
    assert len(os.listdir(a.mount)) == 4 + 1 + 2, "no rubbish is left"


def test_a_full_disk_is_said_at_once_and_leaves_nothing(two: tuple[Node, Node]) -> None:
    a, _ = two
    a.faulty({"errno": "ENOSPC", "ops": ["write"]})
    for write in (atomic.publish_bytes, atomic.write_bytes):
        with pytest.raises(OSError) as full:
            write(a.mount / "x", b"1")
        assert full.value.errno == errno.ENOSPC
    assert sorted(os.listdir(a.mount)) == ["artifacts", "run"]


def test_an_entry_whose_name_a_node_has_missed_is_read_and_built_upon(two: tuple[Node, Node]) -> None:
    """What a loser of a race for a number meets: its node goes on believing that the number is free."""
    a, b = (Ledger(RunDir(node.mount / "run")) for node in two)
    assert not (b.run.ledger / "000001.json").exists()
    append(a, 1)
    append(b, 2)
    append(a, 3)
    assert [linked.body.attempt for linked in b.read()] == [1, 2, 3]


def test_a_ledger_whose_every_write_seems_to_fail_holds_each_entry_once(two: tuple[Node, Node]) -> None:
    for node in two:
        node.faulty({"errno": "EIO", "ops": ["link"], "after": True}, {"errno": "EIO", "ops": ["fsyncdir"], "every": 2})
    ledgers = [Ledger(RunDir(node.mount / "run")) for node in two]
    for number in range(1, 4):
        append(ledgers[number % 2], number)
    assert [linked.body.attempt for linked in ledgers[0].read()] == [1, 2, 3]


def test_an_entry_that_cannot_be_read_now_is_not_called_damaged(two: tuple[Node, Node]) -> None:
    a, b = two
    append(Ledger(RunDir(a.mount / "run")), 1)
    b.faulty({"errno": "ESTALE", "ops": ["read"], "match": "000001"})
    with pytest.raises(OSError) as stale:
        Ledger(RunDir(b.mount / "run")).read()
    assert stale.value.errno == errno.ESTALE
    b.faulty(STALE_NOW_AND_THEN)
    assert len(Ledger(RunDir(b.mount / "run")).read()) == 1


def test_a_base_score_of_another_node_is_seen_at_once(new_node: Callable[..., Node], tmp_path: Path) -> None:
    """Who has looked for it in vain, and goes on believing that, would measure it a second time."""
    (tmp_path / "backing").mkdir()
    a, b = (new_node(name, tmp_path / "backing", cache_s=LONG_CACHE_S) for name in "ab")
    evaluation = Evaluation(split=Split.FEEDBACK, content_hash=HASH, score=50.0, n=2, recipe_hash=HASH)
    engine = Engine(backend="transformers", versions={}, device="cpu", dtype="float32")
    record = Baseline(key=HASH, task="t", base_model="m", evaluation=evaluation, engine=engine, grader="g")
    assert read_baseline(b.mount, HASH) is None
    atomic.publish_bytes(a.mount / f"{HASH}.json", record.canonical() + b"\n")
    started = time.monotonic()
    assert read_baseline(b.mount, HASH) == record
    assert time.monotonic() - started < LONG_CACHE_S / 2


def test_an_artifact_is_kept_while_it_cannot_be_seen_who_holds_it(two: tuple[Node, Node]) -> None:
    a, _ = two
    store = a.mount / "artifacts"
    folder = artifacts.new_folder(store, "run", 1)
    (folder / artifacts.READY_NAME).write_text("{}")
    artifacts.install(store, folder, "hash", "run-1")
    assert artifacts.hold(store, "hash", "run-2")
    artifacts.release(store, "hash", "run-1")
    assert artifacts.artifact_ready(store, "hash")
    a.faulty({"errno": "ESTALE", "ops": ["rmdir"], "match": "refs"})
    artifacts.release(store, "hash", "run-2")
    assert artifacts.artifact_ready(store, "hash"), "a run may have taken hold of it"
    a.faulty()
    artifacts.release(store, "hash", "run-2")
    assert os.listdir(store) == []


def test_installed_from_two_nodes_at_once(two: tuple[Node, Node]) -> None:
    """The second node has looked, found nothing, and goes on believing so while it installs the same content."""
    stores = [node.mount / "artifacts" for node in two]
    assert not artifacts.artifact_ready(stores[1], "hash")
    for number, store in enumerate(stores):
        folder = artifacts.new_folder(store, "run", 1)
        (folder / artifacts.READY_NAME).write_text("{}")
        artifacts.install(store, folder, "hash", f"run-{number}")
    wait_for(lambda: sorted(os.listdir(stores[0] / "hash" / "refs")) == ["run-0", "run-1"], "both references")
    assert os.listdir(stores[0]) == ["hash"]
