"""Manifests as files of the workspace: listed, told apart, read and validated by descriptor."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from autorl_hpc.errors import AutorlError, Refused
from autorl_hpc.files.faults import again, is_cluster_error
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.exchange import Manifest
from autorl_hpc.states import Fault

MAX_MANIFEST_BYTES = 64 * 1024
"""A manifest is a path and a note."""


class TryAgain(Exception):
    """The file system failed; the manifest stays where it is."""


def manifest_names(folder: int) -> list[str]:
    return sorted(n for n in again(lambda: os.listdir(folder)) if n.endswith(".json") and not n.startswith("."))


def identity(folder: int, name: str) -> tuple[str, int, int] | None:
    """What tells one file from another that is renamed over it; None if it is gone.

    Raises:
        OSError: the file system failed.
    """
    try:
        info = again(lambda: os.stat(name, dir_fd=folder, follow_symlinks=False))
    except OSError as error:
        if is_cluster_error(error):
            raise
        return None
    return name, info.st_ino, info.st_mtime_ns


def read_manifest(folder: int, name: str, manifest_id: str) -> Manifest:
    """Reads and validates a manifest by descriptor.

    Raises:
        Refused: it is no regular file, too large, no JSON, or not a manifest; the field is named.
        TryAgain: the file system failed.
    """
    advice = 'write {"model_path": "output/v1"} to a temporary name and rename it, or use ./submit'
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if is_cluster_error(error):
            raise TryAgain(str(error)) from error
        raise Refused(
            "manifest_unreadable", f"the manifest can't be opened: {error.strerror}", advice, Fault.AGENT
        ) from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise Refused("manifest_unreadable", "the manifest is no regular file", advice, Fault.AGENT)
        data = b""
        while info.st_size <= MAX_MANIFEST_BYTES >= len(data) and (part := os.read(fd, MAX_MANIFEST_BYTES + 1)):
            data += part
        if max(info.st_size, len(data)) > MAX_MANIFEST_BYTES:
            raise Refused(
                "manifest_too_large",
                f"the manifest has {info.st_size} bytes, at most {MAX_MANIFEST_BYTES} are read",
                advice,
                Fault.AGENT,
            )
    except OSError as error:
        raise TryAgain(str(error)) from error
    finally:
        os.close(fd)
    manifest = parse_manifest(data, advice)
    if manifest.id is not None and manifest.id != manifest_id:
        what = f"manifest: field `id` is {manifest.id}, the file is {manifest_id}.json"
        raise Refused("manifest_invalid", what, "leave `id` out, or name the file by it", Fault.AGENT)
    return manifest


def parse_manifest(data: bytes, advice: str) -> Manifest:
    """A manifest from its bytes.

    Raises:
        Refused: it is empty, no JSON, or a field is wrong.
    """
    if not data.strip():
        raise Refused("manifest_empty", "the manifest is empty", advice, Fault.AGENT)
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused("manifest_not_json", f"the manifest is not JSON: {error}"[:300], advice, Fault.AGENT) from None
    try:
        return parse_record(Manifest, value, "manifest")
    except AutorlError as error:
        raise Refused("manifest_invalid", f"manifest: {error.what}"[:500], advice, Fault.AGENT) from None
