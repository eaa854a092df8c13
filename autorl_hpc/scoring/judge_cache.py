"""A judge's answers by the content of the request, so that what was asked once is not asked, and not paid, again.

One small JSON file an answer, in a folder for its owner alone. The key is over the request's body (model, messages,
parameters), the address, and the experiment's `judge.revision`: a name alone doesn't say which weights answer under it. An
endpoint that serves other weights at the same address and name is told apart by a new `judge.revision` alone. No question and
no answer of a model is stored, only their hash.

What can't be a verdict is not kept, and what a scorer couldn't read is forgotten: an endpoint's passing trouble must not stay.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from autorl_hpc.files import atomic, reading
from autorl_hpc.records.canonical import canonical_json

log = logging.getLogger("autorl_hpc.judge")

FORMAT: Final = 2
"""Of the files; another one is not read."""
PAUSE_S: Final = 60.0
"""After a failed write: each one would cost seconds of retries."""


@dataclass(frozen=True)
class Answer:
    """What an endpoint answered to one request.

    Attributes:
        logprobs: of the first token, by the likeliest tokens' text; empty where they weren't asked for.
        prompt_tokens, completion_tokens: as the endpoint counts them, 0 where it doesn't say.
        finish: why it ended there, `stop` or `length`, as the endpoint says; "" where it doesn't say.
    """

    text: str
    logprobs: Mapping[str, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish: str = ""

    @property
    def cut_off(self) -> bool:
        """Whether its limit of tokens ended it."""
        return self.finish == "length"

    @property
    def lasting(self) -> bool:
        """Whether it may be kept: it says something, and all of it. One that was asked for its first token's probabilities is
        cut behind that token by design."""
        return bool(self.logprobs) or (bool(self.text.strip()) and self.finish in ("", "stop"))


def request_key(body: Mapping[str, Any], url: str = "", revision: str | None = None) -> str:
    """The sha256, in hex, of a request's body, where it is sent, and what the experiment says of the model there."""
    return hashlib.sha256(canonical_json({"body": dict(body), "url": url, "revision": revision})).hexdigest()


class JudgeCache:
    """A folder of answers. Any number of graders may use it at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._not_before = 0.0

    def get(self, key: str) -> Answer | None:
        """The answer to the request of that key; None if there is none, or its file is damaged."""
        try:
            value = json.loads(reading.read_bytes(self._path(key)))
            if value["format"] != FORMAT or value["key"] != key:
                return None
            logprobs = {str(token): float(number) for token, number in value["logprobs"].items()}
            tokens = int(value["prompt_tokens"]), int(value["completion_tokens"])
            answer = Answer(str(value["text"]), logprobs, tokens[0], tokens[1], str(value["finish"]))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return answer if all(math.isfinite(number) for number in logprobs.values()) else None

    def put(self, key: str, answer: Answer) -> None:
        """Keeps an answer. A folder that can't be written is no error: it is said, and left alone for a minute."""
        if time.monotonic() < self._not_before:
            return
        path = self._path(key)
        value = {
            "format": FORMAT,
            "key": key,
            "text": answer.text,
            "logprobs": dict(answer.logprobs),
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "finish": answer.finish,
        }
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            atomic.write_json(path, value, mode=0o600)
        except OSError as error:
            self._not_before = time.monotonic() + PAUSE_S
            log.warning("the judge's answers can't be kept in %s: %s", self.folder, error)

    def forget(self, key: str) -> None:
        """Removes an answer: it was no verdict. One that can't be removed is read again, and forgotten again."""
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            log.warning("an answer of the judge can't be removed from %s: %s", self.folder, error)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"
