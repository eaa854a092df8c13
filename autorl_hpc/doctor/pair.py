"""Run one side of a pair of processes that find out how they see each other's files: `python3 pair.py FOLDER a|b`.

Runs on two nodes with the standard library alone. Each side has a folder of messages; a message appears by rename and is waited
for by listing. Side A acts and B watches, then both race. Each side ends with a message `result`: raw times by the writer's own
clock, for `visibility` to judge. A also answers pings of a third side, `login`, until B is there.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
import time
from typing import Any

POLL_S = 0.02
QUICK_POLL_S = 0.002  # while clocks are compared: the time of a poll adds to the uncertainty of the result
PHASE_S = 15.0  # for an answer of the other side
PINGS = 8
HELLO_S = 240.0  # the other side may still wait in the queue; whoever started the pair ends it earlier
WATCH_S = 40.0  # an NFS client may believe for 30 s that a name is absent
TOTAL_S = HELLO_S + 120.0
RACES = 30
RACE_STEP_S = 0.015
RACE_SPREAD_S = 0.006
"""B comes at most this much early or late, sweeping, so that the two meet although their clocks are compared only roughly."""

LEAD_S = 0.5  # time for the message that says when a race starts
WATCHED = ("listed", "renamed_over")


class Late(Exception):
    """The other side said nothing in time."""


class Post:
    """Exchanges messages with another side; each side writes to a folder of its own, which is not made again if it is removed."""

    def __init__(self, folder: str, own: str, other: str) -> None:
        self.own = subfolder(folder, own)
        self.other = os.path.join(folder, other)
        self.name = other

    def say(self, name: str, **value: Any) -> None:
        hidden = os.path.join(self.own, f".{name}")
        with open(hidden, "w") as file:
            json.dump({**value, "said": time.time()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(hidden, os.path.join(self.own, name))

    def heard(self, name: str) -> dict[str, Any] | None:
        """Return the message if it is there now; its `heard` is the time of the listing that showed it."""
        if name not in listing(self.other):
            return None
        now = time.time()
        try:
            with open(os.path.join(self.other, name)) as file:
                return {**json.load(file), "heard": now}
        except (OSError, ValueError):
            return None  # look again

    def hear(self, name: str, limit_s: float = PHASE_S, poll_s: float = POLL_S) -> dict[str, Any]:
        """Wait for a message. Raises Late if it did not come in time."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            found = self.heard(name)
            if found is not None:
                return found
            time.sleep(poll_s)
        raise Late(f"no `{name}` within {limit_s:.0f} s")


def subfolder(folder: str, name: str) -> str:
    """Return a folder of an existing one, made if it is not there."""
    path = os.path.join(folder, name)
    try:
        os.mkdir(path)
    except FileExistsError:
        pass
    return path


def listing(folder: str) -> list[str]:
    """Return the names in a folder; none if it can't be listed now."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def write(path: str, data: str) -> None:
    with open(path, "w") as file:
        file.write(data)


def read(path: str) -> str:
    """Return a file's content; empty if it can't be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def who() -> dict[str, Any]:
    boot = read("/proc/sys/kernel/random/boot_id").strip()
    return {"node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(), "boot": boot}


# Clocks


def ping(post: Post, me: str, limit_s: float = PHASE_S) -> list[list[float]]:
    """Return rounds of [asked, heard there, answered there, heard here]; fewer where a round takes long."""
    deadline = time.monotonic() + limit_s
    rounds = []
    for number in range(PINGS):
        asked = time.time()
        post.say(f"ping-{number}")
        try:
            answer = post.hear(f"pong-{me}-{number}", deadline - time.monotonic(), QUICK_POLL_S)
        except Late:
            break
        rounds.append([asked, answer["there"], answer["said"], answer["heard"]])
    return rounds


def pong(post: Post, number: int, limit_s: float) -> None:
    asked = post.hear(f"ping-{number}", limit_s, QUICK_POLL_S)
    post.say(f"pong-{post.name}-{number}", there=asked["heard"])


def offset(rounds: list[list[float]]) -> tuple[float, float] | None:
    """Return how far the other clock is ahead, and the uncertainty, in seconds: by the quickest round (RFC 5905, section 8)."""
    if not rounds:
        return None
    t0, t1, t2, t3 = min(rounds, key=lambda r: (r[3] - r[0]) - (r[2] - r[1]))
    return ((t1 - t0) + (t2 - t3)) / 2, ((t3 - t0) - (t2 - t1)) / 2


# A acts and B watches


def act(folder: str) -> dict[str, float]:
    done = {}
    for name in WATCHED:
        path = os.path.join(folder, name, "file")
        write(path + ".new", "new")
        os.rename(path + ".new", path)
        done[name] = time.time()
    return done


def seen(folder: str, name: str) -> bool:
    if name == "listed":
        return "file" in listing(os.path.join(folder, name))
    return read(os.path.join(folder, name, "file")) == "new"


def watch(post: Post, folder: str) -> dict[str, float | None]:
    """Return when B first saw each change; None: not within WATCH_S."""
    at: dict[str, float | None] = dict.fromkeys(WATCHED)
    for name in WATCHED:
        seen(folder, name)  # every client remembers what it saw
    post.say("watching")
    deadline = time.monotonic() + WATCH_S
    while None in at.values() and time.monotonic() < deadline:
        for name in WATCHED:
            if at[name] is None and seen(folder, name):
                at[name] = time.time()
        time.sleep(POLL_S)
    return at


# Both at once


def race(folder: str, side: str, start: float, spread: float = 0.0) -> list[str]:
    """Link many names at the same time as the other side; return `won`, `lost` or the error for each.

    Args:
        start: by this side's clock.
        spread: this side comes from so many seconds early to so many late, name by name.
    """
    place = subfolder(folder, "race")
    source = os.path.join(place, f"from-{side}")
    write(source, side)
    told = []
    for number in range(RACES):
        shift = spread * (2 * number / (RACES - 1) - 1)
        time.sleep(max(0.0, start + number * RACE_STEP_S + shift - time.time()))
        try:
            os.link(source, os.path.join(place, f"link-{number}"))
            told.append("won")
        except FileExistsError:
            told.append("lost")
        except OSError as error:
            told.append(error.strerror or str(error))
    return told


def lock(folder: str) -> tuple[str, int]:
    """Try flock; return `granted`, `refused` or the error, and the open file."""
    fd = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "refused", fd
    except OSError as error:
        return error.strerror or str(error), fd
    return "granted", fd


# The two sides


def side_a(folder: str, result: dict[str, Any]) -> None:
    """Act; `result` is filled as far as it gets."""
    post, login = Post(folder, "a", "b"), Post(folder, "a", "login")
    for name in WATCHED:  # each in its own folder: listing a folder may clear what a client remembers of its names
        subfolder(folder, name)
    write(os.path.join(folder, "renamed_over", "file"), "old")
    post.say("hello", **who())
    _wait_for_b(post, login)
    result["rounds"] = ping(post, "a")
    post.say("clock", ahead=(offset(result["rounds"]) or (0.0, 0.0))[0])
    post.hear("watching")
    result["acted"] = act(folder)
    post.hear("watched", WATCH_S + PHASE_S)
    start = time.time() + LEAD_S
    post.say("race", start=start)
    result["race"] = race(folder, "a", start)
    result["held"], fd = lock(folder)
    post.say("locked")
    post.hear("tried")
    os.close(fd)
    post.say("unlocked")
    post.hear("result")


def _wait_for_b(post: Post, login: Post) -> None:
    deadline = time.monotonic() + HELLO_S
    answered = 0
    while time.monotonic() < deadline and os.path.isdir(post.own):
        if post.heard("hello") is not None:
            return
        if login.heard(f"ping-{answered}") is not None:
            pong(login, answered, 1.0)
            answered += 1
        time.sleep(POLL_S)
    raise Late("the other side did not start")


def side_b(folder: str, result: dict[str, Any]) -> None:
    """Watch."""
    post = Post(folder, "b", "a")
    post.hear("hello", HELLO_S)
    post.say("hello", **who())
    for number in range(PINGS):
        if post.heard("clock") is not None:
            break
        pong(post, number, PHASE_S)
    clock = post.hear("clock", 2 * PHASE_S)
    result["seen"] = watch(post, folder)
    post.say("watched")
    start = post.hear("race")["start"] + clock["ahead"]
    result["race"] = race(folder, "b", start, RACE_SPREAD_S)
    post.hear("locked")
    result["tried"], fd = lock(folder)
    os.close(fd)
    post.say("tried")
    post.hear("unlocked")
    result["again"] = lock(folder)[0]


def main(folder: str, side: str) -> int:
    """Run a side; its result says how far it came."""
    signal.alarm(int(TOTAL_S))  # whatever hangs: a probe must not keep a node
    result: dict[str, Any] = {**who(), "stopped": ""}
    try:
        (side_a if side == "a" else side_b)(folder, result)
    except (Late, OSError, KeyError) as error:
        result["stopped"] = str(error)
    try:
        Post(folder, side, side).say("result", **result)
    except OSError:
        return 1  # the folder is gone: nobody waits any more
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
