"""Read the text of files that an agent wrote (`chunks`), in bounded time and memory: plain, in binary files (Arrow, databases), compressed
once; weights are skipped. Chunks overlap, so that no n-gram is cut."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import IO, Any, NamedTuple

from autorl_hpc.recorder.watch import Parts, WorkspaceWalk

CHUNK_BYTES = 1 << 20
OVERLAP_BYTES = 4096  # longer than 13 words that are escaped twice
WHOLE_BYTES = 1 << 20  # smaller files are always read
SAMPLES, SAMPLE_BYTES = 32, 4096
TEXT_SAMPLES = 2  # that must be text, because a file of weights begins with a text header
MAX_BAD_SHARE = 0.15
MAX_MEMBERS = 10_000
MAX_DIRECTORY_BYTES = 16 << 20  # of a zip: the standard library takes ten times its size in memory
PIECE_BYTES = 32  # shorter than 13 words, so one of its pieces is all text, as 32 compressed bytes never seem
OPAQUE_BYTES = 4096
MIN_PRINTABLE = 0.55  # random bytes have 0.38 (compressed or encrypted data, weights), a pickle of texts more

_TEXT = bytes([9, 10, 13, *range(32, 127)])
_ASCII = bytes(range(128))
_CHARACTER = rb"(?:[\0\t\n\r\x20-\x7e]|[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3})"
# UTF-8 of at least the length of 8 words, or one that goes on in the next piece.
_RUN = re.compile(rb"%b{16,}|\A%b+|%b+\Z" % (_CHARACTER, _CHARACTER, _CHARACTER))


class Limit(Exception):
    """A search has used up its time or its bytes, or was asked to end."""


class TooMuch(Exception):
    """A file holds more than is read of one file; the rest is skipped."""


@dataclass
class ReadingBudget:
    """What one search may still use; of one file at most `file_bytes`, of a compressed one (a bomb) `inflated_bytes`."""

    deadline: float
    bytes_left: int
    stopped: Callable[[], bool] = lambda: False
    file_bytes: int = 512 << 20
    inflated_bytes: int = 256 << 20

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
    """Yield the text of an open regular file; nothing for a file of weights. Raises Limit: the search is over; TooMuch: the rest is
    skipped; OSError, ValueError, EOFError, MemoryError, and what decompressors raise: it can't be read."""
    size, head = os.fstat(fd).st_size, os.pread(fd, 8, 0)
    problem: Exception | None = None
    with os.fdopen(os.dup(fd), "rb") as file:
        opener = next((opener for magic, opener in _OPENERS if head.startswith(magic)), None)
        begins_packed = opener is not None or head.startswith(b"PK\3\4") or _is_zlib(fd)
        if begins_packed or zipfile.is_zipfile(file):
            file.seek(0)
            parts = _unpack(file, opener) if opener is not None else _zlib(file) if _is_zlib(fd) else _zip(file)
            try:
                yield from _overlapping(_bounded(parts, meter, meter.inflated_bytes))
            except Limit:
                raise
            except Exception as error:
                problem = error
    if not begins_packed or (size <= WHOLE_BYTES and _has_text_between(os.pread(fd, size, 0))):
        code = next((code for mark, code in _MARKS if head.startswith(mark)), None)
        if code is not None or size <= WHOLE_BYTES or _is_text(fd, size):
            for chunk in _overlapping(_bounded(_plain(fd, size), meter, meter.file_bytes)):
                if code is not None:
                    yield chunk.decode(code, "replace").encode("utf-8", "replace")
                yield chunk  # a mark may be there by chance
    if problem is not None:
        raise problem


def readable(chunk: bytes) -> tuple[bytes, int]:
    """Return a chunk whose pieces that are no text (compressed, encrypted, weights) are reduced to runs of characters, and their bytes."""
    parts: list[bytes] = []
    opaque = 0
    for at in range(0, len(chunk), OPAQUE_BYTES):
        piece = chunk[at : at + OPAQUE_BYTES]
        content = piece.replace(b"\0", b"")
        strange = len(content.translate(None, _TEXT))
        if strange > (1 - MIN_PRINTABLE) * len(content) and not looks_like_text(content):
            opaque += len(piece)
            piece = b"\x7f".join(_RUN.findall(piece))
        parts.append(piece)
    return b"".join(parts), opaque


def looks_like_text(sample: bytes) -> bool:
    """Return whether nearly all of it is UTF-8 text."""
    other = sample.translate(None, _TEXT)
    high = other.translate(None, _ASCII)
    bad = len(other) - len(high)
    if high:
        bad += sample.decode("utf-8", "replace").count("\ufffd")
    return bool(sample) and bad <= MAX_BAD_SHARE * len(sample)


def _has_text_between(data: bytes) -> bool:
    starts = range(0, len(data) - PIECE_BYTES + 1, PIECE_BYTES // 2)
    return any(looks_like_text(data[at : at + PIECE_BYTES]) for at in starts)


def _is_text(fd: int, size: int) -> bool:
    step = max(1, (size - SAMPLE_BYTES) // (SAMPLES - 1))
    samples = (os.pread(fd, SAMPLE_BYTES, n * step).replace(b"\0", b"") for n in range(SAMPLES))  # UTF-16 too
    return sum(map(looks_like_text, samples)) >= TEXT_SAMPLES


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
    at = 0
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            return  # only a hole follows
        data = os.pread(fd, min(CHUNK_BYTES, size - at), at)
        if not data:
            return
        at += len(data)
        yield data


# --- compressed text

# By the first bytes. Other files are read unchanged.
_OPENERS: list[tuple[bytes, Callable[[IO[bytes]], Any]]] = [(b"\x1f\x8b", gzip.open), (b"BZh", bz2.open)]
_OPENERS += [(b"\xfd7zXZ\0", lzma.open), (b"\x5d\0\0", lzma.open)]
# Byte order marks, longer ones first.
_MARKS = [(b"\xff\xfe\0\0", "utf-32-le"), (b"\0\0\xfe\xff", "utf-32-be")]
_MARKS += [(b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")]


def _unpack(file: IO[bytes], opener: Callable[[IO[bytes]], Any]) -> Iterator[bytes]:
    with opener(file) as unpacked:
        while data := unpacked.read(CHUNK_BYTES):
            yield data


def _is_zlib(fd: int) -> bool:
    data = os.pread(fd, SAMPLE_BYTES, 0)
    if len(data) < 8 or data[0] & 0x8F != 8 or (data[0] << 8 | data[1]) % 31:
        return False
    try:
        return bool(zlib.decompressobj().decompress(data, SAMPLE_BYTES))
    except zlib.error:
        return False


def _zlib(file: IO[bytes]) -> Iterator[bytes]:
    inflater = zlib.decompressobj()
    while not inflater.eof and (data := inflater.unconsumed_tail or file.read(CHUNK_BYTES)):
        yield inflater.decompress(data, CHUNK_BYTES)


def _zip(file: IO[bytes]) -> Iterator[bytes]:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 65557))  # the end record is here, whatever comes before the archive
    tail = file.read()
    end = tail[tail.rfind(b"PK\5\6") :]
    if int.from_bytes(end[12:16], "little") > MAX_DIRECTORY_BYTES or end[10:12] == b"\xff\xff":
        raise TooMuch("a zip with too large a directory")
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist()[:MAX_MEMBERS]:
            yield b" ".join((info.filename.encode("utf-8", "replace"), info.comment, b""))
            if info.is_dir() or info.flag_bits & 1:
                continue
            with archive.open(info) as member:
                data = member.read(CHUNK_BYTES)
                samples = range(0, CHUNK_BYTES, CHUNK_BYTES // 8)
                if len(data) == CHUNK_BYTES and not any(looks_like_text(data[at:][:SAMPLE_BYTES]) for at in samples):
                    continue  # weights
                while data:
                    yield data
                    data = member.read(CHUNK_BYTES)
            yield b" "


# --- regular files of an agent's folder

MAX_NAME_BYTES = 32 << 20  # of the names and link targets of one walk
Identity = tuple[int, int, int, int]  # device, inode, size, ctime: only root can give a changed file its old ctime


class FoundFile(NamedTuple):
    """A regular file as the listing showed it."""

    parts: Parts
    identity: Identity


def identity_of(status: os.stat_result) -> Identity:
    """Return what distinguishes one content from another."""
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


def list_files(
    folder: Path, meter: ReadingBudget, max_files: int = 100_000
) -> tuple[list[FoundFile], list[bytes], bool]:
    """List a folder, following no link: regular files, those near the top first; names of all entries and link targets, where an agent can
    hide text too; whether that is all. Raises Limit: the search is over; OSError: it can't be opened."""
    files: list[FoundFile] = []
    found: list[bytes] = []
    name_bytes, whole = 0, True

    def visit(parts: Parts, status: os.stat_result) -> None:
        nonlocal name_bytes, whole
        names = [os.fsencode(parts[-1])]
        if stat.S_ISLNK(status.st_mode):
            with suppress(OSError):  # no longer a link
                names.append(os.fsencode(os.readlink(folder.joinpath(*parts))))
        name_bytes += sum(map(len, names))
        if name_bytes <= MAX_NAME_BYTES:
            found.extend(names)
        if stat.S_ISREG(status.st_mode) and len(files) < max_files:
            files.append(FoundFile(parts, identity_of(status)))
        whole &= name_bytes <= MAX_NAME_BYTES and len(files) < max_files

    walk = WorkspaceWalk([visit])
    for _ in walk.steps(folder):
        meter.tick()
    return files, found, whole and not walk.left_out
