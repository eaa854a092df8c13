"""The weights that a run's chain names: accepted copies and sketches that are kept. Each must still be what it was.

The content hash leaves out a copy of a tied head, and the list of what is left out lies in a manifest that no hash covers. So
what may be left out is settled here, not by the manifest.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

from autorl_hpc.files import artifacts, reading
from autorl_hpc.files.checkpoint import (
    EMBEDDING_NAMES,
    HEAD_NAME,
    TensorSpec,
    folder_content_hash,
    hash_span,
    tensors_of,
)
from autorl_hpc.files.faults import again
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.view import RunView

BESIDE = (artifacts.READY_NAME, "refs")
"""What lies in an accepted copy beside the weights: its manifest, and the names of the runs that need it."""


def check_kept(experiment: ExperimentDir, run: RunDir, view: RunView, problems: list[str], notes: list[str]) -> None:
    """Adds to `problems` what was altered, and to `notes` what is gone and could not be checked."""
    for content in sorted({s.content_hash for s in view.accepted() if s.content_hash}):
        folder = experiment.artifacts / content
        if artifacts.artifact_ready(experiment.artifacts, content):
            problems += _artifact(folder, content)
        elif folder.exists():
            problems.append(f"artifacts/{content[:16]}... has lost its manifest")
        elif view.closed and view.closed.selected and view.submissions[view.closed.selected].content_hash == content:
            notes.append(f"artifacts/{content[:16]}..., the selected checkpoint, is not here: not checked")
    _sketches(run, view, problems, notes)


def _artifact(folder: Path, content: str) -> list[str]:
    name = f"artifacts/{content[:16]}..."
    try:
        strange = [n for n in reading.list_names(folder) if n not in BESIDE and not n.endswith(".safetensors")]
        if strange:
            return [f"{name} was altered: it holds {sorted(strange)[0][:100]!r}, which no accepted copy has"]
        left_out = not_in_hash(folder)
        problem = _left_out(folder, left_out)
        if problem:
            return [f"{name} was altered: {problem}"]
        digest = folder_content_hash(folder, drop=frozenset(left_out))
    except Exception as error:
        return [f"{name} can't be read: {error}"]
    return [] if digest == content else [f"{name} was altered: its content hash is {digest[:16]}..."]


def not_in_hash(folder: Path) -> tuple[str, ...]:
    """Tensors of an accepted copy that its content hash leaves out, as its manifest says."""
    value = reading.read_json_or_none(folder / artifacts.READY_NAME)
    names = value.get("not_in_hash", []) if isinstance(value, dict) else []
    return tuple(str(name) for name in names) if isinstance(names, list) else ()


def _left_out(folder: Path, names: tuple[str, ...]) -> str | None:
    """What is wrong with what the content hash leaves out: it may be a head alone that is the embedding, bit by bit."""
    if not names:
        return None
    if set(names) != {HEAD_NAME}:
        other = sorted(set(names) - {HEAD_NAME})[0]
        return f"its manifest leaves tensor {other[:100]!r} out of the content hash"
    tensors = {tensor.name: tensor for tensor in tensors_of(folder)}
    head = tensors.get(HEAD_NAME)
    embedding = next((tensors[name] for name in EMBEDDING_NAMES if name in tensors), None)
    if head is None or embedding is None:
        return f"its manifest leaves out {HEAD_NAME}, and it holds no {HEAD_NAME if head is None else 'embedding'}"
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    if not same or _digest(folder, head) != _digest(folder, embedding):
        return f"{HEAD_NAME}, which the content hash leaves out, is not {embedding.name}"
    return None


def _digest(folder: Path, tensor: TensorSpec) -> str:
    return again(functools.partial(_span, folder / tensor.file, tensor))


def _span(path: Path, tensor: TensorSpec) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return hash_span(fd, tensor.begin, tensor.end)
    finally:
        os.close(fd)


def _sketches(run: RunDir, view: RunView, problems: list[str], notes: list[str]) -> None:
    """What the weights of later submissions were compared with. An exported run has none: its fingerprints are in the chain."""
    lying = reading.list_names(run.sketches)
    gone = 0
    for number, known in sorted(view.fingerprints.items()):
        if known.sketch_sha256 is None:
            continue
        names = [name for name in lying if name.startswith(f"{number:06d}.")]
        gone += not names
        for name in names:
            try:
                digest = hashlib.sha256(reading.read_bytes(run.sketches / name)).hexdigest()
            except (OSError, ValueError) as error:
                problems.append(f"sketches/{name} can't be read: {error}")
                continue
            if digest != known.sketch_sha256:
                problems.append(f"sketches/{name} was altered: its hash is not the one in its fingerprint")
    if gone and lying:
        notes.append(f"{gone} of the sketches that fingerprints name are not here: not checked")
