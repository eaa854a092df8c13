"""The files of an agent's code: what lies in `code/`, and small sources at the top of the workspace.

By descriptors, following no link, opening nothing but folders. What is near the top and looks like source comes first, so
that a limit cuts off the least likely. What an agent may choose, such as a folder's name, takes nothing out of sight: folders
that are left out by name come last, and what of them is not kept is said.
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

from autorl_hpc.recorder.codelink import inside
from autorl_hpc.records.names import printable

CODE = "code"
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

MAX_FILES = 4000
"""Of one revision: more than any agent writes by hand; each version of each is a file on a shared disk."""

MAX_OTHERS = 500
"""Of these, files that don't look like source: data must not take the place of code."""

OTHERS_AT_ONCE = 64
TURNS = 8
"""Large and binary files that don't look like source, beyond the first OTHERS_AT_ONCE, and that rest in a folder that rests, are
looked at in turns: each within so many walks. Data below `code/` must not make looks at code dear, for dear looks come seldom; but a
small text of any name may be the program. Where looks cost more than their share, such texts take TEXT_TURNS, and never more."""

TEXT_TURNS = 2
IN_TURNS = "large or binary files are looked at in turns"
TEXTS_IN_TURNS = "files that don't look like source are looked at by every second look"

MAX_TOP_FILES = 200
MAX_FOLDERS = 1000
MAX_DEPTH = 20
MAX_ASIDE_FOLDERS, MAX_ASIDE_FILES = 50, 100
"""Looked into of those that are left out by name, and sources kept of what lies in them."""

UNSEEN_NAMED = 3
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
"""Made by programs and not written by the agent, as a rule: of them only sources that lie in the folder itself are kept. Virtual
environments of other names are known by what lies in them."""

MARKS_OF_ENVIRONMENTS = frozenset(("pyvenv.cfg", "conda-meta"))
LIBRARIES = frozenset(("lib", "lib64"))
PYTHONS = ("bin/python", "bin/python3")
LEFT_OUT_FILES = frozenset((".env",))
"""Where API keys lie."""

COMPILED = (".pyc", ".pyo")
"""In a folder that is left out by name they are not worth a word; elsewhere an agent put them there."""

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
    """What a walk left out.

    Attributes:
        more: there are more than could be counted.
        missed: what may have gone unseen whatever the walk found: said with the next commit, if this walk leads to none.
    """

    files: int = 0
    by_name: int = 0
    more: bool = False
    reasons: dict[str, int] = field(default_factory=dict)
    missed: set[str] = field(default_factory=set)
    unseen: list[str] = field(default_factory=list)

    def say(self, reason: str, count: int = 1) -> None:
        """Counts something that is not exact."""
        self.reasons[reason] = self.reasons.get(reason, 0) + count

    def close(self) -> None:
        """The walk has ended."""
        if self.unseen:
            named = ", ".join(printable(name)[:80] for name in sorted(self.unseen)[:UNSEEN_NAMED])
            others = len(self.unseen) - UNSEEN_NAMED
            self.missed.add(f"left out by name: {named}" + (f" and {others} more" if others > 0 else ""))


class Listed(NamedTuple):
    """A folder's entries, sorted once: it may hold thousands, and is walked through each second.

    Attributes:
        files: sources first.
        sources: how many of them look like source.
        aside: folders left out by their names.
        by_name: files and folders left out by their names.
        names: how many entries were read.
        more: these are not all.
    """

    folders: Sequence[str]
    files: Sequence[str]
    sources: int
    aside: Sequence[str]
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
            aside=[name for name in ordered if entries[name] and _is_left_out_folder(name)],
            by_name=len(ordered) - len(folders) - len(files),
            is_environment=not (MARKS_OF_ENVIRONMENTS.isdisjoint(ordered) or LIBRARIES.isdisjoint(folders))
            and "bin" in folders,
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
        turns: by one look in how many a file may be looked at; None: by each.
    """

    def __init__(
        self,
        root_fd: int,
        laid: frozenset[str],
        known: Callable[[], Mapping[str, Sequence[str]]],
        listings: Listings,
        turns: Callable[[bytes], int] | None = None,
    ) -> None:
        self.tally = Tally()
        self._root, self._laid, self._known = root_fd, laid, known
        self._listings, self._turns = listings, turns
        listings.begin()
        self._by_folder: Mapping[str, Sequence[str]] | None = None
        self._device = os.fstat(root_fd).st_dev
        self._listed = self._files = self._others = self._of_aside = 0
        self._is_new = False
        self._code: tuple[str, ...] = (CODE,)
        self._aside: list[tuple[str, ...]] = []

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
        yield from self._left_out()
        self.tally.close()

    def _top(self) -> Iterator[Met]:
        """Small sources at the top; `code` itself, if it is no folder."""
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
        """Whether `code` is a link to another folder of the workspace, which is then walked in its place."""
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
        """Sources that lie in folders that are left out by name; what else does is told."""
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
            if (met := self._file(fd, prefix, name, may_wait=False)) is not None:
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
            may_wait = other and not self._is_new and self._others >= OTHERS_AT_ONCE
            if (met := self._file(fd, prefix, name, may_wait)) is not None:
                self._files += 1
                self._others += other
                yield met

    def _file(self, fd: int, prefix: bytes, name: str, may_wait: bool) -> Met | None:
        path = prefix + os.fsencode(name)
        if may_wait and self._turns is not None and (turns := self._turns(path)) > 1:
            self.tally.missed.add(IN_TURNS if turns > TEXT_TURNS else TEXTS_IN_TURNS)
            if (hash(path) + self._listings.walks) % turns:
                return Met(path, fd, name, None)
        status = _status(fd, name)
        if status is None or status.st_dev != self._device:
            return None
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            return None
        return Met(path, fd, name, status)

    def _list(self, fd: int, folder: str) -> Listed:
        """Not all of a folder that holds very many. `_is_new`: it has changed, or not rested since."""
        status = os.fstat(fd)
        listed = self._listings.kept(folder, (status.st_ino, status.st_mtime_ns, status.st_ctime_ns))
        left = MAX_LISTED - self._listed
        self._is_new = listed is None
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
        """A folder of the code, on the workspace's own device; None: it went away, is no folder any more, or is closed."""
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
    """Whether a file's name is one of source, settings or prose."""
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
        return None  # it went away
