"""Read a submitted checkpoint folder (`SubmittedFolder`) and the base model's headers, and compare config.json with the
base's.

The folder is read by descriptor: names are looked up relative to it, no link is followed, no FIFO can block, and a file
that was checked can't be exchanged after it was opened.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError, Refused
from autorl_hpc.files import reading
from autorl_hpc.files.checkpoint import (
    EMBEDDING_NAMES,
    HEAD_NAME,
    MAX_JSON_BYTES,
    TensorSpec,
    own_tensors,
    parse_json,
    read_header,
    weight_files,
)
from autorl_hpc.files.faults import again, is_cluster_error
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import verify_model
from autorl_hpc.records.run import RunRecord
from autorl_hpc.states import Fault

# --- the base model's config and tensors, read once from headers, for the lint


@dataclass(frozen=True)
class BaseModel:
    """The base model as its headers describe it.

    Attributes:
        shapes: shape of each tensor by name, without a tied head, even if the file holds one.
        elements: number of values in all tensors.
        folder: where it is staged; None if only its headers are available.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    content_hash: str
    elements: int
    folder: Path | None = None

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
        shapes = {tensor.name: tensor.shape for tensor in own_tensors(folder)[0]}
        elements = 0
        for shape in shapes.values():
            count = 1
            for size in shape:
                count *= size
            elements += count
        return cls(config=config, shapes=shapes, content_hash=content_hash, elements=elements, folder=folder)

    def open_weights(self, stack: ExitStack) -> tuple[dict[str, int], list[TensorSpec]]:
        """Open the staged weights. Return descriptors by file name, and all tensors. `stack` closes the descriptors.

        Raises:
            OSError: they can't be read, which is always the cluster's fault.
        """
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
    """Return the base model of a run.

    Raises:
        AutorlError: it is not staged, was changed, or was staged again with other weights.
    """
    manifest = verify_model(root, record.science.base_model)
    if manifest.content_hash != record.science.base_model_content_hash:
        raise AutorlError(
            f"base model {manifest.name} was staged anew with other weights since the launch",
            where=root.model(manifest.name),
            fault=Fault.CLUSTER,
            next_step="stage the weights that were launched with, or launch under another name",
        )
    return BaseModel.read(root.model(manifest.name), manifest.content_hash)


MAX_FILES = 2000
"""A checkpoint has tens of files, a trainer's output folder hundreds."""

OPTIMIZER_BYTES_PER_VALUE = 16
"""Training state beside the weights (Adam in fp32, master weights) is at most this large; a larger file is refused."""

SLACK_BYTES = 1 << 30
HEADER_BYTES, HEADER_BYTES_PER_TENSOR = 1 << 20, 4096
"""A header takes about 150 bytes per tensor. Parsing takes many times its size in memory, so the size is limited."""


def max_header_bytes(base: BaseModel) -> int:
    """Return the longest header in bytes that a checkpoint of this base model, or an adapter for it, may have."""
    return HEADER_BYTES + HEADER_BYTES_PER_TENSOR * len(base.shapes)


@dataclass(frozen=True)
class SubmittedFolder:
    """The folder behind `fd`. `stack` closes what is opened.

    Attributes:
        sizes: size in bytes of each regular file.
        folders: names of the subfolders, for messages.
    """

    fd: int
    stack: ExitStack
    sizes: dict[str, int]
    folders: list[str]

    @classmethod
    def survey(cls, fd: int, base: BaseModel, stack: ExitStack) -> SubmittedFolder:
        """List the folder and check every entry.

        Raises:
            Refused: an entry is a link, special file or hard link, a file is too large, or there are too many.
            OSError: the file system failed.
        """
        limit = base.elements * OPTIMIZER_BYTES_PER_VALUE + SLACK_BYTES
        sizes: dict[str, int] = {}
        folders: list[str] = []
        with os.scandir(fd) as entries:
            for count, entry in enumerate(entries):
                if count >= MAX_FILES:
                    raise Refused(
                        "too_many_files",
                        f"the folder holds more than {MAX_FILES} files",
                        "submit a folder with the checkpoint alone",
                    )
                shown = entry.name.encode("utf-8", "backslashreplace").decode()[:120]
                try:
                    info = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:
                    raise Refused(
                        "artifact_changed",
                        f"{shown} was removed while it was looked at",
                        "submit after the save has ended",
                    ) from None
                if stat.S_ISDIR(info.st_mode):
                    folders.append(shown + "/")
                    continue
                _refuse_kind(shown, info, limit)
                sizes[entry.name] = info.st_size
        return cls(fd, stack, sizes, folders)

    def open_regular(self, name: str) -> int:
        """Return a descriptor of the file `name`.

        Raises:
            Refused: it can't be opened, or is no longer a regular file with one name.
            OSError: the file system failed.
        """
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
        except OSError as error:
            if is_cluster_error(error):
                raise
            raise Refused(
                "unreadable", f"{name[:120]}: {error.strerror}", "make the file readable and submit again"
            ) from None
        self.stack.callback(os.close, fd)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
            raise Refused(
                "special_file",
                f"{name[:120]} was exchanged while it was read",
                "submit a folder that nothing writes to",
            )
        return fd

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in the file `name`.

        Raises:
            Refused: it is too large, not JSON, or no object.
            OSError: the file system failed.
        """
        again = "save the checkpoint again with save_pretrained"
        if self.sizes.get(name, 0) > MAX_JSON_BYTES:
            raise Refused("not_json", f"{name}: {self.sizes[name]} bytes are too many", again)
        fd, data = self.open_regular(name), b""
        while len(data) <= MAX_JSON_BYTES and (part := os.read(fd, 1 << 20)):
            data += part
        value = parse_json(data, name)
        if not isinstance(value, dict):
            raise Refused("not_json", f"{name}: holds no JSON object", again)
        return value


def _refuse_kind(shown: str, info: os.stat_result, limit: int) -> None:
    if stat.S_ISLNK(info.st_mode):
        raise Refused("symlink", f"{shown} is a symbolic link", "put real files into the folder: `cp -rL src dst`")
    if not stat.S_ISREG(info.st_mode):
        raise Refused(
            "special_file", f"{shown} is no regular file (FIFO, socket or device)", "remove it from the folder"
        )
    if info.st_nlink > 1:
        raise Refused(
            "hard_link", f"{shown} is a hard link ({info.st_nlink} names)", "copy the file: `cp --reflink=auto src dst`"
        )
    if info.st_size > limit:
        raise Refused(
            "file_too_large",
            f"{shown} has {info.st_size} bytes; nothing of this model needs more than {limit}",
            "remove it from the folder",
        )


# --- comparison of config.json with the base model's. The grader always computes with the base model's config, so an agent
# gains nothing by another one. A refusal shows the agent that it trained another model than the one that would be scored.

IGNORED_CONFIG = frozenset(
    [
        "_name_or_path",
        "_attn_implementation_autoset",
        "architectures",
        "attn_implementation",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "hidden_dropout_prob",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "max_length",
        "task_specific_params",
        "pretraining_tp",
        "is_llama_config",
    ]
)
"""Config fields that don't change what the base architecture computes from given weights."""

PRESENCE_MATTERS = frozenset(
    {"quantization_config", "rope_parameters", "rope_scaling", "sliding_window", "layer_types"}
)
"""Fields that make another model if only one of the two configs has them."""


def compare_config(config: dict[str, Any], base: dict[str, Any]) -> None:
    """Compare the fields that both configs have, and those of PRESENCE_MATTERS.

    Raises:
        Refused: names the field and both values.
    """
    mine, theirs = _normal_config(config), _normal_config(base)
    for key in sorted(set(mine) | set(theirs)):
        a, b = mine.get(key), theirs.get(key)
        both = key in mine and key in theirs
        if a != b and (both or key in PRESENCE_MATTERS):
            raise _differs(key, a, f"the base model's is {_short(b)}")


def _normal_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that matter, with RoPE in one spelling and without empty values."""
    flat = {key: value for key, value in config.items() if key not in IGNORED_CONFIG and value is not None}
    _one_rope(flat)
    if not flat.get("use_sliding_window", True):
        flat.pop("sliding_window", None)
    if isinstance(flat.get("layer_types"), list) and set(map(str, flat["layer_types"])) == {"full_attention"}:
        flat.pop("layer_types")
    return flat


def _one_rope(flat: dict[str, Any]) -> None:
    """Convert `rope_parameters`, which newer versions of transformers write, to `rope_theta` and `rope_scaling`.

    Raises:
        Refused: it is given more than once with different values.
    """
    scalings = [flat[key] for key in ("rope_parameters", "rope_scaling") if isinstance(flat.get(key), dict)]
    if any(isinstance(part, dict) for scaling in scalings for part in scaling.values()):
        return  # one set per kind of layer: compared unchanged
    thetas = [
        value for value in (flat.get("rope_theta"), *(s.get("rope_theta") for s in scalings)) if value is not None
    ]
    for key, values in (("rope_theta", thetas), ("rope_scaling", [_plain_scaling(s) for s in scalings])):
        flat.pop(key, None)
        if any(value != values[0] for value in values):
            raise _differs(
                key, values[0], f"in another place it is {_short(next(v for v in values if v != values[0]))}"
            )
        if values and values[0] is not None:
            flat[key] = values[0]
    flat.pop("rope_parameters", None)


def _plain_scaling(scaling: dict[str, Any]) -> dict[str, Any] | None:
    """Return the scaling without theta and with its kind as `rope_type`; None for the default kind, which changes nothing."""
    plain = {key: value for key, value in scaling.items() if key not in ("rope_theta", "type") and value is not None}
    plain.setdefault("rope_type", scaling.get("type") or "default")
    return None if plain["rope_type"] == "default" else plain


def _differs(field: str, value: Any, other: str) -> Refused:
    return Refused(
        "config_differs",
        f"config.json: field {field} is {_short(value)}, {other}",
        "keep the base model's config; only weights may change",
    )


def _short(value: Any) -> str:
    return "absent" if value is None else repr(value)[:100]
