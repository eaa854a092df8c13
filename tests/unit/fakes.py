"""Scheduler clients of the test's own: small shell scripts that print what real ones were seen to print."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

US = "\x1f"
"""The separator that the suite asks clients for."""


class Clients:
    """A folder that comes first in PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, alone: bool = False) -> None:
        self.folder = folder / "clients"
        self.folder.mkdir()
        rest = "/usr/bin:/bin" if not alone else ""
        monkeypatch.setenv("PATH", f"{self.folder}:{rest}".rstrip(":"))

    def says(self, client: str, text: str = "", *, error: str = "", code: int = 0) -> None:
        """From now on `client` prints this and ends with this code."""
        (self.folder / f"{client}.stdout").write_text(text)
        (self.folder / f"{client}.stderr").write_text(error)
        self.script(
            client,
            f"while IFS= read -r line; do printf '%s\\n' \"$line\"; done < {self._quoted(client, 'stdout')}",
            f"while IFS= read -r line; do printf '%s\\n' \"$line\"; done < {self._quoted(client, 'stderr')} >&2",
            f"exit {code}",
        )

    def script(self, client: str, *lines: str) -> None:
        """From now on `client` is these lines of sh."""
        note = f"printf '%s\\n' \"$@\" -- >> {self._quoted(client, 'calls')}"
        path = self.folder / client
        path.write_text("\n".join(["#!/bin/sh", note, *lines, ""]))
        path.chmod(0o755)

    def calls(self, client: str) -> list[list[str]]:
        """The arguments of each call so far."""
        path = self.folder / f"{client}.calls"
        calls: list[list[str]] = [[]]
        for word in path.read_text().splitlines() if path.exists() else []:
            if word == "--":
                calls.append([])
            else:
                calls[-1].append(word)
        return calls[:-1]

    def _quoted(self, client: str, what: str) -> str:
        return shlex.quote(str(self.folder / f"{client}.{what}"))


def squeue_line(
    job: str, name: str, state: str, number: int | None = None, *, reason: str = "None", nodes: str = "", at: str = "T1"
) -> str:
    """One line of squeue in the suite's format."""
    said = "(null)" if number is None else f"autorl-hpc 0123456789ab number {number}"
    return US.join([job, name, state, reason, nodes, said, at])


def lines(rows: Sequence[str]) -> str:
    """A client's output."""
    return "".join(f"{row}\n" for row in rows)
