"""A pool of worker processes, each the host of some environments, with a thread each and one queue of what came of it.

The caller's engine may put its answers into the same queue (`post`), so that one thread waits for both.
"""

from __future__ import annotations

import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from autorl_hpc.rollouts.source import EnvironmentBroken, Source

# Which worker takes which call. An episode can be begun by any worker, and goes on where it was begun.
#
# Beginnings wait in one line for whichever worker is free first, so a slow worker gets fewer of them. A goal that a worker has
# played before goes to this one again, unless it has much more to do than others: what it has parsed stays parsed. Each worker
# takes the oldest call that it may. One that is stuck, or hosts an episode whose steps are slow, gets no more beginnings; `held_up`
# names the episodes that wait for others there, to be moved away.

SLOW_S = 1.0
"""A step that takes longer is slow: hundreds of times a usual one. Others that wait behind it are better off elsewhere."""

SLOW_BEGINNING_S = 10.0
"""The same of a beginning, in which games are translated and data read."""

LEAD = 4
"""Episodes that the worker which knows a goal may have more than another one that is free: a beginning anew costs some ten
steps, waiting in a line of five costs more."""

KNOWN_GOALS = 8192
"""Whose workers are remembered."""

LOOK_AGAIN_S = 0.25
"""How soon a free worker looks again at beginnings that are another's, who may get stuck."""


class WorkerCall(NamedTuple):
    """What a worker is to do.

    Attributes:
        ticket: counts up over all calls.
        slot: the episode's, by the caller's count.
        request: for the worker's process, which counts its own slots.
    """

    ticket: int
    slot: int
    request: Mapping[str, Any]


class _Beginning(NamedTuple):
    ticket: int
    slot: int
    goal: Mapping[str, Any]
    seed: int

    @property
    def key(self) -> str:
        return str(self.goal.get("id", ""))


@dataclass
class _Place:
    """A worker as the desk sees it."""

    wake: threading.Condition
    calls: deque[WorkerCall] = field(default_factory=deque)
    hosted: dict[int, int] = field(default_factory=dict)  # its process's slot by the caller's
    free: list[int] = field(default_factory=list)  # slots of its process that hosted an episode once
    slow: set[int] = field(default_factory=set)  # the caller's slots
    at: WorkerCall | None = None
    since: float = 0.0
    dozes: bool = False  # until it is woken: there was nothing to look at again


class Desk:
    """The calls of one pool. Safe for threads."""

    def __init__(self, workers: int) -> None:
        self._lock = threading.Lock()
        self._places = [_Place(threading.Condition(self._lock)) for _ in range(workers)]
        self._beginnings: dict[int, _Beginning] = {}  # by slot, oldest first
        self._where: dict[int, int] = {}  # worker by slot
        self._knows: dict[str, int] = {}  # worker by goal
        self._tickets = 0
        self._ended = False

    def begin(self, slot: int, goal: Mapping[str, Any], seed: int) -> int:
        """A beginning in a slot; what was there is given up. Returns its ticket."""
        with self._lock:
            self._release(slot)
            beginning = _Beginning(self._ticket(), slot, goal, seed)
            self._beginnings[slot] = beginning
            knows = self._knows.get(beginning.key)
            anyone = knows is None or self._places[knows].at is not None or bool(self._places[knows].slow)
            for number, place in enumerate(self._places):
                if place.at is None and (anyone or knows == number or place.dozes):
                    place.wake.notify()
            return beginning.ticket

    def act(self, slot: int, request: Mapping[str, Any]) -> int:
        """A step of the episode in a slot. One of an episode that is lost by now is dropped: that it is lost is being told."""
        with self._lock:
            ticket, number = self._ticket(), self._where.get(slot)
            if number is not None:
                place = self._places[number]
                place.calls.append(WorkerCall(ticket, slot, {"slot": place.hosted[slot], **request}))
                place.wake.notify()
            return ticket

    def release(self, slot: int) -> None:
        """The episode in a slot is over or given up; its calls that are not begun are dropped."""
        with self._lock:
            self._release(slot)

    def take(self, number: int) -> WorkerCall | None:
        """The next call for a worker, when there is one; None: the desk is closed."""
        place = self._places[number]
        with self._lock:
            while not self._ended:
                call = self._next(number, place)
                if call is not None:
                    place.at, place.since = call, time.monotonic()
                    return call
                place.dozes = not self._beginnings
                place.wake.wait(None if place.dozes else LOOK_AGAIN_S)
                place.dozes = False
            return None

    def done(self, number: int) -> None:
        """The worker's call was answered."""
        with self._lock:
            place = self._places[number]
            call, took_s = place.at, time.monotonic() - place.since
            place.at = None
            if call is not None and call.slot in place.hosted and "goal" not in call.request:
                (place.slow.add if took_s > SLOW_S else place.slow.discard)(call.slot)

    def lose(self, number: int) -> tuple[int, ...]:
        """The worker's process is gone; the slots of the episodes that went with it."""
        with self._lock:
            place = self._places[number]
            lost = tuple(place.hosted)
            for slot in lost:
                self._release(slot)
            place.at, place.free = None, []
            self._knows = {key: knows for key, knows in self._knows.items() if knows != number}
            return lost

    def worker_of(self, slot: int) -> int | None:
        """The number of the worker that hosts a slot's episode, None before it is begun."""
        return self._where.get(slot)

    def held_up(self) -> list[int]:
        """Slots whose calls wait behind slow ones of others, where some worker is free of such."""
        with self._lock:
            now = time.monotonic()
            slow = [bool(self._slow_here(place, now)) for place in self._places]
            if all(slow):
                return []
            found = []
            for place in self._places:
                if culprits := self._slow_here(place, now):
                    found += [call.slot for call in place.calls if call.slot not in culprits]
            return found

    def close(self) -> None:
        """No more calls; those that wait for one are told."""
        with self._lock:
            self._ended = True
            for place in self._places:
                place.wake.notify_all()

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _release(self, slot: int) -> None:
        self._beginnings.pop(slot, None)
        number = self._where.pop(slot, None)
        if number is None:
            return
        place = self._places[number]
        place.free.append(place.hosted.pop(slot))
        place.slow.discard(slot)
        if any(call.slot == slot for call in place.calls):
            place.calls = deque(call for call in place.calls if call.slot != slot)

    def _next(self, number: int, place: _Place) -> WorkerCall | None:
        own = place.calls[0] if place.calls else None
        for beginning in self._beginnings.values():
            if own is not None and own.ticket < beginning.ticket:
                break
            if self._suits(beginning, number):
                return self._host(beginning, number, place)
        return place.calls.popleft() if own is not None else None

    def _suits(self, beginning: _Beginning, number: int) -> bool:
        place, now = self._places[number], time.monotonic()
        if place.slow and not all(other.slow for other in self._places):
            return False
        knows = self._knows.get(beginning.key)
        if knows is None or knows == number:
            return True
        other = self._places[knows]
        return len(other.hosted) > len(place.hosted) + LEAD or bool(self._slow_here(other, now))

    def _host(self, beginning: _Beginning, number: int, place: _Place) -> WorkerCall:
        del self._beginnings[beginning.slot]
        own = place.free.pop() if place.free else len(place.hosted)
        place.hosted[beginning.slot] = own
        self._where[beginning.slot] = number
        self._knows.pop(beginning.key, None)
        self._knows[beginning.key] = number
        if len(self._knows) > KNOWN_GOALS:
            del self._knows[next(iter(self._knows))]
        if self._beginnings and len(place.hosted) > LEAD:  # others may take from what this one knows
            for other in self._places:
                if other.at is None and other is not place:
                    other.wake.notify()
        request = {"slot": own, "goal": dict(beginning.goal), "seed": beginning.seed}
        return WorkerCall(beginning.ticket, beginning.slot, request)

    def _slow_here(self, place: _Place, now: float) -> set[int]:
        """The slots that hold others up on this worker."""
        found = set(place.slow)
        if place.at is not None:
            limit_s = SLOW_BEGINNING_S if "goal" in place.at.request else SLOW_S
            if now - place.since > limit_s:
                found.add(place.at.slot)
        return found


# The thread that owns a worker's process; JSON lines over pipes.
#
# It sends a call, waits for its answer within the time limit, and replaces the process when it dies or hangs. Processes are
# groups of their own: an environment's children end with it. They end with their starter, however that one ends: by
# PR_SET_PDEATHSIG, and by the end of their stdin.

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Of one line from a worker: observations and prompts are cut well below."""

SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|KEY|JWT", re.IGNORECASE)
"""Names of variables that a worker beside a vault does not get: as in files/secrets.py, which agents don't have."""

PACKAGE = __package__ or "autorl_hpc.rollouts"
HOME = Path(__file__).resolve().parents[len(PACKAGE.split("."))]
"""The folder that this package is imported from; workers get it first in PYTHONPATH."""


class Reply(NamedTuple):
    """An environment's answer to a call; `error` in place of the rest, where it or the dialogue raised or gave garbage.

    Attributes:
        action: what the dialogue took the model's words for; "" at an episode's beginning.
        prompt: what the model is asked next, text or messages; None where the episode is over.
        final: the error would come again.
    """

    ticket: int
    observation: str = ""
    done: bool = False
    reward: float = 0.0
    action: str = ""
    prompt: str | list[dict[str, str]] | None = None
    error: str | None = None
    final: bool = False


class Lost(NamedTuple):
    """A worker died or was killed for hanging: all episodes on it are gone.

    Attributes:
        worker: its number.
        ticket: the call that it was at.
        reason: in words.
        slots: of the episodes that it hosted.
    """

    worker: int
    ticket: int
    reason: str
    slots: tuple[int, ...] = ()


EPITAPH_S = 5.0
"""A process that ends closes its pipes first; on a busy node it takes a while until how it ended can be told."""


class _Dead(Exception):
    """The worker's process is of no use any more."""


class _Closed(_Dead):
    """It closed its pipe: most likely it ended."""


class EnvironmentProcess(threading.Thread):
    """Owns one process at a time. A daemon: its process dies with the interpreter."""

    def __init__(
        self,
        number: int,
        source: Source,
        desk: Desk,
        tell: Callable[[Reply | Lost | EnvironmentBroken], None],
        call_limit_s: float,
        start_limit_s: float,
    ) -> None:
        super().__init__(name=f"environments-{number}", daemon=True)
        self.number = number
        self.process: subprocess.Popen[bytes] | None = None
        self.replays = True
        self._source, self._desk, self._tell = source, desk, tell
        self._call_limit_s, self._start_limit_s = call_limit_s, start_limit_s
        self._ended = False

    def run(self) -> None:
        while (call := self._desk.take(self.number)) is not None:
            try:
                process = self.process or self._start()
                reply = Reply(call.ticket, **_exchange(process, call.request, self._call_limit_s))
                self._desk.done(self.number)
                self._tell(reply)
            except EnvironmentBroken as error:
                self._kill()
                self._desk.lose(self.number)
                self._tell(error)
            except Exception as error:  # whatever it is: a call that is not answered would be waited for, for ever
                reason = self._epitaph(error)
                self._kill()
                self._tell(Lost(self.number, call.ticket, reason, self._desk.lose(self.number)))
        self._kill()

    def end(self) -> None:
        """Ends the process, also in the midst of a call, and so the thread, once the desk is closed."""
        self._ended = True
        self._signal()

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(part for part in (str(HOME), os.environ.get("PYTHONPATH", "")) if part)
        env = {**_inherited(self._source.held_out), "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        env["AUTORL_POOL_PID"] = str(os.getpid())
        env.setdefault("OMP_NUM_THREADS", "1")
        # In this thread, which lives as long as the process is needed: PR_SET_PDEATHSIG looks at the thread.
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE}.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=env,
            start_new_session=True,
        )
        if self._ended:
            raise _Dead("the pool was closed")
        source = self._source
        first = {
            "file": str(source.file),
            "name": source.name,
            "data": str(source.data),
            "held_out": source.held_out,
            "options": dict(source.options),
        }
        try:
            answer = _exchange(self.process, first, self._start_limit_s)
        except Exception as error:
            if self._ended:
                raise
            raise EnvironmentBroken(f"{source.file} can't be loaded: {self._epitaph(error)}") from error
        if "error" in answer:
            raise EnvironmentBroken(answer["error"])
        self.replays = bool(answer.get("replays", True))
        return self.process

    def _epitaph(self, error: Exception) -> str:
        """Why the process is lost, with its end in words."""
        process = self.process
        try:
            code = None if process is None else process.wait(EPITAPH_S if isinstance(error, (_Closed, OSError)) else 0)
        except subprocess.TimeoutExpired:
            code = None
        if code is None:
            return str(error)[:500]
        try:
            end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        except ValueError:  # a real-time signal has no name
            end = f"signal {-code}"
        return f"the environment's process died ({end})"

    def _signal(self) -> None:
        process = self.process
        if process is not None and process.poll() is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except OSError:
                pass

    def _kill(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        try:  # also after its own end: its children are of its group
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:
            pass
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _inherited(held_out: bool) -> dict[str, str]:
    """The starter's environment. A grader's without what looks like a secret, and without its GPUs: those are the engine's."""
    if not held_out:
        return dict(os.environ)
    return {
        **{name: value for name, value in os.environ.items() if not SECRET.search(name)},
        "CUDA_VISIBLE_DEVICES": "",
    }


def _exchange(process: subprocess.Popen[bytes], request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Writes one line and reads one. A worker that reads or writes nothing can't hold this up longer than `limit_s`."""
    assert process.stdin is not None and process.stdout is not None
    out, into = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(out, False)
    os.set_blocking(into, False)
    left = memoryview(json.dumps(request).encode("ascii") + b"\n")
    answer = bytearray()
    deadline = time.monotonic() + limit_s
    poll = select.poll()
    poll.register(out, select.POLLOUT)
    poll.register(into, select.POLLIN)
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise _Dead(f"the environment gave no answer within {limit_s:g} s")
        for fd, _ in poll.poll(remaining * 1000):
            if fd == into:
                data = os.read(into, 1 << 20)
                if not data:
                    raise _Closed("the environment's process closed its pipe")
                answer += data
                if len(answer) > MAX_ANSWER_BYTES:
                    raise _Dead(f"the environment's answer is longer than {MAX_ANSWER_BYTES} bytes")
            elif left:
                left = left[os.write(out, left[: 1 << 16]) :]
                if not left:
                    poll.unregister(out)
        if answer.endswith(b"\n"):
            value = json.loads(answer)
            if not isinstance(value, dict):
                raise _Dead("the environment's process wrote something that is no answer")
            return value


CALL_LIMIT_S = 120.0
"""Of one call. A step takes milliseconds and the slowest reset known (a game's translation) seconds; a machine may be busy."""

START_LIMIT_S = 300.0
"""Until a new worker is ready: Python and libraries cold from a busy shared file system."""


CLOSING_S = 10.0
"""For all threads together to end once their processes are killed."""


class Note(NamedTuple):
    """Something that another than the pool's workers has posted.

    Attributes:
        sender: who; notes of an earlier run are known by it.
        key, content: as posted.
    """

    sender: object
    key: int
    content: Any


class Pool:
    """Environments of one source in up to `workers` processes, which start when they are first needed.

    Attributes:
        size: how many processes at most.
    """

    def __init__(
        self,
        source: Source,
        workers: int = 2,
        *,
        call_limit_s: float = CALL_LIMIT_S,
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        self.source, self.size = source, max(1, workers)
        self._events: queue.SimpleQueue[Reply | Lost | Note | EnvironmentBroken] = queue.SimpleQueue()
        self._desk = Desk(self.size)
        self._workers = [
            EnvironmentProcess(number, source, self._desk, self._events.put, call_limit_s, start_limit_s)
            for number in range(self.size)
        ]
        for worker in self._workers:
            worker.start()

    @property
    def pids(self) -> list[int]:
        """Processes that are up."""
        return [process.pid for worker in self._workers if (process := worker.process) is not None]

    def worker_of(self, slot: int) -> int | None:
        """The number of the worker that hosts a slot's episode, None where it is not begun."""
        return self._desk.worker_of(slot)

    def begin(self, slot: int, goal: Mapping[str, Any], seed: int) -> int:
        """Asks for an episode's beginning in a slot; the ticket comes back in the event."""
        return self._desk.begin(slot, goal, seed)

    def act(self, slot: int, completion: str, *, last: bool = False) -> int:
        """Asks for one step of the episode in a slot, by the model's words. `last`: no prompt is wanted after it."""
        return self._desk.act(slot, {"completion": completion, "last": last})

    def release(self, slot: int) -> None:
        """Gives a slot's episode up; what was asked for it and is not begun is dropped."""
        self._desk.release(slot)

    def held_up(self) -> list[int]:
        """Slots that wait behind slow or hanging episodes of others, and would not elsewhere. None where the environment says
        that it can't be played again (`replays = False`)."""
        return self._desk.held_up() if all(worker.replays for worker in self._workers) else []

    def post(self, note: Note) -> None:
        """Puts a note into the queue of events, from any thread."""
        self._events.put(note)

    def next(self, timeout_s: float | None = None) -> Reply | Lost | None:
        """The next event of a worker, None if there was none in time. Notes are passed over.

        Raises:
            EnvironmentBroken: a worker could not make an environment.
        """
        while isinstance(event := self.hear(timeout_s), Note):
            pass
        return event

    def hear(self, timeout_s: float | None = None) -> Reply | Lost | Note | None:
        """The same with notes."""
        try:
            event = self._events.get_nowait() if timeout_s == 0.0 else self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(event, EnvironmentBroken):
            raise event
        return event

    def close(self) -> None:
        """Ends all processes."""
        self._desk.close()
        for worker in self._workers:
            worker.end()
        deadline = time.monotonic() + CLOSING_S
        for worker in self._workers:
            worker.join(timeout=max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
