"""A git repository of loose objects, written and read without git: the states of an agent's code.

Only what code.git needs: blobs, trees, commits, one ref an attempt. `git log`, `git diff` and `git fsck` read it. Objects
are named by their content and appear whole or not at all, so two writers can't harm each other; they are not synced, so a
node that loses its power may cost the last ones. Every object is checked against its name when it is read.

Format: git's documentation, gitformat-loose, and the book Pro Git, chapter 10.2.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["blob", "tree", "commit"]
FILE, PROGRAM, LINK, FOLDER = 0o100644, 0o100755, 0o120000, 0o40000
"""The modes that a tree's entry may have."""

Files = dict[bytes, tuple[int, str]]
"""By path, mode and object id."""

AUTHOR = "autorl-hpc recorder <recorder@localhost>"
CONFIG = (
    b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = true\n"
    b"[gc]\n\tauto = 0\n"  # packed objects are not read here
)
MAX_OBJECT_BYTES = 32 << 20
"""Inflated. None that is written here comes near."""

MAX_DEPTH = 64
MAX_FILES = 50_000
BLOCK_BYTES = 4096
"""What the smallest file takes on a disk."""

_ID = re.compile(r"[0-9a-f]{40}")
_REF_PREFIX = b"ref: "


class GitDamage(Exception):
    """An object or ref is missing, is not what its name says, or is none that this suite writes."""


@dataclass(frozen=True)
class Commit:
    """A commit. `at_s`: seconds of the Unix clock."""

    revision: str
    tree: str
    parent: str | None
    at_s: int
    message: str


def object_id(kind: Kind, data: bytes) -> str:
    """The name of an object."""
    return hashlib.sha1(b"%s %d\0" % (kind.encode(), len(data)) + data, usedforsecurity=False).hexdigest()


class Repository:
    """A bare repository. Not for several threads at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = 0
        self._known: set[str] = set()

    @classmethod
    def create(cls, path: Path) -> Repository:
        """Makes it, or completes one whose making was cut short; `size_bytes` is what its objects take. Raises OSError."""
        for folder in ("objects", "refs/heads"):
            (path / folder).mkdir(parents=True, exist_ok=True)
        repository = cls(path)
        for name, data in (("config", CONFIG), ("HEAD", b"ref: refs/heads/main\n")):
            if not (path / name).exists():
                repository._replace(path / name, data)
        with os.scandir(path / "objects") as folders:
            for each in folders:
                if each.is_dir(follow_symlinks=False) and len(each.name) == 2:
                    repository.size_bytes += _folder_bytes(each.path)
        return repository

    # ---------------------------------------------------------------- writing

    def write(self, kind: Kind, data: bytes) -> str:
        """Writes an object unless it is there; its id. Raises OSError."""
        name = object_id(kind, data)
        if name in self._known:
            return name
        folder = self.path / "objects" / name[:2]
        final = folder / name[2:]
        if not _stands(final):
            # Level 1: thrice as fast as the default, and code is small.
            packed = zlib.compress(b"%s %d\0" % (kind.encode(), len(data)) + data, 1)
            folder.mkdir(exist_ok=True)
            self._replace(final, packed, 0o444)
            self.size_bytes += _on_disk(len(packed))
        self._known.add(name)
        return name

    def write_files(self, files: Mapping[bytes, tuple[int, str]]) -> str:
        """Writes the trees of these files; the id of the topmost. Raises OSError."""
        folders: dict[bytes, Files] = {b"": {}}
        for path, entry in files.items():
            folder, _, name = path.rpartition(b"/")
            above = folder
            while above not in folders:
                folders[above] = {}
                above = above.rpartition(b"/")[0]
            folders[folder][name] = entry
        for folder in sorted(folders, key=lambda path: (path.count(b"/"), path), reverse=True):
            written = self.write("tree", _tree_bytes(folders[folder]))
            if not folder:
                break
            above, _, name = folder.rpartition(b"/")
            folders[above][name] = (FOLDER, written)
        return written

    def commit(self, tree: str, parent: str | None, message: str, at_s: int) -> str:
        """Writes a commit; its id. The clock's zone is UTC. Raises OSError."""
        stamp = f"{AUTHOR} {max(0, at_s)} +0000"
        lines = [f"tree {tree}", *([f"parent {parent}"] if parent else []), f"author {stamp}", f"committer {stamp}"]
        return self.write("commit", ("\n".join(lines) + f"\n\n{message}\n").encode())

    def set_ref(self, name: str, revision: str) -> None:
        """Points `refs/heads/<name>` to a commit. Raises OSError."""
        self._replace(self.path / "refs" / "heads" / name, revision.encode() + b"\n")

    def set_head(self, name: str) -> None:
        """Makes `refs/heads/<name>` what `git log` begins with. Raises OSError."""
        self._replace(self.path / "HEAD", b"ref: refs/heads/" + name.encode() + b"\n")

    def _replace(self, final: Path, data: bytes, mode: int = 0o644) -> None:
        temporary = self.path / f"tmp_obj_{secrets.token_hex(8)}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
            finally:
                os.close(fd)  # NFS may report a full quota here
            os.rename(temporary, final)
        except OSError:
            try:
                os.unlink(temporary)
            except OSError:
                pass
            raise

    # ---------------------------------------------------------------- reading

    def head_name(self) -> str | None:
        """The name of the ref that HEAD is."""
        try:
            data = _read_small(self.path / "HEAD")
        except GitDamage:
            return None
        prefix = _REF_PREFIX + b"refs/heads/"
        return data[len(prefix) :].strip().decode("ascii", "replace") if data.startswith(prefix) else None

    def ref(self, name: str) -> str | None:
        """The commit that `refs/heads/<name>` points to; None: there is no such ref, or it is damaged."""
        try:
            text = _read_small(self.path / "refs" / "heads" / Path(name).name).decode("ascii", "replace").strip()
        except GitDamage:
            return None
        return text if _ID.fullmatch(text) else None

    def head(self) -> str | None:
        """The newest commit; None: there is none."""
        name = self.head_name()
        return None if name is None else self.ref(name)

    def read(self, name: str, kind: Kind, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        """The object of that id.

        Raises:
            GitDamage: it is missing, of another kind, larger than `max_bytes`, or not what its name says.
        """
        if not _ID.fullmatch(name):
            raise GitDamage(f"{name[:60]!r} is no object's name")
        packed = _read_small(self.path / "objects" / name[:2] / name[2:], max_bytes + 4096)
        unpacker = zlib.decompressobj()
        try:
            data = unpacker.decompress(packed, max_bytes + 64)
        except zlib.error as error:
            raise GitDamage(f"object {name} can't be unpacked: {error}") from None
        if not unpacker.eof:
            raise GitDamage(f"object {name} breaks off, or unpacks to more than {max_bytes} bytes")
        head, _, body = data.partition(b"\0")
        if len(body) > max_bytes:
            raise GitDamage(f"object {name} is larger than {max_bytes} bytes")
        if head != b"%s %d" % (kind.encode(), len(body)) or object_id(kind, body) != name:
            raise GitDamage(f"object {name} is not the {kind} that its name says")
        return body

    def commit_of(self, revision: str) -> Commit:
        """The commit of that id. Raises GitDamage."""
        text = self.read(revision, "commit", 1 << 20).decode("utf-8", "replace")
        head, _, message = text.partition("\n\n")
        fields = dict(reversed([line.partition(" ")[::2] for line in head.split("\n")]))
        stamp = fields.get("committer", "").rsplit(" ", 2)
        at_s = int(stamp[1]) if len(stamp) == 3 and stamp[1].isascii() and stamp[1].isdigit() else 0
        return Commit(revision, fields.get("tree", ""), fields.get("parent"), at_s, message.rstrip("\n"))

    def history(self, revision: str | None, most: int = 100_000) -> Iterator[Commit]:
        """A commit and those before it, the newest first. Raises GitDamage where it breaks off."""
        while revision is not None and most > 0:
            commit = self.commit_of(revision)
            yield commit
            revision, most = commit.parent, most - 1

    def files(self, revision: str) -> Files:
        """All files of a commit. Raises GitDamage, also beyond MAX_FILES or MAX_DEPTH."""
        found: Files = {}
        folders = [(b"", self.commit_of(revision).tree, 0)]
        while folders:
            prefix, tree, depth = folders.pop()
            for mode, name, entry in _tree_entries(self.read(tree, "tree")):
                path = prefix + name
                if mode == FOLDER:
                    if depth >= MAX_DEPTH:
                        raise GitDamage("a tree is nested too deeply")
                    folders.append((path + b"/", entry, depth + 1))
                else:
                    found[path] = (mode, entry)
                if len(found) + len(folders) > MAX_FILES:
                    raise GitDamage(f"a tree holds more than {MAX_FILES} files")
        return found


def _tree_bytes(entries: Files) -> bytes:
    """git sorts folders as if their names ended in a slash."""
    ordered = sorted(entries.items(), key=lambda item: item[0] + (b"/" if item[1][0] == FOLDER else b""))
    return b"".join(b"%o %s\0" % (mode, name) + bytes.fromhex(entry) for name, (mode, entry) in ordered)


def _tree_entries(data: bytes) -> Iterator[tuple[int, bytes, str]]:
    at = 0
    while at < len(data):
        zero = data.find(b"\0", at)
        mode, space, name = data[at : max(at, zero)].partition(b" ")
        if zero < 0 or not space or not name or len(data) < zero + 21 or b"/" in name or name in (b".", b".."):
            raise GitDamage("a tree can't be read")
        try:
            number = int(mode, 8)
        except ValueError:
            raise GitDamage("a tree's entry has no mode") from None
        yield number, name, data[zero + 1 : zero + 21].hex()
        at = zero + 21


def _read_small(path: Path, max_bytes: int = 4096) -> bytes:
    """A regular file's bytes. Whoever could write here may have put a FIFO or a link in its place."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise GitDamage(f"{path.name} is no file")
            parts, left = [], max_bytes + 1
            while left > 0 and (part := os.read(fd, min(left, 1 << 20))):
                parts.append(part)
                left -= len(part)
        finally:
            os.close(fd)
    except OSError as error:
        why = "is a link" if error.errno == errno.ELOOP else f"can't be read: {error.strerror}"
        raise GitDamage(f"{path.parent.name}/{path.name} {why}") from None
    if left <= 0:
        raise GitDamage(f"{path.parent.name}/{path.name} is larger than {max_bytes} bytes")
    return b"".join(parts)


def _stands(path: Path) -> bool:
    """Whether a file is there that is not empty: a lost node leaves names without content."""
    try:
        return os.stat(path, follow_symlinks=False).st_size > 0
    except OSError:
        return False


def _folder_bytes(path: str) -> int:
    with os.scandir(path) as entries:
        return sum(_on_disk(entry.stat(follow_symlinks=False).st_size) for entry in entries)


def _on_disk(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES
