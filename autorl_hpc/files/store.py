"""Manifests of staged data and their verification; staged environments; driver endpoints and keys; frozen code."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.checkpoint import INDEX_NAME, file_sha256, in_threads, walk_files
from autorl_hpc.files.faults import again, is_cluster_error
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.queue import claimed_entries
from autorl_hpc.records import canonical_json
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.driver import DriverEndpoint, DriverSpec
from autorl_hpc.records.exchange import EnvironmentPointer, StoreFile, StoreManifest
from autorl_hpc.records.run import BaseModelPin, Science
from autorl_hpc.states import Fault

MANIFEST_NAME = "MANIFEST.json"
WEIGHT_NAMES = (".safetensors", INDEX_NAME)
MAX_SMALL_JSON_BYTES = 1 << 20
STAMPED_BYTES = 1 << 26  # A larger file is hashed once in a process while its stamp (inode, size, times) stays
_STAMPS: dict[tuple[Path, str], tuple[int, ...]] = {}


def read_manifest(folder: Path, *, name: str, stage_command: str) -> StoreManifest:
    """Read the manifest of a staged folder. Raises AutorlError: it is not staged; the error says how to stage it."""
    path, again_command = folder / MANIFEST_NAME, f"{stage_command} --again"
    try:
        value = reading.read_json(path)
    except FileNotFoundError:
        raise AutorlError(f"{name} is not staged", where=path, next_step=f"run: {stage_command}") from None
    except (OSError, ValueError) as error:
        what, advice = f"the manifest of {name} can't be read: {error}", f"run as its user, or: {again_command}"
        code = Exit.ENVIRONMENT
        raise AutorlError(what, where=path, fault=Fault.CLUSTER, next_step=advice, exit_code=code) from None
    return parse_record(StoreManifest, value, path, next_step=f"stage it again: {again_command}")


def verify_files(folder: Path, manifest: StoreManifest, stage_command: str) -> None:
    """Check that the folder holds exactly the manifest's files, by size and sha256 (an extra shard would be loaded too). Raises
    AutorlError: names the first file that differs; OSError: the file system failed."""
    names = (name for name in _all_names(folder) if not name.rpartition("/")[2].startswith("."))  # an NFS client's
    advice = f"something changed it after staging; put the original back or run: {stage_command} --again"
    _verify(folder, manifest, manifest.name, names, advice)


def _verify(folder: Path, manifest: StoreManifest, name: str, there: Iterable[str], advice: str) -> None:
    known = {file.path for file in manifest.files}
    for extra in sorted(set(there) - known - {MANIFEST_NAME}):
        raise changed_since(f"{extra} is not a file of {name}", folder / extra, advice)

    def check(file: StoreFile) -> None:
        path, what = folder / file.path, f"{file.path} of {name}"
        try:
            info = again(path.stat)
        except OSError as error:
            if is_cluster_error(error):
                raise
            raise changed_since(f"{what} is missing", path, advice) from None
        if info.st_size != file.size_bytes:
            raise changed_since(f"{what} has {info.st_size} bytes, staged were {file.size_bytes}", path, advice)
        stamp = (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_ctime_ns)
        if _STAMPS.get((path, file.sha256)) == stamp:
            return
        digest = file_sha256(path)
        if digest != file.sha256:
            raise changed_since(f"{what} has sha256 {digest[:12]}..., staged was {file.sha256[:12]}...", path, advice)
        if info.st_size >= STAMPED_BYTES:
            _STAMPS[path, file.sha256] = stamp

    in_threads(check, manifest.files)


def _all_names(folder: Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        yield from ((Path(parent) / name).relative_to(folder).as_posix() for name in names)


MODEL_ALIASES = {"tiny": "autorl/tiny", "SmolLM2-135M-Instruct": "autorl/SmolLM2-135M-Instruct-dequantised"}
"""Short names that `stage` takes, and what the models are called."""


def _model_manifest(root: Root, name: str) -> StoreManifest:
    if (full := MODEL_ALIASES.get(name)) is not None:
        advice = f"write {full}; `autorl-hpc stage {name}` brings it in"
        raise AutorlError(
            f"there is no base model `{name}`; did you mean `{full}`?", where=root.models, next_step=advice
        )
    return read_manifest(root.model(name), name=f"base model {name}", stage_command=f"autorl-hpc stage {name}")


def verify_model(root: Root, name: str) -> StoreManifest:
    """Return the manifest of a staged base model, after checking every file's hash. Raises AutorlError: it is not staged,
    or a file was changed."""
    manifest = _model_manifest(root, name)
    verify_files(root.model(name), manifest, f"autorl-hpc stage {name}")
    return manifest


OTHER_PROMPTING = "another chat template, tokenizer, special tokens or config"
PROMPTING_NOISE = frozenset([
    "transformers_version", "_name_or_path", "name_or_path", "tokenizer_file", "is_local", "local_files_only",
    "_from_model_config", "dtype", "torch_dtype",
])  # fmt: skip
"""Fields of a model folder's small JSON files that decide neither a prompt nor where an answer ends."""


def prompting_hash(folder: Path, manifest: StoreManifest) -> str:
    """Return the hash of all files that decide a staged model's prompts and decoding. Small JSON files count by value, without
    what a save notes about itself."""
    rows: dict[str, Any] = {}
    for file in manifest.files:
        if file.path.endswith(WEIGHT_NAMES):
            continue
        rows[file.path] = file.sha256
        if file.path.endswith(".json") and file.size_bytes <= MAX_SMALL_JSON_BYTES and file.path != "tokenizer.json":
            value = json.loads(reading.read_bytes(folder / file.path), parse_constant=str)  # Infinity is no JSON
            rows[file.path] = {k: v for k, v in value.items() if k not in PROMPTING_NOISE}
    return hashlib.sha256(canonical_json(rows)).hexdigest()


def staged_pin(root: Root, name: str) -> BaseModelPin:
    """Return the hashes of a staged base model, by its manifest. Raises AutorlError: it is not staged, or has no content hash."""
    manifest = _model_manifest(root, name)
    if manifest.content_hash is None:
        what, advice = f"{name} was staged without a content hash", f"run: autorl-hpc stage {name} --again"
        raise AutorlError(what, where=root.model(name), next_step=advice)
    prompting = prompting_hash(root.model(name), manifest)
    return BaseModelPin(content_hash=manifest.content_hash, prompting_hash=prompting)


def verify_base_model(root: Root, science: Science) -> StoreManifest:
    """Return the manifest of a run's base model. Raises AutorlError: it is not staged, changed, or not the one of the launch."""
    manifest = verify_model(root, science.base_model)
    folder, other = root.model(science.base_model), None
    if manifest.content_hash != science.base_model_content_hash:
        other = "other weights"
    elif science.base_model_prompting_hash not in (None, prompting_hash(folder, manifest)):
        other = OTHER_PROMPTING
    if other is not None:
        what = f"base model {manifest.name} is not staged here as the run was launched with it: {other}"
        advice = "stage what it was launched with, or launch with this one under another name"
        raise AutorlError(what, where=folder, fault=Fault.CLUSTER, next_step=advice)
    return manifest


def changed_since(what: str, path: Path, next_step: str) -> AutorlError:
    """Return the error of a file that is no longer what was staged or frozen."""
    return AutorlError(what, where=path, fault=Fault.CLUSTER, next_step=next_step, exit_code=Exit.FAILED)


def describe_files(folder: Path, names: Iterable[str] | None = None) -> tuple[StoreFile, ...]:
    """Return StoreFile rows of the files below `folder`, without the manifest."""

    def row(name: str) -> StoreFile:
        path = folder / name
        return StoreFile(path=name, sha256=file_sha256(path), size_bytes=path.stat().st_size)

    return tuple(row(name) for name in (walk_files(folder) if names is None else names) if name != MANIFEST_NAME)


def write_manifest(folder: Path, manifest: StoreManifest) -> None:
    """Write MANIFEST.json, as the last step of staging."""
    atomic.write_json(folder / MANIFEST_NAME, manifest.model_dump(mode="json"))


# --- staged environments: `store/envs/<name>.json` points to `<name>-<12 hex>/`
#
# Launch checks a venv file by file; the start of an agent checks only its manifest, to spare the file server.

VENV, WHEELS, LOCK, IMAGE = "venv", "wheels", "requirements.lock", "image.sif"  # the names in an environment's folder
PYTHON_ON_EVERY_NODE = "it is a link to the Python that made it, which must be on every node: stage the environment anew with a Python on the shared file system"


def wheels_hash(digests: Iterable[str], python: str) -> str:
    """Return the content hash of a venv: over the sorted sha256 of its wheels and its Python tag."""
    return hashlib.sha256(canonical_json({"python": python, "wheels": sorted(digests)})).hexdigest()


def present_hash(root: Root, name: str) -> str | None:
    """Return the content hash that `name` points to now, or None if none is staged."""
    path = root.environment_pointer(name)
    try:
        value = reading.read_json(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        what = f"the pointer of environment {name} is unreadable: {error}"
        advice = f"stage it again: autorl-hpc stage env:{name} --again"
        raise AutorlError(what, where=path, fault=Fault.CLUSTER, next_step=advice) from None
    return parse_record(EnvironmentPointer, value, path).content_hash


def find_environment(root: Root, name: str, content_hash: str | None = None) -> tuple[Path, StoreManifest]:
    """Return folder and manifest of an environment: the current one, or that with the given hash. Its files are not
    checked. Raises AutorlError: it is not staged."""
    command = f"autorl-hpc stage env:{name}"
    wanted = content_hash or present_hash(root, name)
    if wanted is None:
        what, advice = f"environment {name} is not staged", f"run: {command} --requirements FILE, or --from IMAGE.sif"
        raise AutorlError(what, where=root.environment_pointer(name), next_step=advice)
    folder = root.environment(name, wanted)
    manifest = read_manifest(folder, name=f"environment {name}", stage_command=command)
    if manifest.content_hash != wanted or manifest.environment is None:
        what = f"the manifest of environment {name} is that of another one"
        raise changed_since(what, folder / MANIFEST_NAME, _made_again(name))
    return folder, manifest


def verify_environment(root: Root, name: str, content_hash: str | None = None) -> StoreManifest:
    """Return the manifest of a staged environment, after checking every file. Raises AutorlError: not staged, or changed since."""
    folder, manifest = find_environment(root, name, content_hash)
    _verify(folder, manifest, f"environment {name}", environment_files(folder), _made_again(name))
    bundled = [file.sha256 for file in manifest.files if file.path.startswith(f"{WHEELS}/")]
    facts = manifest.environment
    if facts is not None and facts.kind == "venv" and wheels_hash(bundled, facts.python or "") != manifest.content_hash:
        what = f"the content hash of environment {name} is not that of its wheels"
        raise changed_since(what, folder / MANIFEST_NAME, _made_again(name))
    return manifest


def environment_files(folder: Path) -> list[str]:
    """Return the relative paths of all regular files, also compiled ones, which Python would read in place of the source."""
    names = (name for name in _all_names(folder) if not name.rpartition("/")[2].startswith(".nfs"))
    return sorted(name for name in names if name != MANIFEST_NAME and not (folder / name).is_symlink())


def _made_again(name: str) -> str:
    return f"something changed it after staging; make it again: autorl-hpc stage env:{name} --again"


# --- driver endpoints: `drivers/<name>.json`, written by the job that serves the driver, read by gateways
#
# A job takes a generation by link. The highest one owns the driver, and an older job that sees a newer one stops (Slurm may run
# two attempts of one job at once).

STALE_AFTER_S = 60.0  # without a new counter, by the reader's clock, a driver's job counts as dead


def read_endpoint(path: Path) -> DriverEndpoint | None:
    """Return the endpoint in the file, or None if there is none that can be read now."""
    value = reading.read_json_or_none(path)
    try:
        return None if value is None else DriverEndpoint.model_validate(value)
    except ValidationError:
        return None


def write_endpoint(path: Path, endpoint: DriverEndpoint) -> None:
    atomic.write_bytes(path, endpoint.canonical() + b"\n")


def take_generation(folder: Path, name: str) -> int:
    """Take the next generation of a driver; it belongs to the caller alone."""
    while True:
        wanted = newest_generation(folder, name) + 1
        if atomic.publish_bytes(folder / f"{name}.g{wanted:04d}", b""):
            return wanted


def newest_generation(folder: Path, name: str) -> int:
    return claimed_entries(folder).get(name, 0)


class EndpointWatch:
    def __init__(self, path: Path, stale_after_s: float = STALE_AFTER_S) -> None:
        self.path = path
        self.stale_after_s = stale_after_s
        self.last: DriverEndpoint | None = None
        self._changes, self._changed_at = 0, 0.0

    def look(self) -> DriverEndpoint | None:
        """Read the file and return its endpoint, or None if there never was one. Call it every few seconds."""
        found = read_endpoint(self.path)
        if found is None:  # neither alive nor dead: the time since the last change goes on
            return self.last
        if self.last is None or (found.generation, found.counter) != (self.last.generation, self.last.counter):
            self._changes, self._changed_at = self._changes + 1, time.monotonic()
        self.last = found
        return found

    @property
    def is_stale(self) -> bool:
        """Return whether the counter has not changed for `stale_after_s` of this reader's time."""
        return self._changes > 0 and time.monotonic() - self._changed_at > self.stale_after_s

    def ready(self) -> DriverEndpoint | None:
        """Return the endpoint if it says that it is ready and its counter was seen to change: a dead job may have left the file."""
        found = self.look()
        alive = self._changes > 1 and not self.is_stale
        return found if found is not None and found.ready and found.url and alive else None


# --- driver keys: in files that only their owner may read; no error shows any part of one

MAX_KEY_BYTES = 4096


def key_path(experiment: ExperimentDir, name: str, spec: DriverSpec) -> Path | None:
    """Return the file with the driver's key, or None if it has none. An API key from a variable is copied to `drivers/<name>.key`:
    Slurm jobs do not get the launching shell's variables, and other processes could read them in /proc."""
    if spec.key_file is not None:
        return Path(os.path.expanduser(spec.key_file))
    if spec.kind == "vllm" or spec.key_variable is not None:
        return experiment.driver_key(name)
    return None


def read_private(path: Path, whose: str, next_step: str) -> bytes:
    """Return the start of a file that only its owner may read. `whose`: begins the errors' messages. Raises AutorlError: it can't
    be read, is no file, or is open to others. No error shows any part of it."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            state = os.fstat(file.fileno())
            data = file.read(MAX_KEY_BYTES + 1) if stat.S_ISREG(state.st_mode) else b""
    except OSError as error:
        raise AutorlError(
            f"{whose} key file can't be read: {error.strerror}", where=path, next_step=next_step
        ) from None
    if not stat.S_ISREG(state.st_mode):
        raise AutorlError(f"{whose} key file is not a file", where=path, next_step=next_step)
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        what = f"{whose} key file can be read by others, or is another's"
        raise AutorlError(what, where=path, next_step=f"chmod 600 {path}; if others may have read it, make another")
    return data


def read_key(path: Path, whose: str = "the driver's") -> str:
    """Return the key in `path`. Raises AutorlError: see `read_private` and `checked_key`."""
    return checked_key(read_private(path, whose, "put the key into a plain file, and chmod 600 it"), path, whose)


def checked_key(data: bytes, where: str | Path, whose: str = "the driver's") -> str:
    """Return `data` as a key: one line of visible characters. Raises AutorlError: it is not one."""
    key = data.strip()
    if not key or len(key) > MAX_KEY_BYTES or any(not 33 <= byte <= 126 for byte in key):
        what = f"{whose} key is not a single line of visible characters"
        raise AutorlError(what, where=where, next_step="put the key there, and nothing else")
    return key.decode("ascii")


def write_key(path: Path, key: str) -> None:
    """Write the key, readable by its owner only."""
    atomic.write_bytes(path, key.encode() + b"\n", mode=0o600)


def new_key() -> str:
    return secrets.token_urlsafe(32)


# --- frozen code: what an experiment's jobs run, in `code/<content hash>/`

Parts = dict[str, tuple[Path, list[str]]]  # source folder and files of each frozen folder, by its place


def code_hash(frozen: Parts) -> str:
    """Return the hash that names the frozen code: over every file's place and content."""
    placed = [(name, folder, file) for name, (folder, files) in frozen.items() for file in files]
    rows = {f"{name}/{file}".lstrip("/"): file_sha256(folder / file) for name, folder, file in placed}
    return hashlib.sha256(canonical_json(sorted(rows.items()))).hexdigest()


def frozen_is_whole(experiment: ExperimentDir, wanted: str) -> bool:
    """Return whether the frozen code matches the hash in its name and holds nothing else: no link, and no compiled Python, which
    jobs would read in place of the source."""
    folder = experiment.code / wanted
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            if name.endswith(".pyc") or (Path(parent) / name).is_symlink():
                return False
    return folder.is_dir() and code_hash({"": (folder, walk_files(folder))}) == wanted
