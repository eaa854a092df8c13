"""One side of a pair of processes that find out how they see each other's files.

    python3 pair.py FOLDER a|b

Needs the standard library and `post.py` beside it; runs on two nodes, or twice on one. Each side has a folder of messages; a
message appears by rename and is waited for by listing. Side A acts and B watches, then both race. Each ends with a message
`result`, raw: times by the writer's own clock, for `visibility` to judge. A also answers pings of a third side, `login`, until
B is there.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

try:
    from autorl_hpc.doctor.post import PHASE_S, PINGS, POLL_S, Late, Post, below, offset, ping, pong, who
except ImportError:  # a node where the package is not: that is for another check to tell
    from post import PHASE_S, PINGS, POLL_S, Late, Post, below, offset, ping, pong, who  # type: ignore[no-redef]

HELLO_S = 240.0
"""The other side may still wait in the queue; whoever started the pair ends it earlier."""

WATCH_S = 40.0
"""An NFS client may believe for 30 s that a name it once missed is not there."""

TOTAL_S = HELLO_S + 120.0
RACES = 30
RACE_STEP_S = 0.015
RACE_SPREAD_S = 0.006
"""At most: B comes this much early or late, sweeping, so that the two meet though their clocks are known but roughly."""

LEAD_S = 0.5
"""Time for the message that says when a race starts."""

# ------------------------------------------------------------------ what A does and B watches

WATCHED = ("listed", "looked_for", "tried_to_open", "size_by_stat", "size_by_open", "renamed_over", "removed")


def _path(folder: str, name: str) -> str:
    """Each in a folder of its own: listing a folder may clear what a client remembers of its names."""
    return os.path.join(below(folder, "watched", name), "file")


def prepare(folder: str) -> None:
    """A's files as B first sees them."""
    for name in WATCHED:
        path = _path(folder, name)
        if name in ("size_by_stat", "size_by_open", "renamed_over", "removed"):
            write(path, b"old")


def act(folder: str) -> dict[str, float]:
    """A's changes, each with the time right after it."""
    done = {}
    for name in WATCHED:
        path = _path(folder, name)
        if name == "removed":
            os.unlink(path)
        elif name == "renamed_over":
            write(path + ".new", b"new")
            os.rename(path + ".new", path)
        elif name.startswith("size"):
            with open(path, "ab") as file:
                file.write(b"er")
        else:
            write(path, b"new")
        done[name] = time.time()
    return done


def write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def openable(path: str) -> bool:
    os.close(os.open(path, os.O_RDONLY))
    return True


def looks(folder: str) -> dict[str, Callable[[], bool]]:
    """B's ways of looking, each true once the change is seen."""
    path = {name: _path(folder, name) for name in WATCHED}
    return {
        "listed": lambda: "file" in os.listdir(os.path.dirname(path["listed"])),
        "looked_for": lambda: os.path.exists(path["looked_for"]),
        "tried_to_open": lambda: openable(path["tried_to_open"]),
        "size_by_stat": lambda: os.stat(path["size_by_stat"]).st_size == 5,
        "size_by_open": lambda: len(read(path["size_by_open"])) == 5,
        "renamed_over": lambda: read(path["renamed_over"]) == b"new",
        "removed": lambda: not os.path.exists(path["removed"]),
    }


def seen(look: Callable[[], bool]) -> bool:
    try:
        return look()
    except OSError:
        return False


def watch(post: Post, folder: str) -> tuple[dict[str, float | None], dict[str, float]]:
    """When B first saw each change (None: not within WATCH_S), and when it last looked for each in vain: a node that is held up
    looks late."""
    ways = looks(folder)
    missed = dict.fromkeys(ways, time.time())
    early = [name for name, look in ways.items() if seen(look)]  # and every client remembers what it saw
    post.say("watching", early=early)
    at: dict[str, float | None] = dict.fromkeys(ways)
    deadline = time.monotonic() + WATCH_S
    while None in at.values() and time.monotonic() < deadline:
        for name, look in ways.items():
            if at[name] is None:
                began = time.time()
                if seen(look):
                    at[name] = time.time()
                else:
                    missed[name] = began
        time.sleep(POLL_S)
    return {name: when for name, when in at.items() if name not in early}, missed


# ------------------------------------------------------------------ what both do at once

RACE_KINDS = ("link", "mkdir", "create")


def race(folder: str, side: str, start: float, spread: float = 0.0) -> dict[str, list[str]]:
    """By kind, for each name: `won`, `lost` or the error.

    Args:
        start: by this side's clock.
        spread: this side comes from so many seconds early to so many late, name by name.
    """
    place = below(folder, "race")
    source = os.path.join(place, f"from-{side}")
    write(source, side.encode())
    told: dict[str, list[str]] = {}
    for turn, kind in enumerate(RACE_KINDS):
        told[kind] = []
        for number in range(RACES):
            shift = spread * (2 * number / (RACES - 1) - 1)
            wait = start + (turn * RACES + number) * RACE_STEP_S + shift - time.time()
            if wait > 0:
                time.sleep(wait)
            told[kind].append(_try(kind, source, os.path.join(place, f"{kind}-{number}")))
    return told


def _try(kind: str, source: str, path: str) -> str:
    try:
        if kind == "link":
            os.link(source, path)
        elif kind == "mkdir":
            os.mkdir(path)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return "lost"
    except OSError as error:
        return error.strerror or str(error)
    return "won"


def holders(folder: str) -> list[str]:
    """Whose each linked name is, by its content: tells a link that was made though its maker was told otherwise."""
    found = []
    for number in range(RACES):
        try:
            found.append(read(os.path.join(folder, "race", f"link-{number}")).decode())
        except (OSError, UnicodeDecodeError):
            found.append("")
    return found


LOCKS: dict[str, Callable[[int, int], Any]] = {"flock": fcntl.flock, "lockf": fcntl.lockf}


def lock(folder: str, kind: str) -> tuple[str, int]:
    """`granted`, `refused` or the error; and the open file."""
    fd = os.open(os.path.join(folder, f"lock-{kind}"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        LOCKS[kind](fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "refused", fd
    except OSError as error:
        return error.strerror or str(error), fd
    return "granted", fd


# ------------------------------------------------------------------ the two sides


def side_a(folder: str, result: dict[str, Any]) -> None:
    """Acts. `result` is filled as far as it gets."""
    post, login = Post(folder, "a", "b"), Post(folder, "a", "login")
    prepare(folder)
    post.say("hello", **who())
    result["b"] = _wait_for_b(post, login)
    result["rounds"] = ping(post, "a")
    clock = offset(result["rounds"])
    ahead, unsure = clock or (0.0, RACE_SPREAD_S)
    post.say("clock", ahead=ahead, spread=min(max(2 * unsure, 0.001), RACE_SPREAD_S))
    result["early"] = post.hear("watching")["early"]
    result["acted"] = act(folder)
    post.hear("watched", WATCH_S + PHASE_S)
    start = time.time() + LEAD_S
    post.say("race", start=start)
    result["race"] = race(folder, "a", start)
    post.hear("raced")
    result["holders"] = holders(folder)
    held = {kind: lock(folder, kind) for kind in LOCKS}
    result["held"] = {kind: word for kind, (word, _) in held.items()}
    post.say("locked")
    post.hear("tried")
    for _, fd in held.values():
        os.close(fd)
    post.say("unlocked")
    post.hear("result")


def _wait_for_b(post: Post, login: Post) -> dict[str, Any]:
    deadline = time.monotonic() + HELLO_S
    answered = 0
    while time.monotonic() < deadline and os.path.isdir(post.own):
        found = post.heard("hello")
        if found is not None:
            return found
        if login.heard(f"ping-{answered}") is not None:
            pong(login, answered, 1.0)
            answered += 1
        time.sleep(POLL_S)
    raise Late("the other side did not start")


def side_b(folder: str, result: dict[str, Any]) -> None:
    """Watches."""
    post = Post(folder, "b", "a")
    result["a"] = post.hear("hello", HELLO_S)
    post.say("hello", **who())
    for number in range(PINGS):
        if post.heard("clock") is not None:
            break
        pong(post, number, PHASE_S)
    clock = post.hear("clock", 2 * PHASE_S)
    result["seen"], result["missed"] = watch(post, folder)
    post.say("watched")
    start = post.hear("race")["start"] + clock["ahead"]
    result["race"] = race(folder, "b", start, clock["spread"])
    post.say("raced")
    post.hear("locked")
    tried = {kind: lock(folder, kind) for kind in LOCKS}
    result["tried"] = {kind: word for kind, (word, _) in tried.items()}
    for _, fd in tried.values():
        os.close(fd)
    post.say("tried")
    post.hear("unlocked")
    result["again"] = {kind: lock(folder, kind)[0] for kind in LOCKS}


def main(folder: str, side: str) -> int:
    """Runs a side; its result says how far it came."""
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
