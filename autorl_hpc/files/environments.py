"""Staged environments, as launch and the agents' jobs find them: `store/envs/<name>.json` points to `<name>-<12 hex>/`.

A venv is checked file by file when an experiment is launched, and by its manifest alone when an agent starts: a thousand
agents that hash ten thousand files each would be the end of a file server.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import reading
from autorl_hpc.files.faults import again
from autorl_hpc.files.hashing import file_sha256
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import MANIFEST_NAME, read_manifest
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.canonical import canonical_json
from autorl_hpc.records.exchange import EnvironmentPointer, StoreFile, StoreManifest
from autorl_hpc.states import Fault

VENV, WHEELS, LOCK, IMAGE = "venv", "wheels", "requirements.lock", "image.sif"
"""What an environment's folder holds."""


def wheels_hash(digests: Iterable[str], python: str) -> str:
    """The content hash of a venv: over the sorted sha256 of its wheels and the tag of its Python."""
    return hashlib.sha256(canonical_json({"python": python, "wheels": sorted(digests)})).hexdigest()


def present_hash(root: Root, name: str) -> str | None:
    """The content hash of the environment that `name` stands for now; None: none is staged."""
    path = root.environment_pointer(name)
    try:
        value = reading.read_json(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise AutorlError(
            f"the pointer of environment {name} is unreadable: {error}",
            where=path,
            fault=Fault.CLUSTER,
            next_step=f"stage it again: autorl-hpc stage env:{name} --again",
        ) from None
    return parse_record(EnvironmentPointer, value, path).content_hash


def find_environment(root: Root, name: str, content_hash: str | None = None) -> tuple[Path, StoreManifest]:
    """Folder and manifest of an environment, the present one unless a hash is given. Its files are not looked at.

    Raises:
        AutorlError: it is not staged.
    """
    command = f"autorl-hpc stage env:{name}"
    wanted = content_hash or present_hash(root, name)
    if wanted is None:
        raise AutorlError(
            f"environment {name} is not staged",
            where=root.environment_pointer(name),
            next_step=f"run: {command} --requirements FILE, or --from IMAGE.sif",
        )
    folder = root.environment(name, wanted)
    manifest = read_manifest(folder, name=f"environment {name}", stage_command=command)
    if manifest.content_hash != wanted or manifest.environment is None:
        raise _changed(f"the manifest of environment {name} is that of another one", folder / MANIFEST_NAME, name)
    return folder, manifest


def verify_environment(root: Root, name: str, content_hash: str | None = None) -> StoreManifest:
    """The manifest of a staged environment, after every file's hash was checked.

    Raises:
        AutorlError: it is not staged, or something was changed after staging.
    """
    folder, manifest = find_environment(root, name, content_hash)
    known = {file.path: file for file in manifest.files}
    there = set(environment_files(folder))
    for extra in sorted(there - set(known)):
        raise _changed(f"{extra} is no file of environment {name}", folder / extra, name)
    for path, file in known.items():
        if path not in there:
            raise _changed(f"{path} of environment {name} is missing", folder / path, name)
        if again((folder / path).stat).st_size != file.size_bytes or file_sha256(folder / path) != file.sha256:
            raise _changed(f"{path} of environment {name} is not what was staged", folder / path, name)
    bundled = [file.sha256 for file in manifest.files if file.path.startswith(f"{WHEELS}/")]
    facts = manifest.environment
    if facts is not None and facts.kind == "venv" and wheels_hash(bundled, facts.python or "") != manifest.content_hash:
        raise _changed(
            f"the content hash of environment {name} is not that of its wheels", folder / MANIFEST_NAME, name
        )
    return manifest


def environment_files(folder: Path) -> list[str]:
    """Relative paths of all regular files, compiled ones too, which Python would read in the place of the source.

    Links are those that a venv makes to its interpreter, which is the host's; others are no part of an environment.
    """
    found = []
    for parent, _, names in os.walk(folder):
        found += [
            (Path(parent) / name).relative_to(folder).as_posix()
            for name in names
            if not name.startswith(".nfs") and not (Path(parent) / name).is_symlink()
        ]
    return sorted(name for name in found if name != MANIFEST_NAME)


def describe_environment(folder: Path) -> tuple[StoreFile, ...]:
    """The manifest's rows of an environment's folder."""
    return tuple(
        StoreFile(path=name, sha256=file_sha256(folder / name), size_bytes=(folder / name).stat().st_size)
        for name in environment_files(folder)
    )


def _changed(what: str, path: Path, name: str) -> AutorlError:
    return AutorlError(
        what,
        where=path,
        fault=Fault.CLUSTER,
        next_step=f"something changed it after staging; make it again: autorl-hpc stage env:{name} --again",
        exit_code=Exit.FAILED,
    )
