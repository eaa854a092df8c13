"""The lint of a checkpoint folder: everything that can be refused before a byte of weights is copied.

Works on an open directory: names are looked up relative to it, no link is followed, no FIFO can block, and the files
that are linted are the files that are copied, since their descriptors stay open. Each refusal says which file and
field, and what to do. What transformers makes of each case is in docs/checkpoints.md.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from autorl_hpc.errors import Refused
from autorl_hpc.files.checkpoint import INDEX_NAME, MAX_JSON_BYTES, SINGLE_NAME, TensorSpec, parse_json, read_header
from autorl_hpc.files.faults import is_cluster_error
from autorl_hpc.supervise.basemodel import HEAD_NAME, BaseModel
from autorl_hpc.supervise.configs import compare_config

MAX_FILES = 2000
"""A checkpoint has tens of files; a trainer's output folder hundreds."""

OPTIMIZER_BYTES_PER_VALUE = 16
"""Training state beside the weights (Adam in fp32, master weights) is at most this large; a larger file is a trap."""

SLACK_BYTES = 1 << 30
HEADER_BYTES, HEADER_BYTES_PER_TENSOR = 1 << 20, 4096
"""A header has about 150 bytes a tensor; parsing one takes many times its size in memory, so it is bounded by the base's."""

CONFIGS = ("config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
PLAIN_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors$")


@dataclass
class Linted:
    """A folder that passed: open weight files, tensors to copy, and what was left aside."""

    files: dict[str, int]
    tensors: list[TensorSpec]
    config: dict[str, Any]
    ignored: list[str] = field(default_factory=list)
    extra_head: bool = False  # a tied base, yet the file holds a head: it must equal the embedding
    size_bytes: int = 0


def lint_folder(folder_fd: int, base: BaseModel, stack: ExitStack) -> Linted:
    """Checks the folder behind `folder_fd` against the base model. Opened files are closed by `stack`.

    Raises:
        Refused: with a code, the file and field, and advice.
        OSError: the file system failed: nobody's fault but the cluster's.
    """
    sizes, ignored = _survey(folder_fd, base)
    _refuse_code(folder_fd, sizes)
    names = _weight_names(folder_fd, sizes)
    config = _read_json(folder_fd, "config.json", sizes)
    compare_config(config, base.config)
    files: dict[str, int] = {}
    tensors: list[TensorSpec] = []
    for name in sorted(set(names.values())) or [SINGLE_NAME]:
        files[name] = fd = _open_regular(folder_fd, name, stack)
        tensors.extend(read_header(fd, name, HEADER_BYTES + HEADER_BYTES_PER_TENSOR * len(base.shapes)))
    if names:
        _compare_index(names, tensors)
    extra_head = _compare_tensors(tensors, base)
    ignored += [name for name in sizes if name not in files and name != "config.json"]
    return Linted(
        files=files,
        tensors=tensors,
        config=config,
        ignored=sorted(ignored)[:50],
        extra_head=extra_head,
        size_bytes=sum(os.fstat(fd).st_size for fd in files.values()),
    )


def _survey(folder_fd: int, base: BaseModel) -> tuple[dict[str, int], list[str]]:
    """Sizes of the regular files and names of the folders; refuses everything that is neither."""
    limit = base.elements * OPTIMIZER_BYTES_PER_VALUE + SLACK_BYTES
    sizes: dict[str, int] = {}
    folders: list[str] = []
    with os.scandir(folder_fd) as entries:
        for count, entry in enumerate(entries):
            if count >= MAX_FILES:
                raise Refused(
                    "too_many_files",
                    f"the folder holds more than {MAX_FILES} files",
                    "submit a folder with the checkpoint alone",
                )
            shown = entry.name.encode("utf-8", "backslashreplace").decode()[:120]
            try:
                info = os.stat(entry.name, dir_fd=folder_fd, follow_symlinks=False)
            except FileNotFoundError:
                raise Refused(
                    "artifact_changed", f"{shown} was removed while it was looked at", "submit after the save has ended"
                ) from None
            if stat.S_ISDIR(info.st_mode):
                folders.append(shown + "/")
            elif stat.S_ISLNK(info.st_mode):
                raise Refused(
                    "symlink", f"{shown} is a symbolic link", "put real files into the folder: `cp -rL src dst`"
                )
            elif not stat.S_ISREG(info.st_mode):
                raise Refused(
                    "special_file", f"{shown} is no regular file (FIFO, socket or device)", "remove it from the folder"
                )
            elif info.st_nlink > 1:
                raise Refused(
                    "hard_link",
                    f"{shown} is a hard link ({info.st_nlink} names)",
                    "copy the file: `cp --reflink=auto src dst`",
                )
            elif info.st_size > limit:
                raise Refused(
                    "file_too_large",
                    f"{shown} has {info.st_size} bytes; nothing of this model needs more than {limit}",
                    "remove it from the folder",
                )
            else:
                sizes[entry.name] = info.st_size
    return sizes, folders


def _refuse_code(folder_fd: int, sizes: dict[str, int]) -> None:
    for name in CONFIGS:
        if name in sizes:
            field_of_code = _names_code(_read_json(folder_fd, name, sizes))
            if field_of_code is not None:
                raise Refused(
                    "auto_map",
                    f"{name}: field {field_of_code} names code to run",
                    f"remove {field_of_code}; no code of a checkpoint is run",
                )


def _names_code(value: Any) -> str | None:
    """The field, at any depth, that makes a loader run code of the folder: auto_map, trust_remote_code, a .py file."""
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


def _weight_names(folder_fd: int, sizes: dict[str, int]) -> dict[str, str]:
    """Tensor name to file from the index; empty for a single file."""
    if "config.json" not in sizes:
        raise Refused("no_config", "config.json is missing", "save with `model.save_pretrained(DIR)`")
    weights = {name for name in sizes if name.endswith(".safetensors")}
    adapter = {"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"} & set(sizes)
    merge = "merge the adapter first: `model = model.merge_and_unload(); model.save_pretrained(DIR)`"
    if adapter and not weights - adapter:
        raise Refused("adapter_only", f"only an adapter is there ({', '.join(sorted(adapter))})", merge)
    if adapter:
        raise Refused(
            "adapter_beside_model",
            f"{sorted(adapter)[0]} lies beside full weights: which is meant?",
            f"{merge}; or remove the adapter files",
        )
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
        return _read_index(folder_fd, sizes, weights)
    if weights != {SINGLE_NAME}:
        raise Refused(
            "ambiguous_weights",
            f"without {INDEX_NAME} there must be {SINGLE_NAME} alone, found {', '.join(sorted(weights))[:200]}",
            "save with save_pretrained into an empty folder",
        )
    return {}


def _read_index(folder_fd: int, sizes: dict[str, int], weights: set[str]) -> dict[str, str]:
    index = _read_json(folder_fd, INDEX_NAME, sizes)
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
            f"the base model has no {HEAD_NAME} (tied embeddings), the checkpoint has one of another shape",
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


def _open_regular(folder_fd: int, name: str, stack: ExitStack) -> int:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    except OSError as error:
        if is_cluster_error(error):
            raise
        raise Refused(
            "unreadable", f"{name[:120]}: {error.strerror}", "make the file readable and submit again"
        ) from None
    stack.callback(os.close, fd)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
        raise Refused(
            "special_file", f"{name[:120]} was exchanged while it was read", "submit a folder that nothing writes to"
        )
    return fd


def _read_json(folder_fd: int, name: str, sizes: dict[str, int]) -> dict[str, Any]:
    if sizes.get(name, 0) > MAX_JSON_BYTES:
        raise Refused(
            "not_json", f"{name}: {sizes[name]} bytes are too many", "save the checkpoint again with save_pretrained"
        )
    with ExitStack() as stack:
        fd = _open_regular(folder_fd, name, stack)
        data = b""
        while len(data) <= MAX_JSON_BYTES and (part := os.read(fd, 1 << 20)):
            data += part
    value = parse_json(data, name)
    if not isinstance(value, dict):
        raise Refused("not_json", f"{name}: holds no JSON object", "save the checkpoint again with save_pretrained")
    return value
