"""Record every state of an agent's code as commits of code.git.

`CodeWalk` finds the files, `CodeFiles` decides what is stored of each, `Repository` writes and reads git objects without
git, and the watch `Revisions` commits. It looks once a second. A change is committed when a look 0.4 s later finds the same
state, or after 0.8 s at the latest, so it is settled within 2 s. The state of a submission is committed at once.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import queue
import re
import secrets
import stat
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from autorl_hpc.recorder.watch import LineWriter, Moment, RecorderJob
from autorl_hpc.records.base import printable
from autorl_hpc.records.recorded import CodeRevision

# --- resolve a link in place of `code/` if it leads to a folder of the workspace

MAX_LINKS = 8
MAX_PARTS = 64


def inside(root_fd: int, name: str) -> tuple[str, ...] | None:
    """Return the parts of the path below the workspace to which `name`, at its top, leads; None for the top or a place
    outside. It opens nothing. Callers that open the parts must follow no link, because they may have changed."""
    todo, done, links = [name], list[str](), 0
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            if not done:
                return None
            done.pop()
            continue
        try:
            target = os.readlink("/".join((*done, part)), dir_fd=root_fd)
        except OSError:  # not a link, or nothing there
            done.append(part)
            continue
        links += 1
        if target.startswith("/"):
            top = os.readlink(f"/proc/self/fd/{root_fd}").rstrip("/") + "/"
            if not target.startswith(top):
                return None
            target, done = target[len(top) :], []
        todo += reversed(target.split("/"))
        if links > MAX_LINKS or len(todo) > MAX_PARTS:
            return None
    return tuple(done) or None


# --- which files are code: those in `code/`, and small sources at the top of the workspace.
# The walk uses descriptors, follows no link, and opens only folders. Sources near the top come first, so that a limit cuts off
# the least likely files. An agent can't hide code by a folder's name: excluded folders come last, and what is not stored is
# reported.

CODE = "code"
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

MAX_FILES = 4000
"""Limit per revision: more than any agent writes by hand; each version of each file is a file on a shared disk."""

MAX_OTHERS = 500
"""Limit for files that don't look like source, so that data files don't displace code."""

MAX_TOP_FILES = 200
MAX_FOLDERS = 1000
MAX_DEPTH = 20
MAX_ASIDE_FOLDERS, MAX_ASIDE_FILES = 50, 100
"""Limits for folders excluded by name: folders that are read, and sources that are stored."""

UNSEEN_NAMED = 3
MAX_LISTED = 20_000
"""Limit of names read in one walk: a million files in one folder must not cost a second."""

MAX_LISTED_IN_ONE = 2500

MAX_NAMES = 32_768
"""Cache size for the kinds of file names."""

SOURCE_SUFFIXES = (
    *(".py", ".pyi", ".ipynb", ".sh", ".bash", ".zsh", ".md", ".rst", ".txt", ".yaml", ".yml", ".json", ".toml"),
    *(".cfg", ".ini", ".conf", ".jinja", ".jinja2", ".j2", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs"),
    *(".go", ".js", ".mjs", ".ts", ".jl", ".r", ".lua", ".pl", ".rb", ".java", ".sql", ".patch", ".diff", ".sbatch"),
)
SOURCE_NAMES = frozenset(("makefile", "dockerfile", "justfile", "readme", "license"))

LEFT_OUT_FOLDERS = frozenset(
    (
        *("__pycache__", "node_modules", "site-packages", ".hg", ".svn", ".venv", "venv", ".conda", ".tox", ".nox"),
        *(".cache", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints", ".eggs"),
    )
)
"""Created by programs, usually. Only sources directly in these folders are stored. Other virtual environments are found by
content."""

MARKS_OF_ENVIRONMENTS = frozenset(("pyvenv.cfg", "conda-meta"))
LIBRARIES = frozenset(("lib", "lib64"))
PYTHONS = ("bin/python", "bin/python3")
LEFT_OUT_FILES = frozenset((".env",))
"""Excluded because they hold API keys."""

COMPILED = (".pyc", ".pyo")
"""Not reported in folders excluded by name; elsewhere the agent put them there."""

GITS_OWN = (".git", "git~", "gitmod~", "gitatt~", "gi7eba~", "gi7d29~")
"""Prefixes that git reserves on some file systems: no tree may contain them (git, path.c and utf8.c)."""

IGNORED_BY_HFS = dict.fromkeys((*range(0x200C, 0x2010), *range(0x202A, 0x202F), *range(0x206A, 0x2070), 0xFEFF), None)


class Met(NamedTuple):
    """A file or link whose folder is open."""

    path: bytes
    folder_fd: int
    name: str
    status: os.stat_result


@dataclass
class Tally:
    """What a walk left out.

    Attributes:
        more: more was left out than could be counted.
        missed: what may have been missed; reported with the next commit, if this walk leads to none.
    """

    files: int = 0
    by_name: int = 0
    more: bool = False
    reasons: dict[str, int] = field(default_factory=dict)
    missed: set[str] = field(default_factory=set)
    unseen: list[str] = field(default_factory=list)

    def say(self, reason: str, count: int = 1) -> None:
        """Count something that makes the state inexact."""
        self.reasons[reason] = self.reasons.get(reason, 0) + count

    def close(self) -> None:
        """End the walk and add the report of folders excluded by name."""
        if self.unseen:
            named = ", ".join(printable(name)[:80] for name in sorted(self.unseen)[:UNSEEN_NAMED])
            others = len(self.unseen) - UNSEEN_NAMED
            self.missed.add(f"left out by name: {named}" + (f" and {others} more" if others > 0 else ""))


class Listed(NamedTuple):
    """A folder's entries, sorted.

    Attributes:
        files: sources first.
        sources: how many of the files look like source.
        aside: folders excluded by name.
        by_name: number of files and folders excluded by name.
        more: the folder has more entries.
    """

    folders: Sequence[str]
    files: Sequence[str]
    sources: int
    aside: Sequence[str]
    by_name: int
    is_environment: bool
    more: bool

    @classmethod
    def of(cls, entries: Mapping[str, bool], more: bool) -> Listed:
        """Build it from names, and whether each is a folder."""
        ordered = sorted(entries, key=lambda name: (not is_source(name), name))
        folders = [name for name in ordered if entries[name] and not _is_left_out_folder(name)]
        files = [name for name in ordered if not entries[name] and not _is_left_out(name)]
        return cls(
            folders=folders,
            files=files,
            sources=sum(map(is_source, files)),
            aside=[name for name in ordered if entries[name] and _is_left_out_folder(name)],
            by_name=len(ordered) - len(folders) - len(files),
            is_environment=not (MARKS_OF_ENVIRONMENTS.isdisjoint(ordered) or LIBRARIES.isdisjoint(folders))
            and "bin" in folders,
            more=more,
        )


class CodeWalk:
    """One walk over the code.

    Args:
        known: returns the names of files stored before, by folder; they are read even if a listing is cut short.
    """

    def __init__(
        self,
        root_fd: int,
        laid: frozenset[str],
        known: Callable[[], Mapping[str, Sequence[str]]],
    ) -> None:
        self.tally = Tally()
        self._root, self._laid, self._known = root_fd, laid, known
        self._by_folder: Mapping[str, Sequence[str]] | None = None
        self._device = os.fstat(root_fd).st_dev
        self._listed = self._files = self._others = self._of_aside = 0
        self._code: tuple[str, ...] = (CODE,)
        self._aside: list[tuple[str, ...]] = []

    def run(self) -> Iterator[Met]:
        """Yield the files and links; read each one before asking for the next. Raises OSError if the workspace can't be read."""
        yield from self._top()
        folders: deque[tuple[str, ...]] = deque([(CODE,)])
        met = 0
        while folders:
            parts = folders.popleft()
            met += 1
            if met > MAX_FOLDERS or len(parts) > MAX_DEPTH or self._listed >= MAX_LISTED:
                self.tally.more = True
                self.tally.say("folders beyond the limits")
                continue
            fd = self._open(parts)
            if fd is None:
                continue
            try:
                yield from self._folder(fd, parts, folders)
            except OSError:
                self.tally.say("folders that could not be read")
            finally:
                os.close(fd)
        yield from self._left_out()
        self.tally.close()

    def _top(self) -> Iterator[Met]:
        """Yield small sources at the top, and `code` itself if it is no folder."""
        status = _status(self._root, CODE)
        if status is not None and not stat.S_ISDIR(status.st_mode) and not self._is_elsewhere(status):
            yield Met(CODE.encode(), self._root, CODE, status)
        taken = 0
        listed = self._list(self._root, "")
        for name in listed.files[: listed.sources]:
            if name in self._laid or name.startswith("."):
                continue
            status = _status(self._root, name)
            if status is None or not stat.S_ISREG(status.st_mode) or status.st_dev != self._device:
                continue
            taken += 1
            if taken > MAX_TOP_FILES:
                self.tally.files += 1
                continue
            yield Met(os.fsencode(name), self._root, name, status)

    def _is_elsewhere(self, status: os.stat_result) -> bool:
        """Return whether `code` is a link to another folder of the workspace, which is then walked instead."""
        if not stat.S_ISLNK(status.st_mode):
            return False
        self._code = inside(self._root, CODE) or (CODE,)
        fd = self._open((CODE,))  # follows no link
        if fd is None:
            self._code = (CODE,)
            self.tally.missed.add("code is a link to what is no folder of the workspace: nothing of it is kept")
            return False
        os.close(fd)
        where = printable("/".join(self._code))[:200]
        self.tally.missed.add(f"code is a link: what lies in {where} is kept as code")
        return True

    def _left_out(self) -> Iterator[Met]:
        """Yield the sources directly in folders excluded by name; other content is reported."""
        for at, parts in enumerate(self._aside):
            over = at >= MAX_ASIDE_FOLDERS or self._listed >= MAX_LISTED or _is_gits(parts[-1])
            fd = None if over else self._open(parts)
            if fd is None:
                if over:
                    self.tally.unseen.append("/".join(parts))
                continue
            try:
                yield from self._sources(fd, parts)
            except OSError:
                self.tally.unseen.append("/".join(parts))
            finally:
                os.close(fd)

    def _sources(self, fd: int, parts: tuple[str, ...]) -> Iterator[Met]:
        listed = self._list(fd, "/".join(parts))
        others = [name for name in listed.files[listed.sources :] if not name.endswith(COMPILED)]
        unseen = bool(listed.folders or listed.aside or others or listed.more)
        prefix = os.fsencode("/".join((*parts, "")))
        for name in listed.files[: listed.sources]:
            if self._of_aside >= MAX_ASIDE_FILES or self._files >= MAX_FILES:
                unseen = True
                break
            if (met := self._file(fd, prefix, name)) is not None:
                self._of_aside += 1
                self._files += 1
                yield met
        if unseen:
            self.tally.unseen.append("/".join(parts))

    def _folder(self, fd: int, parts: tuple[str, ...], folders: deque[tuple[str, ...]]) -> Iterator[Met]:
        listed = self._list(fd, "/".join(parts))
        if len(parts) > 1 and listed.is_environment and any(_status(fd, name) is not None for name in PYTHONS):
            self.tally.by_name += 1
            self._aside.append(parts)
            return
        self.tally.by_name += listed.by_name
        self._aside += [(*parts, name) for name in listed.aside]
        folders.extend([(*parts, name) for name in listed.folders])
        prefix = os.fsencode("/".join((*parts, "")))
        for at, name in enumerate(listed.files):
            other = at >= listed.sources
            if self._files >= MAX_FILES or (other and self._others >= MAX_OTHERS):
                self.tally.files += len(listed.files) - at  # after the sources, all are others
                return
            if (met := self._file(fd, prefix, name)) is not None:
                self._files += 1
                self._others += other
                yield met

    def _file(self, fd: int, prefix: bytes, name: str) -> Met | None:
        status = _status(fd, name)
        if status is None or status.st_dev != self._device:
            return None
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            return None
        return Met(prefix + os.fsencode(name), fd, name, status)

    def _list(self, fd: int, folder: str) -> Listed:
        """List a folder, but not completely if it is very large."""
        found: dict[str, bool] = {}
        most, more = min(MAX_LISTED_IN_ONE, MAX_LISTED - self._listed), False
        with os.scandir(fd) as entries:
            for entry in entries:
                if len(found) >= most:
                    self.tally.more = more = True
                    self.tally.say("folders with too many files to list")
                    found |= dict.fromkeys(self._kept_in(folder), False)
                    break
                found[entry.name] = entry.is_dir(follow_symlinks=False)
        self._listed += len(found)
        return Listed.of(found, more)

    def _kept_in(self, folder: str) -> Sequence[str]:
        if self._by_folder is None:
            self._by_folder = self._known()
        return self._by_folder.get(folder, ())

    def _open(self, parts: tuple[str, ...]) -> int | None:
        """Open a folder of the code on the workspace's device. Return None if it was removed, is no folder, or can't be read."""
        fd = os.dup(self._root)
        try:
            for part in (*self._code, *parts[1:]):
                following = os.open(part, FOLDER_FLAGS, dir_fd=fd)
                os.close(fd)
                fd = following
            if os.fstat(fd).st_dev == self._device:
                return fd
            self.tally.say("folders on another device")
        except PermissionError:
            self.tally.say("folders that could not be read")
        except OSError:
            pass
        os.close(fd)
        return None


@lru_cache(maxsize=MAX_NAMES)
def is_source(name: str) -> bool:
    """Return whether a file name is that of source code, settings or text."""
    lower = name.lower()
    return lower.endswith(SOURCE_SUFFIXES) or lower in SOURCE_NAMES


@lru_cache(maxsize=MAX_NAMES)
def _is_left_out(name: str) -> bool:
    return name in LEFT_OUT_FILES or _is_gits(name)


def _is_left_out_folder(name: str) -> bool:
    return name.lower() in LEFT_OUT_FOLDERS or _is_gits(name)


def _is_gits(name: str) -> bool:
    return (name if name.isascii() else name.translate(IGNORED_BY_HFS)).lower().startswith(GITS_OWN)


def _status(fd: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return None  # removed meanwhile


# --- a git repository of loose objects, written and read without git: blobs, trees, commits, and one ref per attempt.
# `git log`, `git diff` and `git fsck` can read it. Objects are named by their content and appear whole or not at all, so two
# writers can't harm each other. They are not synced, so a power failure may lose the last ones. Each object is verified when
# it is read. Format: git's gitformat-loose, and Pro Git, chapter 10.2.

Kind = Literal["blob", "tree", "commit"]
FILE, PROGRAM, LINK, FOLDER = 0o100644, 0o100755, 0o120000, 0o40000
"""Modes of a tree's entries."""

BY_HASH = b"by-hash/"
"""Folder for large and binary files: a small JSON file with size and hash, under the same path. No file of an agent can be in
it."""

Files = dict[bytes, tuple[int, str]]
"""Mode and object id by path."""

AUTHOR = "autorl-hpc recorder <recorder@localhost>"
CONFIG = (
    b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = true\n"
    b"[gc]\n\tauto = 0\n"  # packed objects can't be read here
)
MAX_OBJECT_BYTES = 32 << 20
"""Limit for an unpacked object; objects written here are far smaller."""

MAX_TREE_DEPTH = 64
MAX_TREE_FILES = 50_000
BLOCK_BYTES = 4096
"""Disk space of the smallest file."""

_ID = re.compile(r"[0-9a-f]{40}")
_REF_PREFIX = b"ref: "


class GitDamage(Exception):
    """An object or ref is missing, doesn't match its name, or was not written by this suite."""


@dataclass(frozen=True)
class Commit:
    """A commit. `at_s` is in seconds since 1970."""

    revision: str
    tree: str
    parent: str | None
    at_s: int
    message: str


def object_id(kind: Kind, data: bytes) -> str:
    """Return the id of an object: its SHA-1."""
    return hashlib.sha1(b"%s %d\0" % (kind.encode(), len(data)) + data, usedforsecurity=False).hexdigest()


class Repository:
    """A bare repository. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = 0
        self._known: set[str] = set()

    @classmethod
    def create(cls, path: Path) -> Repository:
        """Create the repository, or complete an unfinished one; sets `size_bytes` to the size of its objects. Raises OSError."""
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

    def write(self, kind: Kind, data: bytes) -> str:
        """Write an object unless it exists. Return its id. Raises OSError."""
        name = object_id(kind, data)
        if name in self._known:
            return name
        folder = self.path / "objects" / name[:2]
        final = folder / name[2:]
        if not _stands(final):
            # Level 1 is three times as fast as the default, and code is small.
            packed = zlib.compress(b"%s %d\0" % (kind.encode(), len(data)) + data, 1)
            folder.mkdir(exist_ok=True)
            self._replace(final, packed, 0o444)
            self.size_bytes += _on_disk(len(packed))
        self._known.add(name)
        return name

    def write_files(self, files: Mapping[bytes, tuple[int, str]]) -> str:
        """Write the trees of these files. Return the id of the root tree. Raises OSError."""
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
        """Write a commit with times in UTC. Return its id. Raises OSError."""
        stamp = f"{AUTHOR} {max(0, at_s)} +0000"
        lines = [f"tree {tree}", *([f"parent {parent}"] if parent else []), f"author {stamp}", f"committer {stamp}"]
        return self.write("commit", ("\n".join(lines) + f"\n\n{message}\n").encode())

    def set_ref(self, name: str, revision: str) -> None:
        """Point `refs/heads/<name>` to a commit. Raises OSError."""
        self._replace(self.path / "refs" / "heads" / name, revision.encode() + b"\n")

    def set_head(self, name: str) -> None:
        """Point HEAD to `refs/heads/<name>`, where `git log` begins. Raises OSError."""
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

    def head_name(self) -> str | None:
        """Return the name of the ref that HEAD points to; None if HEAD is damaged."""
        try:
            data = _read_small(self.path / "HEAD")
        except GitDamage:
            return None
        prefix = _REF_PREFIX + b"refs/heads/"
        return data[len(prefix) :].strip().decode("ascii", "replace") if data.startswith(prefix) else None

    def ref(self, name: str) -> str | None:
        """Return the commit that `refs/heads/<name>` points to; None if there is no such ref or it is damaged."""
        try:
            text = _read_small(self.path / "refs" / "heads" / Path(name).name).decode("ascii", "replace").strip()
        except GitDamage:
            return None
        return text if _ID.fullmatch(text) else None

    def head(self) -> str | None:
        """Return the newest commit; None if there is none."""
        name = self.head_name()
        return None if name is None else self.ref(name)

    def read(self, name: str, kind: Kind, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        """Return the content of an object.

        Raises:
            GitDamage: it is missing, of another kind, larger than `max_bytes`, or doesn't match its id.
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
        """Return the commit with that id. Raises GitDamage."""
        text = self.read(revision, "commit", 1 << 20).decode("utf-8", "replace")
        head, _, message = text.partition("\n\n")
        fields = dict(reversed([line.partition(" ")[::2] for line in head.split("\n")]))
        stamp = fields.get("committer", "").rsplit(" ", 2)
        at_s = int(stamp[1]) if len(stamp) == 3 and stamp[1].isascii() and stamp[1].isdigit() else 0
        return Commit(revision, fields.get("tree", ""), fields.get("parent"), at_s, message.rstrip("\n"))

    def history(self, revision: str | None, most: int = 100_000) -> Iterator[Commit]:
        """Yield a commit and its ancestors, newest first. Raises GitDamage if one can't be read."""
        while revision is not None and most > 0:
            commit = self.commit_of(revision)
            yield commit
            revision, most = commit.parent, most - 1

    def files(self, revision: str) -> Files:
        """Return all files of a commit. Raises GitDamage, also beyond MAX_TREE_FILES or MAX_TREE_DEPTH."""
        found: Files = {}
        folders = [(b"", self.commit_of(revision).tree, 0)]
        while folders:
            prefix, tree, depth = folders.pop()
            for mode, name, entry in _tree_entries(self.read(tree, "tree")):
                path = prefix + name
                if mode == FOLDER:
                    if depth >= MAX_TREE_DEPTH:
                        raise GitDamage("a tree is nested too deeply")
                    folders.append((path + b"/", entry, depth + 1))
                else:
                    found[path] = (mode, entry)
                if len(found) + len(folders) > MAX_TREE_FILES:
                    raise GitDamage(f"a tree holds more than {MAX_TREE_FILES} files")
        return found


def _tree_bytes(entries: Files) -> bytes:
    """Encode a tree. git sorts folders as if their names ended in a slash."""
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
    """Return a regular file's bytes; refuses a FIFO or link, which the agent could have put there."""
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
    """Return whether a non-empty file is there: a lost node may leave names without content."""
    try:
        return os.stat(path, follow_symlinks=False).st_size > 0
    except OSError:
        return False


def _folder_bytes(path: str) -> int:
    with os.scandir(path) as entries:
        return sum(_on_disk(entry.stat(follow_symlinks=False).st_size) for entry in entries)


def _on_disk(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


# --- what is stored of one file, and when it is read again.
# A file is read again when its size, times or inode change. Times are coarse and a file server's clock differs from ours, so a
# file that was read soon after a change is read once more after SURE_S by our own clock.

SURE_S = 2.5
"""File times have steps of up to 2 s (FAT; NFS 3 and Lustre 1 s)."""

MAX_TEXT_BYTES = 1 << 20
"""Of larger files only the hash is stored."""

MAX_TEXTS_BYTES = 32 << 20
"""Limit for all texts of one revision."""

BINARY_LOOK_BYTES = 8000
"""A zero byte in the first 8,000 makes a file binary, as in git (xdiff-interface.c)."""

HASH_AT_ONCE_BYTES = 8 << 20
MAX_HASHED_BYTES = 256 << 20
"""Of larger files only size and time are stored: checkpoints get their own hash when they are submitted."""

SLICE_BYTES = 16 << 20
"""Bytes of large files hashed per look: about 0.03 s."""

CHUNK_BYTES = 1 << 20
RESTLESS_CHANGES = 20
"""After this many changes, each within RESTLESS_GAP_S of the one before, a file counts as restless, such as a log, and is read
less often. Never a source file: an unobserved minute is enough to train with something else. Commits are limited anyway."""

RESTLESS_GAP_S = 10.0
RESTLESS_EVERY_S = 60.0
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Non-blocking: a FIFO may replace the file between stat and open."""

Identity = tuple[int, int, int, int, int, int]
"""Device, inode, mode, size, mtime, ctime."""


def _identity(status: os.stat_result) -> Identity:
    return (
        status.st_dev,
        status.st_ino,
        status.st_mode,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


@dataclass(frozen=True)
class Pointer:
    """What is stored of a file without its content.

    Attributes:
        why: `large` or `binary`.
        sha256: None if not computed; `note` says why.
    """

    why: str
    size_bytes: int | None = None
    sha256: str | None = None
    note: str | None = None

    def data(self, mtime_ns: int | None = None) -> bytes:
        """Return the JSON text that code.git holds instead of the file."""
        value = {"mtime_ns": mtime_ns, "note": self.note, "sha256": self.sha256, "size_bytes": self.size_bytes}
        kept = {name: each for name, each in value.items() if each is not None}
        return json.dumps({**kept, "why": self.why}, sort_keys=True).encode() + b"\n"


@dataclass(slots=True)
class _Known:
    """What earlier looks learned about a file. Times are by our monotonic clock."""

    identity: Identity
    seen_s: float
    mode: int = FILE
    entry: str = ""
    pointer: Pointer | None = None
    sure: bool = False
    changed_s: float = 0.0
    read_s: float = 0.0
    streak: int = 0
    hashing: Any = None
    hashed_bytes: int = 0
    text_bytes: int = 0

    @property
    def restless(self) -> bool:
        return self.streak >= RESTLESS_CHANGES


@dataclass
class CodeFiles:
    """Collects the files of one look after another.

    Attributes:
        files: files of the current look, as a commit will hold them.
        fresh: content that is not in code.git yet, by object id.
    """

    files: Files = field(default_factory=dict)
    fresh: dict[str, bytes] = field(default_factory=dict)
    by_hash: int = 0
    _known: dict[bytes, _Known] = field(default_factory=dict)
    _met: dict[bytes, _Known] = field(default_factory=dict)
    _exact: bool = False
    _texts_bytes: int = 0
    _slice_left: int = 0
    _now: float = 0.0

    def begin(self, *, exact: bool) -> None:
        """Begin a look. With `exact`, everything that may have changed unnoticed is read again."""
        self.files, self.by_hash, self._met = {}, 0, {}
        self._exact, self._texts_bytes, self._slice_left, self._now = exact, 0, SLICE_BYTES, time.monotonic()

    def end(self) -> None:
        """End a look and forget what it did not find."""
        self._known = self._met
        if not self.fresh:
            return
        needed = {known.entry for known in self._met.values()}
        self.fresh = {entry: data for entry, data in self.fresh.items() if entry in needed}

    def kept(self) -> dict[str, list[str]]:
        """Return the names of the files of the last look, by folder."""
        found: dict[str, list[str]] = {}
        for path in self._known:
            folder, _, name = os.fsdecode(path).rpartition("/")
            found.setdefault(folder, []).append(name)
        return found

    def add(self, met: Met, tally: Tally) -> None:
        """Add a file to this look; a file that was removed meanwhile is skipped."""
        try:
            known = self._link(met) if stat.S_ISLNK(met.status.st_mode) else self._file(met, tally)
        except FileNotFoundError:
            return
        except OSError:
            tally.files += 1
            tally.say("files that could not be read")
            return
        if known is None:
            return
        if known.pointer is None and (self._texts_bytes + known.text_bytes) > MAX_TEXTS_BYTES:
            tally.files += 1
            return
        self._met[met.path] = known
        self._texts_bytes += known.text_bytes
        if known.pointer is not None:
            self.by_hash += 1
            if known.pointer.note is not None:
                tally.say(f"files by size alone, {known.pointer.note}")
        self.files[met.path if known.pointer is None else BY_HASH + met.path] = (known.mode, known.entry)

    def _link(self, met: Met) -> _Known:
        known = _Known(_identity(met.status), self._now, LINK)
        known.entry = self._keep(os.fsencode(os.readlink(met.name, dir_fd=met.folder_fd)))
        return known

    def _file(self, met: Met, tally: Tally) -> _Known | None:
        known, identity = self._known.get(met.path), _identity(met.status)
        if known is None or known.mode == LINK:
            return self._read(met, _Known(identity, self._now, changed_s=-RESTLESS_GAP_S), tally)
        if known.identity == identity:
            if known.hashing is not None or _waits_for_hash(known):
                return self._hash_on(met, known)
            rested = self._now - known.seen_s >= SURE_S
            return known if known.sure or not (rested or self._exact) else self._read(met, known, tally)
        if known.restless and not (self._exact or is_source(met.name)) and self._now - known.read_s < RESTLESS_EVERY_S:
            tally.missed.add("files that never rest are read once a minute")
            return known
        close = self._now - known.changed_s < (RESTLESS_EVERY_S + RESTLESS_GAP_S if known.restless else RESTLESS_GAP_S)
        streak = known.streak + 1 if close else 0
        return self._read(met, _Known(identity, self._now, changed_s=self._now, streak=streak), tally)

    def _read(self, met: Met, known: _Known, tally: Tally) -> _Known | None:
        if met.status.st_size <= MAX_TEXT_BYTES and self._texts_bytes + met.status.st_size > MAX_TEXTS_BYTES:
            tally.files += 1
            return None
        fd = os.open(met.name, FILE_FLAGS, dir_fd=met.folder_fd)
        try:
            before = os.fstat(fd)
            if not stat.S_ISREG(before.st_mode):
                return None
            known.mode = PROGRAM if before.st_mode & stat.S_IXUSR else FILE
            known.read_s = self._now
            if before.st_size > MAX_TEXT_BYTES:
                self._read_large(fd, known, before)
            else:
                self._read_small(fd, known)
            same = _identity(os.fstat(fd)) == _identity(before) == known.identity
        finally:
            os.close(fd)
        # The identity before reading is stored: if the file changed since, the next look sees another identity.
        if known.identity != _identity(before):
            known.identity, known.seen_s = _identity(before), self._now
        known.sure = same and self._now - known.seen_s >= SURE_S
        return known

    def _read_small(self, fd: int, known: _Known) -> None:
        data = _read_at_most(fd, MAX_TEXT_BYTES)
        known.pointer, known.hashing, known.text_bytes = None, None, 0
        if b"\0" in data[:BINARY_LOOK_BYTES]:
            self._point(known, Pointer("binary", len(data), hashlib.sha256(data).hexdigest()))
        else:
            known.entry = self._keep(data)
            known.text_bytes = len(data)

    def _read_large(self, fd: int, known: _Known, before: os.stat_result) -> None:
        if before.st_size > self._slice_left and _identity(before) == known.identity and known.pointer is not None:
            return  # keep what is known; verification waits for its turn
        known.hashing, known.text_bytes = None, 0
        digest, note = None, "for they have not rested yet"
        if before.st_size > MAX_HASHED_BYTES:
            note = f"for they are larger than {MAX_HASHED_BYTES >> 20} MiB"
        elif before.st_size <= min(HASH_AT_ONCE_BYTES, self._slice_left):
            hasher, done = hashlib.sha256(), 0
            while done < before.st_size and (chunk := os.read(fd, CHUNK_BYTES)):
                hasher.update(chunk)
                done += len(chunk)
            self._slice_left -= done
            if _identity(os.fstat(fd)) == _identity(before):
                digest = hasher.hexdigest()
        size = before.st_size
        pointer = Pointer("large", size, digest) if digest else Pointer("large", size, note=note)
        self._point(known, pointer, before.st_mtime_ns)

    def _hash_on(self, met: Met, known: _Known) -> _Known | None:
        """Hash a further slice of a large file that no longer changes."""
        if self._now - known.seen_s < SURE_S or self._slice_left <= 0:
            return known
        fd = os.open(met.name, FILE_FLAGS, dir_fd=met.folder_fd)
        try:
            if _identity(os.fstat(fd)) != known.identity:
                return known  # the next look reads it again
            if known.hashing is None:
                known.hashing, known.hashed_bytes = hashlib.sha256(), 0
            os.lseek(fd, known.hashed_bytes, os.SEEK_SET)
            size = known.identity[3]
            while known.hashed_bytes < size and self._slice_left > 0 and (chunk := os.read(fd, CHUNK_BYTES)):
                known.hashing.update(chunk)
                known.hashed_bytes += len(chunk)
                self._slice_left -= len(chunk)
            if known.hashed_bytes == size and _identity(os.fstat(fd)) == known.identity:
                self._point(known, Pointer("large", size, known.hashing.hexdigest()))
                known.hashing, known.sure = None, True
        finally:
            os.close(fd)
        return known

    def _point(self, known: _Known, pointer: Pointer, mtime_ns: int | None = None) -> None:
        known.pointer = pointer
        known.entry = self._keep(pointer.data(None if pointer.sha256 else mtime_ns))

    def _keep(self, data: bytes) -> str:
        entry = object_id("blob", data)
        self.fresh[entry] = data
        return entry


def _waits_for_hash(known: _Known) -> bool:
    return (
        known.pointer is not None
        and known.pointer.why == "large"
        and known.pointer.sha256 is None
        and known.identity[3] <= MAX_HASHED_BYTES
    )


def _read_at_most(fd: int, most: int) -> bytes:
    """Read up to `most` bytes, because a file may grow meanwhile."""
    parts, left = [], most
    while left > 0 and (part := os.read(fd, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


LOOK_S = 1.0
SETTLE_S = 0.4
OVERDUE_S = 1.5
"""After this long without an unchanged look, a change is committed by the next look that sees it (the second or third)."""

LATE_S = 5.0
"""After this long without an unchanged look, the commit reports that states may have been missed."""

COMMITS_AT_ONCE = 300
COMMIT_EVERY_S = 20.0
"""Further commits come once per COMMIT_EVERY_S: a program that writes files all day must not fill a shared disk with objects."""

MAX_REPOSITORY_BYTES = 512 << 20
RESERVED_BYTES = 64 << 20
"""Part of MAX_REPOSITORY_BYTES that is reserved for submissions."""

MAX_MISSED = 20
"""Reports stored from looks without a commit, until the next commit."""

PREFIX = "attempt-"


@dataclass(frozen=True)
class Ask:
    """A submission's request for the current state. `answer` is called once, with the commit or None."""

    submission_id: int
    answer: Callable[[str | None], None]


class RepositoryFull(Exception):
    """code.git has reached its size limit, so the run's code is no longer recorded."""


class Revisions:
    """The watch over the code. Each attempt has its own ref, which continues the one before, so two at once don't conflict."""

    name = "revisions"

    def __init__(self, job: RecorderJob, asks: queue.SimpleQueue[Ask]) -> None:
        self.every_s = LOOK_S
        self.head: str | None = None
        self._job, self._asks = job, asks
        self._lines = LineWriter(job.run.recorded(self.name))
        self._repository = Repository.create(job.run.code_git)
        self._files = CodeFiles()
        self._commits = 0
        self._committed: Files | None = None
        self._seen: Files | None = None
        self._since: float | None = None
        self._unchanged_s = self._committed_s = time.monotonic()
        self._owed: list[CodeRevision] = []
        self._reasons: list[str] = []
        self._missed: set[str] = set()
        self._said: set[str] = set()
        self._full = False
        self._go_on()

    def look(self, now: Moment) -> None:
        """Look once. Raises errors of the file system; the next look starts again."""
        asks, revision = self._asked(), None
        try:
            self._look(now, asks[-1].submission_id if asks else None, exact=bool(asks))
            revision = self.head if self._files.files == self._committed else None
        finally:
            for ask in asks:
                ask.answer(revision)

    def close(self, now: Moment) -> None:
        """Commit the last state after the agent's end."""
        try:
            self._look(now, None, exact=True, last=True)
            if self._files.files != self._committed:
                self.head = None  # the last state was not stored
        finally:
            self._lines.close()

    def _asked(self) -> list[Ask]:
        asks = []
        while True:
            try:
                asks.append(self._asks.get_nowait())
            except queue.Empty:
                return asks

    def _go_on(self) -> None:
        """Continue from this attempt's last commit, or from the attempt before."""
        own, before = f"{PREFIX}{self._job.attempt}", self._repository.head_name()
        revision = self._repository.ref(own) or (None if before is None else self._repository.ref(before))
        try:
            self._committed = None if revision is None else self._repository.files(revision)
            self.head = revision
        except GitDamage as error:
            self._reasons.append(f"what was kept before can't be read: {error}")

    def _look(self, now: Moment, submission_id: int | None, *, exact: bool, last: bool = False) -> None:
        self.every_s = LOOK_S
        tally = self._gather(exact)
        self._tell_owed()
        if self._due(exact) or (last and not self._missed <= self._said):
            self._commit(now, tally, submission_id, exact)
        elif self._since is not None and self._may_commit():
            self.every_s = SETTLE_S

    def _gather(self, exact: bool) -> Tally:
        root = os.open(self._job.workspace, FOLDER_FLAGS)
        try:
            walk = CodeWalk(root, self._job.laid, self._files.kept)
            self._files.begin(exact=exact)
            for met in walk.run():
                self._files.add(met, walk.tally)
            self._files.end()
        finally:
            os.close(root)
        for missed in sorted(walk.tally.missed):
            if len(self._missed) < MAX_MISSED:
                self._missed.add(missed)
        return walk.tally

    def _due(self, exact: bool) -> bool:
        """Return whether the state that was just seen is committed now."""
        files, at_s = self._files.files, time.monotonic()
        if files == self._committed:
            self._seen = self._since = None
            self._unchanged_s = at_s
            self._files.fresh.clear()
            return False
        if exact or self._committed is None:
            return True
        settled = files == self._seen or (self._since is not None and at_s - self._unchanged_s >= OVERDUE_S)
        self._seen, self._since = files, at_s if self._since is None else self._since
        return settled and self._may_commit()

    def _may_commit(self) -> bool:
        return self._commits < COMMITS_AT_ONCE or time.monotonic() - self._committed_s >= COMMIT_EVERY_S

    def _commit(self, now: Moment, tally: Tally, submission_id: int | None, exact: bool) -> None:
        most = MAX_REPOSITORY_BYTES - (0 if exact else RESERVED_BYTES)
        if self._repository.size_bytes + sum(map(len, self._files.fresh.values())) > most:
            if exact or self._full:
                return
            self._full = True
            raise RepositoryFull(f"code.git has {most >> 20} MiB: from now on only states of submissions are kept")
        files, own, parent = self._files.files, f"{PREFIX}{self._job.attempt}", self.head
        for data in self._files.fresh.values():
            self._repository.write("blob", data)
        tree = self._repository.write_files(files)
        asked = "" if submission_id is None else f", submission {submission_id}"
        message = f"{now.elapsed_s:.1f} s, attempt {now.attempt}{asked}"
        revision = self._repository.commit(tree, parent, message, int(time.time()))
        self._repository.set_ref(own, revision)
        if self._is_newest():
            self._repository.set_head(own)
        before, self._committed, self.head = self._committed or {}, files, revision
        self._seen = self._since = None
        self._files.fresh.clear()
        self._commits += 1
        self._owed.append(
            CodeRevision.model_validate(
                {
                    **now.told(),
                    "revision": revision,
                    "parent": parent,
                    "submission_id": submission_id,
                    "files": len(files),
                    "changed": _changed(before, files),
                    "by_hash": self._files.by_hash,
                    "left_out": tally.files,
                    "by_name": tally.by_name,
                    "reason": self._reason(tally),
                }
            )
        )
        self._unchanged_s = self._committed_s = time.monotonic()
        self._reasons.clear()
        self._said, self._missed = self._missed, set()
        self._tell_owed()

    def _is_newest(self) -> bool:
        """Return whether no later attempt has begun to write."""
        name = self._repository.head_name() or ""
        number = name.removeprefix(PREFIX)
        return not (number.isascii() and number.isdigit()) or int(number) < self._job.attempt

    def _reason(self, tally: Tally) -> str | None:
        """Return what is not exact about the state that is committed; None if nothing."""
        said = [*self._reasons, *(f"{count} {what}" for what, count in sorted(tally.reasons.items()))]
        if tally.more:
            said.append("more was left out than could be counted")
        late_s = time.monotonic() - self._unchanged_s
        if late_s > LATE_S:
            said.append(f"{late_s:.0f} s since the state before was seen last")
        if self._commits > COMMITS_AT_ONCE:
            said.append(f"changes without end: one commit in {COMMIT_EVERY_S:.0f} s")
        said += sorted(self._missed)
        return "; ".join(said)[:1000] or None

    def _tell_owed(self) -> None:
        """Write the pending lines about commits; those that fail are retried at the next look."""
        while self._owed:
            self._lines.add(self._owed[0])
            self._owed.pop(0)


def _changed(before: Files, after: Files) -> int:
    return sum(before.get(path) != after.get(path) for path in before.keys() | after.keys())
