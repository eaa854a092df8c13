"""The files of a revision of code.git, as tests compare them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.recorder import code
from autorl_hpc.recorder.code import BY_HASH, LINK, Repository


@dataclass(frozen=True)
class Pointer(code.Pointer):
    """A file of which no content is kept, or a link (`why`), which leads to `target`."""

    target: str | None = None


def files_at(code_git: Path, revision: str) -> dict[str, bytes | Pointer]:
    """The files of a revision by their paths in the workspace. Raises GitDamage."""
    repository, found = Repository(code_git), dict[str, bytes | Pointer]()
    for path, (mode, entry) in sorted(repository.files(revision).items()):
        data = repository.read(entry, "blob")
        value: bytes | Pointer = data
        if path.startswith(BY_HASH):
            value = Pointer(**{key: each for key, each in json.loads(data).items() if key != "mtime_ns"})
        elif mode == LINK:
            value = Pointer("link", target=data.decode("utf-8", "surrogateescape"))
        found[path.removeprefix(BY_HASH).decode("utf-8", "surrogateescape")] = value
    return found


def message_of(code_git: Path, revision: str) -> str:
    """A commit's message."""
    return Repository(code_git).read(revision, "commit").decode().partition("\n\n")[2].rstrip("\n")


def history(code_git: Path, revision: str | None) -> list[str]:
    """A commit and its ancestors, newest first."""
    found: list[str] = []
    while revision is not None:
        found.append(revision)
        head = Repository(code_git).read(revision, "commit").decode().partition("\n\n")[0].splitlines()
        revision = next((line.split()[1] for line in head if line.startswith("parent ")), None)
    return found
