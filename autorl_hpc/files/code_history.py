"""code.git as the report reads it: the files of a revision, and what changed between two.

Files whose content is kept stand under their paths; of those that are large or binary a small JSON text says size and hash,
under the same path below `by-hash/`, a folder that no file of an agent can stand in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autorl_hpc.files.gitobjects import LINK, Files, GitDamage, Repository
from autorl_hpc.files.linediff import Work, line_diff

BY_HASH = b"by-hash/"
MAX_READ_BYTES = 64 << 20
"""Of one revision. The recorder keeps less."""

MAX_DIFF_BYTES = 256 << 10
"""Of one file: longer ones are told without their lines."""

MAX_TEXT_CHARS = 1 << 20
"""Of the unified diff of two revisions."""

MAX_POINTER_BYTES = 4096


@dataclass(frozen=True)
class Pointer:
    """A file of which no content is kept.

    Attributes:
        why: `large`, `binary`, `link` (`target` says where to), or `unread`: what is kept of it can't be read here.
        sha256: None: not computed; `note` says why.
    """

    why: Literal["large", "binary", "link", "unread"]
    size_bytes: int | None = None
    sha256: str | None = None
    note: str | None = None
    target: str | None = None

    def data(self, mtime_ns: int | None = None) -> bytes:
        """What stands in code.git for it."""
        value = {"mtime_ns": mtime_ns, "note": self.note, "sha256": self.sha256, "size_bytes": self.size_bytes}
        kept = {name: each for name, each in value.items() if each is not None}
        return json.dumps({**kept, "why": self.why}, sort_keys=True).encode() + b"\n"


@dataclass(frozen=True)
class FileChange:
    """One file that differs. Lines are None where there are none to count: pointers, and texts too long to compare."""

    path: str
    what: Literal["added", "changed", "removed"]
    added_lines: int | None
    removed_lines: int | None


@dataclass(frozen=True)
class Changes:
    """Two revisions compared. `text`: a unified diff of the texts, raw: escape it before it is shown.

    Attributes:
        cut: something was too long: lines that are not counted, or a shortened text.
    """

    files: tuple[FileChange, ...] = ()
    added_lines: int = 0
    removed_lines: int = 0
    text: str = ""
    cut: bool = False


def open_history(code_git: Path | Repository) -> Repository:
    """The repository to read from: hand on one to several calls. Nothing is opened yet."""
    return code_git if isinstance(code_git, Repository) else Repository(code_git)


def files_at(code_git: Path | Repository, revision: str) -> dict[str, bytes | Pointer]:
    """The files of a revision by their paths in the workspace, sorted; bytes that are no UTF-8 as surrogates.

    Raises:
        GitDamage: the revision can't be read as a whole.
    """
    repository = open_history(code_git)
    left, found = MAX_READ_BYTES, {}
    for path, (mode, entry) in sorted(repository.files(revision).items()):
        value = _content(repository, path, mode, entry, left)
        left -= len(value) if isinstance(value, bytes) else 0
        found[_shown(path)] = value
    return found


def changes(code_git: Path | Repository, before: str | None, after: str, work: Work | None = None) -> Changes:
    """What changed from one revision to another; from nothing, if `before` is None.

    Args:
        work: bound of the steps that comparing lines may take, for several calls together.

    Raises:
        GitDamage: a revision can't be read.
    """
    repository = open_history(code_git)
    old = {} if before is None else _by_path(repository.files(before))
    new = _by_path(repository.files(after))
    told = _Told(work or Work())
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) != new.get(path):
            told.add(path, _read(repository, old.get(path)), _read(repository, new.get(path)))
    return Changes(
        tuple(told.files),
        sum(f.added_lines or 0 for f in told.files),
        sum(f.removed_lines or 0 for f in told.files),
        "".join(told.texts),
        told.cut,
    )


Place = tuple[bytes, int, str]
"""Path in the repository, mode, object id."""


def _by_path(files: Files) -> dict[str, Place]:
    return {_shown(path): (path, mode, entry) for path, (mode, entry) in files.items()}


def _shown(path: bytes) -> str:
    return path.removeprefix(BY_HASH).decode("utf-8", "surrogateescape")


def _read(repository: Repository, place: Place | None) -> bytes | Pointer | None:
    return None if place is None else _content(repository, *place, MAX_DIFF_BYTES)


def _content(repository: Repository, path: bytes, mode: int, entry: str, left: int) -> bytes | Pointer:
    try:
        if path.startswith(BY_HASH):
            return _pointer(repository.read(entry, "blob", MAX_POINTER_BYTES))
        data = repository.read(entry, "blob", max(0, left))
    except GitDamage as error:
        return Pointer("unread", note=str(error))
    return Pointer("link", target=data.decode("utf-8", "surrogateescape")) if mode == LINK else data


def _pointer(data: bytes) -> Pointer:
    try:
        value: Any = json.loads(data)
        why, size, digest, note = (value.get(name) for name in ("why", "size_bytes", "sha256", "note"))
    except (ValueError, RecursionError, AttributeError):
        return Pointer("unread", note="what is kept of it can't be read")
    return Pointer(
        why if why in ("large", "binary") else "unread",
        size if isinstance(size, int) else None,
        digest if isinstance(digest, str) else None,
        note if isinstance(note, str) else None,
    )


@dataclass
class _Told:
    """Gathers the changes of one comparison within its bounds."""

    work: Work
    files: list[FileChange] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    chars: int = 0
    cut: bool = False

    def add(self, path: str, old: bytes | Pointer | None, new: bytes | Pointer | None) -> None:
        """Adds one file."""
        what: Literal["added", "changed", "removed"] = (
            "added" if old is None else "removed" if new is None else "changed"
        )
        if isinstance(old, Pointer) or isinstance(new, Pointer):
            unread = any(isinstance(each, Pointer) and each.why == "unread" for each in (old, new))
            self.cut = self.cut or unread
            self.files.append(FileChange(path, what, None, None))
            return
        given_up = self.work.given_up
        diff = line_diff(_text(old), _text(new), self.work)
        self.cut = self.cut or self.work.given_up > given_up
        self.files.append(FileChange(path, what, diff.added, diff.removed))
        names = ("/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}")
        text = f"--- {names[0]}\n+++ {names[1]}\n{diff.text}"
        if self.chars + len(text) > MAX_TEXT_CHARS:
            self.cut = True
        else:
            self.texts.append(text)
            self.chars += len(text)


def _text(data: bytes | None) -> str:
    return "" if data is None else data.decode("utf-8", "replace")
