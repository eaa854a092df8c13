"""The store and the vault: manifests of what `stage` brought in, and their verification."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.checkpoint import file_sha256, walk_files
from autorl_hpc.files.faults import again, is_cluster_error
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.records import canonical_json
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.driver import DriverEndpoint, DriverSpec
from autorl_hpc.records.exchange import EnvironmentPointer, StoreFile, StoreManifest
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


# Staged environments, as launch and the agents' jobs find them: `store/envs/<name>.json` points to `<name>-<12 hex>/`.
#
# A venv is checked file by file when an experiment is launched, and by its manifest alone when an agent starts: a thousand
# agents that hash ten thousand files each would be the end of a file server.

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
        raise _environment_changed(
            f"the manifest of environment {name} is that of another one", folder / MANIFEST_NAME, name
        )
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
        raise _environment_changed(f"{extra} is no file of environment {name}", folder / extra, name)
    for path, file in known.items():
        if path not in there:
            raise _environment_changed(f"{path} of environment {name} is missing", folder / path, name)
        if again((folder / path).stat).st_size != file.size_bytes or file_sha256(folder / path) != file.sha256:
            raise _environment_changed(f"{path} of environment {name} is not what was staged", folder / path, name)
    bundled = [file.sha256 for file in manifest.files if file.path.startswith(f"{WHEELS}/")]
    facts = manifest.environment
    if facts is not None and facts.kind == "venv" and wheels_hash(bundled, facts.python or "") != manifest.content_hash:
        raise _environment_changed(
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


def _environment_changed(what: str, path: Path, name: str) -> AutorlError:
    return AutorlError(
        what,
        where=path,
        fault=Fault.CLUSTER,
        next_step=f"something changed it after staging; make it again: autorl-hpc stage env:{name} --again",
        exit_code=Exit.FAILED,
    )


# Where the drivers answer that jobs of ours serve: `drivers/<name>.json`, written by the driver's job, read by gateways.
#
# A job makes a generation its own by link; the highest one holds the driver, and an older job that sees a newer one steps back
# (Slurm may run two attempts of one job at once). A reader judges the heartbeat by its own monotonic clock.

_GENERATION = re.compile(r"^(?P<name>.+)\.g(?P<generation>\d{4,})$")

STALE_AFTER_S = 60.0
"""Without a new counter for so long, a driver's job is taken for dead. It writes every few seconds."""


def read_endpoint(path: Path) -> DriverEndpoint | None:
    """The endpoint in the file; None where there is none, or none that can be read now."""
    value = reading.read_json_or_none(path)
    try:
        return None if value is None else DriverEndpoint.model_validate(value)
    except ValidationError:
        return None


def write_endpoint(path: Path, endpoint: DriverEndpoint) -> None:
    """Replaces the file, whole or not at all."""
    atomic.write_bytes(path, endpoint.canonical() + b"\n")


def take_generation(folder: Path, name: str) -> int:
    """The next generation of a driver, which is then the caller's alone."""
    while True:
        wanted = newest_generation(folder, name) + 1
        if atomic.publish_bytes(folder / f"{name}.g{wanted:04d}", b""):
            return wanted


def newest_generation(folder: Path, name: str) -> int:
    """The highest generation that a job has taken; 0: none."""
    found = [match for entry in reading.list_names(folder) if (match := _GENERATION.match(entry))]
    return max((int(match["generation"]) for match in found if match["name"] == name), default=0)


class EndpointWatch:
    """One driver's endpoint file, as one reader sees it over time."""

    def __init__(self, path: Path, stale_after_s: float = STALE_AFTER_S) -> None:
        self.path = path
        self.stale_after_s = stale_after_s
        self.last: DriverEndpoint | None = None
        self._changed_at: float | None = None
        self._seen_twice = False

    def look(self) -> DriverEndpoint | None:
        """What the file says now; None if nothing. Call it every few seconds."""
        now = time.monotonic()
        found = read_endpoint(self.path)
        if found is None:  # no sign of life, and none of death: time goes on from the last one
            return self.last
        if self.last is None or (found.generation, found.counter) != (self.last.generation, self.last.counter):
            self._seen_twice = self.last is not None
            self._changed_at = now
        self.last = found
        return found

    @property
    def is_stale(self) -> bool:
        """Whether the counter has not changed for `stale_after_s` of this reader's time."""
        return self._changed_at is not None and time.monotonic() - self._changed_at > self.stale_after_s

    @property
    def is_alive(self) -> bool:
        """Whether the counter was seen to change: a file alone may be left over from a dead job."""
        return self._seen_twice and not self.is_stale

    def ready(self) -> DriverEndpoint | None:
        """The endpoint, where the driver says that it answers and its job lives."""
        found = self.look()
        return found if found is not None and found.ready and found.url and self.is_alive else None


# The key of a driver: in a file that its owner alone may read. No error shows any of it.

MAX_KEY_BYTES = 4096


def key_path(experiment: ExperimentDir, name: str, spec: DriverSpec) -> Path | None:
    """The file that holds the driver's key; None where it has none.

    An API's key that came in a variable lies in `drivers/<name>.key`, as that of a server of ours does: jobs of Slurm don't get
    the launching shell's variables, and any process of the user may read those of another.
    """
    if spec.key_file is not None:
        return Path(os.path.expanduser(spec.key_file))
    if spec.kind == "vllm" or spec.key_variable is not None:
        return experiment.driver_key(name)
    return None


def read_key(path: Path) -> str:
    """The key in `path`.

    Raises:
        AutorlError: the file can't be read, is open to others, or holds no key.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            state = os.fstat(fd)
            data = os.read(fd, MAX_KEY_BYTES + 1) if stat.S_ISREG(state.st_mode) else b""
        finally:
            os.close(fd)
    except OSError as error:
        raise _no_key(
            f"the driver's key file can't be read: {error.strerror}", path, "put the key there, and chmod 600 it"
        ) from None
    if not stat.S_ISREG(state.st_mode):
        raise _no_key("the driver's key file is no file", path, "put the key into a plain file, and chmod 600 it")
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise _no_key("the driver's key file can be read by others, or is another's", path, f"chmod 600 {path}")
    return checked_key(data, path)


def checked_key(data: bytes, where: str | Path) -> str:
    """`data` as a key: one line of visible characters.

    Raises:
        AutorlError: it is none.
    """
    key = data.strip()
    if not key or len(key) > MAX_KEY_BYTES or any(not 33 <= byte <= 126 for byte in key):
        raise _no_key(
            "the driver's key is no single line of visible characters", where, "put the key there, and nothing else"
        )
    return key.decode("ascii")


def write_key(path: Path, key: str) -> None:
    """Writes the key for its owner alone."""
    atomic.write_bytes(path, key.encode() + b"\n", mode=0o600)


def new_key() -> str:
    """A random key for a server of ours."""
    return secrets.token_urlsafe(32)


def _no_key(what: str, where: str | Path, next_step: str) -> AutorlError:
    return AutorlError(what, where=where, next_step=next_step, exit_code=Exit.USAGE)


# The code that an experiment's jobs run, under the hash of its content: `code/<hash>/`.

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
