"""Unpacking an exported run. It comes from somebody who may want to be believed: every name, size and hash is checked, and
nothing is written outside the folder that is given.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import IO

from autorl_hpc.errors import AutorlError, Exit, from_os_error
from autorl_hpc.evidence import places
from autorl_hpc.files import artifacts, atomic, reading
from autorl_hpc.files.archive import Damaged, Reading, packing_of
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.evidence import EvidenceManifest
from autorl_hpc.records.exchange import StoreFile
from autorl_hpc.stage.space import check_space

MAX_HEAD_BYTES = 32 * 1024 * 1024
MAX_FILES = 100_000
MAX_RECORDS_BYTES = 4 * 1024**3
"""Of all records together; a run of ten thousand submissions has less."""

ROW_BYTES = 4096
CHUNK_BYTES = 1024 * 1024
NEXT_STEP = "take it again from where it was made, and compare its sha256; don't trust what this one says"


def unpack_evidence(bundle: Path, into: Path, weights_allowed: Callable[[EvidenceManifest], int]) -> EvidenceManifest:
    """Unpacks `bundle` into the empty folder `into`: `experiment/` and `task/`.

    Args:
        weights_allowed: called before anything is written; how many bytes of weights such a checkpoint may have.

    Raises:
        AutorlError: it is no exported run, was cut or altered, or is too large.
    """
    try:
        packing = packing_of(bundle)
        if packing is None:
            raise _refused(bundle, f"{bundle.name} is no bundle: neither tar nor packed by gzip or zstd")
        with closing(Reading(bundle, packing, MAX_HEAD_BYTES + ROW_BYTES)) as source, source.damage():
            files = source.files()
            manifest = _head(bundle, next(files, None))
            _check_sizes(manifest, weights_allowed(manifest))
            check_space(into, sum(file.size_bytes for file in manifest.files), f"the bundle {bundle.name}")
            source.bound.allowed = sum(f.size_bytes + ROW_BYTES for f in manifest.files) + MAX_HEAD_BYTES
            missing = {file.path: file for file in manifest.files}
            for name, size_bytes, data in files:
                row = missing.pop(name, None)
                if row is None or row.size_bytes != size_bytes:
                    raise Damaged(f"{name[:200]!r} is not as {places.MANIFEST_NAME} says")
                _write(into, row, data)
            if missing:
                raise Damaged(f"it ends without {min(missing)}")
        _mark_artifact(ExperimentDir(into / places.EXPERIMENT), manifest)
        return manifest
    except Damaged as error:
        raise _refused(bundle, f"{bundle.name} is damaged: {error}") from None
    except OSError as error:
        raise from_os_error(error, f"unpacking {bundle.name}", error.filename or into) from error


def _refused(bundle: Path, what: str) -> AutorlError:
    return AutorlError(what, where=bundle, next_step=NEXT_STEP, exit_code=Exit.FAILED)


def _head(bundle: Path, first: tuple[str, int, IO[bytes]] | None) -> EvidenceManifest:
    """EVIDENCE.json, with every name in it checked."""
    if first is None or first[0] != places.MANIFEST_NAME or first[1] > MAX_HEAD_BYTES:
        raise _refused(bundle, f"{bundle.name} is no exported run: it doesn't begin with {places.MANIFEST_NAME}")
    try:
        value = json.loads(first[2].read())
    except RecursionError:
        raise Damaged(f"{places.MANIFEST_NAME} is nested too deeply") from None
    manifest = parse_record(EvidenceManifest, value, f"{bundle}:{places.MANIFEST_NAME}", next_step=NEXT_STEP)
    if not places.is_run_id(manifest.run_id) or manifest.head.run_id != manifest.run_id:
        raise Damaged(f"{manifest.run_id[:100]!r} is no run")
    names = [file.path for file in manifest.files]
    if len(set(names)) != len(names):
        raise Damaged(f"a file stands twice in {places.MANIFEST_NAME}")
    content = manifest.weights.content_hash if manifest.weights else None
    for name in names:
        if not places.is_record(name, manifest.run_id) and not places.is_weights(name, content):
            raise Damaged(f"{name[:200]!r} is no file of an exported run")
    return manifest


def _check_sizes(manifest: EvidenceManifest, weights_allowed: int) -> None:
    content = manifest.weights.content_hash if manifest.weights else None
    weights = [file for file in manifest.files if places.is_weights(file.path, content)]
    records = [file for file in manifest.files if not places.is_weights(file.path, content)]
    if len(manifest.files) > MAX_FILES or sum(file.size_bytes for file in records) > MAX_RECORDS_BYTES:
        raise Damaged("it holds more records than a run has")
    for file in records:
        if file.size_bytes > reading.MAX_RECORD_BYTES:
            raise Damaged(f"{file.path} has {file.size_bytes} bytes: no record is so large")
    if sum(file.size_bytes for file in weights) > weights_allowed:
        raise Damaged(f"its weights are larger than {weights_allowed} bytes, the most that this base model's can be")


def _write(into: Path, row: StoreFile, data: IO[bytes]) -> None:
    """Writes a file and checks its hash as it goes."""
    target = into / row.path
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        while chunk := data.read(CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != row.sha256:
        raise Damaged(f"{row.path} has sha256 {digest.hexdigest()}, {places.MANIFEST_NAME} says {row.sha256}")


def _mark_artifact(experiment: ExperimentDir, manifest: EvidenceManifest) -> None:
    """What intake leaves in an accepted copy, so that it is verified and loaded as one."""
    if manifest.weights is not None:
        folder = experiment.artifacts / manifest.weights.content_hash
        if not folder.is_dir():
            raise Damaged("it names weights and holds none")
        atomic.write_json(folder / artifacts.READY_NAME, {"not_in_hash": list(manifest.weights.not_in_hash)})
