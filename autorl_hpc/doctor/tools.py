"""Other programs, asked so that they can't hang a check; Slurm's clients are `cluster.commands`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from autorl_hpc.cluster import programs

TOOL_LIMIT_S = 10.0
"""quota asks every file server; one that is down keeps it waiting."""

MOST_WORDS = 200


class Answer(programs.Answer):
    """What a program said."""

    @property
    def said(self) -> str:
        """Its last words."""
        return self.last_words(MOST_WORDS) or "nothing"


def ask(argv: Sequence[str], *, limit_s: float = TOOL_LIMIT_S) -> Answer | None:
    """What a program prints; None: it is not here."""
    if shutil.which(argv[0]) is None:
        return None
    answer = programs.ask(argv, env={**os.environ, "LC_ALL": "C"}, limit_s=limit_s)
    return Answer(answer.code, answer.out, answer.err)


def span(seconds: float) -> str:
    """Such as 12 ms, 1.4 s, 90 s, 12 min, 8 h, 3 days."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    for unit, size, above in (("days", 86400, 2 * 86400), ("h", 3600, 2 * 3600), ("min", 60, 120)):
        if seconds >= above:
            return f"{seconds / size:.3g} {unit}" if seconds % size else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
