"""Bundles: staged tasks, models and environments in one tar archive for a cluster without network. The first file, BUNDLE.json,
lists the others with size and sha256."""

from __future__ import annotations

import io
import json
import os
import re
import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from autorl_hpc.errors import AutorlError, Exit, from_os_error
from autorl_hpc.files import archive, atomic
from autorl_hpc.files.archive import ArchiveReader, DamagedArchive, Hashed
from autorl_hpc.files.checkpoint import file_sha256
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import IMAGE, LOCK, MANIFEST_NAME, WHEELS, find_environment, read_manifest, verify_model
from autorl_hpc.records import readable_json
from autorl_hpc.records.base import MODEL_NAME_PATTERN, is_name, parse_record
from autorl_hpc.records.exchange import BundleManifest, BundlePart, StoreFile, StoreManifest
from autorl_hpc.stage.environments import PREFIX, build_environment, install_image, python_tag
from autorl_hpc.stage.models import check_unpacked, full_name, tell_change
from autorl_hpc.stage.sources import Say, check_space, in_words, progress, work_folder
from autorl_hpc.stage.tasks import replace_folder
from autorl_hpc.tasks.heldout import verify_staged_task
from autorl_hpc.tasks.loader import load_task

BUNDLE_NAME = "BUNDLE.json"
MODE = 0o600  # mode of the bundle; it may hold held-out items
STORE_MODE, VAULT_MODE = 0o444, 0o400


def check_bundle_name(out: Path) -> None:
    """Check `--bundle out` before anything is staged. Raises AutorlError: unknown suffix, no packing module, no such folder."""
    if archive.suffix_of(out) == ".tar.zst":
        archive.zstandard_module()
    folder = out.absolute().parent
    if not folder.is_dir():
        raise AutorlError("there is no such folder", where=folder, next_step="make it, or choose another")


def make_bundle(root: Root, staged: list[StoreManifest], out: Path, say: Say = lambda _: None) -> dict[str, Any]:
    """Pack the parts that `staged` describes (verified just before) into `out`; return its facts for `--json`. Raises AutorlError."""
    parts: dict[tuple[str, str], BundlePart] = {}
    places: dict[str, tuple[StoreFile, Path]] = {}
    for one in staged:
        part, files = _describe(root, one)
        parts[part.kind, part.name] = part
        places |= {file.path: (file, path) for file, path in files}
    ordered = [places[name] for name in sorted(places)]
    described = tuple(parts[key] for key in sorted(parts))
    manifest = BundleManifest(parts=described, files=tuple(file for file, _ in ordered))
    total = sum(file.size_bytes for file in manifest.files)
    out = out.absolute()
    temporary = out.parent / f"{atomic.TEMPORARY_PREFIX}{out.name}.{os.getpid()}.{secrets.token_hex(6)}"
    try:
        check_space(out.parent, total, f"the bundle {out.name}")
        say(f"{out.name}: packing {len(ordered)} files, {in_words(total)}")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE), "wb") as raw:
            sink = Hashed(raw)
            with archive.writing(sink, archive.suffix_of(out)) as tar:
                head = readable_json(manifest.model_dump(mode="json"))
                archive.add(tar, BUNDLE_NAME, len(head), STORE_MODE, io.BytesIO(head))
                done, shown = 0, progress(out.name, say)
                for row, path in ordered:
                    mode = VAULT_MODE if row.path.startswith("vault/") else STORE_MODE
                    with open(path, "rb") as file:
                        data = Hashed(file)
                        if os.fstat(file.fileno()).st_size == row.size_bytes:
                            archive.add(tar, row.path, row.size_bytes, mode, data)
                    if data.digest() != row.sha256:
                        what, again = "this file was changed while it was packed", "run the same command again"
                        raise AutorlError(what, where=path, next_step=again, exit_code=Exit.FAILED)
                    done += row.size_bytes
                    shown(done, total)
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(temporary, out)
        atomic.fsync_directory(out.parent)
    except OSError as error:
        raise from_os_error(error, f"writing the bundle {out.name}", error.filename or out) from error
    finally:
        atomic.unlink_quietly(temporary)
    if any(part.kind == "task" for part in manifest.parts):
        say(f"{out.name} holds held-out items: keep it where no agent can read it")
    say(f"{out.name}: {in_words(sink.size_bytes)}, sha256 {sink.digest()}")
    return {"kind": "bundle", "path": str(out), "sha256": sink.digest(), "size_bytes": sink.size_bytes}


def _describe(root: Root, manifest: StoreManifest) -> tuple[BundlePart, list[tuple[StoreFile, Path]]]:
    """Return the bundle part and files of a manifest. A task has two manifests and is one part."""
    name, digest, files = manifest.name, manifest.content_hash, list(manifest.files)
    if manifest.kind == "environment":
        place, folder = f"store/envs/{name}", find_environment(root, name, digest)[0]
        # No venv: it is rebuilt from the same wheels where the bundle is unpacked.
        files = [f for f in files if f.path in (LOCK, IMAGE) or f.path.startswith(f"{WHEELS}/")]
        part = BundlePart(name=name, kind="environment", content_hash=digest, environment=manifest.environment)
    else:
        place, folder = {
            "model": (f"store/models/{name}", root.model(name)),
            "task": (f"store/tasks/{name}", root.task_store(name)),
            "vault": (f"vault/{name}", root.task_vault(name)),
        }[manifest.kind]
        own = folder / MANIFEST_NAME
        files.append(StoreFile(path=MANIFEST_NAME, sha256=file_sha256(own), size_bytes=own.stat().st_size))
        part = BundlePart(name=name, kind="model" if manifest.kind == "model" else "task", content_hash=digest)
    return part, [(f.model_copy(update={"path": f"{place}/{f.path}"}), folder / f.path) for f in files]


# --- unpacking: everything is checked before anything is installed, by rename from work folders beside the final place

MAX_HEAD_BYTES = 64 * 1024 * 1024
ROW_BYTES = 4096  # archive overhead per file: header and padding
PART_OF_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+!-]{0,254}")
"""Allowed path parts in a bundle: not hidden, no `..`, no character that is special to a shell or terminal."""


@dataclass(frozen=True)
class Unpacked(Root):
    """The unpacked files, laid out as a root of their own."""

    work: dict[str, Path]  # the work folders of `store` and `vault`

    @property
    def store(self) -> Path:  # type: ignore[override]
        return self.work["store"]

    @property
    def vault(self) -> Path:  # type: ignore[override]
        return self.work["vault"]


def unpack(
    root: Root, bundle: Path, names: list[str], *, again: bool = False, say: Say = lambda _: None
) -> list[StoreManifest]:
    """Stage the parts of `bundle`, all or those in `names`. Raises AutorlError: it is no bundle, truncated, altered, of another
    version, or too large for the disk."""
    try:
        packing = archive.packing_of(bundle)
        if packing is None:
            raise _refused(bundle, f"{bundle.name} is not a bundle: neither tar nor packed by gzip or zstd")
        with ExitStack() as stack:
            reading = ArchiveReader(bundle, packing, MAX_HEAD_BYTES)
            stack.callback(reading.close)
            with reading.damage():
                files = reading.files()
                manifest = _head(bundle, next(files, None))
            parts = _chosen(bundle, manifest, names)
            total = sum(file.size_bytes for file in manifest.files if _part_of(file.path, parts) is not None)
            check_space(root.store, total, f"the bundle {bundle.name}")
            root.vault.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(root.vault, 0o700)
            store = stack.enter_context(work_folder(root.store, "bundle"))
            vault = stack.enter_context(work_folder(root.vault, "bundle", mode=0o700))
            place = Unpacked(root.path, {"store": store, "vault": vault})
            say(f"{bundle.name}: unpacking {', '.join(map(_shown, parts))}, {in_words(total)}")
            reading.bound.allowed = sum(f.size_bytes + ROW_BYTES for f in manifest.files) + MAX_HEAD_BYTES
            with reading.damage():
                done, shown = 0, progress(bundle.name, say)
                missing = {file.path: file for file in manifest.files}
                for name, size_bytes, data in files:
                    row = missing.pop(name, None)
                    if row is None or row.size_bytes != size_bytes:
                        raise DamagedArchive(f"{name[:200]!r} is not as {BUNDLE_NAME} says")
                    if _part_of(name, parts) is not None:
                        top, _, rest = name.partition("/")
                        archive.write_hashed(place.work[top] / rest, data, row, BUNDLE_NAME)
                        done += size_bytes
                        shown(done, total)
                if missing:
                    raise DamagedArchive(f"it ends without {min(missing)}")
            for part in parts:
                _check(bundle, place, part)
            return [staged for part in parts for staged in _install(root, bundle, place, part, again, say)]
    except DamagedArchive as error:
        raise _refused(bundle, f"{bundle.name} is damaged: {error}") from None
    except OSError as error:
        raise from_os_error(error, f"unpacking {bundle.name}", error.filename or root.path) from error


def _refused(bundle: Path, what: str) -> AutorlError:
    advice = "copy it again from where it was made, and compare its sha256; or make it again: autorl-hpc stage NAMES --bundle FILE"
    return AutorlError(what, where=bundle, next_step=advice, exit_code=Exit.FAILED)


def _head(bundle: Path, first: tuple[str, int, IO[bytes]] | None) -> BundleManifest:
    """Read BUNDLE.json and check every name in it. Raises AutorlError, DamagedArchive."""
    if first is None or first[0] != BUNDLE_NAME or first[1] > MAX_HEAD_BYTES:
        raise _refused(bundle, f"{bundle.name} is not a bundle: it doesn't begin with {BUNDLE_NAME}")
    try:
        value = json.loads(first[2].read())
    except RecursionError:
        raise DamagedArchive(f"{BUNDLE_NAME} is nested too deeply") from None
    manifest = parse_record(BundleManifest, value, f"{bundle}:{BUNDLE_NAME}", next_step="make the bundle again")
    for part in manifest.parts:
        if not (re.fullmatch(MODEL_NAME_PATTERN, part.name) if part.kind == "model" else is_name(part.name)):
            raise DamagedArchive(f"{part.name[:100]!r} is no name")
    known = {file.path for file in manifest.files}
    if len(known) != len(manifest.files):
        raise DamagedArchive(f"a file is twice in {BUNDLE_NAME}")
    for path in known:
        above = next((str(parent) for parent in PurePosixPath(path).parents if str(parent) in known), None)
        if above is not None:
            raise DamagedArchive(f"{path[:200]!r} lies below {above[:200]!r}, which is a file")
        if not all(PART_OF_PATH.fullmatch(step) for step in path.split("/")) or _part_of(path, manifest.parts) is None:
            raise DamagedArchive(f"{path[:200]!r} belongs to none of its parts")
    return manifest


def _part_of(path: str, parts: tuple[BundlePart, ...]) -> BundlePart | None:
    places = {"model": ("store/models",), "task": ("store/tasks", "vault"), "environment": ("store/envs",)}
    found = (p for p in parts if path.startswith(tuple(f"{place}/{p.name}/" for place in places[p.kind])))
    return next(found, None)


def _shown(part: BundlePart) -> str:
    return f"{PREFIX}{part.name}" if part.kind == "environment" else part.name


def _chosen(bundle: Path, manifest: BundleManifest, names: list[str]) -> tuple[BundlePart, ...]:
    by_name = {_shown(part): part for part in manifest.parts}
    chosen = [full_name(name) for name in names] or list(by_name)
    unknown = next((name for name in chosen if name not in by_name), None)
    if unknown is not None:
        there = f"it holds {', '.join(sorted(by_name))}"
        raise AutorlError(f"{bundle.name} holds no {unknown}", where=bundle, next_step=there)
    parts = tuple(by_name[name] for name in dict.fromkeys(chosen))
    for part in parts:
        own = f"store/tasks/{part.name}/{part.name}/task.yaml"  # of another library: the bundle brings the folder
        if part.kind == "task" and not any(file.path == own for file in manifest.files):
            load_task(part.name)  # it may be missing here: report it before unpacking
        facts = part.environment
        if part.kind == "environment" and (facts is None or part.content_hash is None):
            raise DamagedArchive(f"{_shown(part)} is not described")
        if facts is not None and facts.kind == "venv" and facts.python != python_tag():
            what = f"{_shown(part)} was made for {facts.python}, this Python is {python_tag()}"
            advice = "run autorl-hpc with that Python, or stage the environment for this one where there is network"
            raise AutorlError(what, where=bundle, next_step=advice, exit_code=Exit.ENVIRONMENT)
    return parts


def _check(bundle: Path, place: Unpacked, part: BundlePart) -> None:
    """Check that a part matches its manifest, and that this version could have staged it. Raises AutorlError."""
    try:
        if part.kind == "model":
            verify_model(place, part.name)
            check_unpacked(place.model(part.name), _manifest(place.model(part.name), part))
        elif part.kind == "task":
            verify_staged_task(place, load_task(part.name, root=place))
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
    """Install a checked part, unless the same content is installed already."""
    name = part.name
    if part.kind == "environment":
        install = install_image if part.environment and part.environment.kind == "image" else build_environment
        work, origin = place.environments / name, f"bundle {bundle.name}"
        return [install(root, name, work, origin, expected=part.content_hash, say=say)]
    if part.kind == "model":
        folders = [(place.model(name), root.model(name))]
    else:
        folders = [(place.task_store(name), root.task_store(name)), (place.task_vault(name), root.task_vault(name))]
    staged, kept = [], False
    for fresh, target in folders:
        manifest = _manifest(fresh, part)
        staged.append(manifest)
        if again or not (target / MANIFEST_NAME).exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            if part.kind == "model":
                tell_change(root, target, manifest, fresh, say)
            replace_folder(fresh, target, private=manifest.kind == "vault")
            say(f"{name}: installed {len(manifest.files)} files")
        elif _manifest(target, part).files != manifest.files:
            what = f"{name} is staged already, with other content than in {bundle.name}"
            raise AutorlError(what, where=target, next_step="add --again to put the bundle's in its place")
        else:
            kept = True
    if kept:
        say(f"{name}: staged already; verifying")
        verify_model(root, name) if part.kind == "model" else verify_staged_task(root, load_task(name, root=root))
    return staged


def _manifest(folder: Path, part: BundlePart) -> StoreManifest:
    manifest = read_manifest(folder, name=part.name, stage_command=f"autorl-hpc stage {part.name}")
    if manifest.name != part.name or (manifest.kind == "model") != (part.kind == "model"):
        raise AutorlError(f"the manifest of {part.name} is that of {manifest.name}", where=folder / MANIFEST_NAME)
    return manifest
