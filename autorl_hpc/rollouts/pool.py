"""A pool of worker processes that host environments: scheduling of calls, one thread per process, one queue of events.

The caller's engine may post its answers into the same queue (`post`), so that one thread waits for both.
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

# --- scheduling: which worker takes which call
# Any worker can begin an episode; it then stays there. New episodes wait in one line for the first free worker, so a slow worker
# gets fewer. A goal returns to the worker that has played it and has its data parsed, unless that one is much busier. Workers
# take the oldest call that suits them. One that is stuck, or hosts an episode with slow steps, gets no new episodes; `held_up`
# names the episodes that wait behind such calls and should move.

SLOW_S = 1.0
"""A step that takes longer is slow (usual steps are hundreds of times faster); episodes waiting behind it should move."""

SLOW_BEGINNING_S = 10.0
"""The same for the beginning of an episode, in which games are translated and data read."""

LEAD = 4
"""Episodes that the worker which knows a goal may have more than a free one. Beginning without its cache costs about ten steps;
waiting in a line of five costs more."""

KNOWN_GOALS = 8192
"""Goals whose workers are remembered."""

LOOK_AGAIN_S = 0.25
"""Interval at which a free worker checks for episodes reserved for another worker, which may be stuck."""


class WorkerCall(NamedTuple):
    """One call for a worker.

    Attributes:
        ticket: increases over all calls.
        slot: the episode's slot as counted by the caller.
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
    """A worker as the scheduler sees it."""

    wake: threading.Condition
    calls: deque[WorkerCall] = field(default_factory=deque)
    hosted: dict[int, int] = field(default_factory=dict)  # the process's slot by the caller's
    free: list[int] = field(default_factory=list)  # slots of the process that once hosted an episode
    slow: set[int] = field(default_factory=set)  # the caller's slots
    at: WorkerCall | None = None
    since: float = 0.0
    dozes: bool = False  # waits without timeout, because there was nothing to check again


class Desk:
    """Schedules the calls of one pool. Thread-safe."""

    def __init__(self, workers: int) -> None:
        self._lock = threading.Lock()
        self._places = [_Place(threading.Condition(self._lock)) for _ in range(workers)]
        self._beginnings: dict[int, _Beginning] = {}  # by slot, oldest first
        self._where: dict[int, int] = {}  # worker by slot
        self._knows: dict[str, int] = {}  # worker by goal
        self._tickets = 0
        self._ended = False

    def begin(self, slot: int, goal: Mapping[str, Any], seed: int) -> int:
        """Begin an episode in a slot, replacing the previous one; return the ticket."""
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
        """Step the episode in a slot. Dropped if the episode is lost; the loss is reported separately."""
        with self._lock:
            ticket, number = self._ticket(), self._where.get(slot)
            if number is not None:
                place = self._places[number]
                place.calls.append(WorkerCall(ticket, slot, {"slot": place.hosted[slot], **request}))
                place.wake.notify()
            return ticket

    def release(self, slot: int) -> None:
        """Release a slot whose episode has ended or is abandoned; its pending calls are dropped."""
        with self._lock:
            self._release(slot)

    def take(self, number: int) -> WorkerCall | None:
        """Wait for the next call for a worker; None if the scheduler is closed."""
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
        """Note that the worker's call was answered."""
        with self._lock:
            place = self._places[number]
            call, took_s = place.at, time.monotonic() - place.since
            place.at = None
            if call is not None and call.slot in place.hosted and "goal" not in call.request:
                (place.slow.add if took_s > SLOW_S else place.slow.discard)(call.slot)

    def lose(self, number: int) -> tuple[int, ...]:
        """Note that the worker's process is gone; return the slots of its episodes."""
        with self._lock:
            place = self._places[number]
            lost = tuple(place.hosted)
            for slot in lost:
                self._release(slot)
            place.at, place.free = None, []
            self._knows = {key: knows for key, knows in self._knows.items() if knows != number}
            return lost

    def worker_of(self, slot: int) -> int | None:
        """Return the number of the worker that hosts a slot's episode; None before it has begun."""
        return self._where.get(slot)

    def held_up(self) -> list[int]:
        """Return slots whose calls wait behind others' slow ones while another worker is free of such."""
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
        """Accept no more calls and wake all waiting workers."""
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
        if self._beginnings and len(place.hosted) > LEAD:  # others may now take goals that this one knows
            for other in self._places:
                if other.at is None and other is not place:
                    other.wake.notify()
        request = {"slot": own, "goal": dict(beginning.goal), "seed": beginning.seed}
        return WorkerCall(beginning.ticket, beginning.slot, request)

    def _slow_here(self, place: _Place, now: float) -> set[int]:
        """Return the slots that hold others up on this worker."""
        found = set(place.slow)
        if place.at is not None:
            limit_s = SLOW_BEGINNING_S if "goal" in place.at.request else SLOW_S
            if now - place.since > limit_s:
                found.add(place.at.slot)
        return found


# --- the thread that owns a worker's process; JSON lines over pipes
# It sends a call, waits for the answer within the time limit, and replaces a process that dies or hangs. Each process is a
# process group, so an environment's children end with it. Workers end with their starter, by PR_SET_PDEATHSIG and by the end of
# their stdin.

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Limit of one line from a worker; observations and prompts are cut well below."""

SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|KEY|JWT", re.IGNORECASE)
"""Variables with such names are not passed to a worker with access to a vault. Agents don't have files/redact.py."""

PACKAGE = __package__ or "autorl_hpc.rollouts"
HOME = Path(__file__).resolve().parents[len(PACKAGE.split("."))]
"""The folder that this package is imported from; first in the workers' PYTHONPATH."""


class Reply(NamedTuple):
    """A worker's answer to a call. If environment or dialogue failed, `error` replaces the rest.

    Attributes:
        action: the action that the dialogue extracted; "" at the beginning of an episode.
        prompt: the next prompt, text or messages; None if the episode is over.
        final: a retry would give the same error.
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
    """A worker died, or was killed because it hung; all its episodes are gone.

    Attributes:
        worker: its number.
        ticket: the call that it worked on.
        reason: a description.
        slots: of its episodes.
    """

    worker: int
    ticket: int
    reason: str
    slots: tuple[int, ...] = ()


EPITAPH_S = 5.0
"""An ending process closes its pipes first; on a busy node its exit status comes later."""


class _Dead(Exception):
    """The worker's process can't be used any more."""


class _Closed(_Dead):
    """It closed its pipe; most likely it ended."""


class EnvironmentProcess(threading.Thread):
    """Owns one process at a time. A daemon thread; its process dies with the interpreter."""

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
            except Exception as error:  # any error must be reported, or the caller would wait for ever
                reason = self._epitaph(error)
                self._kill()
                self._tell(Lost(self.number, call.ticket, reason, self._desk.lose(self.number)))
        self._kill()

    def end(self) -> None:
        """Kill the process, even during a call. The thread then ends once the scheduler is closed."""
        self._ended = True
        self._signal()

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(part for part in (str(HOME), os.environ.get("PYTHONPATH", "")) if part)
        env = {**_inherited(self._source.held_out), "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        env["AUTORL_POOL_PID"] = str(os.getpid())
        env.setdefault("OMP_NUM_THREADS", "1")
        # Started in this thread, which lives as long as the process, because PR_SET_PDEATHSIG refers to the thread.
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
        """Describe why the process was lost and how it ended."""
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
        try:  # even if it has ended: its children are in its group
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:
            pass
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _inherited(held_out: bool) -> dict[str, str]:
    """Return our environment; for a grader without secrets and without GPUs, which belong to the engine."""
    if not held_out:
        return dict(os.environ)
    return {
        **{name: value for name, value in os.environ.items() if not SECRET.search(name)},
        "CUDA_VISIBLE_DEVICES": "",
    }


def _exchange(process: subprocess.Popen[bytes], request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Write one line and read one. The worker can't delay this beyond `limit_s` by not reading or writing."""
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
"""Limit of one call. A step takes milliseconds, the slowest known reset (translating a game) seconds, on an idle machine."""

START_LIMIT_S = 300.0
"""Limit until a new worker is ready, with Python and libraries cold on a busy shared file system."""


CLOSING_S = 10.0
"""Time for all threads together to end after their processes are killed."""


class Note(NamedTuple):
    """An event from outside the pool's workers.

    Attributes:
        sender: who posted it, to recognise notes of an earlier run.
        key, content: as posted.
    """

    sender: object
    key: int
    content: Any


class Pool:
    """Environments of one source in up to `workers` processes, which start when needed.

    Attributes:
        size: maximum number of processes.
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
        """Ids of the running processes."""
        return [process.pid for worker in self._workers if (process := worker.process) is not None]

    def worker_of(self, slot: int) -> int | None:
        """Return the number of the worker that hosts a slot's episode; None if it has not begun."""
        return self._desk.worker_of(slot)

    def begin(self, slot: int, goal: Mapping[str, Any], seed: int) -> int:
        """Request the beginning of an episode in a slot; return the ticket, which the event repeats."""
        return self._desk.begin(slot, goal, seed)

    def act(self, slot: int, completion: str, *, last: bool = False) -> int:
        """Request one step of the episode in a slot with the model's completion. `last`: no further prompt is needed."""
        return self._desk.act(slot, {"completion": completion, "last": last})

    def release(self, slot: int) -> None:
        """Abandon a slot's episode and drop its pending calls."""
        self._desk.release(slot)

    def held_up(self) -> list[int]:
        """Return slots that wait behind slow or hanging episodes and would not elsewhere; none if the environment has
        `replays = False`."""
        return self._desk.held_up() if all(worker.replays for worker in self._workers) else []

    def post(self, note: Note) -> None:
        """Put a note into the event queue, from any thread."""
        self._events.put(note)

    def next(self, timeout_s: float | None = None) -> Reply | Lost | None:
        """Return the next event of a worker, skipping notes; None if there was none in time.

        Raises:
            EnvironmentBroken: a worker could not create an environment.
        """
        while isinstance(event := self.hear(timeout_s), Note):
            pass
        return event

    def hear(self, timeout_s: float | None = None) -> Reply | Lost | Note | None:
        """Return the next event or note; otherwise like `next`."""
        try:
            event = self._events.get_nowait() if timeout_s == 0.0 else self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(event, EnvironmentBroken):
            raise event
        return event

    def close(self) -> None:
        """End all processes."""
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
