"""Tolerant listing and reading: on a shared file system any OSError on a read means "look again".

Waiters list directories and never wait on `exists()` of a name: an NFS client may go on believing for 30 s that a
name it once missed is not there, while the listing already shows it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.atomic import TEMPORARY_PREFIX

RETRIES = 5
"""A stale handle or a remote I/O error clears at the next open; five looks in a second see it gone."""

RETRY_PAUSE_S = 0.05
UNSEEN_PATIENCE_S = 40.0
"""An NFS client goes on for 30 s with a name that it once missed, if nothing makes it ask; a listing most often does."""

UNSEEN_PAUSE_S = 0.1
MAX_RECORD_BYTES = 32 * 1024 * 1024
"""No record of ours comes near this; a larger file under a record's name is damage, not data."""

_STEP_BYTES = 1 << 16

MAX_UNPACKED_BYTES = 512 * 1024 * 1024
"""Of an items file: some hundred bytes an item."""


def list_names(folder: Path) -> list[str]:
    """The sorted names in `folder`, unfinished writes left out. A folder that is not there is empty.

    Raises:
        OSError: the folder is there and can't be listed after several looks.
    """
    for attempt in range(RETRIES):
        try:
            return sorted(name for name in os.listdir(folder) if not name.startswith(TEMPORARY_PREFIX))
        except FileNotFoundError:
            return []
        except (NotADirectoryError, PermissionError):
            raise
        except OSError as error:
            if attempt == RETRIES - 1 or error.errno == errno.ELOOP:
                raise
            time.sleep(RETRY_PAUSE_S * 2**attempt)
    return []


def read_bytes(path: Path, *, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """The whole file, read through a fresh open (which is what makes NFS look at the server).

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is larger than `max_bytes`, or a FIFO, a socket or a device.
        OSError: it can't be read after several looks.
    """
    for attempt in range(RETRIES):
        try:
            data = _read_file(path, max_bytes + 1)
            break
        except FileNotFoundError:
            raise
        except (IsADirectoryError, PermissionError):
            raise
        except OSError:
            if attempt == RETRIES - 1:
                raise
            time.sleep(RETRY_PAUSE_S * 2**attempt)
    if len(data) > max_bytes:
        raise ValueError(f"{path} is larger than {max_bytes} bytes")
    return data


def says(path: Path, parts: Iterable[bytes]) -> bool:
    """Whether the file is there and is just these parts, one after the other."""
    try:
        with open(_open_file(path)[0], "rb") as file:
            return all(file.read(len(part)) == part for part in parts) and not file.read(1)
    except (OSError, ValueError):
        return False


def _read_file(path: Path, limit: int) -> bytes:
    """At most `limit` bytes."""
    fd, size = _open_file(path)
    try:
        found: list[bytes] = []
        left, step = limit, size + 1  # most often all of it in one read, and a second one that finds the end
        while left > 0 and (data := os.read(fd, min(step, left))):
            found.append(data)
            left, step = left - len(data), max(_STEP_BYTES, size)
        return found[0] if len(found) == 1 else b"".join(found)
    finally:
        os.close(fd)


def _open_file(path: Path) -> tuple[int, int]:
    """A descriptor and the size of nothing but a file, opened without waiting for a FIFO's other end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is no file")
    except BaseException:
        os.close(fd)
        raise
    return fd, status.st_size


def read_listed(path: Path) -> bytes:
    """The whole file, whose name a listing has shown. As long as listings go on to show it, absent means not yet seen.

    Raises:
        FileNotFoundError: it is no longer listed, or has not come to be seen for longer than any client keeps a name missed.
        ValueError, OSError: see `read_bytes`.
    """
    deadline = time.monotonic() + UNSEEN_PATIENCE_S
    while True:
        try:
            return read_bytes(path)
        except FileNotFoundError:
            if path.name not in list_names(path.parent) or time.monotonic() > deadline:
                raise
        time.sleep(UNSEEN_PAUSE_S)


def gunzip(data: bytes, *, max_bytes: int = MAX_UNPACKED_BYTES) -> bytes:
    """The bytes that were packed by gzip.

    Raises:
        ValueError: it is no gzip, or unpacks to more than `max_bytes`: a few kilobytes may hold gigabytes.
    """
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        found = unpacker.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"not readable as gzip ({error})") from None
    if len(found) > max_bytes:
        raise ValueError(f"it unpacks to more than {max_bytes} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("not readable as gzip (it breaks off, or something follows)")
    return found


def read_json(path: Path) -> Any:
    """The JSON value in `path`.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is not JSON in UTF-8 (json.JSONDecodeError is a ValueError), or too large.
    """
    try:
        return json.loads(read_bytes(path))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error


def read_json_or_none(path: Path) -> Any | None:
    """The JSON value in `path`, or None where it is absent or unreadable right now."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


# YAML files of users, read so that a mistake is named by file and line.

MAX_YAML_BYTES = 1024 * 1024


def parse_yaml(data: bytes, where: str | Path) -> Any:
    """The value of a YAML text (the safe loader: no objects).

    Raises:
        AutorlError: it is not YAML, a key stands twice, or it is not UTF-8.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """The safe loader, which also refuses a key that stands twice."""

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key.value}` stands twice", key.start_mark
                )
            seen.add(str(key.value))
        loader.flatten_mapping(node)
        return dict(loader.construct_pairs(node, deep=True))

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        return yaml.load(data.decode("utf-8"), Loader=Loader)
    except UnicodeDecodeError as error:
        raise AutorlError(f"not UTF-8 (byte {error.start})", where=where, next_step="save it as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise AutorlError(
            f"not readable as YAML{line}: {problem}", where=where, next_step="correct that line"
        ) from None
    except (RecursionError, ValueError, TypeError) as error:
        raise AutorlError(f"not readable as YAML: {error}", where=where, next_step="simplify it") from None


def read_yaml(path: Path) -> Any:
    """The value of a YAML file.

    Raises:
        AutorlError: it is absent, unreadable or no YAML.
    """
    try:
        data = read_bytes(path, max_bytes=MAX_YAML_BYTES)
    except FileNotFoundError:
        raise AutorlError("there is no such file", where=path, next_step="check the path") from None
    except (OSError, ValueError) as error:
        raise AutorlError(
            f"can't be read: {error}", where=path, next_step="check the path and its permissions"
        ) from None
    return parse_yaml(data, path)
