"""Fetching a task's source files from where task.yaml says they are, each against its pin."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import Root
from autorl_hpc.records.task import SourceFile
from autorl_hpc.stage.derive import is_pinned, make_derived
from autorl_hpc.stage.download import PATIENCE, Patience, Pin, fetch
from autorl_hpc.stage.progress import Say
from autorl_hpc.stage.sources import Address, address_of
from autorl_hpc.stage.web import NoNetwork
from autorl_hpc.tasks.loader import Task


@dataclass(frozen=True)
class Wanted:
    """A source file and where it is fetched from; no address: only a person can get it."""

    pinned: SourceFile
    address: Address | None


def wanted_sources(task: Task) -> list[Wanted]:
    """The task's source files.

    Raises:
        AutorlError: an address in task.yaml is none.
    """
    found = []
    for pinned in task.file.sources:
        try:
            url = pinned.derived.url if pinned.derived else pinned.url
            found.append(Wanted(pinned, address_of(url) if url else None))
        except AutorlError as error:
            raise AutorlError(
                f"field `sources`, {pinned.file}: {error.what}",
                where=task.folder / "task.yaml",
                next_step=error.next_step,
            ) from None
    return found


def fetch_sources(
    root: Root, task: Task, wanted: list[Wanted], *, say: Say = lambda _: None, patience: Patience = PATIENCE
) -> Path:
    """The folder with the task's source files, after all that have an address were downloaded into it.

    Raises:
        NoNetwork: with the list of what to fetch elsewhere.
        AutorlError: a file could not be had, or is not the pinned one.
    """
    folder = sources_folder(root, task.name)
    for place in (root.vault, folder.parent, folder):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(place, 0o700)
    for one in wanted:
        target = folder / one.pinned.file
        if one.address is None:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        say(f"{task.name}: {one.pinned.file} from {one.address.shown}")
        try:
            if one.pinned.derived is None:
                fetch(one.address, target, Pin(sha256=one.pinned.sha256), say=say, patience=patience)
            elif not target.is_file() or is_pinned(target, one.pinned) is not None:
                raw = target.with_name(f"{target.name}.made-of")
                fetch(one.address, raw, say=say, patience=patience)
                try:
                    make_derived(raw, target, one.pinned.derived)
                finally:
                    raw.unlink()
        except NoNetwork as error:
            raise NoNetwork(
                error.what,
                where=error.where,
                fault=error.fault,
                next_step=_ways_out(task, wanted),
                exit_code=Exit.ENVIRONMENT,
            ) from None
    return folder


def sources_folder(root: Root, name: str) -> Path:
    """Where downloads are kept until they are staged: in the vault, since held-out items are made of them."""
    return root.vault / ".sources" / name


def remove_sources(root: Root, name: str) -> None:
    """Frees what was downloaded."""
    shutil.rmtree(sources_folder(root, name), ignore_errors=True)


def _ways_out(task: Task, wanted: list[Wanted]) -> str:
    lines = [
        f"either run it where there is network, most often on the login node: autorl-hpc stage {task.name}",
        f"         or lay these files into a folder DIR and run: autorl-hpc stage {task.name} --from DIR",
    ]
    for one in wanted:
        place = one.address.shown if one.address else one.pinned.url or task.file.source
        if one.pinned.derived is not None:
            place = f"the first {one.pinned.derived.n} rows of {place}"
        optional = "  (optional)" if one.pinned.optional else ""
        lines.append(f"           {one.pinned.file}  {place}  sha256 {one.pinned.sha256}{optional}")
    lines.append(
        f"         or make a bundle elsewhere: autorl-hpc stage {task.name} --bundle FILE.tar.gz; here: --from FILE.tar.gz"
    )
    return "\n".join(lines)
