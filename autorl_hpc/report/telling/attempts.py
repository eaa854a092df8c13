"""When each attempt of a run went on, in budget time."""

from __future__ import annotations

from autorl_hpc.files.spans import Span
from autorl_hpc.files.view import RunView


def attempts_of(view: RunView, elapsed_s: float) -> dict[int, Span]:
    """Begin and end of each attempt by its number: up to the next one, the last up to `elapsed_s`."""
    begun = sorted({a.attempt: a.elapsed_s for a in view.attempts}.items())
    ends = [*(begin for _, begin in begun[1:]), elapsed_s]
    return {number: (begin, max(begin, end)) for (number, begin), end in zip(begun, ends, strict=False)}
