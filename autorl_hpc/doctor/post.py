"""Messages between processes that share nothing but a folder, and the difference of their clocks by them.

Standard library only: it is copied beside `pair.py` and may run under a node's own Python.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

POLL_S = 0.02
QUICK_POLL_S = 0.002
"""While clocks are compared: what a poll adds to a round is the uncertainty of the result."""

PHASE_S = 15.0
"""For an answer of the other side."""

PINGS = 8


class Late(Exception):
    """The other side said nothing in time."""


class Post:
    """Messages of one side to another: files in a folder that only the writer writes to."""

    def __init__(self, folder: str, own: str, other: str) -> None:
        self.own = below(folder, own)
        self.other = os.path.join(folder, other)
        self.name = other

    def say(self, name: str, **value: Any) -> None:
        """Makes a message appear."""
        hidden = os.path.join(self.own, f".{name}")
        with open(hidden, "w") as file:
            json.dump({**value, "said": time.time()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(hidden, os.path.join(self.own, name))

    def heard(self, name: str) -> dict[str, Any] | None:
        """The message, if it is there now; `heard` in it is the time of the listing that showed it."""
        if name not in listing(self.other):
            return None
        now = time.time()
        try:
            with open(os.path.join(self.other, name)) as file:
                return {**json.load(file), "heard": now}
        except (OSError, ValueError):
            return None  # look again

    def hear(self, name: str, limit_s: float = PHASE_S, poll_s: float = POLL_S) -> dict[str, Any]:
        """Waits for a message."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            found = self.heard(name)
            if found is not None:
                return found
            time.sleep(poll_s)
        raise Late(f"no `{name}` within {limit_s:.0f} s")


def below(folder: str, *names: str) -> str:
    """A folder in a folder that is there; one that was taken away meanwhile is not made again."""
    for name in names:
        folder = os.path.join(folder, name)
        try:
            os.mkdir(folder)
        except FileExistsError:
            pass
    return folder


def listing(folder: str) -> list[str]:
    """The names in a folder; none if it can't be listed now."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def who() -> dict[str, Any]:
    """This process's host."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    host = socket.gethostname()
    return {"node": os.environ.get("SLURMD_NODENAME") or host, "host": host, "boot": boot, "python": sys.version[:12]}


def ping(post: Post, me: str, limit_s: float = PHASE_S) -> list[list[float]]:
    """Rounds of [asked, heard there, answered there, heard here]; fewer where a round takes long."""
    deadline = time.monotonic() + limit_s
    rounds = []
    for number in range(PINGS):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        asked = time.time()
        post.say(f"ping-{number}")
        try:
            answer = post.hear(f"pong-{me}-{number}", left, QUICK_POLL_S)
        except Late:
            break
        rounds.append([asked, answer["there"], answer["said"], answer["heard"]])
    return rounds


def offset(rounds: list[list[float]]) -> tuple[float, float] | None:
    """How far the other clock is ahead, and how uncertain that is, in seconds: by the quickest round (RFC 5905, section 8)."""
    if not rounds:
        return None
    t0, t1, t2, t3 = min(rounds, key=lambda r: (r[3] - r[0]) - (r[2] - r[1]))
    return ((t1 - t0) + (t2 - t3)) / 2, ((t3 - t0) - (t2 - t1)) / 2


def pong(post: Post, number: int, limit_s: float) -> None:
    """Answers one ping."""
    asked = post.hear(f"ping-{number}", limit_s, QUICK_POLL_S)
    post.say(f"pong-{post.name}-{number}", there=asked["heard"])
