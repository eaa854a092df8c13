"""One worker process: hosts environments and their dialogue and answers calls, one JSON object a line, no pickle.

First line in: the source. Then `{"slot": 3, "goal": {...}, "seed": 0}` begins an episode in the slot, and
`{"slot": 3, "completion": "...", "last": false}` goes on with it by the model's words. Each line is answered by
`{"observation", "done", "reward", "action", "prompt"}` or by `{"error"}`. A task's code runs here alone: the process that asks
the engine loads none of it, so nothing that it does can stop or end that one. The end of stdin ends the process, and so does the death of the one that started it.
"""

from __future__ import annotations

import ctypes
import json
import math
import numbers
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from autorl_hpc.rollouts.environment import Dialogue, Environment, Transcript, Turn, Unavailable
from autorl_hpc.rollouts.source import EnvironmentBroken, Source

MAX_PROMPT_CHARS = 8_000_000
"""No model reads more; it would only be sent and cut into tokens."""

MAX_OBSERVATION_CHARS = 200_000
"""More than any context window holds; what is longer is cut, so that one mad environment doesn't fill the memory."""

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4


class InvalidStep(Exception):
    """The environment gave something that is no observation or no step."""


def main() -> int:
    """Runs until stdin ends."""
    _die_with_parent()
    calls, answers = _private_channels()
    host: Host | None = None
    for line in calls:
        request = json.loads(line)
        if host is None:
            source = Source(**request)
            if source.held_out:
                _deny_inspection()
            host = Host(source)
            answer = host.probe()
        else:
            answer = host.answer(request)
        answers.write(json.dumps(answer).encode("ascii") + b"\n")
        answers.flush()
    return 0


@dataclass
class _Seat:
    """An environment and the episode in it."""

    environment: Environment
    transcript: Transcript = field(default_factory=lambda: Transcript({}, ""))


class Host:
    """The environments of this process by slot."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._seats: dict[int, _Seat] = {}
        self._spare: Environment | None = None
        self._dialogue: Dialogue | None = None

    def probe(self) -> dict[str, Any]:
        """Whether environment and dialogue can be made at all; the first environment is kept for the first slot."""
        try:
            self._dialogue, self._spare = self._source.dialogue(), self._source.environment()
        except EnvironmentBroken as error:
            return {"error": str(error)}
        return {"ready": True, "replays": getattr(self._spare, "replays", True) is not False}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What follows on a call. An environment that raised is thrown away."""
        slot = int(request["slot"])
        try:
            if "completion" in request:
                if not isinstance(request["completion"], str):
                    raise InvalidStep(f"a completion is text, not {request['completion']!r:.100}")
                return self._go_on(slot, request)
            return self._begin(slot, request)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._drop(slot)
            words = f"{type(error).__name__}: {error}"[:500].encode("utf-8", "replace").decode()
            return {"error": words, "final": isinstance(error, Unavailable)}

    def _begin(self, slot: int, request: dict[str, Any]) -> dict[str, Any]:
        seat = self._fresh(slot)
        first = _text(seat.environment.reset(request["goal"], request["seed"]), "an observation")
        seat.transcript = Transcript(request["goal"], first)
        return {"observation": first, "prompt": self._prompt(seat)}

    def _go_on(self, slot: int, request: dict[str, Any]) -> dict[str, Any]:
        seat = self._seats[slot]
        assert self._dialogue is not None
        with _named("action"):
            action = _text(self._dialogue.action(request["completion"]), "an action")
        answer = _step(seat.environment.step(action))
        seat.transcript.turns.append(Turn(action, answer["observation"]))
        prompt = None if answer["done"] or request["last"] else self._prompt(seat)
        return {**answer, "action": action, "prompt": prompt}

    def _prompt(self, seat: _Seat) -> str | list[dict[str, str]]:
        assert self._dialogue is not None
        with _named("prompt"):
            made = self._dialogue.prompt(seat.transcript)
            if isinstance(made, str):
                return _text(made, "a prompt", MAX_PROMPT_CHARS)
            messages = [
                {
                    _text(name, "a message's field"): _text(text, "a message's text", MAX_PROMPT_CHARS)
                    for name, text in message.items()
                }
                for message in made
            ]
            if not all({"role", "content"} <= message.keys() for message in messages):
                raise InvalidStep("a message has a role and a content")
            return messages

    def _fresh(self, slot: int) -> _Seat:
        if slot not in self._seats:
            spare, self._spare = self._spare, None
            self._seats[slot] = _Seat(self._source.environment() if spare is None else spare)
        return self._seats[slot]

    def _drop(self, slot: int) -> None:
        seat = self._seats.pop(slot, None)
        if seat is not None:
            try:
                seat.environment.close()
            except Exception:
                pass  # it has raised already; that is what is told


class DialogueFailed(Exception):
    """The task's dialogue raised: the task's fault, whatever the model's words were."""


@contextmanager
def _named(method: str) -> Iterator[None]:
    """Says of an error that it is the dialogue's.

    Raises:
        DialogueFailed: something was raised inside.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise DialogueFailed(f"Dialogue.{method} raised {type(error).__name__}: {error}") from error


def _step(value: Any) -> dict[str, Any]:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError  # one of three characters would come apart
        observation, done, reward = value
    except (TypeError, ValueError):
        raise InvalidStep(f"a step is (observation, done, reward), not {value!r:.200}") from None
    if not _is_bool(done):
        raise InvalidStep(f"`done` is True or False, not {done!r:.100}")
    if isinstance(reward, (str, bytes)) or not isinstance(reward, numbers.Real):
        raise InvalidStep(f"a reward is a number, not {reward!r:.100}")
    reward = float(reward)
    if not (math.isfinite(reward) and 0.0 <= reward <= 1.0):
        raise InvalidStep(f"a reward lies between 0 and 1, not {reward!r}")
    return {"observation": _text(observation, "an observation"), "done": bool(done), "reward": reward}


def _is_bool(value: Any) -> bool:
    """Also numpy's own, which is no bool for Python."""
    return isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"))


def _text(value: Any, name: str, limit: int = MAX_OBSERVATION_CHARS) -> str:
    if not isinstance(value, str):
        raise InvalidStep(f"{name} is text, not {type(value).__name__}")
    return value[:limit].encode("utf-8", "replace").decode()


def _private_channels() -> tuple[BinaryIO, BinaryIO]:
    """stdin and stdout for this protocol alone: what an environment prints goes to stderr."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return calls, answers


def _deny_inspection() -> None:
    """The vault's goals are in this process: no other one of the user may read its memory or its environment in /proc."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (OSError, AttributeError):
        pass  # not Linux


def _die_with_parent() -> None:
    """The kernel kills this process when the thread that started it is gone, also in the midst of a call."""
    starter = int(os.environ.get("AUTORL_POOL_PID", os.getppid()))
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        pass  # not Linux: the end of stdin ends it, if later
    if os.getppid() != starter:
        sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
