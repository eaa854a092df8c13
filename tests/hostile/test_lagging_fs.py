"""The file system of these tests is as bad as it says: without this, a pass of the loop over it would mean nothing."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from helpers import PATIENCE_S, wait_for
from nodes import Node, ahead

pytestmark = pytest.mark.xdist_group("hostile")
CACHE_S = 2.0
"""Shorter than a cluster's, for the tests' time."""

SLACK_S = 0.5
TRIES = 20

T = TypeVar("T")


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    """What the server has."""
    folder = tmp_path / "backing"
    folder.mkdir()
    return folder


@pytest.fixture
def a(new_node: Callable[..., Node], backing: Path) -> Node:
    return new_node("a", backing, cache_s=CACHE_S)


@pytest.fixture
def b(new_node: Callable[..., Node], backing: Path) -> Node:
    return new_node("b", backing, cache_s=CACHE_S)


def believed_until(condition: Callable[[], bool]) -> tuple[float, float]:
    """When the last look began that did not see `condition`, and when the one had ended that did. A busy machine may look late:
    what a mount believed ran out between the two."""
    missed = -math.inf  # none did
    deadline = time.monotonic() + PATIENCE_S
    while (now := time.monotonic()) < deadline:
        if condition():
            return missed, time.monotonic()
        missed = now
        time.sleep(0.02)
    raise AssertionError(f"believed for more than {PATIENCE_S} s")


def in_time(look: Callable[[str], T]) -> T:
    """What `look` (given a name that is new) returns while a mount believes what it saw in it: one that was held up for so long
    that this has run out, and failed, tells nothing and is done anew."""
    for number in range(TRIES):
        started = time.monotonic()
        try:
            return look(f"file-{number}")
        except (AssertionError, OSError):
            if time.monotonic() - started < CACHE_S:
                raise
    raise AssertionError(f"held up {TRIES} times")


def test_a_name_once_missed_stays_missed_though_the_listing_shows_it(a: Node, b: Node) -> None:
    def miss(name: str) -> tuple[str, float, float]:
        before = time.monotonic()
        assert not (b.mount / name).exists()
        after = time.monotonic()
        (a.mount / name).write_text("here")
        assert name in os.listdir(b.mount)
        assert not (b.mount / name).exists()
        return name, before, after

    name, before, after = in_time(miss)
    missed, seen = believed_until((b.mount / name).exists)
    assert seen > before + CACHE_S - SLACK_S
    assert missed < after + CACHE_S + SLACK_S
    assert (b.mount / name).read_text() == "here"
    (a.mount / "never looked for").write_text("seen at once")
    assert (b.mount / "never looked for").exists()


def test_what_another_node_replaced_is_stale_and_what_this_one_removed_is_hidden(a: Node, b: Node) -> None:
    (a.mount / "file").write_text("old")
    with open(b.mount / "file", "rb", buffering=0) as file:
        (a.mount / "fresh").write_text("new")
        os.replace(a.mount / "fresh", a.mount / "file")
        with pytest.raises(OSError) as stale:
            file.read()
        assert stale.value.errno == errno.ESTALE
    assert (b.mount / "file").read_text() == "new"
    with open(a.mount / "file", "rb", buffering=0) as file:
        (a.mount / "file").unlink()
        assert file.read() == b"new"
        assert [name[:12] for name in os.listdir(b.mount)] == [".fuse_hidden"]
    wait_for(lambda: os.listdir(b.mount) == [], "the hidden file to go")


def test_faults_are_counted_and_can_be_switched(a: Node, b: Node) -> None:
    folder = a.mount / "ledger"
    folder.mkdir()

    def write(name: str) -> int:
        try:
            with open(folder / name, "w") as file:
                file.write("x")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return error.errno or 0
        return 0

    a.faulty({"errno": "ENOSPC", "ops": ["create"], "match": "^/ledger/", "every": 3})
    assert [write(f"a{number}") for number in range(6)] == [0, 0, errno.ENOSPC] * 2
    assert len(os.listdir(folder)) == 4
    a.faulty({"errno": "EIO", "ops": ["fsync"], "match": "/b1$"})
    assert [write("b0"), write("b1"), write("b2")] == [0, errno.EIO, 0]
    a.faulty({"errno": "EIO", "ops": ["link", "rename"], "every": 2, "after": True})
    os.link(folder / "b0", folder / "c0")
    with pytest.raises(OSError, match="Input/output"):
        os.link(folder / "b0", folder / "c1")
    assert "c1" in os.listdir(folder), "it was done, and only its answer lost"
    a.faulty()
    assert write("d") == 0
    assert a.injected() == [
        "ENOSPC create /ledger/a2",
        "ENOSPC create /ledger/a5",
        "EIO fsync /ledger/b1",
        "EIO link /ledger/c1",
    ]
    assert b.injected() == []


def test_stale_handles(a: Node) -> None:
    (a.mount / "file").write_text("text")
    a.faulty({"errno": "ESTALE", "ops": ["open"], "every": 2})
    assert [(a.mount / "file").read_text() for _ in range(4)] == ["text"] * 4, "Linux itself opens once more"
    a.faulty({"errno": "ESTALE", "ops": ["open"], "every": 3, "burst": 2})
    assert (a.mount / "file").read_text() == "text"
    time.sleep(CACHE_S + 0.1)  # attributes that are still believed are not asked for
    for op in ("getattr", "open", "read", "readdir"):
        a.faulty({"errno": "ESTALE", "ops": [op]})
        with pytest.raises(OSError) as stale:
            (a.mount / "file").stat()
            (a.mount / "file").read_text()
            os.listdir(a.mount)
        assert stale.value.errno == errno.ESTALE, op


def test_a_wall_clock_ahead_and_a_monotonic_one_that_is_not() -> None:
    code = (
        "import datetime, threading, time; start = time.monotonic(); threading.Event().wait(0.2); time.sleep(0.1);"
        "print(time.time(), time.time_ns() / 1e9, datetime.datetime.now(datetime.timezone.utc).timestamp(),"
        "time.monotonic(), time.monotonic() - start)"
    )
    before, started = time.time(), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **ahead(90)}, capture_output=True, text=True, check=True
    )
    *walls, monotonic, waited = map(float, done.stdout.split())
    assert all(before + 85 < wall < time.time() + 95 for wall in walls)
    assert started < monotonic < time.monotonic()
    assert 0.3 < waited < 25, "and not 90 times as long"
