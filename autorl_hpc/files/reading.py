"""Tolerant listing and reading of files, JSON, gzip and YAML on a shared file system, where a read error means "try again".

Waiters list directories and never poll `exists()`, because an NFS client may remember for 30 s that a name is absent.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.atomic import TEMPORARY_PREFIX
from autorl_hpc.files.faults import again

UNSEEN_PATIENCE_S = 40.0  # longer than an NFS client may miss a new name
UNSEEN_PAUSE_S = 0.1
MAX_RECORD_BYTES = 32 * 1024 * 1024  # far above any record of ours; a larger file under a record's name is damage
_STEP_BYTES = 1 << 16
MAX_UNPACKED_BYTES = 512 * 1024 * 1024  # limit for an items file, which has some hundred bytes an item


def list_names(folder: Path) -> list[str]:
    """Return the sorted names in `folder`, without unfinished writes; an absent folder is empty. Raises OSError."""
    try:
        names = again(lambda: os.listdir(folder))
    except FileNotFoundError:
        return []
    return sorted(name for name in names if not name.startswith(TEMPORARY_PREFIX))


def read_bytes(path: Path, *, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Read the whole file through a new open, which makes NFS ask the server. Raises ValueError: it is larger than `max_bytes`, or
    no regular file; OSError: it is absent, or can't be read after several tries."""
    data = again(lambda: _read_file(path, max_bytes + 1))
    if len(data) > max_bytes:
        raise ValueError(f"{path} is larger than {max_bytes} bytes")
    return data


def tail(path: Path, max_bytes: int, start: int = 0) -> str | None:
    """Return the end of a log, at most `max_bytes` and nothing before the offset `start`; None if it can't be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(start, os.fstat(file.fileno()).st_size - max_bytes))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return None


def says(path: Path, parts: Iterable[bytes]) -> bool:
    """Return whether the file exists and consists of exactly these parts."""
    try:
        with open(_open_file(path)[0], "rb") as file:
            return all(file.read(len(part)) == part for part in parts) and not file.read(1)
    except (OSError, ValueError):
        return False


def _read_file(path: Path, limit: int) -> bytes:
    fd, size = _open_file(path)
    try:
        found: list[bytes] = []
        left, step = limit, size + 1  # usually one read gets all, and a second one finds the end
        while left > 0 and (data := os.read(fd, min(step, left))):
            found.append(data)
            left, step = left - len(data), max(_STEP_BYTES, size)
        return found[0] if len(found) == 1 else b"".join(found)
    finally:
        os.close(fd)


def _open_file(path: Path) -> tuple[int, int]:
    """Open a regular file without waiting for a FIFO's other end; return its descriptor and size in bytes."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a file")
    except BaseException:
        os.close(fd)
        raise
    return fd, status.st_size


def read_listed(path: Path) -> bytes:
    """Read a file whose name a listing has shown: while it is listed, "absent" means "not visible yet". Raises FileNotFoundError:
    it is no longer listed, or stayed invisible; ValueError, OSError: see `read_bytes`."""
    deadline = time.monotonic() + UNSEEN_PATIENCE_S
    while True:
        try:
            return read_bytes(path)
        except FileNotFoundError:
            if path.name not in list_names(path.parent) or time.monotonic() > deadline:
                raise
        time.sleep(UNSEEN_PAUSE_S)


def gunzip(data: bytes) -> bytes:
    """Unpack gzip data. Raises ValueError: it is not gzip, or unpacks to more than MAX_UNPACKED_BYTES."""
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        found = unpacker.decompress(data, MAX_UNPACKED_BYTES + 1)
    except zlib.error as error:
        raise ValueError(f"not readable as gzip ({error})") from None
    if len(found) > MAX_UNPACKED_BYTES:
        raise ValueError(f"it unpacks to more than {MAX_UNPACKED_BYTES} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("not readable as gzip (it breaks off, or something follows)")
    return found


def read_json(path: Path) -> Any:
    """Return the JSON value in `path`. Raises OSError: it can't be read; ValueError: it is not JSON in UTF-8, or too large."""
    try:
        return json.loads(read_bytes(path))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error


def read_json_or_none(path: Path) -> Any | None:
    """Return the JSON value in `path`, or None if it is absent or unreadable now."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


# --- users' YAML files: errors name the file and the line

MAX_YAML_BYTES = 1024 * 1024
_PLAIN_SCALAR = re.compile(
    r"[-+]?(?:(?:0|[1-9][0-9_]*)(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]+)?|[-+]?\.inf|\.nan|true|false", re.IGNORECASE
)


def parse_yaml(data: bytes, where: str | Path, *, strict: bool = True) -> Any:
    """Return the value of a YAML text, read by the safe loader (no objects). Raises AutorlError: it is not YAML, not
    UTF-8, has a duplicate key or, if `strict`, a value that YAML reads unlike a person (`1:30`, `010`, `0x10`, `on`)."""
    import yaml

    class Loader(yaml.SafeLoader):
        """The safe loader, which also refuses duplicate keys."""

    def wrong(what: str, node: Any) -> Exception:
        return yaml.constructor.ConstructorError(None, None, what, node.start_mark)

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and key.value in seen:
                raise wrong(f"the key `{key.value}` stands twice", key)
            seen.add(str(key.value))
        loader.flatten_mapping(node)
        return dict(loader.construct_pairs(node, deep=True))

    def scalar(loader: Any, node: Any) -> Any:
        text, kind = node.value, node.tag.rpartition(":")[2]
        value = getattr(loader, f"construct_yaml_{kind}")(node)
        if not _PLAIN_SCALAR.fullmatch(text):
            digits = re.sub(r"^([-+]?)0[0_]*(?=[0-9])", r"\1", text)
            plain = f"{digits} or {value}" if _PLAIN_SCALAR.fullmatch(digits) and digits != str(value) else value
            meant = "1m30s or 1h30m for a duration" if ":" in text else str(plain).lower()
            what = f"`{text}` is {str(value).lower()} in YAML; write what is meant: {meant}, or a text in quotes"
            raise wrong(what, node)
        return value

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    for kind in ("int", "float", "bool") if strict else ():
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", scalar)
    try:
        return yaml.load(data.decode("utf-8"), Loader=Loader)
    except UnicodeDecodeError as error:
        raise AutorlError(f"not UTF-8 (byte {error.start})", where=where, next_step="save it as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = f"not readable as YAML{line}: {getattr(error, 'problem', None) or error}"
        raise AutorlError(what, where=where, next_step="correct that line") from None
    except (RecursionError, ValueError, TypeError) as error:
        raise AutorlError(f"not readable as YAML: {error}", where=where, next_step="simplify it") from None


def read_yaml(path: Path) -> Any:
    """Return the value of a YAML file. Raises AutorlError: it is absent, unreadable or not YAML."""
    try:
        return parse_yaml(read_bytes(path, max_bytes=MAX_YAML_BYTES), path)
    except FileNotFoundError:
        raise AutorlError("there is no such file", where=path, next_step="check the path") from None
    except (OSError, ValueError) as error:
        advice = "check the path and its permissions"
        raise AutorlError(f"can't be read: {error}", where=path, next_step=advice) from None
