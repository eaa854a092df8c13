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
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from autorl_hpc.files import atomic, reading
from autorl_hpc.records import canonical_json
from autorl_hpc.scoring.gsm8k import without_closed_thinking
from autorl_hpc.scoring.outcome import Verdict

log = logging.getLogger("autorl_hpc.judge")

FORMAT: Final = 2
"""Of the files; another one is not read."""
PAUSE_S: Final = 60.0
"""After a failed write: each one would cost seconds of retries."""


@dataclass(frozen=True)
class JudgeReply:
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

    def get(self, key: str) -> JudgeReply | None:
        """The answer to the request of that key; None if there is none, or its file is damaged."""
        try:
            value = json.loads(reading.read_bytes(self._path(key)))
            if value["format"] != FORMAT or value["key"] != key:
                return None
            logprobs = {str(token): float(number) for token, number in value["logprobs"].items()}
            tokens = int(value["prompt_tokens"]), int(value["completion_tokens"])
            answer = JudgeReply(str(value["text"]), logprobs, tokens[0], tokens[1], str(value["finish"]))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return answer if all(math.isfinite(number) for number in logprobs.values()) else None

    def put(self, key: str, answer: JudgeReply) -> None:
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


# A judge's prompt for a pair of answers: the text file of a task, filled in; and the reading of the judge's word.
#
# A prompt file holds turns as `<|im_start|>ROLE`, text, `<|im_end|>`, the form of alpaca_eval's own files, so that those can be
# used as they are. `{instruction}`, `{output_1}` and `{output_2}` are filled in, and `{mark}`: 16 hex digits that depend on all
# three, so that no answer can hold the line that ends it.

Conversation = list[dict[str, str]]

FIRST, SECOND = ("1", "m"), ("2", "M")
"""What a judge calls the answer that it is shown first, and the other one."""

REMINDER: Final = "\n\nReply with {first} or {second} alone, and nothing else."
_TURN = re.compile(r"<\|im_start\|>(system|user|assistant)\n(.*?)\n?<\|im_end\|>", re.DOTALL)
_FIELD = re.compile(r"\{(instruction|output_1|output_2|mark)\}")


class JudgedPairText(NamedTuple):
    """A pair as a judge is asked about it.

    Attributes:
        swapped: the model's answer comes first.
    """

    instruction: str
    reference: str
    answer: str
    swapped: bool


def is_swapped(instruction: str, seed: int) -> bool:
    """Whether the model's answer is shown first: a coin for each instruction, the same for every model."""
    return hashlib.sha256(f"{seed}\0{instruction}".encode("utf-8", "replace")).digest()[0] % 2 == 1


def conversation(template: str, pair: JudgedPairText, *, remind: tuple[str, str] | None = None) -> Conversation:
    """The turns that a judge is asked.

    Args:
        remind: what it may reply; it has replied something else before.

    Raises:
        ValueError: the template has no user's turn with both outputs.
    """
    turns = [(role, text) for role, text in _TURN.findall(template)]
    if not turns or turns[-1][0] != "user" or not {"output_1", "output_2"} <= set(_FIELD.findall(turns[-1][1])):
        raise ValueError("a judge's prompt ends with a user's turn that holds {output_1} and {output_2}")
    first, second = (pair.answer, pair.reference) if pair.swapped else (pair.reference, pair.answer)
    mark = hashlib.sha256("\0".join((pair.instruction, first, second)).encode("utf-8", "replace")).hexdigest()[:16]
    values = {"instruction": pair.instruction, "output_1": first, "output_2": second, "mark": mark}
    # In one pass: what is filled in may itself hold {output_2}, or the marks of a turn.
    made = [{"role": role, "content": _FIELD.sub(lambda field: values[field[1]], text)} for role, text in turns]
    if remind:
        made[-1]["content"] += REMINDER.format(first=remind[0], second=remind[1])
    return made


def read_discrete(verdict: Verdict, *, swapped: bool) -> float | None:
    """The preference for the model's answer, 1 or 0; None if the judge named neither."""
    said = re.fullmatch(r"[^\w]*([12mM])[^\w]*", without_closed_thinking(verdict.text))
    return None if said is None else float((said[1] in SECOND) != swapped)


def read_logprobs(verdict: Verdict, *, swapped: bool) -> float | None:
    """The preference for the model's answer, 0 to 1, from the first token's probabilities; None if neither name is likely.

    Source: tatsu-lab/alpaca_eval @ cd543a14, `logprob_parser`: p(second) / (p(first) + p(second)), a name that is not among
    the likeliest tokens having none. Spaces around a name are passed over.
    """
    first, second = (
        math.fsum(math.exp(min(value, 0.0)) for token, value in verdict.logprobs.items() if token.strip() in names)
        for names in (FIRST, SECOND)
    )
    if first + second <= 0.0:
        return None
    return (first if swapped else second) / (first + second)
