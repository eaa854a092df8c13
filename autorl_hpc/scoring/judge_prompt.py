"""A judge's prompt for a pair of answers: the text file of a task, filled in; and the reading of the judge's word.

A prompt file holds turns as `<|im_start|>ROLE`, text, `<|im_end|>`, the form of alpaca_eval's own files, so that those can be
used as they are. `{instruction}`, `{output_1}` and `{output_2}` are filled in, and `{mark}`: 16 hex digits that depend on all
three, so that no answer can hold the line that ends it.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Final, NamedTuple

from autorl_hpc.scoring.outcome import Verdict
from autorl_hpc.scoring.thinking import without_closed_thinking

Conversation = list[dict[str, str]]

FIRST, SECOND = ("1", "m"), ("2", "M")
"""What a judge calls the answer that it is shown first, and the other one."""

REMINDER: Final = "\n\nReply with {first} or {second} alone, and nothing else."
_TURN = re.compile(r"<\|im_start\|>(system|user|assistant)\n(.*?)\n?<\|im_end\|>", re.DOTALL)
_FIELD = re.compile(r"\{(instruction|output_1|output_2|mark)\}")


class Shown(NamedTuple):
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


def conversation(template: str, pair: Shown, *, remind: tuple[str, str] | None = None) -> Conversation:
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
