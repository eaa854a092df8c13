"""The files of an agent's code: what lies in `code/`, and small sources at the top of the workspace.

By descriptors, following no link, opening nothing but folders. What is near the top and looks like source comes first, so
that a limit cuts off the least likely.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

CODE = "code"
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

MAX_FILES = 4000
"""Of one revision: more than any agent writes by hand; each version of each is a file on a shared disk."""

MAX_OTHERS = 500
"""Of these, files that don't look like source: data must not take the place of code."""

OTHERS_AT_ONCE = 64
TURNS = 8
"""Files that don't look like source, beyond the first OTHERS_AT_ONCE, and that rest, are looked at in turns: each within so many walks.
Data below `code/` must not make looks at code dear, for dear looks come seldom."""

MAX_TOP_FILES = 200
MAX_FOLDERS = 1000
MAX_DEPTH = 20
MAX_LISTED = 20_000
"""Names read in one walk: a million files in one folder must not cost a second."""

MAX_LISTED_IN_ONE = 2500

SURE_S = 2.5
"""Times of files move in steps of up to 2 s (FAT; NFS 3 and Lustre 1 s)."""

Stamp = tuple[int, int, int]
"""Of a folder: inode, mtime, ctime."""

MAX_NAMES = 8192
"""Whose kind is remembered from look to look."""

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
"""Made by programs and not written by the agent. Virtual environments of other names are known by what lies in them."""

MARKS_OF_ENVIRONMENTS = frozenset(("pyvenv.cfg", "conda-meta"))
LEFT_OUT_FILES = frozenset((".env",))
"""Where API keys lie."""

LEFT_OUT_SUFFIXES = (".pyc", ".pyo")
GITS_OWN = (".git", "git~", "gitmod~", "gitatt~", "gi7eba~", "gi7d29~")
"""How names begin that git takes for its own, on some file system: no tree may hold them (git, path.c and utf8.c)."""

IGNORED_BY_HFS = dict.fromkeys((*range(0x200C, 0x2010), *range(0x202A, 0x202F), *range(0x206A, 0x2070), 0xFEFF), None)


class Met(NamedTuple):
    """A file or link, while its folder is open. `status` None: it was not its turn to be looked at, and it stays as it was."""

    path: bytes
    folder_fd: int
    name: str
    status: os.stat_result | None


@dataclass
class Tally:
    """What a walk left out. `more`: there are more than could be counted."""

    files: int = 0
    by_name: int = 0
    more: bool = False
    reasons: dict[str, int] = field(default_factory=dict)

    def say(self, reason: str, count: int = 1) -> None:
        """Counts something that is not exact."""
        self.reasons[reason] = self.reasons.get(reason, 0) + count


class Listed(NamedTuple):
    """A folder's entries, sorted once: it may hold thousands, and is walked through each second.

    Attributes:
        files: sources first.
        sources: how many of them look like source.
        by_name: files and folders left out by their names.
        names: how many entries were read.
        more: these are not all.
    """

    folders: Sequence[str]
    files: Sequence[str]
    sources: int
    by_name: int
    is_environment: bool
    names: int
    more: bool

    @classmethod
    def of(cls, entries: Mapping[str, bool], more: bool) -> Listed:
        """From names, and whether each is a folder's."""
        ordered = sorted(entries, key=lambda name: (not is_source(name), name))
        folders = [name for name in ordered if entries[name] and not _is_left_out_folder(name)]
        files = [name for name in ordered if not entries[name] and not _is_left_out(name)]
        return cls(
            folders=folders,
            files=files,
            sources=sum(map(is_source, files)),
            by_name=len(ordered) - len(folders) - len(files),
            is_environment=not MARKS_OF_ENVIRONMENTS.isdisjoint(ordered),
            names=len(ordered),
            more=more,
        )


@dataclass
class Listings:
    """Folders' entries of earlier walks: a folder with the times that it had is not listed again.

    As with files, times are coarse and not ours: a listing counts once the folder has rested for SURE_S before it.
    """

    now_s: float = 0.0
    walks: int = 0
    _before: dict[str, tuple[Stamp, float, Listed | None]] = field(default_factory=dict)
    _met: dict[str, tuple[Stamp, float, Listed | None]] = field(default_factory=dict)

    def begin(self) -> None:
        """A walk begins; folders that the last one did not meet are forgotten."""
        self._before, self._met, self.now_s = self._met, {}, time.monotonic()
        self.walks += 1

    def kept(self, folder: str, stamp: Stamp) -> Listed | None:
        """The entries, if they are surely the same."""
        seen = self._before.get(folder)
        if seen is None or seen[0] != stamp:
            seen = (stamp, self.now_s, None)
        self._met[folder] = seen
        return seen[2]

    def keep(self, folder: str, listed: Listed) -> None:
        """What a folder whose stamp was asked about holds."""
        stamp, since_s, _ = self._met[folder]
        if self.now_s - since_s >= SURE_S:
            self._met[folder] = (stamp, since_s, listed)


class Walk:
    """One walk.

    Args:
        known: gives names of files that were kept before, by folder: looked for even if a listing is cut short.
        rests: whether a file was seen to rest, so that it can wait for its turn; None: nothing waits.
    """

    def __init__(
        self,
        root_fd: int,
        laid: frozenset[str],
        known: Callable[[], Mapping[str, Sequence[str]]],
        listings: Listings,
        rests: Callable[[bytes], bool] | None = None,
    ) -> None:
        self.tally = Tally()
        self._root, self._laid, self._known = root_fd, laid, known
        self._listings, self._rests = listings, rests
        listings.begin()
        self._by_folder: Mapping[str, Sequence[str]] | None = None
        self._device = os.fstat(root_fd).st_dev
        self._listed = self._files = self._others = 0

    def run(self) -> Iterator[Met]:
        """The files and links, each to be read before the next is asked for. Raises OSError if the workspace can't be read."""
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

    def _top(self) -> Iterator[Met]:
        """Small sources at the top; `code` itself, if it is no folder."""
        status = _status(self._root, CODE)
        if status is not None and not stat.S_ISDIR(status.st_mode):
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

    def _folder(self, fd: int, parts: tuple[str, ...], folders: deque[tuple[str, ...]]) -> Iterator[Met]:
        listed = self._list(fd, "/".join(parts))
        if len(parts) > 1 and listed.is_environment:
            self.tally.by_name += 1
            return
        self.tally.by_name += listed.by_name
        folders.extend([(*parts, name) for name in listed.folders])
        prefix = os.fsencode("/".join((*parts, "")))
        for at, name in enumerate(listed.files):
            other = at >= listed.sources
            if self._files >= MAX_FILES or (other and self._others >= MAX_OTHERS):
                self.tally.files += len(listed.files) - at  # after the sources, all are others
                return
            if (met := self._file(fd, prefix, name, other)) is not None:
                self._files += 1
                self._others += other
                yield met

    def _file(self, fd: int, prefix: bytes, name: str, other: bool) -> Met | None:
        path = prefix + os.fsencode(name)
        if other and self._others >= OTHERS_AT_ONCE and self._rests is not None:
            its_turn = (hash(path) + self._listings.walks) % TURNS == 0
            if not its_turn and self._rests(path):
                return Met(path, fd, name, None)
        status = _status(fd, name)
        if status is None or status.st_dev != self._device:
            return None
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            return None
        return Met(path, fd, name, status)

    def _list(self, fd: int, folder: str) -> Listed:
        """Not all of a folder that holds very many."""
        status = os.fstat(fd)
        listed = self._listings.kept(folder, (status.st_ino, status.st_mtime_ns, status.st_ctime_ns))
        left = MAX_LISTED - self._listed
        if listed is None or listed.names > left:
            listed = self._read_list(fd, folder, min(MAX_LISTED_IN_ONE, left))
            if left >= MAX_LISTED_IN_ONE:  # else where it was cut depends on other folders
                self._listings.keep(folder, listed)
        if listed.more:
            self.tally.more = True
            self.tally.say("folders with too many files to list")
        self._listed += listed.names
        return listed

    def _read_list(self, fd: int, folder: str, most: int) -> Listed:
        found: dict[str, bool] = {}
        more = False
        with os.scandir(fd) as entries:
            for entry in entries:
                if len(found) >= most:
                    more = True
                    found |= dict.fromkeys(self._kept_in(folder), False)
                    break
                found[entry.name] = entry.is_dir(follow_symlinks=False)
        return Listed.of(found, more)

    def _kept_in(self, folder: str) -> Sequence[str]:
        if self._by_folder is None:
            self._by_folder = self._known()
        return self._by_folder.get(folder, ())

    def _open(self, parts: tuple[str, ...]) -> int | None:
        """A folder on the workspace's own device; None: it went away, is no folder any more, or is closed."""
        fd = os.dup(self._root)
        try:
            for part in parts:
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
    """Whether a file's name is one of source, settings or prose."""
    lower = name.lower()
    return lower.endswith(SOURCE_SUFFIXES) or lower in SOURCE_NAMES


@lru_cache(maxsize=MAX_NAMES)
def _is_left_out(name: str) -> bool:
    return name in LEFT_OUT_FILES or name.endswith(LEFT_OUT_SUFFIXES) or _is_gits(name)


def _is_left_out_folder(name: str) -> bool:
    return name.lower() in LEFT_OUT_FOLDERS or _is_gits(name)


def _is_gits(name: str) -> bool:
    return (name if name.isascii() else name.translate(IGNORED_BY_HFS)).lower().startswith(GITS_OWN)


def _status(fd: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return None  # it went away
