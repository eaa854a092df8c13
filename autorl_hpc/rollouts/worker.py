"""Worker process: hosts environments and their dialogue, one JSON object per line. The first line in holds the source.
`{"slot": 3, "goal": {...}, "seed": 0}` begins an episode, `{"slot": 3, "completion": "...", "last": false}` continues it. A
task's code runs only here."""

from __future__ import annotations

import math
import numbers
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from autorl_hpc.rollouts.child import Answering, hide_memory, is_bool, serve
from autorl_hpc.rollouts.environment import Dialogue, Environment, Transcript, Turn, Unavailable
from autorl_hpc.rollouts.source import EnvironmentBroken, Source, blamed

MAX_PROMPT_CHARS = 8_000_000  # No model reads more; a longer prompt would be sent and tokenized for nothing
MAX_OBSERVATION_CHARS = 200_000
"""Longer observations are cut, so that a faulty environment does not fill the memory. No context window holds more."""


class InvalidStep(Exception):
    """The environment returned an invalid observation or step."""


def main() -> int:
    """Run until stdin ends; return the exit code."""
    return serve(_begin, shown=True)


def _begin(request: dict[str, Any]) -> tuple[dict[str, Any], Answering]:
    source = Source(**request)
    if source.held_out:
        hide_memory()
    host = Host(source)
    return host.probe(), host.answer


@dataclass
class _Seat:
    environment: Environment
    transcript: Transcript = field(default_factory=lambda: Transcript({}, ""))


class Host:
    """This process's environments by slot."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._seats: dict[int, _Seat] = {}
        self._spare: Environment | None = None
        self._dialogue: Dialogue | None = None

    def probe(self) -> dict[str, Any]:
        """Check that environment and dialogue can be created; the first slot uses this environment."""
        try:
            self._dialogue, self._spare = self._source.dialogue(), self._source.environment()
        except EnvironmentBroken as error:
            return {"error": str(error)}
        return {"ready": True}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a call. An environment that raised is discarded."""
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
        if slot not in self._seats:
            spare, self._spare = self._spare, None
            self._seats[slot] = _Seat(self._source.environment() if spare is None else spare)
        seat = self._seats[slot]
        first = _text(seat.environment.reset(request["goal"], request["seed"]), "an observation")
        seat.transcript = Transcript(request["goal"], first)
        return {"observation": first, "prompt": self._prompt(seat)}

    def _go_on(self, slot: int, request: dict[str, Any]) -> dict[str, Any]:
        seat = self._seats[slot]
        assert self._dialogue is not None
        with blamed(DialogueFailed, "Dialogue.action raised"):
            action = _text(self._dialogue.action(request["completion"]), "an action")
        answer = _step(seat.environment.step(action))
        seat.transcript.turns.append(Turn(action, answer["observation"]))
        prompt = None if answer["done"] or request["last"] else self._prompt(seat)
        return {**answer, "action": action, "prompt": prompt}

    def _prompt(self, seat: _Seat) -> str | list[dict[str, str]]:
        assert self._dialogue is not None
        with blamed(DialogueFailed, "Dialogue.prompt raised"):
            made = self._dialogue.prompt(seat.transcript)
            if isinstance(made, str):
                return _text(made, "a prompt", MAX_PROMPT_CHARS)
            if not all({"role", "content"} <= message.keys() for message in made):
                raise InvalidStep("a message has a role and a content")
            prompt = []
            for each in made:
                pairs = [(_text(k, "a field"), _text(v, "a message's text", MAX_PROMPT_CHARS)) for k, v in each.items()]
                prompt.append(dict(pairs))
            return prompt

    def _drop(self, slot: int) -> None:
        if (seat := self._seats.pop(slot, None)) is not None:
            with suppress(Exception):  # its first error is the one reported
                seat.environment.close()


class DialogueFailed(Exception):
    """The task's dialogue raised. The task is at fault, whatever the model wrote."""


def _step(value: Any) -> dict[str, Any]:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError  # otherwise a text of three characters would be unpacked
        observation, done, reward = value
    except (TypeError, ValueError):
        raise InvalidStep(f"a step is (observation, done, reward), not {value!r:.200}") from None
    if not is_bool(done):
        raise InvalidStep(f"`done` is True or False, not {done!r:.100}")
    if isinstance(reward, (str, bytes)) or not isinstance(reward, numbers.Real):
        raise InvalidStep(f"a reward is a number, not {reward!r:.100}")
    reward = float(reward)
    if not (math.isfinite(reward) and 0.0 <= reward <= 1.0):
        raise InvalidStep(f"a reward lies between 0 and 1, not {reward!r}")
    return {"observation": _text(observation, "an observation"), "done": bool(done), "reward": reward}


def _text(value: Any, name: str, limit: int = MAX_OBSERVATION_CHARS) -> str:
    if not isinstance(value, str):
        raise InvalidStep(f"{name} is text, not {type(value).__name__}")
    return value[:limit].encode("utf-8", "replace").decode()


if __name__ == "__main__":
    sys.exit(main())
