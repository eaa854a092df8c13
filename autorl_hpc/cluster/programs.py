"""Other programs, asked so that they can't hang who asks."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Answer:
    """What a program said.

    Attributes:
        code: its exit code; None: it gave no answer in time, or could not be started.
        missing: it is not on this host.
    """

    code: int | None
    out: str
    err: str
    missing: bool = False

    def last_words(self, most: int) -> str:
        """The last line that holds anything, of what went to standard output if there is one; at most so many characters."""
        lines = [line.strip() for line in f"{self.err}\n{self.out}".splitlines() if line.strip()]
        return (lines[-1] if lines else "")[:most]


def ask(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    limit_s: float,
    folder: str | Path | None = None,
    given: str = "",
) -> Answer:
    """Runs a program to its end, at most so many seconds, with `given` on its standard input."""
    try:
        done = subprocess.run(
            list(argv),
            env=dict(env),
            cwd=folder,
            stdin=None if given else subprocess.DEVNULL,
            input=given or None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(None, "", f"no answer within {limit_s:.0f} s")
    except OSError as error:
        return Answer(None, "", error.strerror or str(error), missing=isinstance(error, FileNotFoundError))
    return Answer(done.returncode, done.stdout, done.stderr)
