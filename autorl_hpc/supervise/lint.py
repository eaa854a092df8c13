"""Lint a checkpoint folder: refuse everything that can be refused before a byte of weights is copied.

The lint works on an open directory: names are looked up relative to it, no link is followed, no FIFO can block, and the
descriptors stay open for the copy, so the linted files are the copied ones. Each refusal names file and field, and what to
do. docs/checkpoints.md says how transformers treats each case.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from autorl_hpc.errors import Refused
from autorl_hpc.files.checkpoint import HEAD_NAME, INDEX_NAME, SINGLE_NAME, TensorSpec, read_header
from autorl_hpc.supervise.adapters import ADAPTER_CONFIG, ADAPTER_FILES, Adapter, lint_adapter
from autorl_hpc.supervise.checkpoint_folder import BaseModel, SubmittedFolder, compare_config, max_header_bytes

CONFIGS = ("config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json", ADAPTER_CONFIG)
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
PLAIN_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors$")


@dataclass
class Linted:
    """A folder that passed: open weight files, tensors to copy, and ignored files.

    Attributes:
        files: descriptors of the files to copy; for an adapter, the staged base model's.
        adapter: the adapter that is added during the copy.
    """

    files: dict[str, int]
    tensors: list[TensorSpec]
    ignored: list[str] = field(default_factory=list)
    extra_head: bool = False  # a tied base, but the file holds a head: it must equal the embedding
    size_bytes: int = 0
    adapter: Adapter | None = None


def lint_folder(folder_fd: int, base: BaseModel, stack: ExitStack) -> Linted:
    """Check the folder behind `folder_fd` against the base model. `stack` closes the opened files.

    Raises:
        Refused: with a code, the file and field, and advice.
        OSError: the file system failed, which is the cluster's fault.
    """
    folder = SubmittedFolder.survey(folder_fd, base, stack)
    _refuse_code(folder)
    if ADAPTER_FILES & set(folder.sizes):
        return _lint_adapter_folder(folder, base)
    names = _weight_names(folder)
    compare_config(folder.read_json("config.json"), base.config)
    files: dict[str, int] = {}
    tensors: list[TensorSpec] = []
    for name in sorted(set(names.values())) or [SINGLE_NAME]:
        files[name] = fd = folder.open_regular(name)
        tensors.extend(read_header(fd, name, max_header_bytes(base)))
    if names:
        _compare_index(names, tensors)
    extra_head = _compare_tensors(tensors, base)
    return _linted(folder, files, tensors, {*files, "config.json"}, extra_head=extra_head)


def _lint_adapter_folder(folder: SubmittedFolder, base: BaseModel) -> Linted:
    adapter = lint_adapter(folder, base)
    if "config.json" in folder.sizes:  # written by some trainers, not by peft
        compare_config(folder.read_json("config.json"), base.config)
    files, tensors = base.open_weights(folder.stack)
    extra_head = base.tied and HEAD_NAME in {tensor.name for tensor in tensors}
    used = {*ADAPTER_FILES, "config.json"}
    return _linted(folder, files, tensors, used, extra_head=extra_head, adapter=adapter)


def _linted(
    folder: SubmittedFolder,
    files: dict[str, int],
    tensors: list[TensorSpec],
    used: set[str],
    *,
    extra_head: bool = False,
    adapter: Adapter | None = None,
) -> Linted:
    ignored = folder.folders + [name for name in folder.sizes if name not in used]
    size_bytes = sum(os.fstat(fd).st_size for fd in files.values())
    return Linted(files, tensors, sorted(ignored)[:50], extra_head, size_bytes, adapter)


def _refuse_code(folder: SubmittedFolder) -> None:
    for name in CONFIGS:
        if name in folder.sizes:
            field_of_code = _names_code(folder.read_json(name))
            if field_of_code is not None:
                raise Refused(
                    "auto_map",
                    f"{name}: field {field_of_code[:100]} names code to run",
                    f"remove {field_of_code[:100]}; no code of a checkpoint is run",
                )


def _names_code(value: Any) -> str | None:
    """Return the field, at any depth, that makes a loader run code of the folder: auto_map, trust_remote_code, a .py file."""
    waiting = [value]
    while waiting:
        here = waiting.pop()
        for key, inner in here.items() if isinstance(here, dict) else ():
            if key == "auto_map" or (key == "trust_remote_code" and inner):
                return str(key)
            if isinstance(inner, str) and inner.endswith(".py"):
                return str(key)
            waiting.append(inner)
        waiting.extend(here if isinstance(here, list) else ())
    return None


def _weight_names(folder: SubmittedFolder) -> dict[str, str]:
    """Return the index as tensor name to file; empty for a single file."""
    sizes = folder.sizes
    if "config.json" not in sizes:
        raise Refused("no_config", "config.json is missing", "save with `model.save_pretrained(DIR)`")
    weights = {name for name in sizes if name.endswith(".safetensors")}
    if not weights:
        pickles = [name for name in sizes if name.endswith(PICKLES)]
        if pickles:
            raise Refused(
                "pickle",
                f"{pickles[0]}: weights as pickle are not read",
                "save with `save_pretrained(DIR, safe_serialization=True)`",
            )
        raise Refused(
            "no_weights", "no *.safetensors in the folder", "save with `save_pretrained(DIR, safe_serialization=True)`"
        )
    if INDEX_NAME in sizes:
        if SINGLE_NAME in sizes:
            raise Refused(
                "ambiguous_weights",
                f"both {SINGLE_NAME} and {INDEX_NAME} are there",
                "remove the older save from the folder",
            )
        return _read_index(folder, weights)
    if weights != {SINGLE_NAME}:
        raise Refused(
            "ambiguous_weights",
            f"without {INDEX_NAME} there must be {SINGLE_NAME} alone, found {', '.join(sorted(weights))[:200]}",
            "save with save_pretrained into an empty folder",
        )
    return {}


def _read_index(folder: SubmittedFolder, weights: set[str]) -> dict[str, str]:
    index = folder.read_json(INDEX_NAME)
    mapping = index.get("weight_map")
    again = "save with save_pretrained into an empty folder"
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(v, str) for v in mapping.values()):
        raise Refused("index_broken", f"{INDEX_NAME}: field weight_map is missing or no table of names", again)
    for file in sorted(set(mapping.values())):
        if not PLAIN_NAME.fullmatch(file):
            raise Refused(
                "index_outside",
                f"{INDEX_NAME}: weight_map names {file[:120]!r}; only plain names of this folder are read",
                again,
            )
        if file not in weights:
            raise Refused(
                "shard_missing",
                f"{INDEX_NAME} names {file}, which is not there",
                "wait for the save to end, then submit again",
            )
    stray = weights - set(mapping.values())
    if stray:
        raise Refused("ambiguous_weights", f"{sorted(stray)[0]} is not named by {INDEX_NAME}", again)
    return dict(mapping)


def _compare_index(names: dict[str, str], tensors: list[TensorSpec]) -> None:
    stored = {tensor.name: tensor.file for tensor in tensors}
    if len(stored) != len(tensors):
        raise Refused("tensor_twice", "a tensor stands in two shards", "save with save_pretrained into an empty folder")
    for name in sorted(set(stored) ^ set(names)) or [n for n in sorted(stored) if stored[n] != names[n]]:
        raise Refused(
            "index_broken",
            f"{INDEX_NAME} and the shards disagree about tensor {name[:120]!r}",
            "save with save_pretrained into an empty folder",
        )


def _compare_tensors(tensors: list[TensorSpec], base: BaseModel) -> bool:
    found = {tensor.name: tensor.shape for tensor in tensors}
    extra_head = base.tied and HEAD_NAME in found
    if extra_head and (base.embedding is None or found[HEAD_NAME] != base.shapes[base.embedding]):
        raise Refused(
            "untied_head",
            f"{HEAD_NAME} is the embedding in the base model (tied), the checkpoint has one of another shape",
            "keep tie_word_embeddings as in the base model",
        )
    if extra_head:
        del found[HEAD_NAME]
    missing, unknown = sorted(set(base.shapes) - set(found)), sorted(set(found) - set(base.shapes))
    if missing or unknown:
        prefix = next(
            (
                p
                for p in ("module.", "_orig_mod.", "base_model.model.", "_fsdp_wrapped_module.")
                if any(n.startswith(p) for n in unknown)
            ),
            None,
        )
        if prefix:
            raise Refused(
                "tensor_names",
                f"tensor names begin with {prefix!r}, such as {unknown[0][:120]}",
                "save the inner model: `accelerator.unwrap_model(model).save_pretrained(DIR)`",
            )
        what = (
            f"missing {len(missing)} (first {missing[0][:120]})"
            if missing
            else f"unknown {len(unknown)} (first {unknown[0][:120]})"
        )
        raise Refused(
            "tensor_names",
            f"the tensors are not the base model's: {what}",
            "submit the base model's architecture with all its tensors",
        )
    for name, shape in base.shapes.items():
        if found[name] != shape:
            raise Refused(
                "tensor_shapes",
                f"tensor {name} has shape {list(found[name])}, the base model's has {list(shape)}",
                "keep the base model's architecture and vocabulary size",
            )
    return extra_head
