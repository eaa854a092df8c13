"""Hashes of files and of folders."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from autorl_hpc.files.faults import again
from autorl_hpc.records.canonical import canonical_json

CHUNK_BYTES = 4 * 1024 * 1024
SKIPPED = ("__pycache__", ".git", ".mypy_cache", ".ruff_cache", ".pytest_cache")
"""Folders that are no part of code: they come and go with the interpreter."""


def file_sha256(path: Path) -> str:
    """sha256 of a file, in hex; read anew should the file system fail on the way."""
    return again(lambda: _file_sha256(path))


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while True:
            got = file.readinto(buffer)
            if not got:
                return digest.hexdigest()
            digest.update(view[:got])


def walk_files(folder: Path) -> list[str]:
    """Relative paths of the regular files below `folder`, sorted; caches left out, links never followed."""
    found: list[str] = []
    for parent, folders, names in os.walk(folder, followlinks=False):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        for name in names:
            path = Path(parent) / name
            if not name.endswith(".pyc") and path.is_file() and not path.is_symlink():
                found.append(path.relative_to(folder).as_posix())
    return sorted(found)


def tree_sha256(folder: Path, files: Iterable[str] | None = None) -> str:
    """A hash over (relative path, sha256) of the files below `folder`."""
    names = walk_files(folder) if files is None else sorted(files)
    return hashlib.sha256(canonical_json([[name, file_sha256(folder / name)] for name in names])).hexdigest()
