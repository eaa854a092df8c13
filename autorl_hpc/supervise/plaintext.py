"""Read the text of files that an agent wrote (`chunks`), in bounded time and memory, and list the files of a folder.

Plain text, text inside binary files (Arrow, databases) and text compressed once, as the standard library undoes it, are
read; weights are recognised by samples and skipped. Chunks overlap, so that no n-gram is cut.
"""

from __future__ import annotations

import bz2
import lzma
import os
import stat
import struct
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import IO, Any

from autorl_hpc.files.safe_open import DIR_FLAGS, open_below

CHUNK_BYTES = 1 << 20
OVERLAP_BYTES = 4096
"""Longer than 13 words that are escaped twice."""

WHOLE_BYTES = 1 << 20
"""Smaller files are always read."""

SAMPLES, SAMPLE_BYTES = 32, 4096
TEXT_SAMPLES = 2
"""At least this many samples must be text, because a file of weights begins with a text header."""

MAX_BAD_SHARE = 0.15
MAX_FILE_BYTES = 512 << 20
MAX_INFLATED_BYTES = 256 << 20
"""Limit for one compressed file, so that a decompression bomb costs only seconds."""

MAX_MEMBERS = 10_000
MAX_DIRECTORY_BYTES = 16 << 20
"""Limit for a zip: the standard library reads the directory at once and takes ten times its size in memory."""

XZ_MEMORY_BYTES = 256 << 20
PIECE_BYTES = 32
"""Shorter than a run of 13 words, so one of its pieces is all text; 32 compressed bytes in a row never look like text."""

OPAQUE_BYTES = 4096
MIN_PRINTABLE = 0.55
"""Random bytes have 0.38 (compressed or encrypted data, weights). A pickle of texts has more."""

_TEXT = bytes([9, 10, 13, *range(32, 127)])
_ASCII = bytes(range(128))


class Limit(Exception):
    """A search has used up its time or its bytes, or was asked to end."""


class TooMuch(Exception):
    """A file holds more than is read of one file; the rest is skipped."""


@dataclass
class ReadingBudget:
    """What one search may still use."""

    deadline: float
    bytes_left: int
    stopped: Callable[[], bool] = lambda: False

    def tick(self) -> None:
        """Check the time. Raises Limit if it is over or the search is asked to end."""
        if self.stopped():
            raise Limit("asked to end")
        if monotonic() > self.deadline:
            raise Limit("time")

    def take(self, count: int) -> None:
        """Subtract bytes of text. Raises Limit if too many were read."""
        self.tick()
        self.bytes_left -= count
        if self.bytes_left < 0:
            raise Limit("bytes")


def chunks(fd: int, meter: ReadingBudget) -> Iterator[bytes]:
    """Yield the text of an open regular file; nothing for a file of weights.

    Raises:
        Limit: the search is over.
        TooMuch: the rest of the file is skipped.
        OSError, ValueError, EOFError, MemoryError, and what decompressors raise: the rest can't be read.
    """
    size = min(os.fstat(fd).st_size, MAX_FILE_BYTES + 1)
    head = os.pread(fd, 8, 0)
    reader = next((reader for magic, reader in _FORMATS if head.startswith(magic)), None)
    if reader is None and _is_zlib(fd):
        reader = _inflated(_Zlib)
    if reader is not None:
        try:
            yield from _overlapping(_bounded(reader(fd), meter, MAX_INFLATED_BYTES))
        except Limit:
            raise
        except Exception:
            yield from _between(fd, size, meter)
            raise
        yield from _between(fd, size, meter)
        return
    code = next((code for mark, code in _MARKS if head.startswith(mark)), None)
    if code is not None or size <= WHOLE_BYTES or _is_text(fd, size):
        for chunk in _overlapping(_bounded(_plain(fd, size), meter, MAX_FILE_BYTES)):
            if code is not None:
                yield chunk.decode(code, "replace").encode("utf-8", "replace")
            yield chunk  # a mark may be there by chance
    if _has_zip_end(fd):
        yield from _overlapping(_bounded(_zip(fd), meter, MAX_INFLATED_BYTES))


def _between(fd: int, size: int, meter: ReadingBudget) -> Iterator[bytes]:
    """Yield a small archive unchanged if it holds uncompressed text before, between or after its members."""
    if size <= WHOLE_BYTES:
        data = os.pread(fd, size, 0)
        pieces = (data[at : at + PIECE_BYTES] for at in range(0, len(data) - PIECE_BYTES + 1, PIECE_BYTES // 2))
        if any(map(looks_like_text, pieces)):
            yield from _bounded(iter([data]), meter, WHOLE_BYTES)


def opaque_bytes(chunk: bytes) -> int:
    """Return how many of these bytes are not readable text (compressed, encrypted, weights), in steps of OPAQUE_BYTES."""
    found = 0
    for at in range(0, len(chunk), OPAQUE_BYTES):
        piece = chunk[at : at + OPAQUE_BYTES]
        content = piece.replace(b"\0", b"")
        strange = len(content.translate(None, _TEXT))
        if strange > (1 - MIN_PRINTABLE) * len(content) and not looks_like_text(content):
            found += len(piece)
    return found


def _overlapping(parts: Iterator[bytes]) -> Iterator[bytes]:
    tail = b""
    for part in parts:
        yield tail + part
        tail = (tail + part)[-OVERLAP_BYTES:]


def _bounded(parts: Iterator[bytes], meter: ReadingBudget, limit: int) -> Iterator[bytes]:
    taken = 0
    for part in parts:
        if taken > limit:
            raise TooMuch(f"more than {limit >> 20} MiB")
        meter.take(len(part))
        taken += len(part)
        if part:
            yield part


def _plain(fd: int, size: int) -> Iterator[bytes]:
    """Yield the bytes that the file had when it was opened. Holes are skipped, so that a huge sparse file costs nothing."""
    stat = os.fstat(fd)
    sparse = stat.st_blocks * 512 < stat.st_size
    at = 0
    while at < size:
        if sparse:
            try:
                at = os.lseek(fd, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == 6:  # ENXIO: only a hole follows
                    return
                sparse = False
        data = os.pread(fd, min(CHUNK_BYTES, size - at), at)
        if not data:
            return
        at += len(data)
        yield data


def _is_text(fd: int, size: int) -> bool:
    step = max(1, (size - SAMPLE_BYTES) // (SAMPLES - 1))
    samples = (os.pread(fd, SAMPLE_BYTES, n * step).replace(b"\0", b"") for n in range(SAMPLES))  # UTF-16 too
    return sum(map(looks_like_text, samples)) >= TEXT_SAMPLES


def looks_like_text(sample: bytes) -> bool:
    """Return whether nearly all of it is UTF-8 text."""
    other = sample.translate(None, _TEXT)
    high = other.translate(None, _ASCII)
    bad = len(other) - len(high)
    if high:
        bad += sample.decode("utf-8", "replace").count("\ufffd")
    return bool(sample) and bad <= MAX_BAD_SHARE * len(sample)


def _file(fd: int) -> IO[bytes]:
    file = os.fdopen(os.dup(fd), "rb")
    file.seek(0)
    return file


def _is_zlib(fd: int) -> bool:
    """Return whether it begins with a zlib stream: two bytes by RFC 1950, and what follows can be inflated."""
    data = os.pread(fd, SAMPLE_BYTES, 0)
    if len(data) < 8 or data[0] & 0x8F != 8 or (data[0] << 8 | data[1]) % 31:
        return False
    try:
        return bool(zlib.decompressobj().decompress(data, SAMPLE_BYTES))
    except zlib.error:
        return False


class _Zlib:
    """A zlib and gzip decompressor with the interface of those of bz2 and lzma."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(47)

    def decompress(self, data: bytes, most: int) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, most)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data


def _inflated(new: Callable[[], Any]) -> Callable[[int], Iterator[bytes]]:
    """Return a reader of consecutive streams of one format."""

    def read(fd: int) -> Iterator[bytes]:
        with _file(fd) as file:
            data = file.read(CHUNK_BYTES)
            while data:
                inflater = new()
                while not inflater.eof:
                    yield inflater.decompress(data, CHUNK_BYTES)
                    data = b""
                    if inflater.needs_input and not inflater.eof:
                        data = file.read(CHUNK_BYTES)
                        if not data:
                            return
                data = inflater.unused_data.lstrip(b"\0") or file.read(CHUNK_BYTES)

    return read


def _xz() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_AUTO, memlimit=XZ_MEMORY_BYTES)


def _zip(fd: int) -> Iterator[bytes]:
    _refuse_huge_directory(fd)
    with _file(fd) as file, zipfile.ZipFile(file) as archive:
        for info in archive.infolist()[:MAX_MEMBERS]:
            yield b" ".join((info.filename.encode("utf-8", "replace"), info.comment, b""))
            if info.is_dir() or info.flag_bits & 1:
                continue
            with archive.open(info) as member:
                data = member.read(CHUNK_BYTES)
                if len(data) == CHUNK_BYTES and not any(
                    looks_like_text(data[at : at + SAMPLE_BYTES]) for at in range(0, CHUNK_BYTES, CHUNK_BYTES // 8)
                ):
                    continue  # weights
                while data:
                    yield data
                    data = member.read(CHUNK_BYTES)
            yield b" "


def _zip_tail(fd: int) -> bytes:
    """Return the last bytes of a file, where a zip's end record is, whatever comes before the archive."""
    return os.pread(fd, 65557, max(0, os.fstat(fd).st_size - 65557))


def _has_zip_end(fd: int) -> bool:
    tail = _zip_tail(fd)
    return 0 <= tail.rfind(b"PK\5\6") <= len(tail) - 22 and b"PK\1\2" in tail


def _refuse_huge_directory(fd: int) -> None:
    tail = _zip_tail(fd)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < 22:
        raise ValueError("a zip without an end")
    entries, length = struct.unpack("<HI", tail[at + 10 : at + 16])
    if length > MAX_DIRECTORY_BYTES or entries == 0xFFFF:
        raise TooMuch("a zip with too large a directory")


_FORMATS: list[tuple[bytes, Callable[[int], Iterator[bytes]]]] = [
    (b"\x1f\x8b", _inflated(_Zlib)),
    (b"\xfd7zXZ\0", _inflated(_xz)),
    (b"\x5d\0\0", _inflated(_xz)),
    (b"BZh", _inflated(bz2.BZ2Decompressor)),
    (b"PK\3\4", _zip),
]
"""What the standard library reads. Other files are read unchanged."""

_MARKS = [
    (b"\xff\xfe\0\0", "utf-32-le"),
    (b"\0\0\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
]
"""Byte order marks, longer ones first."""


# --- regular files of an agent's folder, by descriptor. No link is followed, and nothing else is opened.

MAX_FILES = 100_000
MAX_FOLDERS = 50_000
MAX_DEPTH = 64
TICK_ENTRIES = 256
MAX_NAME_BYTES = 32 << 20
"""Limit for the names and link targets of one walk."""

Identity = tuple[int, int, int, int]
"""Device, inode, size, ctime: only root can give a changed file its old ctime."""


@dataclass(frozen=True)
class FoundFile:
    """A regular file as the listing showed it."""

    parts: tuple[str, ...]
    identity: Identity

    @property
    def size(self) -> int:
        return self.identity[2]


@dataclass
class Listing:
    """What a walk found; `whole` is False if it was cut short or a folder could not be read.

    Attributes:
        names: names of all entries, and link targets, because an agent can hide text there too.
    """

    files: list[FoundFile]
    whole: bool = True
    names: list[bytes] = field(default_factory=list)
    _name_bytes: int = 0

    def add_name(self, name: bytes) -> None:
        """Store a name, within MAX_NAME_BYTES."""
        self._name_bytes += len(name) + 1
        if self._name_bytes > MAX_NAME_BYTES:
            self.whole = False
        else:
            self.names.append(name)


def identity_of(status: os.stat_result) -> Identity:
    """Return what distinguishes one content from another."""
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


def list_files(root_fd: int, meter: ReadingBudget) -> Listing:
    """List the regular files below an open folder, those near the top first; other devices are skipped.

    Raises:
        Limit: the search is over.
    """
    listing, device = Listing([]), os.fstat(root_fd).st_dev
    folders: deque[tuple[str, ...]] = deque([()])
    met = entries_seen = 0
    while folders:
        parts = folders.popleft()
        try:
            fd = open_below(root_fd, parts, DIR_FLAGS)
        except FileNotFoundError:
            continue
        except OSError:
            listing.whole = False
            continue
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    entries_seen += 1
                    if entries_seen % TICK_ENTRIES == 0:
                        meter.tick()
                    try:
                        status = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # removed meanwhile; its neighbours must still be read
                    here = (*parts, entry.name)
                    listing.add_name(os.fsencode(entry.name))
                    if stat.S_ISLNK(status.st_mode):
                        try:
                            listing.add_name(os.fsencode(os.readlink(entry.name, dir_fd=fd)))
                        except OSError:
                            pass  # no longer a link
                    if status.st_dev != device:
                        continue
                    if stat.S_ISDIR(status.st_mode):
                        met += 1
                        if met > MAX_FOLDERS or len(here) > MAX_DEPTH:
                            listing.whole = False
                        else:
                            folders.append(here)
                    elif stat.S_ISREG(status.st_mode):
                        if len(listing.files) >= MAX_FILES:
                            listing.whole = False
                            return listing
                        listing.files.append(FoundFile(here, identity_of(status)))
        except Limit:
            raise
        except OSError:
            listing.whole = False
        finally:
            os.close(fd)
    return listing
