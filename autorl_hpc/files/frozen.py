"""The code that an experiment's jobs run, under the hash of its content: `code/<hash>/`."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from autorl_hpc.files.hashing import file_sha256, walk_files
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.records.canonical import canonical_json

Parts = dict[str, tuple[Path, list[str]]]
"""Where each frozen folder comes from, and its files, by its place."""


def code_hash(frozen: Parts) -> str:
    """The hash that the frozen code is named by: over every file's place and content."""
    rows = {
        f"{name}/{file}".lstrip("/"): file_sha256(folder / file)
        for name, (folder, files) in frozen.items()
        for file in files
    }
    return hashlib.sha256(canonical_json(sorted(rows.items()))).hexdigest()


def frozen_is_whole(experiment: ExperimentDir, wanted: str) -> bool:
    """Whether the frozen code still has the hash that it is named by, and holds nothing that the hash passes over.

    Compiled Python is such a thing: jobs write none (PYTHONDONTWRITEBYTECODE), but would read it in place of the source.
    """
    folder = experiment.code / wanted
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            if name.endswith(".pyc") or (Path(parent) / name).is_symlink():
                return False
    return folder.is_dir() and code_hash({"": (folder, walk_files(folder))}) == wanted
