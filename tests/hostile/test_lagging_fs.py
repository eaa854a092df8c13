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
