"""Bundles: staged tasks, models and environments in one file, for a cluster without network.

A bundle is a tar archive of plain files. The first, BUNDLE.json, says what there is, with size and sha256 of every file;
the others follow sorted by name: `store/models/...`, `store/tasks/...`, `vault/...`, `store/envs/NAME/...`.
"""

from __future__ import annotations

import io
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.errors import AutorlError, Exit, from_os_error
from autorl_hpc.files import atomic
from autorl_hpc.files.archive import Hashed, add, suffix_of, writing, zstandard_module
from autorl_hpc.files.environments import IMAGE, LOCK, WHEELS, find_environment
from autorl_hpc.files.hashing import file_sha256
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import MANIFEST_NAME
from autorl_hpc.records.canonical import readable_json
from autorl_hpc.records.exchange import BundleManifest, BundlePart, StoreFile, StoreManifest
from autorl_hpc.stage.progress import Say, in_words, progress
from autorl_hpc.stage.space import check_space
from autorl_hpc.states import Fault

BUNDLE_NAME = "BUNDLE.json"
MODE = 0o600
"""Of the bundle: it may hold held-out items."""

STORE_MODE, VAULT_MODE = 0o444, 0o400


@dataclass(frozen=True)
class Packed:
    """A bundle that was written."""

    path: Path
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Entry:
    """A file of a bundle: its name there, and where it lies."""

    file: StoreFile
    path: Path


def check_bundle_name(out: Path) -> None:
    """Says what is wrong with `--bundle out` before anything is staged.

    Raises:
        AutorlError: its suffix is unknown, what packs it is missing, or its folder is.
    """
    if suffix_of(out) == ".tar.zst":
        zstandard_module()
    if not out.absolute().parent.is_dir():
        raise AutorlError(
            "there is no such folder", where=out.absolute().parent, next_step="make it, or choose another"
        )


def make_bundle(root: Root, staged: list[StoreManifest], out: Path, say: Say = lambda _: None) -> Packed:
    """Packs what `staged` describes, just verified, into `out`.

    Raises:
        AutorlError: the disk is too small, or a file was changed meanwhile.
    """
    parts, entries = [], []
    for one in staged:
        part, files = _describe(root, one)
        parts += [part] if part not in parts else []
        entries += files
    by_name = {entry.file.path: entry for entry in entries}
    ordered = [by_name[name] for name in sorted(by_name)]
    parts.sort(key=lambda part: (part.kind, part.name))
    manifest = BundleManifest(parts=tuple(parts), files=tuple(entry.file for entry in ordered))
    total = sum(file.size_bytes for file in manifest.files)
    out = out.absolute()
    temporary = out.parent / f"{atomic.TEMPORARY_PREFIX}{out.name}.{os.getpid()}.{secrets.token_hex(6)}"
    try:
        check_space(out.parent, total, f"the bundle {out.name}")
        say(f"{out.name}: packing {len(ordered)} files, {in_words(total)}")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE), "wb") as raw:
            sink = Hashed(raw)
            with progress(out.name, say) as shown, writing(sink, suffix_of(out)) as archive:
                head = readable_json(manifest.model_dump(mode="json"))
                add(archive, BUNDLE_NAME, len(head), STORE_MODE, io.BytesIO(head))
                done = 0
                for entry in ordered:
                    mode = VAULT_MODE if entry.file.path.startswith("vault/") else STORE_MODE
                    with open(entry.path, "rb") as file:
                        source = Hashed(file)
                        if os.fstat(file.fileno()).st_size == entry.file.size_bytes:
                            add(archive, entry.file.path, entry.file.size_bytes, mode, source)
                    if source.digest() != entry.file.sha256:
                        raise _changed(entry.path)
                    done += entry.file.size_bytes
                    shown(done, total)
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(temporary, out)
        atomic.fsync_directory(out.parent)
    except OSError as error:
        raise from_os_error(error, f"writing the bundle {out.name}", error.filename or out) from error
    finally:
        atomic.unlink_quietly(temporary)
    if any(part.kind == "task" for part in parts):
        say(f"{out.name} holds held-out items: keep it where no agent can read it")
    say(f"{out.name}: {in_words(sink.size_bytes)}, sha256 {sink.digest()}")
    return Packed(out, sink.digest(), sink.size_bytes)


def _changed(path: Path) -> AutorlError:
    return AutorlError(
        "this file was changed while it was packed",
        where=path,
        fault=Fault.CLUSTER,
        next_step="run the same command again",
        exit_code=Exit.FAILED,
    )


def _describe(root: Root, manifest: StoreManifest) -> tuple[BundlePart, list[Entry]]:
    """What a manifest puts into a bundle. A task has two manifests, and is one part."""
    name = manifest.name
    if manifest.kind == "environment":
        assert manifest.content_hash is not None
        folder = find_environment(root, name, manifest.content_hash)[0]
        # No venv: it is made anew where the bundle is unpacked, out of the same wheels.
        files = [f for f in manifest.files if f.path in (LOCK, IMAGE) or f.path.startswith(f"{WHEELS}/")]
        part = BundlePart(
            name=name, kind="environment", content_hash=manifest.content_hash, environment=manifest.environment
        )
        return part, [_entry(f"store/envs/{name}", folder, file) for file in files]
    place, folder = {
        "model": (f"store/models/{name}", root.model(name)),
        "task": (f"store/tasks/{name}", root.task_store(name)),
        "vault": (f"vault/{name}", root.task_vault(name)),
    }[manifest.kind]
    own = folder / MANIFEST_NAME
    head = StoreFile(path=MANIFEST_NAME, sha256=file_sha256(own), size_bytes=own.stat().st_size)
    part = BundlePart(
        name=name, kind="model" if manifest.kind == "model" else "task", content_hash=manifest.content_hash
    )
    return part, [_entry(place, folder, file) for file in (*manifest.files, head)]


def _entry(place: str, folder: Path, file: StoreFile) -> Entry:
    return Entry(file.model_copy(update={"path": f"{place}/{file.path}"}), folder / file.path)
