"""One worker process: hosts environments and answers calls, one JSON object a line, no pickle.

First line in: the source. Then `{"slot": 3, "goal": {...}, "seed": 0}` begins an episode in the slot, and
`{"slot": 3, "action": "..."}` goes on with it. Each line is answered by `{"observation", "done", "reward"}` or by
`{"error"}`. The end of stdin ends the process, and so does the death of the one that started it.
"""

from __future__ import annotations

import ctypes
import json
import math
import numbers
import os
import signal
import sys
from typing import Any, BinaryIO

from autorl_hpc.rollouts.environment import Environment
from autorl_hpc.rollouts.source import EnvironmentBroken, Source

MAX_OBSERVATION_CHARS = 200_000
"""More than any context window holds; what is longer is cut, so that one mad environment doesn't fill the memory."""

PR_SET_PDEATHSIG = 1


class Garbage(Exception):
    """The environment gave something that is no observation or no step."""


def main() -> int:
    """Runs until stdin ends."""
    _die_with_parent()
    calls, answers = _private_channels()
    host: Host | None = None
    for line in calls:
        request = json.loads(line)
        if host is None:
            host = Host(Source(**request))
            answer = host.probe()
        else:
            answer = host.answer(request)
        answers.write(json.dumps(answer).encode("ascii") + b"\n")
        answers.flush()
    return 0


class Host:
    """The environments of this process by slot."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._environments: dict[int, Environment] = {}

    def probe(self) -> dict[str, Any]:
        """Whether an environment can be made at all; the first one is kept for slot 0's owner."""
        try:
            self._environments[-1] = self._source.environment()
        except EnvironmentBroken as error:
            return {"error": str(error)}
        return {"ready": True}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What follows on a call. An environment that raised is thrown away."""
        slot = int(request["slot"])
        try:
            if "action" in request:
                if not isinstance(request["action"], str):
                    raise Garbage(f"the dialogue's action is text, not {request['action']!r:.100}")
                return _step(self._environments[slot].step(request["action"]))
            return {"observation": _text(self._fresh(slot).reset(request["goal"], request["seed"]))}
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._drop(slot)
            return {"error": f"{type(error).__name__}: {error}"[:500].encode("utf-8", "replace").decode()}

    def _fresh(self, slot: int) -> Environment:
        if slot not in self._environments:
            spare = self._environments.pop(-1, None)
            self._environments[slot] = self._source.environment() if spare is None else spare
        return self._environments[slot]

    def _drop(self, slot: int) -> None:
        environment = self._environments.pop(slot, None)
        if environment is not None:
            try:
                environment.close()
            except Exception:
                pass  # it has raised already; that is what is told


def _step(value: Any) -> dict[str, Any]:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError  # one of three characters would come apart
        observation, done, reward = value
    except (TypeError, ValueError):
        raise Garbage(f"a step is (observation, done, reward), not {value!r:.200}") from None
    if not _is_bool(done):
        raise Garbage(f"`done` is True or False, not {done!r:.100}")
    if isinstance(reward, (str, bytes)) or not isinstance(reward, numbers.Real):
        raise Garbage(f"a reward is a number, not {reward!r:.100}")
    reward = float(reward)
    if not (math.isfinite(reward) and 0.0 <= reward <= 1.0):
        raise Garbage(f"a reward lies between 0 and 1, not {reward!r}")
    return {"observation": _text(observation), "done": bool(done), "reward": reward}


def _is_bool(value: Any) -> bool:
    """Also numpy's own, which is no bool for Python."""
    return isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Garbage(f"an observation is text, not {type(value).__name__}")
    return value[:MAX_OBSERVATION_CHARS].encode("utf-8", "replace").decode()


def _private_channels() -> tuple[BinaryIO, BinaryIO]:
    """stdin and stdout for this protocol alone: what an environment prints goes to stderr."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return calls, answers


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
