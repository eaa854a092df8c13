"""A judge for trying things out: no model, no network, and no opinion worth anything.

It prefers the answer that takes up more of the instruction's words, and of two that take up equally many the longer one, up
to a limit. It reads the prompts of this package alone (`judge_prompt.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

from autorl_hpc.records.experiment import JudgeSpec
from autorl_hpc.scoring.judges import Usage
from autorl_hpc.scoring.outcome import Verdict

MAX_CHARS: Final = 600
"""More length than this is worth nothing."""
WORD_WORTH_CHARS: Final = 2 * MAX_CHARS
"""One word of the instruction outweighs any length."""
STEEPNESS: Final = 2.0 / WORD_WORTH_CHARS
"""Of its log probabilities: one word more makes the odds e^2."""

_PART = re.compile(
    r"^\[(?P<mark>[0-9a-f]{16}) instruction\]\n(?P<instruction>.*)^\[(?P=mark) first answer\]\n(?P<first>.*)"
    r"^\[(?P=mark) second answer\]\n(?P<second>.*)^\[(?P=mark) end\]$",
    re.DOTALL | re.MULTILINE,
)


class LengthAndWords:
    """The built-in judge. It can't fail."""

    model = JudgeSpec.BUILTIN

    def __init__(self) -> None:
        self._asked = 0

    @property
    def usage(self) -> Usage:
        """Its requests cost nothing."""
        return Usage(requests=self._asked)

    def ask(
        self, conversations: Sequence[Sequence[Mapping[str, str]]], *, max_tokens: int, logprobs: int = 0
    ) -> list[Verdict]:
        """One verdict a conversation, `?` where it can't read the prompt."""
        self._asked += len(conversations)
        return [_verdict(conversation[-1]["content"], logprobs) for conversation in conversations]

    def forget(self, verdicts: Sequence[Verdict]) -> None:
        """It keeps none."""


def _verdict(prompt: str, logprobs: int) -> Verdict:
    parts = _PART.search(prompt)
    if parts is None:
        return Verdict("?")
    first, second = (_worth(parts["instruction"], parts[name]) for name in ("first", "second"))
    if not logprobs:
        return Verdict("1" if first >= second else "2")
    odds = STEEPNESS * (second - first)
    return Verdict("m" if odds <= 0 else "M", {"m": -math.log1p(math.exp(odds)), "M": -math.log1p(math.exp(-odds))})


def _worth(instruction: str, answer: str) -> float:
    wanted, given = (set(re.findall(r"[^\W\d_]{3,}", text.lower())) for text in (instruction, answer))
    return len(wanted & given) * WORD_WORTH_CHARS + min(len(answer.strip()), MAX_CHARS)
