"""Cache of judge replies by a hash of request, address and `judge.revision`, so that no request is paid twice; and the prompts
and parsing for pairwise judging. What can't be a verdict is not stored."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter

from autorl_hpc.files import atomic, reading
from autorl_hpc.records import canonical_json
from autorl_hpc.scoring.gsm8k import without_closed_thinking
from autorl_hpc.scoring.outcome import Verdict

log = logging.getLogger("autorl_hpc.judge")
FORMAT: Final = 2  # Format version of the files; other versions are ignored


@dataclass(frozen=True)
class JudgeReply:
    """An endpoint's reply to one request, with the log probabilities of the first token's likeliest candidates if requested, tokens
    as the endpoint counts them (0: unknown), and its finish reason (`stop`, `length`, "" if unknown)."""

    text: str
    logprobs: Mapping[str, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish: str = ""

    @property
    def cut_off(self) -> bool:
        return self.finish == "length"

    @property
    def lasting(self) -> bool:
        """Whether it may be stored: it is complete and not empty. A reply requested for its first token's probabilities is always
        cut off after that token."""
        return bool(self.logprobs) or (bool(self.text.strip()) and self.finish in ("", "stop"))


def request_key(body: Mapping[str, Any], url: str = "", revision: str | None = None) -> str:
    """Return the hex sha256 of a request body, its address, and the experiment's revision of the model there."""
    return hashlib.sha256(canonical_json({"body": dict(body), "url": url, "revision": revision})).hexdigest()


class JudgeCache:
    """A folder of replies. Several graders may use it at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writable = True

    def get(self, key: str) -> JudgeReply | None:
        """Return the reply for a key; None if there is none or its file is damaged."""
        try:
            value = json.loads(reading.read_bytes(self._path(key)))
            if (value.pop("format"), value.pop("key")) != (FORMAT, key):
                return None
            return TypeAdapter(JudgeReply).validate_python(value)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def put(self, key: str, answer: JudgeReply) -> None:
        """Store a reply. If the folder can't be written, this is logged, and nothing more is stored; it is not an error."""
        path = self._path(key)
        try:
            if self._writable:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.parent.mkdir(mode=0o700, exist_ok=True)
                atomic.write_json(path, {"format": FORMAT, "key": key, **asdict(answer)}, mode=0o600)
        except OSError as error:
            self._writable = False
            log.warning("the judge's answers can't be kept in %s: %s", self.folder, error)

    def forget(self, key: str) -> None:
        """Remove a reply that was not a verdict. If that fails, it will be read and removed again."""
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            log.warning("an answer of the judge can't be removed from %s: %s", self.folder, error)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


# --- pairwise judging: the prompt and the parsing of replies
# A prompt file holds turns as `<|im_start|>ROLE`, text, `<|im_end|>`, the form of alpaca_eval's files, so that those can be used
# unchanged. Fields: `{instruction}`, `{output_1}`, `{output_2}`, and `{mark}`: 16 hex digits that depend on all three, so that
# no answer can hold the line that ends it.

Conversation = list[dict[str, str]]
FIRST, SECOND = ("1", "m"), ("2", "M")  # The judge's names for the first and the second answer
REMINDER: Final = "\n\nReply with {first} or {second} alone, and nothing else."
_TURN = re.compile(r"<\|im_start\|>(system|user|assistant)\n(.*?)\n?<\|im_end\|>", re.DOTALL)
_FIELD = re.compile(r"\{(instruction|output_1|output_2|mark)\}")


class JudgedPairText(NamedTuple):
    """A pair in the form in which a judge sees it; `swapped` if the model's answer comes first."""

    instruction: str
    reference: str
    answer: str
    swapped: bool


def is_swapped(instruction: str, seed: int) -> bool:
    """Return whether the model's answer is shown first: decided by a hash of the instruction, the same for every model."""
    return hashlib.sha256(f"{seed}\0{instruction}".encode("utf-8", "replace")).digest()[0] % 2 == 1


def conversation(template: str, pair: JudgedPairText, *, remind: tuple[str, str] | None = None) -> Conversation:
    """Return the turns of the judge's prompt, with a reminder of the allowed replies if an earlier one was unreadable. ValueError if
    the template has no user turn with both outputs."""
    turns = [(role, text) for role, text in _TURN.findall(template)]
    if not turns or turns[-1][0] != "user" or not {"output_1", "output_2"} <= set(_FIELD.findall(turns[-1][1])):
        raise ValueError("a judge's prompt ends with a user's turn that holds {output_1} and {output_2}")
    first, second = (pair.answer, pair.reference) if pair.swapped else (pair.reference, pair.answer)
    mark = hashlib.sha256("\0".join((pair.instruction, first, second)).encode("utf-8", "replace")).hexdigest()[:16]
    values = {"instruction": pair.instruction, "output_1": first, "output_2": second, "mark": mark}
    # In one pass, because the filled-in texts may hold {output_2} or turn markers.
    made = [{"role": role, "content": _FIELD.sub(lambda field: values[field[1]], text)} for role, text in turns]
    if remind:
        made[-1]["content"] += REMINDER.format(first=remind[0], second=remind[1])
    return made


def read_discrete(verdict: Verdict, *, swapped: bool) -> float | None:
    """Return the preference for the model's answer, 1 or 0; None if the judge named neither."""
    said = re.fullmatch(r"[^\w]*([12mM])[^\w]*", without_closed_thinking(verdict.text))
    return None if said is None else float((said[1] in SECOND) != swapped)


def read_logprobs(verdict: Verdict, *, swapped: bool) -> float | None:
    """Return the preference for the model's answer, 0 to 1: p(second) / (p(first) + p(second)) of the first token; None if
    neither is likely. Source: tatsu-lab/alpaca_eval @ cd543a14, `logprob_parser`."""
    first, second = (
        math.fsum(math.exp(min(value, 0.0)) for token, value in verdict.logprobs.items() if token.strip() in names)
        for names in (FIRST, SECOND)
    )
    if first + second <= 0.0:
        return None
    return (first if swapped else second) / (first + second)
