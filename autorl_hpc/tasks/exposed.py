"""What agents get of an rl-smith folder beside its training rows, and what must not lie in it: copies of held-out rows."""

from __future__ import annotations

import posixpath
import zlib
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.tasks.folders import DATA_FOLDER, code_files
from autorl_hpc.tasks.smith_rows import MAX_DATA_BYTES, question_key, questions_in

TRAIN_NAME = "train.jsonl"
"""Of the training rows in the workspace's data/."""
GZIP_MARK = b"\x1f\x8b"


class NotExposed(ValueError):
    """A name that `expose_files` can't hold; the words say why."""


def exposed_names(folder: Path, given: Any) -> list[str]:
    """The files that the field `expose_files` names, as plain paths below the folder.

    Raises:
        NotExposed: no list of names; or one names no file of the folder, one among the data, one behind a link, or one that
            would lie where the training rows do.
    """
    given = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise NotExposed(f"a list of file names is expected, not {given!r:.100}")
    names: list[str] = []
    for name in given:
        plain = posixpath.normpath(name)
        _check_name(folder, name, plain)
        if plain not in names:
            names.append(plain)
    return names


def _check_name(folder: Path, name: str, plain: str) -> None:
    parts = plain.split("/")
    path = folder / plain
    if name.startswith("/") or parts[0] == ".." or not name:
        raise NotExposed(f"{name}: no file of this folder")
    # Both: by its name also where a file system takes DATA/ for data/, and by what it is.
    if parts[0].lower() == DATA_FOLDER.rstrip("/") or path.resolve().is_relative_to((folder / DATA_FOLDER).resolve()):
        raise NotExposed(f"{name}: agents get training rows alone")
    if any((folder / "/".join(parts[:depth])).is_symlink() for depth in range(1, len(parts) + 1)):
        raise NotExposed(f"{name}: a link; only files of the folder itself can be given")
    if not path.is_file():
        raise NotExposed(f"{name}: no file of this folder")
    if parts[0].lower() == TRAIN_NAME:
        raise NotExposed(f"{name}: it would lie in the place of the training rows")


def refuse_held_out(folder: Path, held_out: Iterable[Any]) -> None:
    """Looks for held-out rows in all files of the folder that are frozen or given to agents.

    A file is one with rows if it is JSON, or JSON lines, packed by gzip or not, and has an object that asks one of the questions.
    Rows in another form (an archive, a table of a spreadsheet) are not seen.

    Args:
        held_out: the questions.

    Raises:
        AutorlError: naming the file.
    """
    wanted = {question_key(question) for question in held_out}
    for name in code_files(folder):
        if _holds(folder / name, wanted):
            raise AutorlError(
                f"{name} holds held-out rows with their questions: what lies outside {DATA_FOLDER} is frozen with each "
                "experiment, and may be given to agents",
                where=folder / name,
                next_step=f"move it into {DATA_FOLDER} or out of the folder",
            )


def _holds(path: Path, wanted: Set[str]) -> bool:
    data = reading.read_bytes(path, max_bytes=MAX_DATA_BYTES)
    if data.startswith(GZIP_MARK):
        try:
            data = zlib.decompressobj(wbits=31).decompress(data, MAX_DATA_BYTES)
        except zlib.error:
            return False
    return any(question_key(question) in wanted for question in questions_in(data))


def write_exposed(folder: Path, names: Sequence[str], out: Path) -> None:
    """Lays exposed files below `out`; FileExistsError where something lies there already."""
    for name in names:
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "xb") as file:
            file.write((folder / name).read_bytes())
