"""Unpacking a bundle: everything is checked before anything is installed, and each part is installed by a rename.

Files go to folders beside their last place; what a killed unpacking leaves there is removed by the next one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from autorl_hpc.errors import AutorlError, Exit, from_os_error
from autorl_hpc.files.archive import Damaged, Reading, packing_of
from autorl_hpc.files.environments import IMAGE, LOCK, WHEELS
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import MANIFEST_NAME, read_manifest, verify_model
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.exchange import BundleManifest, BundlePart, StoreFile, StoreManifest
from autorl_hpc.records.names import MODEL_NAME_PATTERN, is_name
from autorl_hpc.stage.bundle import BUNDLE_NAME
from autorl_hpc.stage.environments import PREFIX, build_environment, install_image, python_tag
from autorl_hpc.stage.models import check_unpacked, full_name
from autorl_hpc.stage.progress import Say, in_words, progress
from autorl_hpc.stage.space import check_space
from autorl_hpc.stage.tasks import replace_folder
from autorl_hpc.stage.work import work_folder
from autorl_hpc.tasks.loader import load_task
from autorl_hpc.tasks.staged import verify_staged_task

MAX_HEAD_BYTES = 64 * 1024 * 1024
ROW_BYTES = 4096
"""Of a file in the archive beside its data: headers and filling."""

CHUNK_BYTES = 1024 * 1024
PART_OF_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+!-]{0,254}")
"""Names in a bundle: nothing hidden, no `..`, nothing that a shell or a terminal would take for more than a name."""


@dataclass(frozen=True)
class Unpacked(Root):
    """The unpacked files, laid out as a root of their own."""

    store_place: Path
    vault_place: Path

    @property
    def store(self) -> Path:
        return self.store_place

    @property
    def vault(self) -> Path:
        return self.vault_place


def unpack(
    root: Root, bundle: Path, names: list[str], *, again: bool = False, say: Say = lambda _: None
) -> list[StoreManifest]:
    """Stages what `bundle` holds, or of it what is named.

    Raises:
        AutorlError: it is no bundle, was cut or altered, doesn't fit this version, or is too large for the disk.
    """
    try:
        packing = packing_of(bundle)
        if packing is None:
            raise _refused(bundle, f"{bundle.name} is no bundle: neither tar nor packed by gzip or zstd")
        with ExitStack() as stack:
            reading = Reading(bundle, packing, MAX_HEAD_BYTES)
            stack.callback(reading.close)
            with reading.damage():
                files = reading.files()
                manifest = _head(bundle, next(files, None))
            parts = _chosen(bundle, manifest, names)
            total = sum(file.size_bytes for file in manifest.files if _part_of(file.path, parts) is not None)
            check_space(root.store, total, f"the bundle {bundle.name}")
            root.vault.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(root.vault, 0o700)
            place = Unpacked(
                root.path,
                stack.enter_context(work_folder(root.store, "bundle")),
                stack.enter_context(work_folder(root.vault, "bundle", mode=0o700)),
            )
            say(f"{bundle.name}: unpacking {', '.join(map(_shown, parts))}, {in_words(total)}")
            reading.bound.allowed = sum(f.size_bytes + ROW_BYTES for f in manifest.files) + MAX_HEAD_BYTES
            with reading.damage(), progress(bundle.name, say) as shown:
                done = 0
                missing = {file.path: file for file in manifest.files}
                for name, size_bytes, data in files:
                    row = missing.pop(name, None)
                    if row is None or row.size_bytes != size_bytes:
                        raise Damaged(f"{name[:200]!r} is not as {BUNDLE_NAME} says")
                    if _part_of(name, parts) is not None:
                        _write(place, row, data)
                        done += size_bytes
                        shown(done, total)
                if missing:
                    raise Damaged(f"it ends without {min(missing)}")
            for part in parts:
                _check(bundle, place, part)
            return [staged for part in parts for staged in _install(root, bundle, place, part, again, say)]
    except Damaged as error:
        raise _refused(bundle, f"{bundle.name} is damaged: {error}") from None
    except OSError as error:
        raise from_os_error(error, f"unpacking {bundle.name}", error.filename or root.path) from error


def _refused(bundle: Path, what: str) -> AutorlError:
    return AutorlError(
        what,
        where=bundle,
        next_step="copy it again from where it was made, and compare its sha256; or make it again: "
        "autorl-hpc stage NAMES --bundle FILE",
        exit_code=Exit.FAILED,
    )


def _head(bundle: Path, first: tuple[str, int, IO[bytes]] | None) -> BundleManifest:
    """BUNDLE.json, with every name in it checked.

    Raises:
        AutorlError, Damaged: it is not there, or says what no bundle of ours says.
    """
    if first is None or first[0] != BUNDLE_NAME or first[1] > MAX_HEAD_BYTES:
        raise _refused(bundle, f"{bundle.name} is no bundle: it doesn't begin with {BUNDLE_NAME}")
    try:
        value = json.loads(first[2].read())
    except RecursionError:
        raise Damaged(f"{BUNDLE_NAME} is nested too deeply") from None
    manifest = parse_record(BundleManifest, value, f"{bundle}:{BUNDLE_NAME}", next_step="make the bundle again")
    for part in manifest.parts:
        if not (re.fullmatch(MODEL_NAME_PATTERN, part.name) if part.kind == "model" else is_name(part.name)):
            raise Damaged(f"{part.name[:100]!r} is no name")
    paths = [file.path for file in manifest.files]
    if len(set(paths)) != len(paths):
        raise Damaged(f"a file stands twice in {BUNDLE_NAME}")
    known = set(paths)
    for path in paths:
        steps = path.split("/")
        above = next((a for a in ("/".join(steps[:depth]) for depth in range(1, len(steps))) if a in known), None)
        if above is not None:
            raise Damaged(f"{path[:200]!r} lies below {above[:200]!r}, which is a file")
        if not all(PART_OF_PATH.fullmatch(step) for step in path.split("/")) or _part_of(path, manifest.parts) is None:
            raise Damaged(f"{path[:200]!r} belongs to none of its parts")
    return manifest


def _places(part: BundlePart) -> tuple[str, ...]:
    """Where the files of a part lie in a bundle."""
    if part.kind == "model":
        return (f"store/models/{part.name}/",)
    if part.kind == "task":
        return (f"store/tasks/{part.name}/", f"vault/{part.name}/")
    return (f"store/envs/{part.name}/",)


def _part_of(path: str, parts: tuple[BundlePart, ...]) -> BundlePart | None:
    return next((part for part in parts if path.startswith(_places(part))), None)


def _shown(part: BundlePart) -> str:
    return f"{PREFIX}{part.name}" if part.kind == "environment" else part.name


def _chosen(bundle: Path, manifest: BundleManifest, names: list[str]) -> tuple[BundlePart, ...]:
    by_name = {_shown(part): part for part in manifest.parts}
    chosen = [full_name(name) for name in names] or list(by_name)
    unknown = next((name for name in chosen if name not in by_name), None)
    if unknown is not None:
        raise AutorlError(
            f"{bundle.name} holds no {unknown}", where=bundle, next_step=f"it holds {', '.join(sorted(by_name))}"
        )
    parts = tuple(by_name[name] for name in dict.fromkeys(chosen))
    for part in parts:
        if part.kind == "task":
            load_task(part.name)  # of another version or another user: say so before anything is unpacked
        facts = part.environment
        if part.kind == "environment" and (facts is None or part.content_hash is None):
            raise Damaged(f"{_shown(part)} is not described")
        if facts is not None and facts.kind == "venv" and facts.python != python_tag():
            raise AutorlError(
                f"{_shown(part)} was made for {facts.python}, this Python is {python_tag()}",
                where=bundle,
                next_step="run autorl-hpc with that Python, or stage the environment for this one where there is network",
                exit_code=Exit.ENVIRONMENT,
            )
    return parts


def _write(place: Unpacked, row: StoreFile, data: IO[bytes]) -> None:
    """Writes a file and checks its hash as it goes."""
    top, _, rest = row.path.partition("/")
    target = (place.vault if top == "vault" else place.store) / rest
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        while chunk := data.read(CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != row.sha256:
        raise Damaged(f"{row.path} has sha256 {digest.hexdigest()}, {BUNDLE_NAME} says {row.sha256}")


def _check(bundle: Path, place: Unpacked, part: BundlePart) -> None:
    """A part is what its own manifest says, and what this version of the suite would have staged.

    Raises:
        AutorlError: it isn't.
    """
    try:
        if part.kind == "model":
            verify_model(place, part.name)
            check_unpacked(place.model(part.name), _manifest(place.model(part.name), part))
        elif part.kind == "task":
            verify_staged_task(place, load_task(part.name))
            for folder in (place.task_store(part.name), place.task_vault(part.name)):
                _manifest(folder, part)
        else:
            folder = place.environments / part.name
            kept = {IMAGE} if part.environment and part.environment.kind == "image" else {LOCK, WHEELS}
            if {path.name for path in folder.iterdir()} != kept:
                raise AutorlError(f"{_shown(part)} has not the files of an environment")
    except AutorlError as error:
        raise _refused(bundle, f"{_shown(part)} in {bundle.name}: {error.what}") from None


def _install(root: Root, bundle: Path, place: Unpacked, part: BundlePart, again: bool, say: Say) -> list[StoreManifest]:
    """Puts a checked part in its place, unless the same is there."""
    origin = f"bundle {bundle.name}"
    if part.kind == "environment":
        work = place.environments / part.name
        install = install_image if part.environment and part.environment.kind == "image" else build_environment
        return [install(root, part.name, work, origin, expected=part.content_hash, say=say)]
    folders = [(place.model(part.name), root.model(part.name), False)]
    if part.kind == "task":
        folders = [
            (place.task_store(part.name), root.task_store(part.name), False),
            (place.task_vault(part.name), root.task_vault(part.name), True),
        ]
    staged, kept = [], False
    for fresh, target, private in folders:
        manifest = _manifest(fresh, part)
        staged.append(manifest)
        if not again and (target / MANIFEST_NAME).exists():
            if _manifest(target, part).files != manifest.files:
                raise AutorlError(
                    f"{part.name} is staged already, with other content than in {bundle.name}",
                    where=target,
                    next_step="add --again to put the bundle's in its place",
                )
            kept = True
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_folder(fresh, target, private=private)
        say(f"{part.name}: installed {len(manifest.files)} {'held-out files' if private else 'files'}")
    if kept:
        say(f"{part.name}: staged already; verifying")
        verify_model(root, part.name) if part.kind == "model" else verify_staged_task(root, load_task(part.name))
    return staged


def _manifest(folder: Path, part: BundlePart) -> StoreManifest:
    manifest = read_manifest(folder, name=part.name, stage_command=f"autorl-hpc stage {part.name}")
    if manifest.name != part.name or (manifest.kind == "model") != (part.kind == "model"):
        raise AutorlError(f"the manifest of {part.name} is that of {manifest.name}", where=folder / MANIFEST_NAME)
    return manifest
