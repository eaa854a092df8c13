"""Run one side of a pair of processes that find out how they see each other's files: `python3 pair.py FOLDER a|b`.

On two nodes, with the standard library alone. A acts and B answers, then both race; trial_jobs.py judges. No clock is compared: A measures
how long an answer takes.
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
HELLO_S = 240.0  # the other side may still wait in the queue; whoever started the pair ends it earlier
WATCH_S = 40.0  # an NFS client may believe for 30 s that a name is absent
RACES = 500  # names that both sides link, in opposite order, so that they meet in the middle
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
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        hidden.rename(self.own / name)

    def hear(self, name: str, limit_s: float = PHASE_S) -> None:
        deadline = time.monotonic() + limit_s
        while name not in listing(self.other):
            if time.monotonic() > deadline:
                raise Late(f"no `{name}` within {limit_s:.0f} s")
            time.sleep(POLL_S)


def listing(folder: Path) -> list[str]:
    """Return the names in a folder; none if it can't be listed now."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def seen(folder: Path, name: str) -> bool:
    if name == "listed":
        return "file" in listing(folder / name)
    try:
        return (folder / name / "file").read_text() == "new"
    except OSError:
        return False


def race(folder: Path, side: str) -> list[str]:
    """Link many names while the other side does; return `won`, `lost` or the error for each."""
    source = folder / f"from-{side}"
    source.write_text(side)
    told = [""] * RACES
    for number in range(RACES) if side == "a" else reversed(range(RACES)):
        try:
            os.link(source, folder / f"link-{number}")
            told[number] = "won"
        except FileExistsError:
            told[number] = "lost"
        except OSError as error:
            told[number] = str(error.strerror)
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
    post.hear("watching", HELLO_S)
    result["lags"] = {}
    for name in WATCHED:
        (folder / name / "file.new").write_text("new")
        began = time.monotonic()
        (folder / name / "file.new").rename(folder / name / "file")
        post.hear(name, WATCH_S)
        result["lags"][name] = time.monotonic() - began
    post.say("race")
    result["race"] = race(folder, "a")
    post.hear("raced", PHASE_S)
    result["held"], fd = lock(folder)
    post.say("locked")
    post.hear("tried")
    os.close(fd)
    post.say("unlocked")
    post.hear("result")


def side_b(folder: Path, result: dict[str, Any]) -> None:
    """Answer."""
    post = Post(folder, "b", "a")
    post.hear("hello", HELLO_S)
    for name in WATCHED:
        seen(folder, name)  # every client remembers what it saw
    post.say("watching")
    for name in WATCHED:
        deadline = time.monotonic() + WATCH_S
        while not seen(folder, name):
            if time.monotonic() > deadline:
                raise Late(f"`{name}` not seen within {WATCH_S:.0f} s")
            time.sleep(POLL_S)
        post.say(name)
    post.hear("race")
    result["race"] = race(folder, "b")
    post.say("raced")
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
    except (Late, OSError) as error:
        result["stopped"] = str(error)
    try:
        Post(folder, side, side).say("result", **result)
    except OSError:
        return 1  # the folder is gone: nobody waits any more
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
