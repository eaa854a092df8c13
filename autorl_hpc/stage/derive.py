"""Source files that nobody serves as they are: made of one that is served, and pinned by what is in them.

`first_rows_jsonl_gz`: the first rows of a JSON list, one a line as Python's json writes them (not escaped), packed by gzip. The
pin is over the text, since each version of zlib packs it into other bytes; a file of such a source is therefore also taken
if its text is the pinned one.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from pathlib import Path
from typing import Final

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.hashing import file_sha256
from autorl_hpc.records.task import Derived, SourceFile

MAX_RAW_BYTES: Final = 1024 * 1024 * 1024
MAX_TEXT_BYTES: Final = 256 * 1024 * 1024
"""Of the unpacked text: a small file can unpack to anything."""


def is_pinned(path: Path, pinned: SourceFile) -> str | None:
    """None if the file is the one that the task pins, else its sha256."""
    digest = file_sha256(path)
    if digest == pinned.sha256 or (pinned.derived is not None and _text_sha256(path) == pinned.derived.sha256):
        return None
    return digest


def make_derived(raw: Path, target: Path, derived: Derived) -> None:
    """Makes the file out of the one that was downloaded.

    Raises:
        AutorlError: that one is no such list, or what was made is not what the task pins.
    """
    try:
        rows = json.loads(reading.read_bytes(raw, max_bytes=MAX_RAW_BYTES))
    except (ValueError, RecursionError) as error:
        raise _refused(target, derived, f"is no JSON: {str(error)[:200]}") from None
    if not isinstance(rows, list) or len(rows) < derived.n:
        held = f"{len(rows)} rows" if isinstance(rows, list) else "no list"
        raise _refused(target, derived, f"holds {held}, needed are {derived.n} rows")
    # Half of a surrogate pair can stand in JSON and in no file.
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[: derived.n]).encode("utf-8", "replace")
    made = hashlib.sha256(text).hexdigest()
    if made != derived.sha256:
        raise _refused(target, derived, f"gives a text with sha256 {made}, the task pins {derived.sha256}")
    atomic.write_bytes(target, gzip.compress(text, mtime=0))


def _text_sha256(path: Path) -> str | None:
    unpack = zlib.decompressobj(wbits=31)
    try:
        text = unpack.decompress(reading.read_bytes(path, max_bytes=MAX_TEXT_BYTES), MAX_TEXT_BYTES)
    except (zlib.error, ValueError):
        return None
    # Neither cut, nor too long, nor with something behind it.
    return hashlib.sha256(text).hexdigest() if unpack.eof and not unpack.unused_data else None


def _refused(target: Path, derived: Derived, words: str) -> AutorlError:
    return AutorlError(
        f"{target.name} can't be made: what is at {derived.url.partition('?')[0]} {words}",
        where=target,
        next_step="get the file from somebody who has it, and stage with --from DIR",
        exit_code=Exit.FAILED,
    )
