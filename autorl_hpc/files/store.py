"""The store and the vault: manifests of what `stage` brought in, and their verification."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.faults import again, is_cluster_error
from autorl_hpc.files.hashing import file_sha256, walk_files
from autorl_hpc.files.layout import Root
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.exchange import StoreFile, StoreManifest
from autorl_hpc.states import Fault

MANIFEST_NAME = "MANIFEST.json"


def read_manifest(folder: Path, *, name: str, stage_command: str) -> StoreManifest:
    """The manifest of a staged folder.

    Raises:
        AutorlError: it is not staged; says how to stage it.
    """
    path = folder / MANIFEST_NAME
    try:
        value = reading.read_json(path)
    except FileNotFoundError:
        raise AutorlError(
            f"{name} is not staged", where=path, next_step=f"run: {stage_command}", exit_code=Exit.USAGE
        ) from None
    except PermissionError as error:
        raise AutorlError(
            f"{name} can't be read: {error.strerror}",
            where=path,
            fault=Fault.CLUSTER,
            next_step="run as the user who staged it, or stage it into a root of your own",
            exit_code=Exit.ENVIRONMENT,
        ) from None
    except (OSError, ValueError) as error:
        raise AutorlError(
            f"the manifest of {name} is unreadable: {error}",
            where=path,
            fault=Fault.CLUSTER,
            next_step=f"run: {stage_command} --again",
        ) from None
    return parse_record(StoreManifest, value, path, next_step=f"stage it again: {stage_command} --again")


def verify_files(folder: Path, manifest: StoreManifest, stage_command: str) -> None:
    """Every file of the manifest is there, with its size and sha256, and no other: an added shard would be read too.

    Raises:
        AutorlError: the first file that is not.
        OSError: the file system failed: nothing is said about the files.
    """
    stage_again = f"something changed it after staging; put the original back or run: {stage_command} --again"
    known = {file.path for file in manifest.files} | {MANIFEST_NAME}
    for extra in sorted(_all_names(folder) - known):
        raise _changed(f"{extra} is no file of {manifest.name}", folder / extra, stage_again)
    for file in manifest.files:
        path = folder / file.path
        try:
            size = again(path.stat).st_size
        except OSError as error:
            if is_cluster_error(error):
                raise
            raise _changed(f"{file.path} of {manifest.name} is missing", path, stage_again) from None
        if size != file.size_bytes:
            raise _changed(
                f"{file.path} of {manifest.name} has {size} bytes, staged were {file.size_bytes}", path, stage_again
            )
        digest = file_sha256(path)
        if digest != file.sha256:
            raise _changed(
                f"{file.path} of {manifest.name} has sha256 {digest[:12]}..., staged was {file.sha256[:12]}...",
                path,
                stage_again,
            )


def _all_names(folder: Path) -> set[str]:
    """Relative paths of everything below `folder` but folders and hidden names (an NFS client's own, for one)."""
    return {
        (Path(parent) / name).relative_to(folder).as_posix()
        for parent, _, names in os.walk(folder)
        for name in names
        if not name.startswith(".")
    }


def verify_model(root: Root, name: str) -> StoreManifest:
    """The manifest of a staged base model, after every file's hash was checked.

    Raises:
        AutorlError: it is not staged, or something was changed.
    """
    command = f"autorl-hpc stage {name}"
    manifest = read_manifest(root.model(name), name=f"base model {name}", stage_command=command)
    verify_files(root.model(name), manifest, command)
    return manifest


def _changed(what: str, path: Path, next_step: str) -> AutorlError:
    return AutorlError(what, where=path, fault=Fault.CLUSTER, next_step=next_step, exit_code=Exit.FAILED)


def describe_files(folder: Path, names: Iterable[str] | None = None) -> tuple[StoreFile, ...]:
    """StoreFile rows of the files below `folder`, the manifest itself left out."""
    rows = []
    for name in walk_files(folder) if names is None else names:
        if name != MANIFEST_NAME:
            path = folder / name
            rows.append(StoreFile(path=name, sha256=file_sha256(path), size_bytes=path.stat().st_size))
    return tuple(rows)


def write_manifest(folder: Path, manifest: StoreManifest) -> None:
    """Writes MANIFEST.json: the last step of staging, so a folder with one is complete."""
    atomic.write_json(folder / MANIFEST_NAME, manifest.model_dump(mode="json"))
