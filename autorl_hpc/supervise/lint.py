"""Lint a checkpoint folder: refuse everything that can be refused before a byte of weights is copied. It is read by descriptor: no link
is followed, no FIFO can block, and the linted files are the copied ones. docs/checkpoints.md says how transformers treats each case.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.errors import Refused
from autorl_hpc.files import reading
from autorl_hpc.files.checkpoint import (
    EMBEDDING_NAMES,
    HEAD_NAME,
    INDEX_NAME,
    MAX_JSON_BYTES,
    SINGLE_NAME,
    TensorSpec,
    own_tensors,
    parse_json,
    read_header,
    weight_files,
)
from autorl_hpc.files.faults import again, is_cluster_error
from autorl_hpc.files.layout import Root
from autorl_hpc.files.safe_open import DIR_FLAGS, READ_FLAGS, open_below
from autorl_hpc.files.store import verify_base_model
from autorl_hpc.records.run import RunRecord
from autorl_hpc.supervise.model_config import compare_config

ADAPTER_CONFIG = "adapter_config.json"
CONFIGS = ("config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json", ADAPTER_CONFIG)
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
PLAIN_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors$")

AFTER_SAVE = "submit after the save has ended"
EMPTY_FOLDER = "save with save_pretrained into an empty folder"
SAFELY = "save with `save_pretrained(DIR, safe_serialization=True)`"

# --- the base model


@dataclass(frozen=True)
class BaseModel:
    """The base model as its headers describe it. `shapes`: by tensor name, without a tied head, even if the file holds one."""

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    content_hash: str
    folder: Path | None = None  # where it is staged; None if only its headers are available

    @property
    def tied(self) -> bool:
        """Return whether the head shares the embedding's weights."""
        return HEAD_NAME not in self.shapes

    @property
    def embedding(self) -> str | None:
        """Return the name of the embedding tensor; None if it has no usual name."""
        return next((name for name in EMBEDDING_NAMES if name in self.shapes), None)

    @classmethod
    def read(cls, folder: Path, content_hash: str) -> BaseModel:
        """Read a staged model's config and headers."""
        config = json.loads(reading.read_bytes(folder / "config.json"))
        return cls(config, {tensor.name: tensor.shape for tensor in own_tensors(folder)[0]}, content_hash, folder)

    def open_weights(self, stack: ExitStack) -> tuple[dict[str, int], list[TensorSpec]]:
        """Open the staged weights. Return descriptors by file name, which `stack` closes, and all tensors. Raises OSError."""
        files: dict[str, int] = {}
        tensors: list[TensorSpec] = []
        try:
            if self.folder is None:
                raise FileNotFoundError
            for name in weight_files(self.folder):
                files[name] = fd = again(functools.partial(os.open, self.folder / name, os.O_RDONLY | os.O_CLOEXEC))
                stack.callback(os.close, fd)
                tensors.extend(read_header(fd, name))
        except (OSError, Refused):
            raise OSError(errno.EIO, "the staged base model can't be read") from None
        found = {tensor.name: tensor.shape for tensor in tensors if not (self.tied and tensor.name == HEAD_NAME)}
        if found != self.shapes:
            raise OSError(errno.EIO, "the staged base model is not the one that was launched with")
        return files, tensors


def staged_base_model(root: Root, record: RunRecord) -> BaseModel:
    """Return the base model of a run. Raises AutorlError: see `verify_base_model`."""
    manifest = verify_base_model(root, record.science)
    return BaseModel.read(root.model(manifest.name), record.science.base_model_content_hash)


# --- the submitted folder

MAX_INNER, MAX_INNER_DEPTH = 200, 3  # folders that are looked into for a checkpoint below the submitted one
MAX_FILES = 2000  # a checkpoint has tens of files, a trainer's output folder hundreds
OPTIMIZER_BYTES_PER_VALUE, SLACK_BYTES = 16, 1 << 30  # training state (Adam in fp32, master weights) isn't larger
# 150 bytes a tensor are usual; parsing takes many times as much memory
HEADER_BYTES, HEADER_BYTES_PER_TENSOR = 1 << 20, 4096


@dataclass(frozen=True)
class SubmittedFolder:
    """The open folder behind `fd`. `stack` closes what is opened."""

    fd: int
    stack: ExitStack
    sizes: dict[str, int]  # size in bytes of each regular file
    folders: list[str]  # names of the subfolders, for messages

    @classmethod
    def survey(cls, fd: int, base: BaseModel, stack: ExitStack) -> SubmittedFolder:
        """List the folder and check every entry, and that no config names code. Raises Refused; OSError: the file system failed."""
        values = sum(math.prod(shape) for shape in base.shapes.values())
        folder = cls(fd, stack, {}, [])
        with os.scandir(fd) as entries:
            for count, entry in enumerate(entries):
                if count >= MAX_FILES:
                    advice = "submit a folder with the checkpoint alone"
                    raise Refused("too_many_files", f"the folder holds more than {MAX_FILES} files", advice)
                shown = entry.name.encode("utf-8", "backslashreplace").decode()[:120]
                try:
                    info = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:
                    what = f"{shown} was removed while it was looked at"
                    raise Refused("artifact_changed", what, AFTER_SAVE) from None
                if stat.S_ISDIR(info.st_mode):
                    folder.folders.append(shown + "/")
                else:
                    _refuse_kind(shown, info, values * OPTIMIZER_BYTES_PER_VALUE + SLACK_BYTES)
                    folder.sizes[entry.name] = info.st_size
        for name in set(CONFIGS) & set(folder.sizes):
            if (field := _names_code(folder.read_json(name))) is not None:
                advice = f"remove {field[:100]}; no code of a checkpoint is run"
                raise Refused("auto_map", f"{name}: field {field[:100]} names code to run", advice)
        return folder

    def open_regular(self, name: str) -> int:
        """Return a descriptor of a file. Raises Refused: it can't be opened, or is no longer a regular one with one name; OSError."""
        try:
            fd = os.open(name, READ_FLAGS, dir_fd=self.fd)
        except OSError as error:
            if is_cluster_error(error):
                raise
            advice = "make the file readable and submit again"
            raise Refused("unreadable", f"{name[:120]}: {error.strerror}", advice) from None
        self.stack.callback(os.close, fd)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
            what = f"{name[:120]} was exchanged while it was read"
            raise Refused("special_file", what, "submit a folder that nothing writes to")
        return fd

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file. Raises Refused: it is too large, not JSON, or no object; OSError."""
        advice = "save the checkpoint again with save_pretrained"
        if self.sizes.get(name, 0) > MAX_JSON_BYTES:
            raise Refused("not_json", f"{name}: {self.sizes[name]} bytes are too many", advice)
        fd, data = self.open_regular(name), b""
        while len(data) <= MAX_JSON_BYTES and (part := os.read(fd, 1 << 20)):
            data += part
        value = parse_json(data, name)
        if not isinstance(value, dict):
            raise Refused("not_json", f"{name}: holds no JSON object", advice)
        return value

    def inner(self) -> tuple[str, str] | None:
        """Return a folder below that holds a checkpoint or an adapter, the last by number, and which of the two it is."""
        waiting: list[tuple[str, ...]] = [(name.rstrip("/"),) for name in self.folders]
        found: list[tuple[list[int], str, str]] = []
        for parts in itertools.islice(waiting, MAX_INNER):  # it grows meanwhile
            try:
                fd = open_below(self.fd, parts, DIR_FLAGS)
            except OSError:
                continue
            try:
                names = set(itertools.islice((entry.name for entry in os.scandir(fd)), MAX_FILES))
                if len(parts) < MAX_INNER_DEPTH:
                    waiting += [(*parts, e.name) for e in os.scandir(fd) if e.is_dir(follow_symlinks=False)]
            finally:
                os.close(fd)
            path, weights = "/".join(parts), any(name.endswith(".safetensors") for name in names)
            if weights and not names.isdisjoint(("config.json", ADAPTER_CONFIG)):
                kind = "an adapter" if ADAPTER_CONFIG in names else "a checkpoint"
                found.append(([int(number) for number in re.findall(r"\d{1,18}", path)], path, kind))
        return max(found)[1:] if found else None

    def read_tensors(self, fd: int, name: str, base: BaseModel) -> list[TensorSpec]:
        """Return the tensors in the header of the open file `name`, of a length that a header for this base model may have."""
        return read_header(fd, name, HEADER_BYTES + HEADER_BYTES_PER_TENSOR * len(base.shapes))


def _refuse_kind(shown: str, info: os.stat_result, limit: int) -> None:
    remove = "remove it from the folder"
    if stat.S_ISLNK(info.st_mode):
        raise Refused("symlink", f"{shown} is a symbolic link", "put real files into the folder: `cp -rL src dst`")
    if not stat.S_ISREG(info.st_mode):
        raise Refused("special_file", f"{shown} is not a regular file (FIFO, socket or device)", remove)
    if info.st_nlink > 1:
        what = f"{shown} is a hard link ({info.st_nlink} names)"
        raise Refused("hard_link", what, "copy the file: `cp --reflink=auto src dst`")
    if info.st_size > limit:
        what = f"{shown} has {info.st_size} bytes; nothing of this model needs more than {limit}"
        raise Refused("file_too_large", what, remove)


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


def read_exactly(fd: int, into: memoryview, position: int, file: str) -> None:
    """Fill a buffer from an open file of a submission. Raises Refused: the file became shorter."""
    got = 0
    while got < len(into):
        part = os.preadv(fd, [into[got:]], position + got)
        if part <= 0:
            raise Refused("artifact_changed", f"{file} became shorter while it was copied", AFTER_SAVE)
        got += part


# --- full weights


@dataclass
class Linted:
    """A folder that passed: open weight files, tensors to copy, and ignored files."""

    files: dict[str, int]  # descriptors of the files to copy; for an adapter, the staged base model's
    tensors: list[TensorSpec]
    ignored: list[str]
    extra_head: bool  # the base model ties its head, but the file holds one, which must equal the embedding
    inner: tuple[str, str] | None = None  # a folder below that holds a checkpoint or an adapter, and which


def ignored_names(folder: SubmittedFolder, used: set[str]) -> list[str]:
    """Return the names of what is left aside, at most 50."""
    return sorted(folder.folders + [name for name in folder.sizes if name not in used])[:50]


def lint_checkpoint(folder: SubmittedFolder, base: BaseModel) -> Linted:
    """Check a folder with full weights against the base model. Raises Refused; OSError: the file system failed."""
    names = _weight_names(folder)
    compare_config(folder.read_json("config.json"), base.config)
    files: dict[str, int] = {}
    tensors: list[TensorSpec] = []
    for name in sorted(set(names.values())) or [SINGLE_NAME]:
        files[name] = fd = folder.open_regular(name)
        tensors.extend(folder.read_tensors(fd, name, base))
    if names:
        _compare_index(names, tensors)
    extra_head = _compare_tensors(tensors, base)
    return Linted(files, tensors, ignored_names(folder, {*files, "config.json"}), extra_head, folder.inner())


def _weight_names(folder: SubmittedFolder) -> dict[str, str]:
    """Return the index as tensor name to file; empty for a single file."""
    sizes = folder.sizes
    weights = {name for name in sizes if name.endswith(".safetensors")}
    if ("config.json" not in sizes or not weights) and (inner := folder.inner()):
        missing = "*.safetensors" if "config.json" in sizes else "config.json"
        code, advice = "no_weights" if "config.json" in sizes else "no_config", f"submit that folder, {inner[0]}"
        raise Refused(code, f"{missing} is missing; {inner[1]} lies in {inner[0]}", advice)
    if "config.json" not in sizes:
        raise Refused("no_config", "config.json is missing", "save with `model.save_pretrained(DIR)`")
    if not weights:
        pickles = [name for name in sizes if name.endswith(PICKLES)]
        if pickles:
            raise Refused("pickle", f"{pickles[0]}: weights as pickle are not read", SAFELY)
        raise Refused("no_weights", "no *.safetensors in the folder", SAFELY)
    if INDEX_NAME in sizes:
        if SINGLE_NAME in sizes:
            what = f"both {SINGLE_NAME} and {INDEX_NAME} are there"
            raise Refused("ambiguous_weights", what, "remove the older save from the folder")
        return _read_index(folder, weights)
    if weights != {SINGLE_NAME}:
        found = ", ".join(sorted(weights))[:200]
        what = f"without {INDEX_NAME} there must be {SINGLE_NAME} alone, found {found}"
        raise Refused("ambiguous_weights", what, EMPTY_FOLDER)
    return {}


def _read_index(folder: SubmittedFolder, weights: set[str]) -> dict[str, str]:
    mapping = folder.read_json(INDEX_NAME).get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(v, str) for v in mapping.values()):
        what = f"{INDEX_NAME}: field weight_map is missing or no table of names"
        raise Refused("index_broken", what, EMPTY_FOLDER)
    for file in sorted(set(mapping.values())):
        if not PLAIN_NAME.fullmatch(file):
            what = f"{INDEX_NAME}: weight_map names {file[:120]!r}; only plain names of this folder are read"
            raise Refused("index_outside", what, EMPTY_FOLDER)
        if file not in weights:
            what = f"{INDEX_NAME} names {file}, which is not there"
            raise Refused("shard_missing", what, "wait for the save to end, then submit again")
    stray = weights - set(mapping.values())
    if stray:
        raise Refused("ambiguous_weights", f"{sorted(stray)[0]} is not named by {INDEX_NAME}", EMPTY_FOLDER)
    return dict(mapping)


def _compare_index(names: dict[str, str], tensors: list[TensorSpec]) -> None:
    stored = {tensor.name: tensor.file for tensor in tensors}
    if len(stored) != len(tensors):
        raise Refused("tensor_twice", "a tensor is in two shards", EMPTY_FOLDER)
    for name in sorted(set(stored) | set(names)):
        if stored.get(name) != names.get(name):
            what = f"{INDEX_NAME} and the shards disagree about tensor {name[:120]!r}"
            raise Refused("index_broken", what, EMPTY_FOLDER)


MAX_EXPLAINED, MAX_PARTS = 50, 40  # Names that are looked at, and parts of a name; the longest ones have twelve
UNWRAPPED = "save the inner model: `accelerator.unwrap_model(model).save_pretrained(DIR)`"
MERGED = "merge the adapter first: `model.merge_and_unload().save_pretrained(DIR)`"
WRAPPERS = {
    "base_model.model.": MERGED,
    "_orig_mod.": f"{UNWRAPPED}, or `model._orig_mod` (torch.compile)",
    "_fsdp_wrapped_module.": f"{UNWRAPPED}, or gather it with FSDP's full state dict",
    "_checkpoint_wrapped_module.": UNWRAPPED,
    "actor.": "save the actor alone: `model.actor.save_pretrained(DIR)`",
    "module.": UNWRAPPED,
}
"""What to do about a part of tensor names that a wrapper around the model or a layer, or a trainer, adds."""


def explain_names(unknown: Iterable[str], known: Collection[str]) -> tuple[str, str] | None:
    """Return what explains names that a model doesn't have (a part more, wherever it stands, or a prefix less) and what to do;
    None: nothing known."""
    for name in itertools.islice(unknown, MAX_EXPLAINED):
        plain = name.replace(".base_layer.", ".")
        if wrapper := _wrapper(plain, known):
            advice = next((told for part, told in WRAPPERS.items() if part in wrapper), UNWRAPPED)
            what = "have the prefix" if plain.startswith(wrapper) else "hold"
            return f"names {what} {wrapper[:100]!r}", MERGED if plain != name else advice
        if ".lora_" in name or (plain != name and plain in known):
            return f"{name[:120]!r} is a part of an adapter", MERGED
        if longer := next((one for one in known if one.endswith(f".{name}")), None):
            lacks = longer.removesuffix(name)
            return f"names lack the prefix {lacks!r}", "save the whole model (AutoModelForCausalLM), not its inner part"
    return None


def _wrapper(name: str, known: Collection[str]) -> str | None:
    """Return the part without which a name is known, in one place; else the first of several known wrappers."""
    parts = name.split(".")[:MAX_PARTS]
    for part in dict.fromkeys(parts):  # one, wherever it stands
        if ".".join(each for each in parts if each != part) in known:
            return f"{part}."
    inner = [wrapper for wrapper in WRAPPERS if f".{wrapper}" in f".{name}"]
    bare = f".{name}"
    for wrapper in inner:
        bare = bare.replace(f".{wrapper}", ".")
    for text, first in ((f".{name}", ""), (bare, next(iter(inner), ""))):
        parts = text[1:].split(".")[:MAX_PARTS]
        for begin, end in itertools.combinations(range(len(parts)), 2):
            if ".".join(parts[:begin] + parts[end:]) in known:
                return first or ".".join(parts[begin:end]) + "."
        if first and text[1:] in known:
            return first
    return None


def _compare_tensors(tensors: list[TensorSpec], base: BaseModel) -> bool:
    """Compare names and shapes with the base model's. Return whether there is a head that the base model ties."""
    found = {tensor.name: tensor.shape for tensor in tensors}
    extra_head = base.tied and HEAD_NAME in found
    if extra_head and found.pop(HEAD_NAME) != base.shapes.get(base.embedding or ""):
        what = f"{HEAD_NAME} is the embedding in the base model (tied), the checkpoint has one of another shape"
        raise Refused("untied_head", what, "keep tie_word_embeddings as in the base model")
    missing, unknown = sorted(set(base.shapes) - set(found)), sorted(set(found) - set(base.shapes))
    if missing or unknown:
        kinds = [(kind, names) for kind, names in (("missing", missing), ("unknown", unknown)) if names]
        told = ", ".join(f"{kind} {len(names)} (first {names[0][:120]})" for kind, names in kinds)
        whole = "submit the base model's architecture with all its tensors"
        why, advice = explain_names(unknown, base.shapes) or ("", whole)
        what = f"the tensors are not the base model's: {told}{why and f'; {why}'}"
        raise Refused("tensor_names", what, advice)
    for name, shape in base.shapes.items():
        if found[name] != shape:
            what = f"tensor {name} has shape {list(found[name])}, the base model's has {list(shape)}"
            raise Refused("tensor_shapes", what, "keep the base model's architecture and vocabulary size")
    return extra_head
