"""A ledger that is whole, read at one go: what a report over thousands of runs does in place of `Ledger.read`.

Every entry's bytes are hashed and must link to the one before, every body is validated. The envelope around a body is not
parsed but compared with the only bytes that it can have. Whatever differs in anything is left to `Ledger`, which says what
is wrong: this module never judges a ledger to be damaged.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

from pydantic import ValidationError

from autorl_hpc.files import reading
from autorl_hpc.files.atomic import TEMPORARY_PREFIX
from autorl_hpc.files.layout import RunDir
from autorl_hpc.records.base import SCHEMA_VERSION
from autorl_hpc.records.canonical import canonical_json
from autorl_hpc.records.ledger import BODIES, Writer
from autorl_hpc.states import EntryKind

_KINDS = {str(kind).encode(): (kind, BODIES[kind].__pydantic_validator__.validate_json) for kind in EntryKind}
_AT, _BODY, _KIND, _END = b'{"at":"', b'","body":', b',"kind":"', b"}\n"
_AT_CHARS, _BODY_CHARS, _KIND_CHARS = len(_AT), len(_BODY), len(_KIND)
_MARK = b'","prev":"%%b","schema_version":%d,"seq":%%d,"writer":' % SCHEMA_VERSION
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ_AT_ONCE = 1 << 12
"""Most entries are of a kilobyte; longer ones are read in several steps. Room for more takes longer to get than to fill."""


class Read(NamedTuple):
    """One entry: what `Linked` says of it, without the envelope's record."""

    kind: EntryKind
    at: str
    writer: Writer
    body: Any
    sha256: str


class Different(Exception):
    """Something is not as in a whole ledger of this version."""


def read_whole(run: RunDir, genesis: str) -> list[Read] | None:
    """All entries of a ledger, from ledger/, else from its sealed copy; None if anything at all is unusual.

    Where there is a sealed copy, its lines are the first entries byte by byte.

    Args:
        genesis: the hash of run.json's bytes.
    """
    try:
        entries = list(_entry_files(run))
        sealed = _sealed(run)
        if entries and not b"".join(entries).startswith(sealed):
            return None
        return _linked(entries or sealed.splitlines(keepends=True), genesis)
    except (Different, OSError, ValueError, RecursionError, ValidationError):
        return None


def _entry_files(run: RunDir) -> Iterator[bytes]:
    try:
        folder = os.open(run.ledger, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith(TEMPORARY_PREFIX))
        for number, name in enumerate(names, 1):
            if name != f"{number:06d}.json":
                raise Different
            yield _contents(name, folder)
    finally:
        os.close(folder)


def _contents(name: str, folder: int) -> bytes:
    fd = os.open(name, _OPEN, dir_fd=folder)
    try:
        data = os.read(fd, _READ_AT_ONCE)
        if len(data) < _READ_AT_ONCE:
            return data
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Different
        while len(data) <= reading.MAX_RECORD_BYTES and (more := os.read(fd, reading.MAX_RECORD_BYTES)):
            data += more
        return data
    finally:
        os.close(fd)


def _sealed(run: RunDir) -> bytes:
    try:
        data = reading.read_bytes(run.sealed_ledger)
    except FileNotFoundError:
        return b""
    if not data.endswith(b"\n"):  # an empty one too: a seal has entries
        raise Different
    return data


def _linked(entries: list[bytes], genesis: str) -> list[Read]:
    found: list[Read] = []
    head = genesis
    for seq, data in enumerate(entries, 1):
        found.append(_entry(data, seq, head))
        head = found[-1].sha256
    if entries and canonical_json(json.loads(entries[-1])) + b"\n" != entries[-1]:
        raise Different  # the others are held by the links after them
    return found


def _entry(data: bytes, seq: int, head: str) -> Read:
    """The entry whose canonical bytes these are.

    The parts add up to the whole: a timestamp without escapes, a body and a writer that are complete JSON objects, and
    fixed bytes between them. So no other reading of these bytes is possible, wherever the marks were found.
    """
    mark = _MARK % (head.encode(), seq)
    at_end = data.find(b'"', _AT_CHARS)
    link = data.rfind(mark)
    kind_at = data.rfind(_KIND, 0, link)
    body_at = at_end + _BODY_CHARS
    known = _KINDS.get(data[kind_at + _KIND_CHARS : link])
    if (
        known is None
        or not (0 < body_at <= kind_at < link)
        or data[:_AT_CHARS] != _AT
        or data[at_end:body_at] != _BODY
        or not data.endswith(_END)
    ):
        raise Different
    at = data[_AT_CHARS:at_end].decode()
    if "\\" in at or not at.isprintable():
        raise Different
    kind, validate = known
    body = validate(data[body_at:kind_at])
    return Read(kind, at, _writer(data[link + len(mark) : -len(_END)]), body, sha256(data).hexdigest())


@lru_cache(maxsize=1024)
def _writer(data: bytes) -> Writer:
    """Validated once: a run has few writers, each with hundreds of entries."""
    return Writer.model_validate_json(data)
