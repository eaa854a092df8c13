"""Record every state of an agent's code as commits of code.git: once a second, and when a submission asks for its state.

`CodeWalk` finds the files, `CodeFiles` decides what is stored of each, `Repository` writes and reads git objects, `Revisions` commits.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import queue
import re
import secrets
import stat
import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from autorl_hpc.files.safe_open import DIR_FLAGS, READ_FLAGS, open_below, open_plain
from autorl_hpc.recorder.watch import LineWriter, Moment, Parts, RecorderJob
from autorl_hpc.records.recorded import CodeRevision

# --- which files are code: those in `code/`, and small sources at the top of the workspace. The walk follows no link. Sources near
# the top come first, so that a limit cuts off the least likely files; folders excluded by name come last.

CODE = "code"


class CodeLimits(NamedTuple):
    """Limits of what is recorded; beyond them files are counted as left out.

    Attributes:
        sure_s: a file that was read sooner after a change is read once more: file times have steps of up to 2 s (FAT; NFS 3
            and Lustre 1 s), and a file server's clock differs from ours.
    """

    files: int = 4000  # per revision; each version of each file is a file on a shared disk
    others: int = 500  # files that don't look like source, so that data files don't displace code
    folders: int = 1000
    depth: int = 20
    listed: int = 20_000  # names read in one walk
    aside_folders: int = 50  # read of those excluded by name
    aside_files: int = 100  # sources stored of each of these
    texts_bytes: int = 32 << 20
    repository_bytes: int = 512 << 20
    reserved_bytes: int = 64 << 20  # of it, for submissions
    commits: int = 300  # further ones come once per COMMIT_EVERY_S
    sure_s: float = 2.5


SOURCE_SUFFIXES = (
    *(".py", ".pyi", ".ipynb", ".sh", ".bash", ".zsh", ".md", ".rst", ".txt", ".yaml", ".yml", ".json", ".toml"),
    *(".cfg", ".ini", ".conf", ".jinja", ".jinja2", ".j2", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs"),
    *(".go", ".js", ".mjs", ".ts", ".jl", ".r", ".lua", ".pl", ".rb", ".java", ".sql", ".patch", ".diff", ".sbatch"),
)
SOURCE_NAMES = {"makefile", "dockerfile", "justfile", "readme", "license"}
# Created by programs, usually. Only sources directly in these folders are stored.
LEFT_OUT_FOLDERS = {
    *("__pycache__", "node_modules", "site-packages", ".hg", ".svn", ".venv", "venv", ".conda", ".tox", ".nox"),
    *(".cache", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints", ".eggs"),
}

KEYS_FILE = ".env"
COMPILED = (".pyc", ".pyo")
# Prefixes that git reserves on some file systems: no tree may contain them (git, path.c and utf8.c).
GITS_OWN = (".git", "git~", "gitmod~", "gitatt~", "gi7eba~", "gi7d29~")
IGNORED_BY_HFS = dict.fromkeys((*range(0x200C, 0x2010), *range(0x202A, 0x202F), *range(0x206A, 0x2070), 0xFEFF), None)


class Met(NamedTuple):
    path: bytes
    folder_fd: int
    name: str
    status: os.stat_result


class CodeWalk:
    """One walk over the code of a workspace. It counts files beyond the limits (`left_out`), files and folders excluded by name,
    and what makes the state inexact (`reasons`)."""

    def __init__(self, workspace: Path, laid: frozenset[str], limits: CodeLimits) -> None:
        self.left_out = self.by_name = 0
        self.reasons: Counter[str] = Counter()
        self._workspace, self._laid, self._limits = workspace, laid, limits
        self._device = -1
        self._listed = self._files = self._others = 0
        self._waiting: deque[Parts] = deque()
        self._aside: list[Parts] = []

    def run(self) -> Iterator[Met]:
        """Yield the files and links; read each one before asking for the next. Raises OSError if the workspace can't be read."""
        limits, root = self._limits, os.open(self._workspace, DIR_FLAGS)
        try:
            self._device = os.fstat(root).st_dev
            code = self._code(root)
            if code is not None:
                self._waiting.append(code)
            elif (met := self._file(root, b"", CODE)) is not None:
                yield met
            for name in filter(is_source, self._list(root)[1]):
                met = None if name in self._laid or name.startswith(".") else self._file(root, b"", name)
                if met is not None and stat.S_ISREG(met.status.st_mode):
                    self._files += 1
                    yield met
            walked = 0
            while self._waiting:
                parts, walked = self._waiting.popleft(), walked + 1
                if walked > limits.folders or len(parts) > limits.depth or self._listed >= limits.listed:
                    self.reasons["folders beyond the limits"] += 1
                else:
                    yield from self._folder(root, parts, len(code or ()), aside=False)
            for parts in self._aside[: limits.aside_folders]:
                yield from self._folder(root, parts, len(code or ()), aside=True)
        finally:
            os.close(root)

    def _code(self, root: int) -> Parts | None:
        top = os.path.realpath(self._workspace)
        target = os.path.realpath(os.path.join(top, CODE))
        parts = Path(target).relative_to(top).parts if target.startswith(top + "/") else ()
        try:
            os.close(open_below(root, parts, DIR_FLAGS))  # follows no link
        except OSError:
            parts = ()
        if os.path.islink(os.path.join(top, CODE)):
            where = "a folder of the workspace, which is recorded as code" if parts else "what is no such folder"
            self.reasons[f"link `code` to {where}"] += 1
        return parts or None

    def _folder(self, root: int, parts: Parts, code: int, *, aside: bool) -> Iterator[Met]:
        limits, could_not = self._limits, "folders that could not be read"
        try:
            fd = open_below(root, parts, DIR_FLAGS)
        except OSError as error:
            self.reasons[could_not] += isinstance(error, PermissionError)
            return
        try:
            if os.fstat(fd).st_dev != self._device:
                self.reasons["folders on another device"] += 1
                return
            folders, files = self._list(fd)
            kept = [name for name in files if name != KEYS_FILE and not _is_gits(name)]
            if aside:
                hidden = folders or any(not is_source(name) and not name.endswith(COMPILED) for name in files)
                kept = list(filter(is_source, kept))
                self.reasons["folders left out by name that hold more than what is kept"] += bool(
                    hidden or len(kept) > limits.aside_files
                )
                kept = kept[: limits.aside_files]
            else:
                for name in folders:
                    if _is_gits(name) or name.lower() in LEFT_OUT_FOLDERS:
                        self.by_name += 1
                        self._aside += [] if _is_gits(name) else [(*parts, name)]
                    else:
                        self._waiting.append((*parts, name))
                self.by_name += len(files) - len(kept)
            prefix = os.fsencode("/".join((CODE, *parts[code:], "")))
            for at, name in enumerate(kept):
                other = not is_source(name)
                if not aside and (self._files >= limits.files or (other and self._others >= limits.others)):
                    self.left_out += len(kept) - at  # after the sources, all are others
                    return
                if (met := self._file(fd, prefix, name)) is not None:
                    self._files += not aside
                    self._others += other
                    yield met
        except OSError:
            self.reasons[could_not] += 1
        finally:
            os.close(fd)

    def _file(self, fd: int, prefix: bytes, name: str) -> Met | None:
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except OSError:
            return None  # removed meanwhile
        is_kept = stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)
        return Met(prefix + os.fsencode(name), fd, name, status) if is_kept and status.st_dev == self._device else None

    def _list(self, fd: int) -> tuple[list[str], list[str]]:
        left = self._limits.listed - self._listed
        with os.scandir(fd) as entries:
            found = {each.name: each.is_dir(follow_symlinks=False) for each in itertools.islice(entries, left)}
            self.reasons["folders with too many files to list"] += next(entries, None) is not None
        self._listed += len(found)
        ordered = sorted(found, key=lambda name: (not is_source(name), name))
        return [name for name in ordered if found[name]], [name for name in ordered if not found[name]]


def is_source(name: str) -> bool:
    lower = name.lower()
    return lower.endswith(SOURCE_SUFFIXES) or lower in SOURCE_NAMES


def _is_gits(name: str) -> bool:
    return (name if name.isascii() else name.translate(IGNORED_BY_HFS)).lower().startswith(GITS_OWN)


# --- a git repository of loose objects, written and read without git: blobs, trees, commits, and one ref per attempt.
# Objects appear whole or not at all, so two writers can't harm each other; they are not synced. Format: git's gitformat-loose.

Kind = Literal["blob", "tree", "commit"]
FILE, PROGRAM, LINK, FOLDER = 0o100644, 0o100755, 0o120000, 0o40000  # modes of a tree's entries
BY_HASH = b"by-hash/"
"""Folder for large and binary files: a small JSON file with size and hash, under the same path. No file of an agent can be in
it."""

Files = dict[bytes, tuple[int, str]]  # mode and object id by path
AUTHOR = "autorl-hpc recorder <recorder@localhost>"
CONFIG = (
    b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = true\n"
    b"[gc]\n\tauto = 0\n"  # packed objects can't be read here
)
MAX_OBJECT_BYTES = 32 << 20  # limit for an unpacked object; objects written here are far smaller
MAX_TREE_DEPTH = 64
MAX_TREE_FILES = 50_000
BLOCK_BYTES = 4096  # disk space of the smallest file
_ID = re.compile(r"[0-9a-f]{40}")
_HEADS = "refs/heads/"
_REF_PREFIX = f"ref: {_HEADS}"
_TREE = re.compile(rb"tree ([0-9a-f]{40})\n")
_ENTRY = re.compile(rb"([0-7]{5,6}) (?!\.{1,2}\0)([^\0/]+)\0(.{20})", re.DOTALL)


class GitDamage(Exception):
    """An object or ref is missing, doesn't match its name, or was not written by this suite."""


def object_id(kind: Kind, data: bytes) -> str:
    return hashlib.sha1(_headed(kind, data), usedforsecurity=False).hexdigest()


def _headed(kind: Kind, data: bytes) -> bytes:
    return b"%s %d\0" % (kind.encode(), len(data)) + data


class Repository:
    """A bare repository. Not thread-safe. Writing raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path, self.size_bytes = path, 0

    @classmethod
    def create(cls, path: Path) -> Repository:
        """Create the repository, or complete an unfinished one; sets `size_bytes` to the size of its objects."""
        for folder in ("objects", _HEADS):
            (path / folder).mkdir(parents=True, exist_ok=True)
        repository = cls(path)
        for name, data in (("config", CONFIG), ("HEAD", f"{_REF_PREFIX}main\n".encode())):
            if not (path / name).exists():
                repository._replace(path / name, data)
        repository.size_bytes = sum(_on_disk(each.lstat().st_size) for each in (path / "objects").glob("??/*"))
        return repository

    def write(self, kind: Kind, data: bytes) -> str:
        """Write an object unless it exists. Return its id."""
        name = object_id(kind, data)
        final = self._place(name)
        if not final.is_file() or final.stat().st_size == 0:  # a lost node may leave names without content
            packed = zlib.compress(_headed(kind, data), 1)  # three times as fast as the default, and code is small
            final.parent.mkdir(exist_ok=True)
            self._replace(final, packed, 0o444)
            self.size_bytes += _on_disk(len(packed))
        return name

    def write_files(self, files: Files) -> str:
        """Write the trees of these files. Return the id of the root tree."""
        entries = {path: entry for path, entry in files.items() if b"/" not in path}
        folders: defaultdict[bytes, Files] = defaultdict(dict)
        for path in files.keys() - entries.keys():
            name, _, rest = path.partition(b"/")
            folders[name][rest] = files[path]
        entries.update({name: (FOLDER, self.write_files(below)) for name, below in folders.items()})
        # git sorts folders as if their names ended in a slash
        ordered = sorted(entries.items(), key=lambda item: item[0] + (b"/" if item[1][0] == FOLDER else b""))
        return self.write("tree", b"".join(b"%o %s\0" % (mode, n) + bytes.fromhex(e) for n, (mode, e) in ordered))

    def commit(self, tree: str, parent: str | None, message: str, at_s: int) -> str:
        """Write a commit with times in UTC. Return its id."""
        stamp = f"{AUTHOR} {max(0, at_s)} +0000"
        lines = [f"tree {tree}", *([f"parent {parent}"] if parent else []), f"author {stamp}", f"committer {stamp}"]
        return self.write("commit", ("\n".join(lines) + f"\n\n{message}\n").encode())

    def set_ref(self, name: str, revision: str) -> None:
        self._replace(self.path / _HEADS / name, revision.encode() + b"\n")

    def set_head(self, name: str) -> None:
        self._replace(self.path / "HEAD", f"{_REF_PREFIX}{name}\n".encode())

    def _place(self, name: str) -> Path:
        return self.path / "objects" / name[:2] / name[2:]

    def _replace(self, final: Path, data: bytes, mode: int = 0o644) -> None:
        temporary = self.path / f"tmp_obj_{secrets.token_hex(8)}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            os.rename(temporary, final)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def head_name(self) -> str:
        """Return the name of the ref that HEAD points to; empty if HEAD is damaged."""
        text = self._text("HEAD")
        return text.removeprefix(_REF_PREFIX) if text.startswith(_REF_PREFIX) else ""

    def ref(self, name: str) -> str | None:
        """Return a branch's commit; None if there is none or it is damaged."""
        text = self._text(_HEADS + Path(name).name)
        return text if _ID.fullmatch(text) else None

    def head(self) -> str | None:
        return self.ref(self.head_name())

    def _text(self, name: str) -> str:
        try:
            return _read_small(self.path / name).decode("ascii", "replace").strip()
        except GitDamage:
            return ""

    def read(self, name: str, kind: Kind, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        """Return the content of an object. Raises GitDamage: it is missing, of another kind, too large, or doesn't match its id."""
        if not _ID.fullmatch(name):
            raise GitDamage(f"{name[:60]!r} is not an object's name")
        unpacker = zlib.decompressobj()
        try:
            data = unpacker.decompress(_read_small(self._place(name), max_bytes + 4096), max_bytes + 64)
        except zlib.error as error:
            raise GitDamage(f"object {name} can't be unpacked: {error}") from None
        body = data.partition(b"\0")[2]
        if not unpacker.eof or len(body) > max_bytes or data != _headed(kind, body) or object_id(kind, body) != name:
            raise GitDamage(f"object {name} is not the {kind} that its name says, or larger than {max_bytes} bytes")
        return body

    def files(self, revision: str) -> Files:
        """Return all files of a commit. Raises GitDamage, also beyond MAX_TREE_FILES or MAX_TREE_DEPTH."""
        found: Files = {}
        root = _TREE.match(self.read(revision, "commit", 1 << 20))
        if root is None:
            raise GitDamage(f"commit {revision} names no tree")
        folders = [(b"", root[1].decode(), 0)]
        while folders:
            prefix, tree, depth = folders.pop()
            data, at = self.read(tree, "tree"), 0
            while at < len(data):
                entry = _ENTRY.match(data, at)
                if entry is None or len(found) + len(folders) > MAX_TREE_FILES or depth > MAX_TREE_DEPTH:
                    raise GitDamage(f"a tree can't be read, is nested too deeply, or has over {MAX_TREE_FILES} files")
                mode, path, at = int(entry[1], 8), prefix + entry[2], entry.end()
                if mode == FOLDER:
                    folders.append((path + b"/", entry[3].hex(), depth + 1))
                else:
                    found[path] = (mode, entry[3].hex())
        return found


def _read_small(path: Path, max_bytes: int = 4096) -> bytes:
    """Return a regular file's bytes; refuses a FIFO or link, which the agent could have put there."""
    try:
        fd, why = open_plain(path), "it is missing, or no file"
    except OSError as error:
        fd, why = None, str(error.strerror)
    if fd is None:
        raise GitDamage(f"{path.parent.name}/{path.name} can't be read: {why}")
    with os.fdopen(fd, "rb") as file:
        return file.read(max_bytes)


def _on_disk(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


# --- what is stored of one file, and when it is read again: when its size, times or inode change

MAX_TEXT_BYTES = 1 << 20  # of larger files only the hash is stored
BINARY_LOOK_BYTES = 8000  # A zero byte in the first 8,000 makes a file binary, as in git (xdiff-interface.c)
MAX_HASHED_BYTES = 32 << 20
"""Of large files this much is hashed in one look, about 0.05 s. Of a larger file only size and time are stored: checkpoints get
their own hash when they are submitted."""

RESTLESS_CHANGES = 20
RESTLESS_EVERY_S = 60.0
"""A file that has changed this often, such as a log, is read once in this time. Never a source file: an unobserved minute is
enough to train with something else."""

Identity = tuple[int, int, int, int, int, int]


def _identity(status: os.stat_result) -> Identity:
    times = status.st_mtime_ns, status.st_ctime_ns
    return (status.st_dev, status.st_ino, status.st_mode, status.st_size, *times)


@dataclass(frozen=True)
class Pointer:
    """What is stored of a file without its content."""

    why: str  # `large` or `binary`
    size_bytes: int | None = None
    sha256: str | None = None
    note: str | None = None  # why there is no hash

    def data(self, mtime_ns: int | None = None) -> bytes:
        value = {"mtime_ns": mtime_ns, "note": self.note, "sha256": self.sha256, "size_bytes": self.size_bytes}
        kept = {name: each for name, each in value.items() if each is not None}
        return json.dumps({**kept, "why": self.why}, sort_keys=True).encode() + b"\n"


@dataclass(slots=True)
class _Known:
    """What earlier looks learned about a file: since when it has been the same, and whether that is sure."""

    identity: Identity
    seen_s: float
    changes: int = 0
    read_s: float = 0.0
    sure: bool = False
    mode: int = 0
    entry: str = ""
    pointer: Pointer | None = None
    text_bytes: int = 0


@dataclass
class CodeFiles:
    """Collects the files of one look after another."""

    limits: CodeLimits
    now: Callable[[], float]
    files: Files = field(default_factory=dict)  # of the current look, as a commit will hold them
    fresh: dict[str, bytes] = field(default_factory=dict)  # content that is not in code.git yet
    by_hash: int = 0
    _known: dict[bytes, _Known] = field(default_factory=dict)
    _hash_left: int = 0

    def collect(self, walk: CodeWalk, *, exact: bool) -> None:
        """Look at all files of a walk. `exact`: for a submission, so files are read that may have changed unnoticed."""
        before, self._known, self.files = self._known, {}, {}
        self.by_hash = texts_bytes = 0
        self._hash_left = MAX_HASHED_BYTES
        for met in walk.run():
            try:
                known = self._look_at(met, before.get(met.path), walk, exact)
            except OSError as error:
                walk.reasons["files that could not be read"] += not isinstance(error, FileNotFoundError)
                continue
            if known is not None and texts_bytes + known.text_bytes > self.limits.texts_bytes:
                walk.left_out += 1
            elif known is not None:
                self._known[met.path] = known
                texts_bytes += known.text_bytes
                self.by_hash += known.pointer is not None
                if known.pointer is not None and known.pointer.note is not None:
                    walk.reasons[f"files by size alone, {known.pointer.note}"] += 1
                self.files[met.path if known.pointer is None else BY_HASH + met.path] = (known.mode, known.entry)

    def _look_at(self, met: Met, known: _Known | None, walk: CodeWalk, exact: bool) -> _Known | None:
        identity, now = _identity(met.status), self.now()
        if stat.S_ISLNK(met.status.st_mode):
            target = os.fsencode(os.readlink(met.name, dir_fd=met.folder_fd))
            return _Known(identity, now, mode=LINK, entry=self._keep(target))
        if known is None:
            return self._read(met, _Known(identity, now))
        if known.identity == identity:
            rested = now - known.seen_s >= self.limits.sure_s
            return known if known.sure or not (rested or exact) else self._read(met, known)
        restless = known.changes >= RESTLESS_CHANGES and not is_source(met.name)
        if restless and not exact and now - known.read_s < RESTLESS_EVERY_S:
            walk.reasons["files that never rest, read once a minute"] += 1
            return known
        return self._read(met, _Known(identity, now, known.changes + 1))

    def _read(self, met: Met, known: _Known) -> _Known | None:
        with os.fdopen(os.open(met.name, READ_FLAGS, dir_fd=met.folder_fd), "rb") as file:
            before = os.fstat(file.fileno())
            if not stat.S_ISREG(before.st_mode):
                return None
            known.mode, known.read_s = PROGRAM if before.st_mode & stat.S_IXUSR else FILE, self.now()
            known.pointer, known.text_bytes, settled = None, 0, True
            if before.st_size > MAX_TEXT_BYTES:
                settled = self._read_large(file.fileno(), known, before)
            else:
                data = file.read(MAX_TEXT_BYTES)  # a file may grow meanwhile
                if b"\0" in data[:BINARY_LOOK_BYTES]:
                    known.pointer = Pointer("binary", len(data), hashlib.sha256(data).hexdigest())
                known.text_bytes = 0 if known.pointer else len(data)
                known.entry = self._keep(known.pointer.data() if known.pointer else data)
            same = _identity(os.fstat(file.fileno())) == _identity(before) == known.identity
        # The identity before reading is stored: if the file changed since, the next look sees another identity.
        if known.identity != _identity(before):
            known.identity, known.seen_s = _identity(before), self.now()
        known.sure = same and settled and self.now() - known.seen_s >= self.limits.sure_s
        return known

    def _read_large(self, fd: int, known: _Known, status: os.stat_result) -> bool:
        size, data = status.st_size, b""
        if size <= self._hash_left:
            self._hash_left -= size
            data = os.pread(fd, size, 0)
        if len(data) == size and _identity(os.fstat(fd)) == _identity(status):
            known.pointer = Pointer("large", size, hashlib.sha256(data).hexdigest())
            known.entry = self._keep(known.pointer.data())
            return True
        too_large = size > MAX_HASHED_BYTES
        note = f"for they are larger than {MAX_HASHED_BYTES >> 20} MiB" if too_large else "for they have not rested yet"
        known.pointer = Pointer("large", size, note=note)
        known.entry = self._keep(known.pointer.data(status.st_mtime_ns))
        return too_large

    def _keep(self, data: bytes) -> str:
        entry = object_id("blob", data)
        self.fresh[entry] = data
        return entry


LOOK_S = 1.0
LATE_S = 5.0  # after this long without a look, the commit reports that states may have been missed
COMMIT_EVERY_S = 20.0
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

    every_s = LOOK_S

    def __init__(
        self,
        job: RecorderJob,
        asks: queue.SimpleQueue[Ask],
        limits: CodeLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._asks, self._limits, self._clock = job, asks, limits or CodeLimits(), clock
        self._lines = LineWriter(job.run.recorded("revisions"))
        self._repository = Repository.create(job.run.code_git)
        self._files = CodeFiles(self._limits, clock)
        self._commits, self._full, self._branch = 0, False, f"{PREFIX}{job.attempt}"
        self._looked_s = self._committed_s = clock()
        self._damage: str | None = None
        self.head: str | None = None
        self._committed: Files | None = None
        revision = self._repository.ref(self._branch) or self._repository.head()
        try:
            self._committed = None if revision is None else self._repository.files(revision)
            self.head = revision
        except GitDamage as error:
            self._damage = f"what was kept before can't be read: {error}"

    def look(self, now: Moment) -> None:
        asks, revision = list[Ask](), None
        while not self._asks.empty():
            asks.append(self._asks.get())
        try:
            self._look(now, asks[-1].submission_id if asks else None, exact=bool(asks))
            revision = self.head if self._files.files == self._committed else None
        finally:
            for ask in asks:
                ask.answer(revision)

    def close(self, now: Moment) -> None:
        """Commit the last state after the agent's end."""
        try:
            self._look(now, None, exact=True)
            if self._files.files != self._committed:
                self.head = None  # the last state was not stored
        finally:
            self._lines.close()

    def _look(self, now: Moment, submission_id: int | None, *, exact: bool) -> None:
        walk = CodeWalk(self._job.workspace, self._job.laid, self._limits)
        self._files.collect(walk, exact=exact)
        may_commit = self._commits < self._limits.commits or self._clock() - self._committed_s >= COMMIT_EVERY_S
        if self._files.files == self._committed:
            self._files.fresh.clear()
        elif exact or may_commit:
            self._commit(now, walk, submission_id, exact)
        self._looked_s = self._clock()

    def _commit(self, now: Moment, walk: CodeWalk, submission_id: int | None, exact: bool) -> None:
        repository, files, fresh, parent = self._repository, self._files.files, self._files.fresh, self.head
        most = self._limits.repository_bytes - (0 if exact else self._limits.reserved_bytes)
        if repository.size_bytes + sum(map(len, fresh.values())) > most:
            if exact or self._full:
                return
            self._full = True
            raise RepositoryFull(f"code.git has {most >> 20} MiB: from now on only states of submissions are kept")
        for data in fresh.values():
            repository.write("blob", data)
        asked = "" if submission_id is None else f", submission {submission_id}"
        message = f"{now.elapsed_s:.1f} s, attempt {now.attempt}{asked}"
        revision = repository.commit(repository.write_files(files), parent, message, int(time.time()))
        before = self._committed or {}
        self._lines.add(
            CodeRevision(
                **{**now.fields(), "revision": revision, "parent": parent, "submission_id": submission_id},
                **{"files": len(files), "by_hash": self._files.by_hash, "left_out": walk.left_out},
                changed=sum(before.get(path) != files.get(path) for path in before.keys() | files.keys()),
                by_name=walk.by_name,
                reason=self._reason(walk),
            )
        )
        repository.set_ref(self._branch, revision)
        newest = repository.head_name().removeprefix(PREFIX)
        if not (newest.isascii() and newest.isdigit()) or int(newest) < self._job.attempt:
            repository.set_head(self._branch)  # no later attempt has begun to write
        self._committed, self.head = files, revision
        fresh.clear()
        self._commits += 1
        self._committed_s = self._clock()
        self._damage = None

    def _reason(self, walk: CodeWalk) -> str | None:
        said = [self._damage] if self._damage else []
        said += [f"{count} {what}" for what, count in sorted(walk.reasons.items()) if count]
        late_s = self._clock() - self._looked_s
        if late_s > LATE_S:
            said.append(f"{late_s:.0f} s since the state before was seen last")
        if self._commits >= self._limits.commits:
            said.append(f"changes without end: one commit in {COMMIT_EVERY_S:.0f} s")
        return "; ".join(said)[:1000] or None
