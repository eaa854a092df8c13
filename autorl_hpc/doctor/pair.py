"""Run one side of a pair of processes that find out how they see each other's files: `python3 pair.py FOLDER a|b`.

On two nodes, with the standard library alone. A acts and B watches, then both race; trial_jobs.py judges. A also answers a third side, `login`.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

POLL_S = 0.005
PHASE_S = 15.0  # for an answer of the other side
PINGS = 8
HELLO_S = 240.0  # the other side may still wait in the queue; whoever started the pair ends it earlier
WATCH_S = 40.0  # an NFS client may believe for 30 s that a name is absent
RACES = 30
RACE_STEP_S = 0.015
RACE_SPREAD_S = 0.006  # B sweeps, so that the two meet although their clocks are compared only roughly

LEAD_S = 0.5  # time for the message that says when a race starts
WATCHED = ("listed", "renamed_over")


class Late(Exception):
    """The other side said nothing in time."""


class Post:
    """Exchange messages: each a file in the sender's folder, which appears by rename and is found by listing."""

    def __init__(self, folder: Path, own: str, other: str) -> None:
        self.own, self.other = folder / own, folder / other
        self.own.mkdir(exist_ok=True)  # fails once the whole folder is removed

    def say(self, name: str, **value: Any) -> None:
        hidden = self.own / f".{name}"
        with open(hidden, "w") as file:
            json.dump({**value, "said": time.time()}, file)
            file.flush()
            os.fsync(file.fileno())
        hidden.rename(self.own / name)

    def heard(self, name: str) -> dict[str, Any] | None:
        """Return the message if it is there now; its `heard` is the time of that listing."""
        if name not in listing(self.other):
            return None
        now = time.time()
        try:
            return {**json.loads((self.other / name).read_text()), "heard": now}
        except (OSError, ValueError):
            return None  # look again

    def hear(self, name: str, limit_s: float = PHASE_S) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if (found := self.heard(name)) is not None:
                return found
            time.sleep(POLL_S)
        raise Late(f"no `{name}` within {limit_s:.0f} s")


def listing(folder: Path) -> list[str]:
    """Return the names in a folder; none if it can't be listed now."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def ping(post: Post) -> list[list[float]]:
    """Return rounds of [asked, heard there, answered there, heard here]; fewer where an answer takes long."""
    deadline = time.monotonic() + PHASE_S
    rounds: list[list[float]] = []
    try:
        for number in range(PINGS):
            asked = time.time()
            post.say(f"ping-{number}")
            answer = post.hear(f"pong-{post.own.name}-{number}", deadline - time.monotonic())
            rounds.append([asked, answer["there"], answer["said"], answer["heard"]])
    except Late:
        pass
    return rounds


def answer_until(post: Post, name: str, limit_s: float) -> None:
    """Answer the other side's pings until a message `name` of A or B is there. Raises Late if it did not come in time."""
    awaited = Post(post.own.parent, post.own.name, "b" if post.own.name == "a" else "a")
    deadline, answered = time.monotonic() + limit_s, 0
    while awaited.heard(name) is None:
        if time.monotonic() > deadline:
            raise Late(f"no `{name}` within {limit_s:.0f} s")
        if (asked := post.heard(f"ping-{answered}")) is not None:
            post.say(f"pong-{post.other.name}-{answered}", there=asked["heard"])
            answered += 1
        time.sleep(POLL_S)


def offset(rounds: list[list[float]]) -> tuple[float, float] | None:
    """Return how far the other clock is ahead, and the uncertainty, in seconds: by the quickest round (RFC 5905, section 8)."""
    if not rounds:
        return None
    t0, t1, t2, t3 = min(rounds, key=lambda r: (r[3] - r[0]) - (r[2] - r[1]))
    return ((t1 - t0) + (t2 - t3)) / 2, ((t3 - t0) - (t2 - t1)) / 2


def seen(folder: Path, name: str) -> bool:
    if name == "listed":
        return "file" in listing(folder / name)
    try:
        return (folder / name / "file").read_text() == "new"
    except OSError:
        return False


def watch(post: Post, folder: Path) -> dict[str, float | None]:
    """Return when B first saw each change; None: not within WATCH_S."""
    at: dict[str, float | None] = dict.fromkeys(WATCHED)
    for name in WATCHED:
        seen(folder, name)  # every client remembers what it saw
    post.say("watching")
    deadline = time.monotonic() + WATCH_S
    while None in at.values() and time.monotonic() < deadline:
        at |= {name: time.time() for name in WATCHED if at[name] is None and seen(folder, name)}
        time.sleep(POLL_S)
    return at


def race(folder: Path, side: str, start: float, spread: float = 0.0) -> list[str]:
    """Link many names at the same time as the other side; return `won`, `lost` or the error for each. `start` is by this side's clock;
    it comes from `spread` seconds early to as many late, name by name."""
    source = folder / f"from-{side}"
    source.write_text(side)
    told = []
    for number in range(RACES):
        shift = spread * (2 * number / (RACES - 1) - 1)
        time.sleep(max(0.0, start + number * RACE_STEP_S + shift - time.time()))
        try:
            os.link(source, folder / f"link-{number}")
            told.append("won")
        except FileExistsError:
            told.append("lost")
        except OSError as error:
            told.append(str(error.strerror))
    return told


def lock(folder: Path) -> tuple[str, int]:
    """Try flock; return `granted`, `refused` or the error, and the open file."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "refused", fd
    except OSError as error:
        return str(error.strerror), fd
    return "granted", fd


def side_a(folder: Path, result: dict[str, Any]) -> None:
    """Act; `result` is filled as far as it gets."""
    post = Post(folder, "a", "b")
    for name in WATCHED:  # each in its own folder: listing a folder may clear what a client remembers of its names
        (folder / name).mkdir()
    (folder / "renamed_over" / "file").write_text("old")
    post.say("hello")
    answer_until(Post(folder, "a", "login"), "hello", HELLO_S)
    result["rounds"] = ping(post)
    post.say("clock", ahead=(offset(result["rounds"]) or (0.0, 0.0))[0])
    post.hear("watching")
    result["acted"] = {}
    for name in WATCHED:
        (folder / name / "file.new").write_text("new")
        (folder / name / "file.new").rename(folder / name / "file")
        result["acted"][name] = time.time()
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


def side_b(folder: Path, result: dict[str, Any]) -> None:
    """Watch."""
    post = Post(folder, "b", "a")
    post.hear("hello", HELLO_S)
    post.say("hello")
    answer_until(post, "clock", 2 * PHASE_S)
    clock = post.hear("clock")
    result["seen"] = watch(post, folder)
    post.say("watched")
    result["race"] = race(folder, "b", post.hear("race")["start"] + clock["ahead"], RACE_SPREAD_S)
    post.hear("locked")
    result["tried"], fd = lock(folder)
    os.close(fd)
    post.say("tried")
    post.hear("unlocked")
    result["again"] = lock(folder)[0]


def main(folder: Path, side: str) -> int:
    """Run a side; its result says how far it came."""
    signal.alarm(int(HELLO_S + 120))  # whatever hangs: a probe must not keep a node
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    result: dict[str, Any] = {"node": node, "boot": Path("/proc/sys/kernel/random/boot_id").read_text(), "stopped": ""}
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
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
